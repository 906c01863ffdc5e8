"""Steps whose forward passes all come before their backward passes: the same gradient, from fewer passes."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.conftest import records
from integration.resuming import TIMES
from processes import one_rank, run_ranks
from tropism.config import METHODS
from tropism.distributed import World
from tropism.errors import StoppedEarly
from tropism.model.attention import TreePass
from tropism.model.language_model import LanguageModel
from tropism.observe.console import Voice
from tropism.runner import Run, run
from tropism.train import loop
from tropism.train.engine import Engine
from tropism.train.setup import planned
from tropism.train.step import train_step
from tropism.train.step_packs import StepPacks

Passes = list[str]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "kto": ("kto", {}), "bco": ("kto", {"loss": "bco"}), "aot": ("dpo", {"loss": "aot,aot_unpaired"}),
    "dpo": ("dpo", {}), "both, adapter": ("kto", {"loss": "kto,bco", "lora": {"rank": 2}}),
    "live": ("kto", {"loss": "kto,bco", "reference": "live"}),
    "padded": ("kto", {"loss": "kto,bco", "layout": "padded"}),
    "router": ("dpo", {"model": "MOE", "router_aux_weight": 0.3}),
    "router and leaves": ("kto", {"model": "MOE", "router_aux_weight": 0.3})}
FEWER = {name for name in CASES if name != "dpo"}


def options(method: str, plain: Path, moe: Path, data: dict[str, Path], folder: Path, **changes: Any) -> dict[str, Any]:
    values = {"model": str(plain), "data": str(data[method]), "output": str(folder / "run"), "samples": 0,
              "store": str(folder / "store"), "batch_size": 8, "max_steps": 4, "learning_rate": 1e-3,
              "microbatch_tokens": 64, "checkpointing": "full", "log_every": 1, **changes}
    return values | ({"model": str(moe)} if values["model"] == "MOE" else {})


@dataclass
class Caught:
    """An updater that keeps the gradient of a step and changes nothing."""

    owned: Any
    gradient: list[torch.Tensor] = field(default_factory=list)

    def apply(self, step: int, finite: torch.Tensor) -> float:
        assert bool(finite)
        self.gradient = [part.grad for part in self.owned.parts]
        for part in self.owned.parts:
            part.grad = None
        return 0.0


def done(engine: Engine, packs: StepPacks) -> tuple[list[torch.Tensor], Any]:
    """The gradient of a step, and its outcome."""
    caught = Caught(engine.updater.owned)
    outcome = train_step(replace(engine, max_grad_norm=0.0, updater=caught), packs)
    engine.shift.forget()
    engine.shift.sums = None
    return caught.gradient, outcome


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_that_of_two_passes_and_the_passes_are_fewer(
        case: str, tiny_model_dir: Path, tiny_moe_dir: Path, data_of: dict[str, Path], tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch) -> None:
    method, changes = CASES[case]
    opened = Run(METHODS[method](**options(method, tiny_model_dir, tiny_moe_dir, data_of, tmp_path, precision="fp64",
                                           **changes)), World(0, 1, torch.device("cpu")), Voice(loud=False))
    engine = opened.build()
    first = opened.planner.packs_of(1)
    apart = replace(opened.planner, forwards_first_tokens=0).packs_of(1)
    assert len(first.packs) == len(apart.packs) > 2
    assert (first.forwards_first, apart.forwards_first) == (case in FEWER, False)
    assert (first.computed_tokens < apart.computed_tokens) is (case in FEWER)
    assert bool(first.leaves) is (method == "kto" and case not in ("bco", "live", "padded"))

    calls: Passes = []
    inner = engine.model.layers[-1].self_attn  # which is computed again in the backward pass
    inner.register_forward_pre_hook(lambda *_: calls.append("forward" if torch.is_grad_enabled() else "alone"))
    backward = LanguageModel.backward
    monkeypatch.setattr(LanguageModel, "backward",
                        lambda *args, **given: (calls.append("backward"), backward(*args, **given))[1])
    wanted, expected = done(engine, apart)
    twice, calls[:] = calls.copy(), []
    found, outcome = done(engine, first)
    scale = max(float(part.abs().max()) for part in wanted)
    assert scale > 0
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-8 * scale)
    if expected.point is not None:
        assert float(outcome.point.raw) == pytest.approx(float(expected.point.raw), rel=1e-9, abs=1e-12)

    packs = len(first.packs)
    begins = calls.index("backward")
    if case in FEWER:
        assert calls[begins:] == ["backward", "forward"] * packs  # each pack is computed again once
        assert calls[:begins].count("forward") == packs
        assert calls[:begins].count("alone") == len(first.leaves) + len(first.mismatched)
        assert len(calls) < len(twice) or first.leaves  # which are shorter
    else:
        assert calls == twice


def test_a_pack_keeps_neither_keys_nor_states_of_its_prompts(
        tiny_model_dir: Path, tiny_moe_dir: Path, data_of: dict[str, Path], tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one pack at a time are in memory, while its mismatched completions are computed."""
    opened = Run(METHODS["kto"](**options("kto", tiny_model_dir, tiny_moe_dir, data_of, tmp_path)),
                 World(0, 1, torch.device("cpu")), Voice(loud=False))
    engine = opened.build()
    recorded: list[TreePass] = []
    tree_pass, backward = LanguageModel.tree_pass, LanguageModel.backward

    def watched_pass(model: LanguageModel, batch: Any, **given: Any) -> TreePass | None:
        assert not any(one._kept for one in recorded) or given.get("earlier") is recorded[-1]
        made = tree_pass(model, batch, **given)
        if given.get("record"):
            assert made is not None
            recorded.append(made)
        return made

    def watched_backward(model: LanguageModel, share: torch.Tensor, last: bool) -> None:
        assert not any(one._kept or one.states is not None for one in recorded)
        backward(model, share, last)

    monkeypatch.setattr(LanguageModel, "tree_pass", watched_pass)
    monkeypatch.setattr(LanguageModel, "backward", watched_backward)
    packs = opened.planner.packs_of(1)
    train_step(engine, packs)
    assert len(recorded) == len(packs.packs) > 2


