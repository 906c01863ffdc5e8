"""A step that runs out of memory is repeated in smaller packs, and the run ends as one that had them from that step on.

Memory is not really exhausted: a pass over more tokens than "fit" raises what an allocator raises.
"""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from integration import resuming
from integration.conftest import records, weights
from integration.resuming import TIMES, manifest
from processes import one_rank, run_ranks
from tropism.config import METHODS
from tropism.errors import StoppedEarly, TropismError
from tropism.model import language_model
from tropism.model.language_model import LanguageModel
from tropism.runner import run
from tropism.train import loop
from tropism.train.optimizer import Scheduled
from tropism.train.step_packs import StepPlanner

CPU_ERROR = ("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
             "allocate 4000000000000000 bytes. Error code 12")
BUDGET = 512
Lines = list[dict[str, Any]]


@dataclass
class Memory:
    """Passes that a step makes from step `first` on, and which of them fail.

    Args:
        tokens: that fit into one pass with gradients.
        no_grad: that fit into one without.
        first: step from which it is so.
        where: `forward` or `backward`.
        checkpointed: tokens that fit with full checkpointing.
        waiting: tokens of passes before their backward passes that fit together.
        error: what an allocator raises.
    """

    tokens: int = 10**9
    no_grad: int = 10**9
    first: int = 0
    where: str = "forward"
    checkpointed: int = 0
    waiting: int = 10**9
    error: Exception = field(default_factory=lambda: RuntimeError(CPU_ERROR))
    step: int = 0
    failures: int = 0
    after: int = 0
    """Passes of a step that fit whatever their size."""
    passes: int = 0
    held: int = 0
    open: int = 0

    def check(self, model: LanguageModel, tokens: int, learns: bool) -> None:
        most = max(self.tokens, self.checkpointed * (model.checkpointing == "full")) if learns else self.no_grad
        self.passes += 1
        if (tokens > most or self.open > self.waiting) and self.step >= self.first and self.passes > self.after:
            self.failures += 1
            raise type(self.error)(*self.error.args)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    """Memory that a test can make small."""
    found = Memory()
    install(found, monkeypatch.setattr)
    return found


def install(memory: Memory, setattr: Callable[..., None]) -> None:
    hidden, backward, step = LanguageModel._hidden, LanguageModel.backward, loop.train_step

    def watched_hidden(model: LanguageModel, batch: Any, *rest: Any) -> Any:
        learns = torch.is_grad_enabled()
        memory.held = batch.tokens
        memory.open += batch.tokens * learns
        if not learns or memory.where == "forward":
            memory.check(model, batch.tokens, learns)
        return hidden(model, batch, *rest)

    def watched_backward(model: LanguageModel, share: Any, last: bool) -> None:
        tokens, memory.open = memory.held, 0  # the first one ends the forward passes
        backward(model, share, last)  # first, so that gradients are there
        if memory.where == "backward":
            memory.check(model, tokens, True)

    def watched_step(engine: Any, work: Any) -> Any:
        memory.step, memory.passes, memory.open = work.step, 0, 0
        return step(engine, work)

    setattr(LanguageModel, "_hidden", watched_hidden)
    setattr(LanguageModel, "backward", watched_backward)
    setattr(loop, "train_step", watched_step)


answers = resuming.answers


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path, feedback: Path, pairs: Path,
          answers: Path) -> Callable[..., Any]:
    """Run a method for five steps of 8 rows."""
    store = tmp_path_factory.mktemp("store")
    data = {"kto": feedback, "dpo": pairs, "kd": answers, "sft": answers}

    def go(method: str, **changes: Any) -> Any:
        settings = {"model": str(tiny_model_dir), "data": str(data[method]), "batch_size": 8, "max_steps": 5,
                    "output": str(tmp_path_factory.mktemp("runs") / "run"), "learning_rate": 1e-3, "log_every": 1,
                    "samples": 0, "microbatch_tokens": BUDGET, "store": str(store), **changes}
        if method == "sft":
            del settings["store"]
        return run(METHODS[method](**settings))

    return go


