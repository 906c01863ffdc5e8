"""The result depends on data, options and seed only: not on packs, workers, store, layout or ranks."""

import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from integration.conftest import assert_same_metrics, distance, records, weights

# The run's own bound: relative to the distance travelled in 20 AdamW steps; and (relative, absolute) of metrics.
BOUNDS = {"fp64": (1e-8, 0.0, 1e-8), "fp32": (3e-4, 1e-4, 1e-5)}
LAYOUT_BOUND = {"fp64": (1e-5, 1e-5, 1e-5), "fp32": (3e-4, 1e-4, 1e-5)}

BASE: dict[str, Any] = {"microbatch_tokens": 1024, "eval_fraction": 0.2, "export_dtype": "float64"}
VARIANTS: dict[str, dict[str, Any]] = {
    "small packs": {"microbatch_tokens": 256},
    "one tree a pack": {"microbatch_tokens": 16},
    "large packs": {"microbatch_tokens": 8192},
    "workers": {"workers": 2},
    "cold store": {"store": "cold"},
    "live reference": {"reference": "live"},
}


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("method", ["kto", "dpo"])
def test_nothing_but_data_options_and_seed_changes_the_result(
    train: Callable[..., Any], tiny_model_dir: Path, tmp_path: Path, method: str, precision: str,
) -> None:
    """L1, N5, P1, R4: weights after 20 steps, and every metric, short last steps included."""
    base = train(method, precision=precision, **BASE)
    expected, start = weights(base.model), weights(tiny_model_dir)
    travelled = distance(expected, start)
    assert travelled > 1e-2
    sizes = {record["examples"] for record in records(base)[1:3]}
    assert sizes == {8, 16}
    bounds = BOUNDS[precision]
    for name, changes in VARIANTS.items():
        changes = {key: str(tmp_path / value) if key == "store" else value for key, value in changes.items()}
        other = train(method, precision=precision, **{**BASE, **changes})
        assert distance(weights(other.model), expected) / travelled < bounds[0], name
        assert_same_metrics(records(other), records(base), bounds[1], bounds[2])
    padded = train(method, precision=precision, **BASE, layout="padded")
    bounds = LAYOUT_BOUND[precision]
    assert distance(weights(padded.model), expected) / travelled < bounds[0]
    assert_same_metrics(records(padded), records(base), bounds[1], bounds[2])


def test_a_step_shorter_than_the_batch_is_among_those_compared(train: Callable[..., Any]) -> None:
    """The comparison above goes over epochs of 43 rows less the held-out ones: the last step is short."""
    counts = [record["examples"] for record in records(train("dpo", **BASE)) if record["split"] == "train"]
    taken = [after - before for before, after in zip([0, *counts], counts, strict=False)]
    assert min(taken) < 8


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def one_rank(rank: int, size: int, port: int, method: str, settings: dict[str, Any]) -> None:
    """What torchrun does, without its start-up time."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port)}
    import torch

    from tropism.api import run
    from tropism.config import METHODS

    torch.set_num_threads(1)
    run(METHODS[method](**settings))


def run_ranks(size: int, target: Callable[..., None], *args: Any) -> list[int]:
    """Run `target(rank, size, port, *args)` in processes of a fork server; exit codes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers.models.llama.modeling_llama", "tropism.api"])
    port = free_port()
    ranks = [context.Process(target=target, args=(rank, size, port, *args)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    return [int(rank.exitcode if rank.exitcode is not None else -1) for rank in ranks]


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("method", ["kto", "dpo"])
def test_two_ranks_equal_one_process(
    train: Callable[..., Any], tiny_model_dir: Path, data_of: dict[str, Path], tmp_path: Path, method: str,
    precision: str,
) -> None:
    """L1, X1: two gloo processes, uneven trees, packs of different numbers, and a store they build together."""
    one = train(method, precision=precision, **BASE)
    settings = {"model": str(tiny_model_dir), "data": str(data_of[method]), "output": str(tmp_path / "two"),
                "store": str(tmp_path / "store-of-two"), "batch_size": 8, "max_steps": 20, "learning_rate": 1e-3,
                "samples": 1, "precision": precision, **BASE, "microbatch_tokens": 64}
    assert run_ranks(2, one_rank, method, settings) == [0, 0]

    class Two:
        directory = tmp_path / "two"

    travelled = distance(weights(one.model), weights(tiny_model_dir))
    bounds = BOUNDS[precision]
    assert distance(weights(Two.directory / "model"), weights(one.model)) / travelled < bounds[0]
    assert_same_metrics(records(Two), records(one), bounds[1], bounds[2])


def test_more_ranks_than_trees_end_without_a_hang(tiny_model_dir: Path, tmp_path: Path) -> None:
    """X1: a rank whose share of a step is empty runs empty packs; each row counts once."""
    import json

    data = tmp_path / "few.jsonl"
    rows = [{"prompt": f"{word}? ", "completion": word, "label": word == "oak"} for word in ("oak", "elm", "ash")]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"model": str(tiny_model_dir), "data": str(data), "output": str(tmp_path / "run"),
                "store": str(tmp_path / "store"), "batch_size": 2, "epochs": 3, "learning_rate": 1e-3, "samples": 0}
    assert run_ranks(4, one_rank, "kto", settings) == [0] * 4

    class Run:
        directory = tmp_path / "run"

    assert records(Run)[-1]["examples"] == 9


def test_torchrun_runs_the_command_line(tiny_model_dir: Path, feedback: Path, tmp_path: Path) -> None:
    """X1: as a user starts it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port",
               str(free_port()), "-m", "tropism", "kto", "--model", str(tiny_model_dir), "--data", str(feedback),
               "--output", str(tmp_path / "run"), "--store", str(tmp_path / "store"), "--batch-size", "8",
               "--max-steps", "2", "--samples", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("plan: ") == 1
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