def lines(directory: Path) -> list[dict[str, Any]]:
    found = map(json.loads, (directory / "metrics.jsonl").open())
    return [{key: value for key, value in line.items() if key not in TIMES} for line in found]


def test_a_resumed_run_keeps_the_order_of_its_passes(
        tiny_model_dir: Path, tiny_moe_dir: Path, data_of: dict[str, Path], tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, although the machine would now choose otherwise."""
    def settings(name: str, **changes: Any) -> Any:
        return METHODS["kto"](**options("kto", tiny_model_dir, tiny_moe_dir, data_of, tmp_path,
                                        output=str(tmp_path / name), loss="kto,bco", save_every=1,
                                        max_steps=3, eval_every=0, **changes))

    whole = run(settings("whole"))
    inner = loop.train_step

    def stopping(engine: Any, work: Any) -> Any:
        if work.step == 2:
            raise KeyboardInterrupt
        return inner(engine, work)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", stopping)
        with pytest.raises((KeyboardInterrupt, StoppedEarly)):
            run(settings("stopped"))
    monkeypatch.setattr(planned, "quick_tokens", lambda *_: 0)
    found = run(settings("stopped", resume="auto"))
    assert (found.model / "model.safetensors").read_bytes() == (whole.model / "model.safetensors").read_bytes()
    assert lines(found.directory) == lines(whole.directory)
    assert records(found)[-2]["tokens/computed"] < 2 * records(found)[-2]["tokens"]


@pytest.mark.slow
def test_processes_equal_one(tiny_model_dir: Path, tiny_moe_dir: Path, data_of: dict[str, Path],
                             tmp_path: Path) -> None:
    """Sharded ones and copies, with uneven trees and a process that may have nothing."""
    def job(name: str, **changes: Any) -> tuple[str, dict[str, Any]]:
        return "kto", options("kto", tiny_model_dir, tiny_moe_dir, data_of, tmp_path, precision="fp64", max_steps=2,
                              loss="kto,bco", output=str(tmp_path / name), export_dtype="float64", **changes)

    run(METHODS["kto"](**job("one")[1]))
    jobs = [job("sharded", parallel={"shard": 2}, store=str(tmp_path / "two")),
            job("copies", parallel={"shard": 1, "replicate": 2}, store=str(tmp_path / "two")),
            job("few", parallel={"shard": 2}, batch_size=2, store=str(tmp_path / "two"))]
    assert run_ranks(2, one_rank, jobs) == [0, 0]
    for name in ("sharded", "copies"):
        for line, other in zip(lines(tmp_path / name), lines(tmp_path / "one"), strict=True):
            assert line["loss"] == pytest.approx(other["loss"], rel=1e-9)
            if line["split"] == "train":
                assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-8)
                assert line["kl/raw"] == pytest.approx(other["kl/raw"], rel=1e-8, abs=1e-12)
                assert line["tokens/computed"] == other["tokens/computed"]