def same(ours: Any, theirs: Any) -> None:
    """Weights and records, to the bit."""
    one, other = ([{key: value for key, value in line.items() if key not in TIMES} for line in records(result)]
                  for result in (ours, theirs))
    assert one == other
    mine, wanted = weights(ours.directory / "model"), weights(theirs.directory / "model")
    assert all(torch.equal(mine[name], wanted[name]) for name in wanted)


def smaller_from(step: int, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps from this one on have packs of so many tokens."""
    plain = StepPlanner.packs_of

    def packs_of(planner: StepPlanner, number: int) -> Any:
        return plain(replace(planner, microbatch_tokens=budget) if number >= step else planner, number)

    monkeypatch.setattr(StepPlanner, "packs_of", packs_of)


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "kto, one pack with leaves": ("kto", {"microbatch_tokens": 4096}, {"tokens": 400}),
    "kto, in the leaves": ("kto", {"microbatch_tokens": 4096}, {"no_grad": 220}),
    "kto, in the mismatched packs": ("kto", {}, {"no_grad": 250}),
    "kto, backward of a later pack": ("kto", {}, {"tokens": 250, "where": "backward", "after": 3}),
    "kto, live reference": ("kto", {"reference": "live"}, {"tokens": 300}),
    "bco, in the look-ahead": ("kto", {"loss": "bco"}, {"no_grad": 300}),
    "bco, in the backward": ("kto", {"loss": "bco"}, {"tokens": 300, "where": "backward"}),
    "aot": ("dpo", {"loss": "aot"}, {"tokens": 300, "where": "backward"}),
    "dpo, twice in a row": ("dpo", {"microbatch_tokens": 4096}, {"tokens": 250}),
    "dpo, prefetched": ("dpo", {"prefetch": 3}, {"tokens": 300, "error": torch.OutOfMemoryError("CUDA out of memory")}),
    "sft, padded": ("sft", {"layout": "padded", "microbatch_tokens": 4096}, {"tokens": 300, "error": MemoryError()}),
    "kd, live teacher": ("kd", {"teacher": "MODEL"}, {"tokens": 220, "where": "backward"}),
}


@pytest.mark.some(4)
@pytest.mark.parametrize("case", CASES)
def test_a_step_is_repeated_in_smaller_packs(case: str, memory: Memory, start: Callable[..., Any], tiny_model_dir: Path,
                                             monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                                             ) -> None:
    """Nothing of the step that failed is left: to the bit the run that has smaller packs from that step on."""
    method, options, full = CASES[case]
    memory.first = 2
    for name, value in full.items():
        setattr(memory, name, value)
    options = {"max_steps": 3, **{key: str(tiny_model_dir) if value == "MODEL" else value
                                  for key, value in options.items()}}
    ours = start(method, **options)
    assert memory.failures >= (2 if "twice" in case else 1)
    kept = manifest(ours.directory)["settings"]
    before = options.get("microbatch_tokens", BUDGET)
    assert 0 < kept["microbatch_tokens"] < before == kept["asked_tokens"]
    assert kept["checkpointing"] == "none"
    said = [line for line in capsys.readouterr().out.splitlines() if "out of memory" in line]
    assert len(said) == memory.failures
    assert f"step 2: out of memory with packs of up to {before:,} tokens, so it is repeated with packs" in said[0]
    memory.first = 10
    smaller_from(2, kept["microbatch_tokens"], monkeypatch)
    same(ours, start(method, **options))


def test_a_pack_of_one_tree_is_repeated_with_full_checkpointing(memory: Memory, start: Callable[..., Any],
                                                                capsys: pytest.CaptureFixture[str]) -> None:
    memory.first, memory.tokens, memory.checkpointed = 2, 20, 1000
    ours = start("dpo", microbatch_tokens=40)
    kept = manifest(ours.directory)["settings"]
    assert (kept["checkpointing"], kept["asked_checkpointing"]) == ("full", "none")
    out = capsys.readouterr().out
    assert "step 2: out of memory in a pack of one prompt with its completions (" in out
    assert "so it is repeated with --checkpointing full" in out


@pytest.mark.parametrize("loss", ["kto", "bco"])
def test_a_step_with_all_forward_passes_first_is_repeated_pack_by_pack(
        loss: str, memory: Memory, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    """With the packs that it had; a step whose passes fit together before is not touched."""
    memory.first, memory.waiting = 2, BUDGET
    options = {"loss": loss, "checkpointing": "full", "max_steps": 3, "microbatch_tokens": BUDGET // 2}
    ours = start("kto", **options)
    assert memory.failures == 1
    kept = manifest(ours.directory)["settings"]
    assert (kept["forwards_first_tokens"], kept["microbatch_tokens"], kept["asked_tokens"]) == (0, BUDGET // 2, 0)
    assert "step 2: out of memory with all forward passes before the backward passes" in capsys.readouterr().out
    memory.first = 10
    plain = StepPlanner.packs_of
    monkeypatch.setattr(StepPlanner, "packs_of", lambda planner, number: plain(
        replace(planner, forwards_first_tokens=0) if number >= 2 else planner, number))
    theirs = start("kto", **options)
    same(ours, theirs)
    assert manifest(theirs.directory)["settings"]["forwards_first_tokens"] > 0


def test_a_row_that_does_not_fit_is_named(memory: Memory, start: Callable[..., Any], pairs: Path) -> None:
    memory.first, memory.tokens = 2, 20
    with pytest.raises(TropismError, match=rf"{pairs.name}:\d+: \d+ tokens do not fit into memory, in a pack of their "
                                           r"own with full checkpointing .*--max-length"):
        start("dpo")


def test_a_model_without_known_layers_is_not_repeated_in_vain(memory: Memory, start: Callable[..., Any], pairs: Path,
                                                              monkeypatch: pytest.MonkeyPatch,
                                                              capsys: pytest.CaptureFixture[str]) -> None:
    memory.first, memory.tokens = 2, 20
    monkeypatch.setattr(language_model, "layers_of", lambda module: [])
    with pytest.raises(TropismError, match=rf"{pairs.name}:\d+: \d+ tokens do not fit into memory, in a pack of their "
                                           r"own \(.*--max-length"):
        start("dpo")
    assert "--checkpointing full" not in capsys.readouterr().out


def test_a_stopped_run_keeps_what_it_lowered(memory: Memory, start: Callable[..., Any], tmp_path: Path,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is in progress when memory runs out, and the resumed run has the smaller packs from its start."""
    memory.first, memory.tokens = 3, 300
    whole = start("kto", save_every=1)
    inner = loop.train_step

    def stopping(engine: Any, work: Any) -> Any:
        if work.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return inner(engine, work)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", stopping)
        with pytest.raises(StoppedEarly):
            start("kto", save_every=1, output=str(tmp_path / "run"))
    failures = memory.failures
    ours = start("kto", save_every=1, output=str(tmp_path / "run"), resume="auto")
    assert memory.failures == failures
    same(ours, whole)
    assert manifest(ours.directory)["settings"] == manifest(whole.directory)["settings"]


def test_memory_that_is_short_at_resume(memory: Memory, start: Callable[..., Any], tmp_path: Path,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step after a checkpoint fails, with the optimizer's state loaded."""
    with monkeypatch.context() as patch:
        inner = loop.train_step
        patch.setattr(loop, "train_step", lambda engine, work: (
            work.step == 3 and os.kill(os.getpid(), signal.SIGTERM), inner(engine, work))[1])
        with pytest.raises(StoppedEarly):
            start("kto", save_every=1, output=str(tmp_path / "run"))
    memory.first, memory.tokens = 4, 300
    ours = start("kto", save_every=1, output=str(tmp_path / "run"), resume="auto")
    assert memory.failures == 1
    memory.first = 10
    smaller_from(4, manifest(ours.directory)["settings"]["microbatch_tokens"], monkeypatch)
    same(ours, start("kto", save_every=1))


def test_an_update_is_never_repeated(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the weights may have changed, so a second try would apply it twice."""
    calls: list[int] = []

    def apply(updater: Scheduled, step: int, finite: Any) -> float:
        calls.append(step)
        raise RuntimeError(CPU_ERROR)

    monkeypatch.setattr(Scheduled, "apply", apply)
    with pytest.raises(TropismError, match=r"out of memory in the update of step 1, which may have changed only some"):
        start("sft")
    assert calls == [1]


@pytest.mark.parametrize(("method", "options"), [
    ("kto", {"eval_fraction": 0.3}), ("kd", {"teacher": "MODEL", "top_k": 4, "eval_fraction": 0.3})])
def test_passes_without_gradients_are_divided(method: str, options: dict[str, Any], memory: Memory,
                                              start: Callable[..., Any], tiny_model_dir: Path, tmp_path: Path) -> None:
    """Reference, teacher, first comparison and evaluation: the same figures from packs that fit."""
    options = {key: str(tiny_model_dir) if value == "MODEL" else value for key, value in options.items()}
    options |= {"max_steps": 1, "microbatch_tokens": 4096}
    plain = start(method, store=str(tmp_path / "plain"), **options)
    memory.no_grad = 300
    ours = start(method, store=str(tmp_path / "divided"), **options)
    assert memory.failures > 1
    for one, other in zip(records(ours), records(plain), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)


def ranks(rank: int, size: int, port: int, full: dict[str, Any], jobs: Any) -> None:
    """`one_rank` with little memory on process 1 only."""
    memory = Memory(**full)
    if rank == 1:
        install(memory, setattr)
    one_rank(rank, size, port, jobs)


def test_processes_repeat_a_step_together(start: Callable[..., Any], tiny_model_dir: Path, feedback: Path, pairs: Path,
                                          tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one of two processes runs out of memory. Both drop the step, lower the budget alike, and end alike."""
    cases = {"leaves": ("kto", feedback, {"microbatch_tokens": 4096}), "aot": ("dpo", pairs, {"loss": "aot"}),
             "bco": ("kto", feedback, {"loss": "bco"})}

    def settings(name: str, tokens: int = 0) -> tuple[str, dict[str, Any]]:
        method, data, options = cases[name]
        return method, {"model": str(tiny_model_dir), "data": str(data), "output": str(tmp_path / f"{name}{tokens}"),
                        "store": str(tmp_path / "store"), "batch_size": 8, "max_steps": 2, "learning_rate": 1e-3,
                        "samples": 0, "log_every": 1, "microbatch_tokens": BUDGET,
                        "parallel": {"shard": 1, "replicate": 2}, **options,
                        **({"microbatch_tokens": tokens} if tokens else {})}

    full = {"tokens": 200, "where": "backward"}
    assert run_ranks(2, ranks, full, [settings(name) for name in cases]) == [0, 0]
    kept = {name: manifest(tmp_path / f"{name}0")["settings"] for name in cases}
    assert all(0 < one["microbatch_tokens"] < one["asked_tokens"] for one in kept.values())
    assert run_ranks(2, one_rank, [settings(name, kept[name]["microbatch_tokens"]) for name in cases]) == [0, 0]
    for name in cases:
        one, other = (weights(tmp_path / f"{name}{tokens}" / "model")
                      for tokens in (0, kept[name]["microbatch_tokens"]))
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_sharded_step_ends_on_all_processes(tiny_model_dir: Path, pairs: Path, tmp_path: Path) -> None:
    """A process cannot leave a pass that all compute together: none hangs, and the run can be resumed."""
    job = ("dpo", {"model": str(tiny_model_dir), "data": str(pairs), "output": str(tmp_path / "run"),
                   "store": str(tmp_path / "store"), "batch_size": 8, "max_steps": 4, "learning_rate": 1e-3,
                   "samples": 0, "save_every": 1, "parallel": {"shard": 2}})
    assert run_ranks(2, ranks, {"tokens": 20, "first": 3}, [job]) == [1, 1]
    assert "another process of the run failed" in manifest(tmp_path / "run")["error"]
    assert run_ranks(2, one_rank, [(job[0], {**job[1], "resume": "auto", "microbatch_tokens": 1024})]) == [0, 0]
