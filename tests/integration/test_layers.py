"""Runs with checkpoints and compiled layers, through the command line's own call."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tropism.train.setup.memory_and_speed as setup
from integration.conftest import assert_same_metrics, distance, records, weights
from tropism.errors import ModelError, UsageError
from tropism.model.compiled import CompiledLayers

Train = Callable[..., Any]


def manifest(result: Any) -> dict[str, Any]:
    return json.loads((result.directory / "manifest.json").read_text())


def bytes_of(result: Any) -> bytes:
    return (result.model / "model.safetensors").read_bytes()


@pytest.mark.parametrize("method", ["kto", "dpo", "kd"])
def test_checkpoints_change_no_bit_of_the_weights(train: Train, method: str, tiny_moe_dir: Path,
                                                  tiny_model_dir: Path) -> None:
    """A mixture of experts too, with the routers' loss, and a teacher."""
    options: dict[str, Any] = {"max_steps": 2, "microbatch_tokens": 200, "eval_every": 0}
    if method == "dpo":
        options |= {"model": str(tiny_moe_dir), "router_aux_weight": 0.1}
    if method == "kd":
        options |= {"teacher": str(tiny_model_dir)}
    plain = train(method, **options)
    for mode in ("selective", "full"):
        result = train(method, checkpointing=mode, **options)
        assert bytes_of(result) == bytes_of(plain)
        assert manifest(result)["settings"]["checkpointing"] == mode
    assert manifest(plain)["settings"]["checkpointing"] == "none"


def test_a_run_with_compiled_layers(train: Train, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, names and records are those of a plain run. Each step has packs of other sizes."""
    monkeypatch.setattr(setup, "CompiledLayers", partial(CompiledLayers, "eager"))
    options: dict[str, Any] = {"max_steps": 4, "precision": "fp64", "microbatch_tokens": 300, "export_dtype": "float64"}
    plain = train("kto", **options)
    compiled = train("kto", compile="on", checkpointing="full", samples=1, **options)
    expected = weights(plain.model)
    assert distance(weights(compiled.model), expected) < 1e-8 * distance(expected, weights(tiny_model_dir))
    assert_same_metrics(records(compiled), records(plain), 0.0, 1e-8)
    counts = [line["compile/recompiles"] for line in records(compiled) if line["split"] == "train"]
    assert counts == [0, 0, 0, 0]
    assert not any("compile/recompiles" in line for line in records(plain))
    assert manifest(compiled)["settings"]["compiled"]


def test_options_without_effect_are_refused_before_a_model_is_loaded(train: Train) -> None:
    for options in ({"offload_checkpoints": True}, {"offload_checkpoints": True, "checkpointing": "selective"},
                    {"compile": "on", "layout": "padded"}):
        with pytest.raises(UsageError, match=r"--offload-checkpoints|--compile on"):
            train("kto", model="/no/model/here", **options)


def test_a_compiler_that_is_missing_stops_only_a_run_that_asks_for_it(
        train: Train, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def missing() -> Any:
        raise RuntimeError("g++ not found")

    monkeypatch.setattr(setup, "CompiledLayers", missing)
    with pytest.raises(ModelError, match=r"--compile on: .*g\+\+ not found\. Use --compile off"):
        train("kto", compile="on", max_steps=1)
    monkeypatch.setattr("tropism.train.setup.planned.worth_compiling", lambda steps, device: True)
    result = train("kto", max_steps=1)
    assert "layers are not compiled: RuntimeError: g++ not found" in capfd.readouterr().out
    assert not manifest(result)["settings"]["compiled"]
