"""Adapters on a model that is spread over processes: what one process gives."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from integration.conftest import assert_same_metrics, distance, records
from integration.test_invariance import BOUNDS, Left
from processes import one_rank, run_ranks
from tropism.config import METHODS
from tropism.runner import run

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("kto", {"rank": 4}), "dora": ("dpo", {"rank": 3, "dora": True, "rslora": True}),
    "whole modules": ("dpo", {"rank": 4, "targets": "q_proj,down_proj", "modules_to_save": "lm_head"}),
    "continued": ("kto", {"adapter": "ADAPTER"}), "live": ("kto", {"rank": 4}), "live, continued": (
        "kto", {"adapter": "ADAPTER"})}


def adapter(run_directory: Path) -> dict[str, Any]:
    state = load_file(run_directory / "model" / "adapter_model.safetensors")
    return {name: tensor.double() for name, tensor in state.items()}


@pytest.fixture(scope="module")
def common(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    store = tmp_path_factory.mktemp("store")
    return {"model": str(tiny_model_dir), "batch_size": 8, "max_steps": 4, "learning_rate": 1e-2, "precision": "fp64",
            "export_dtype": "float64", "samples": 0, "eval_fraction": 0.2, "store": str(store),
            "parallel": {"shard": "on"}}


def test_two_processes_equal_one(common: dict[str, Any], data_of: dict[str, Path], tmp_path: Path) -> None:
    """X2, R2, R3, S1: weights and metrics; every row of every lora_B is kept; the frozen base is spread too."""
    run(METHODS["kto"](**common, data=str(data_of["kto"]), lora={"rank": 4}, output=str(tmp_path / "first")))
    jobs = []
    for name, (method, lora) in KINDS.items():
        lora = {key: str(tmp_path / "first" / "model") if value == "ADAPTER" else value for key, value in lora.items()}
        settings = {**common, "data": str(data_of[method]), "lora": lora, "max_steps": 3,
                    **({"reference": "live"} if "live" in name else {})}
        run(METHODS[method](**settings, output=str(tmp_path / f"{name} one")))
        settings["samples"] = int(name == "lora")
        jobs.append((method, {**settings, "output": str(tmp_path / f"{name} two"), "microbatch_tokens": 200,
                              "save_every": 2, "store": str(tmp_path / "store of two")}))
    assert run_ranks(2, one_rank, jobs) == [0, 0]
    for name in KINDS:
        one, two = tmp_path / f"{name} one", tmp_path / f"{name} two"
        ours, theirs = adapter(two), adapter(one)
        learned = sum(float(tensor.pow(2).sum()) for key, tensor in theirs.items() if "lora_B" in key) ** 0.5
        assert distance(ours, theirs) / learned < BOUNDS["fp64"][0], name
        assert all(bool((tensor != 0).any(dim=1).all()) for key, tensor in ours.items() if "lora_B" in key), name
        assert_same_metrics(records(Left(two)), records(Left(one)), *BOUNDS["fp64"][1:])
        first = records(Left(two))[0]
        assert (first["rewards/margins"], first["step"]) == (0.0, 0) or abs(first["rewards/margins"]) < 1e-9
        manifests = [json.loads((place / "manifest.json").read_text()) for place in (one, two)]
        assert manifests[0]["base_weights"] == manifests[1]["base_weights"]
        assert manifests[0]["fingerprints"] == {**manifests[1]["fingerprints"], "config": manifests[0]["fingerprints"][
            "config"]}


def test_resume_on_one_process(common: dict[str, Any], data_of: dict[str, Path], tmp_path: Path) -> None:
    """C2: a checkpoint of an adapter that two processes wrote."""
    settings = {**common, "data": str(data_of["kto"]), "lora": {"rank": 4}, "save_every": 2, "keep": 0}
    run(METHODS["kto"](**settings, output=str(tmp_path / "straight")))
    output = tmp_path / "run"
    assert run_ranks(2, one_rank, [("kto", {**settings, "output": str(output)})]) == [0, 0]
    run(METHODS["kto"](**settings, output=str(output), resume=str(output / "checkpoints" / "step-00000002")))
    ours, theirs = adapter(output), adapter(tmp_path / "straight")
    assert distance(ours, theirs) / sum(float(tensor.pow(2).sum()) for tensor in theirs.values()) ** 0.5 < 1e-8


@pytest.mark.slow
def test_a_live_reference_in_bfloat16(common: dict[str, Any], data_of: dict[str, Path], tmp_path: Path) -> None:
    """R1, R2, C2: of an adapter that has learned much, the reference is what the policy computes, not the merged sum;
    the start-up comparison keeps the tree layout, and one process takes the run up."""
    run(METHODS["kto"](**{**common, "learning_rate": 0.3, "max_steps": 8}, data=str(data_of["kto"]), lora={"rank": 4},
                       output=str(tmp_path / "first")))
    settings = {**common, "model": str(tmp_path / "first" / "model"), "data": str(data_of["dpo"]), "reference": "live",
                "precision": "bf16", "save_every": 2, "output": str(tmp_path / "two")}
    assert run_ranks(2, one_rank, [("dpo", settings)]) == [0, 0]
    first = records(Left(tmp_path / "two"))[0]
    assert (first["step"], first["loss"]) == (0, pytest.approx(math.log(2), rel=1e-9))
    facts = json.loads((tmp_path / "two" / "manifest.json").read_text())
    assert facts["layout"] == "tree"
    run(METHODS["dpo"](**{**settings, "max_steps": 6}, resume="auto"))
    assert json.loads((tmp_path / "two" / "manifest.json").read_text())["steps"] == 6
