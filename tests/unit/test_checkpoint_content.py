"""Odd values in a checkpoint whose hashes are right: named, or without effect."""

import os
from pathlib import Path
from typing import Any

import pytest

from tropism.errors import CheckpointError
from tropism.train.checkpoints.content import group_fits, invalid_entries
from tropism.train.checkpoints.files import verify
from tropism.train.checkpoints.resume import check_options
from tropism.train.checkpoints.rng_state import random_state
from tropism.train.evaluation.samples import Sampler
from tropism.train.monitor.guards import Guards, Subject
from tropism.train.run_state import RunState
from tropism.train.settings import Settings


def content() -> dict[str, Any]:
    return {**RunState(samples_before=["a"]).to_json(), "options": {}, "fingerprints": {}, "libraries": {},
            "stop_ids": [2], "guards": {"guards": Guards(Subject("paired", ())).state(), "stopper": None},
            "offsets": {"metrics.jsonl": 5}, "shift": [0.5, 3.0], "random": random_state(), "updater": {},
            "optimizer": {"groups": [{"lr": 0.1, "params": ["w"]}], "values": {}, "begun": True}}


def test_what_is_written_is_valid() -> None:
    assert invalid_entries(content()) == []


@pytest.mark.parametrize("settings", [
    Settings().state(), Settings(64, "full", True, True, 128, "none", "onednn", forwards_first_tokens=4096).state(), {},
    {"microbatch_tokens": 2048, "checkpointing": "none", "offload": False, "compiled": False}])
def test_settings_of_this_and_earlier_versions_are_valid(settings: dict[str, Any]) -> None:
    assert invalid_entries(content() | {"settings": settings}) == []
    assert Settings.restored(settings) == Settings(**settings)


@pytest.mark.parametrize("changes", [
    {"microbatch_tokens": 0}, {"microbatch_tokens": "auto"}, {"checkpointing": []}, {"checkpointing": "half"},
    {"products": "cublas"}, {"products": None}, {"asked_checkpointing": 1}, {"compiled": 1}, {"later": True},
    {"forwards_first_tokens": -1}])
def test_odd_settings_are_named(changes: dict[str, Any]) -> None:
    assert invalid_entries(content() | {"settings": Settings().state() | changes}) == ["settings"]


@pytest.mark.parametrize(("name", "value"), [
    ("step", True), ("step", 2**70), ("step", -1), ("shift", 3), ("shift", [1.0]), ("shift", {"a": 1}),
    ("answers", "text"), ("answers", [1]), ("answers", {}), ("optimizer", {"groups": 5, "values": {}, "begun": True}),
    ("optimizer", {"groups": [{"params": "w"}], "values": {}, "begun": True}), ("updater", [1]),
    ("optimizer", {"groups": [], "values": {"w": 1}, "begun": True}), ("evaluation", {"loss": "x"}),
    ("random", {"torch": 1, "numpy": [], "python": []}), ("guards", {"guards": {"first": {}}}), ("guards", []),
    ("guards", {"stopper": {"metric": "loss", "best": "x", "best_step": 0, "without": 0}}),
    ("stop_ids", ["x"]), ("totals", {"examples": None}), ("offsets", {"../x": 1}), ("fingerprints", {"data": 1})])
def test_odd_values_are_named(name: str, value: Any) -> None:
    assert invalid_entries(content() | {name: value}) == [name]


def test_groups_of_another_optimizer() -> None:
    mine = {"lr": 0.1, "betas": (0.9, 0.99), "foreach": None, "fused": True, "params": ["w"]}
    assert group_fits(mine, mine | {"betas": [0.8, 1], "lr": 1})
    assert group_fits(mine, {"params": ["w"], "foreach": True, "fused": None})
    for name, value in (("lr", "x"), ("lr", None), ("betas", 0.9), ("betas", [0.9]), ("betas", [None, 1]),
                        ("fused", 3), ("foreach", [])):
        assert not group_fits(mine, mine | {name: value}), (name, value)


def test_an_odd_rank_is_another_option(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"lora\.rank"):
        check_options({"lora": {"rank": "x"}}, {"lora": {"rank": 4}}, tmp_path)


@pytest.mark.parametrize("name", ["trainer.json", "COMPLETE", "state/.metadata", "other"])
def test_a_named_pipe_in_a_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    """Reading it would wait for a writer."""
    (tmp_path / "state").mkdir()
    (tmp_path / "trainer.json").write_text("{}")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{name}: not a regular file"):
        verify(tmp_path)


def test_another_number_of_completions() -> None:
    sampler = Sampler([], held_out=False, count=0, tokenizer=None, stop_ids=(), max_positions=None)
    sampler.check([])
    with pytest.raises(CheckpointError, match="1 completion sampled before training, but this run samples 0"):
        sampler.check(["x"])
