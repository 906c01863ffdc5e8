"""Runs on rows with weights: the same for any packs and processes, resumed exactly, and without weights as before."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from integration.conftest import assert_same_metrics, distance, records, weights
from processes import run_ranks
from tropism.config import METHODS
from tropism.errors import CheckpointError, UsageError
from tropism.runner import run

SHORT: dict[str, Any] = {"batch_size": 8, "max_steps": 3, "precision": "fp64", "eval_fraction": 0.2}


def weighted(source: Path, target: Path, factor: Callable[[int], float | None]) -> Path:
    """A copy of a file whose rows have weights, or none."""
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    for number, row in enumerate(rows):
        row |= {} if factor(number) is None else {"weight": factor(number)}
    target.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return target


@pytest.fixture(scope="session")
def data_of(feedback: Path, pairs: Path) -> dict[str, Path]:
    """The data of each method, without weights."""
    return {"kto": feedback, "dpo": pairs, "sft": feedback, "kd": feedback}


@pytest.fixture
def data(tmp_path: Path, data_of: dict[str, Path]) -> dict[str, str]:
    """The data of each method with uneven weights."""
    return {method: str(weighted(source, tmp_path / f"{method}.jsonl", lambda number: (0, 0.5, 1, 2.5)[number % 4]))
            for method, source in data_of.items()}


@pytest.mark.parametrize("method", ["kto", "kd"])
def test_weights_of_one_are_no_weights(method: str, train: Callable[..., Any], tmp_path: Path, tiny_model_dir: Path,
                                       data_of: dict[str, Path]) -> None:
    ones = weighted(data_of[method], tmp_path / "ones.jsonl", lambda number: 1 if number % 3 else None)
    given = SHORT | ({"teacher": str(tiny_model_dir)} if method == "kd" else {})
    plain, same = (train(method, data=str(path), **given) for path in (data_of[method], ones))
    one, other = (load_file(result.directory / "model" / "model.safetensors") for result in (plain, same))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("method", "divisor"), [("kto", "count"), ("dpo", "sum"), ("sft", "sum"), ("kd", "count")])
def test_packs_change_nothing(method: str, divisor: str, train: Callable[..., Any], data: dict[str, str],
                              tiny_model_dir: Path) -> None:
    """X1: the weights of rows are those of their units in any pack, in training and in the evaluation."""
    given = SHORT | {"data": data[method], "weight_divisor": divisor} | (
        {"teacher": str(tiny_model_dir), "kd_weight": 0.0} if method == "kd" else {})
    one, other = train(method, **given), train(method, **given, microbatch_tokens=40)
    plain = train(method, **{**given, "weight_divisor": "count", "columns": "unused=weight"})
    found = [weights(result.directory / "model") for result in (one, other, plain)]
    assert distance(found[0], found[1]) < 1e-8 * distance(found[0], weights(tiny_model_dir))
    assert distance(found[0], found[2]) > 1e-3 * distance(found[0], weights(tiny_model_dir))
    for here, there in zip(records(one), records(other), strict=True):
        assert here["loss"] == pytest.approx(there["loss"], rel=1e-9)


def _rank(rank: int, size: int, port: int, settings: dict[str, Any]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port)}
    run(METHODS["sft"](**settings))


def test_two_processes_equal_one(train: Callable[..., Any], data: dict[str, str], tiny_model_dir: Path,
                                 tmp_path: Path) -> None:
    given = SHORT | {"data": data["sft"], "weight_divisor": "sum"}
    alone = train("sft", **given)
    settings = {**given, "model": str(tiny_model_dir), "output": str(tmp_path / "two"),
                "store": str(tmp_path / "store"), "learning_rate": 1e-3, "samples": 0}
    assert run_ranks(2, _rank, settings) == [0, 0]
    found = weights(tmp_path / "two" / "model"), weights(alone.directory / "model")
    assert distance(*found) < 1e-8 * distance(found[0], weights(tiny_model_dir))
    lines = [json.loads(line) for line in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()]
    assert_same_metrics(records(alone), lines, 0.0, 1e-8)


def test_a_resumed_run_has_the_same_weights(train: Callable[..., Any], data: dict[str, str], tmp_path: Path,
                                            data_of: dict[str, Path]) -> None:
    """A run continues with its weights bit for bit, and not with others or another divisor."""
    given = SHORT | {"data": data["sft"], "save_every": 1, "schedule": "constant", "warmup_ratio": 0.0}
    whole = train("sft", **given)
    begun = train("sft", **given | {"max_steps": 1})
    again = {"output": str(begun.directory), "resume": "auto"}
    others = weighted(data_of["kto"], tmp_path / "others.jsonl", lambda number: 1 + number % 2)
    for change, named in (({"data": str(others)}, "training data"), ({"weight_divisor": "sum"}, "--weight-divisor")):
        with pytest.raises(CheckpointError, match=named):
            train("sft", **given | again | change)
    train("sft", **given | again)
    one, other = (load_file(path / "model" / "model.safetensors") for path in (whole.directory, begun.directory))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_ranking_losses_stop_before_a_model_is_loaded(train: Callable[..., Any], data: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="not defined for --loss aot"):
        train("dpo", data=data["dpo"], loss="aot", **SHORT)


def test_kto_keeps_its_reference_point(train: Callable[..., Any], data: dict[str, str]) -> None:
    """Weights scale terms, not the estimate of z0: before the first update both runs have the same one."""
    given = SHORT | {"max_steps": 1, "eval_fraction": 0.0}
    points = [next(line for line in records(result) if line["split"] == "train")["kl/raw"] for result in (
        train("kto", data=data["kto"], **given), train("kto", data=data["kto"], columns="unused=weight", **given))]
    assert points[0] == points[1]
