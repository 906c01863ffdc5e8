"""What a run notices of itself: values that are not finite, dead training, guards, early stopping."""

import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from integration.conftest import records, weights
from processes import run_ranks
from tropism.errors import NonFiniteError, NothingLearnedError, ReferenceMismatchError, UsageError
from tropism.model.language_model import LanguageModel
from tropism.train import loop
from tropism.train.step_log import StepOutcome

Spoil = Callable[[set[int]], None]


def spoil(patch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """Give one completion of these steps the log-prob NaN, after the model's own forward."""
    real_step, real = loop.train_step, LanguageModel.score_completions
    spoilt: list[bool] = [False]

    def step(engine: Any, work: Any) -> StepOutcome:
        spoilt[0] = work.step in steps
        return real_step(engine, work)

    def outcome(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = real(self, *args, **kwargs)
        if spoilt[0] and len(found.logps):
            factor = torch.ones_like(found.logps)
            factor[0] = float("nan")
            object.__setattr__(found, "logps", found.logps * factor)
            spoilt[0] = False
        return found

    patch.setattr(loop, "train_step", step)
    patch.setattr(LanguageModel, "score_completions", outcome)


@pytest.fixture
def spoil_logps(monkeypatch: pytest.MonkeyPatch) -> Spoil:
    """As `spoil`."""
    return partial(spoil, monkeypatch)


@pytest.fixture
def spoil_gradient(monkeypatch: pytest.MonkeyPatch) -> Spoil:
    """Put a NaN into a gradient of these steps, by a hook as a faulty kernel would."""
    def on(steps: set[int]) -> None:
        real = loop.train_step

        def step(engine: Any, work: Any) -> StepOutcome:
            handle = next(engine.model.module.parameters()).register_hook(
                lambda gradient: gradient * float("nan") if work.step in steps else gradient)
            try:
                return real(engine, work)
            finally:
                handle.remove()

        monkeypatch.setattr(loop, "train_step", step)

    return on


def lines(result: Any, name: str) -> list[dict[str, Any]]:
    file = result.directory / name
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.parametrize("method", ["kto", "dpo"])
def test_a_log_prob_that_is_not_finite_is_named(train: Callable[..., Any], spoil_logps: Spoil, method: str) -> None:
    """N1: which row, in which line of which file, and that it is the policy's log-prob."""
    spoil_logps({2})
    file = {"kto": "feedback", "dpo": "pairs"}[method]
    with pytest.raises(NonFiniteError, match=rf"step 2: the loss of 1 row .*{file}\.jsonl:\d+\. Cause: "
                                             r"the log-prob of the policy is not finite"):
        train(method, max_steps=3, microbatch_tokens=8192)


def test_a_gradient_that_is_not_finite_is_told_apart(train: Callable[..., Any], spoil_gradient: Spoil) -> None:
    """N1: no row is to blame, so those of the step are named."""
    spoil_gradient({2})
    with pytest.raises(NonFiniteError, match=r"step 2: all losses are finite, but the gradient is not \(norm nan\)\. "
                                             r"Rows of the step: pairs\.jsonl:\d+"):
        train("dpo", max_steps=3)


def test_a_store_that_holds_no_log_prob_is_named_before_step_1(train: Callable[..., Any], tmp_path: Path) -> None:
    """N1, R4: also under skip, with the file and how to get rid of it."""
    from tropism.train.frozen.score_store import ScoreStore

    folder = next((tmp_path / "store").glob("*"), None) or Path(train("dpo", max_steps=1).directory)
    folder = next((tmp_path / "store").glob("*"))
    keys = next(iter(np.load(next(folder.glob("*.npz")))["keys"])).tobytes()
    ScoreStore(tmp_path / "store", folder.name, {}).add({keys: float("nan")})
    with pytest.raises(ReferenceMismatchError, match=r"\.npz: invalid log-prob nan.*tropism store clean"):
        train("dpo", max_steps=1, on_nonfinite="skip")


@pytest.mark.parametrize("log_every", [1, 3])
def test_skip_leaves_the_step_out_and_says_so(train: Callable[..., Any], spoil_logps: Spoil, log_every: int,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    """N1: of the means too; the log, a warning and `skipped.jsonl` show it, and the run ends well."""
    spoil_logps({2, 3})
    result = train("dpo", max_steps=6, log_every=log_every, on_nonfinite="skip")
    found = records(result)
    assert [line.get("skipped") for line in found] == ([None, 1, 1, None, None, None] if log_every == 1 else [2, None])
    assert all(np.isfinite(line["loss"]) for line in found if line["step"] not in (2, 3) or log_every == 3)
    assert ("loss" in found[1]) == (log_every == 3)  # a record of nothing but left-out steps has no means
    assert all(np.isfinite(value) for line in found for value in line.values() if isinstance(value, float))
    named = lines(result, "skipped.jsonl")
    assert [line["step"] for line in named] == [2, 3]
    assert {line["cause"] for line in named} == {"log-prob"}
    assert all(row["place"].startswith("pairs.jsonl:") for line in named for row in line["rows"])
    said = capsys.readouterr().out
    assert f"the loss of 1 row is not finite: {named[0]['rows'][0]['id']}" in said
    assert "The step was skipped" in said
    assert json.loads((result.directory / "manifest.json").read_text())["status"] == "done"
    assert all(torch.isfinite(tensor).all() for tensor in weights(result.model).values())


def test_means_leave_out_what_was_skipped(train: Callable[..., Any], spoil_gradient: Spoil) -> None:
    """N1: a window is the mean of its other steps, and what belongs to one step is of the last one applied."""
    spoil_gradient({2})
    single = records(train("dpo", max_steps=3, on_nonfinite="skip", precision="fp64"))
    pooled, = records(train("dpo", max_steps=3, on_nonfinite="skip", precision="fp64", log_every=3))
    assert pooled["skipped"] == 1
    assert pooled["loss"] == pytest.approx((single[0]["loss"] + single[2]["loss"]) / 2, rel=1e-12)
    assert pooled["grad_norm"] == single[2]["grad_norm"]


def test_ten_skipped_steps_in_a_row_stop_the_run(train: Callable[..., Any], spoil_gradient: Spoil) -> None:
    """N1."""
    spoil_gradient(set(range(3, 30)))
    with pytest.raises(NonFiniteError, match=r"10 steps in a row .*--on-nonfinite skip.*step 12: "):
        train("dpo", max_steps=20, on_nonfinite="skip")


def test_a_step_that_changes_no_weight_stops_the_run(train: Callable[..., Any]) -> None:
    """N4: an update far below the rounding of float32; a rate of 0 is allowed, with a notice."""
    with pytest.raises(NothingLearnedError, match=r"changed no weight: .*rounding of float32.*Trainable: "):
        train("dpo", max_steps=2, optimizer="sgd", learning_rate=1e-46)
    assert len(records(train("dpo", max_steps=2, learning_rate=0.0))) == 2
    assert len(records(train("dpo", max_steps=2, learning_rate=5e-6, warmup_ratio=0.0))) == 2


def test_a_gradient_of_zero_is_told_of(train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch,
                                       capsys: pytest.CaptureFixture[str]) -> None:
    """N4: three steps in a row, after a first step that did change something."""
    real = loop.train_step

    def step(engine: Any, work: Any) -> StepOutcome:
        outcome = real(engine, work)
        if work.step > 1:
            outcome.grad_norm = torch.zeros(())
        return outcome

    monkeypatch.setattr(loop, "train_step", step)
    result = train("dpo", max_steps=6)
    assert [(line["step"], line["guard"]) for line in lines(result, "notices.jsonl")] == [(4, "zero_gradient")]
    assert "note: step 4: the gradient norm has been exactly 0 for 3 records" in capsys.readouterr().out


def test_guards_speak_of_a_run_that_goes_too_far(train: Callable[..., Any],
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    """N4: a margin above 50, and what comes with it; a tame run is left in peace."""
    result = train("dpo", max_steps=40, learning_rate=3e-2, beta=5.0, warmup_ratio=0.0)
    named = {line["guard"] for line in lines(result, "notices.jsonl")}
    assert "large_margin" in named
    assert "saturated" in named
    assert "nats, above 50" in capsys.readouterr().out
    assert lines(train("dpo", max_steps=20, learning_rate=1e-4), "notices.jsonl") == []


@pytest.mark.parametrize(("method", "metric"), [("kto", "rewards/auc"), ("dpo", "loss")])
def test_a_run_that_gets_no_better_stops_early(train: Callable[..., Any], method: str, metric: str,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    """A normal end: the model is there, and the manifest says why."""
    result = train(method, eval_fraction=0.2, eval_every=1, max_steps=20, learning_rate=0.0, stop_metric=metric,
                   stop_patience=2)
    assert result.steps == 2
    assert (result.model / "model.safetensors").exists()
    manifest = json.loads((result.directory / "manifest.json").read_text())
    assert (manifest["status"], manifest["steps"], manifest["stopped_by"]) == ("done", 2, "stop_metric")
    assert re.fullmatch(rf"no improvement of {metric} in 2 evaluations \(best: \S+ at step 0\)", manifest["reason"])
    assert f"step 2: early stopping: {manifest['reason']}" in capsys.readouterr().out
    assert [line["step"] for line in records(result) if line["split"] == "train"] == [1, 2]


def test_early_stopping_is_checked_before_anything_is_spent(train: Callable[..., Any], tmp_path: Path) -> None:
    """H2: with the known metrics, and without rows to evaluate."""
    for changes, sentence in (({"stop_metric": "rewards/acc", "eval_fraction": 0.2}, "is not one of loss, rewards/auc"),
                              ({"stop_metric": "loss"}, "requires rows to evaluate"),
                              ({"stop_patience": 2}, "has no effect without --stop-metric")):
        with pytest.raises(UsageError, match=sentence):
            train("kto", **changes)
    assert not list(tmp_path.glob("run*"))


def test_a_resumed_run_says_the_same_at_the_same_steps(train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch,
                                                       ) -> None:
    """C1: guards, stopper and tolerance are part of a checkpoint."""
    options = {"max_steps": 30, "learning_rate": 3e-2, "beta": 5.0, "warmup_ratio": 0.0, "save_every": 5,
               "eval_fraction": 0.2, "eval_every": 3, "stop_metric": "rewards/margins", "stop_patience": 9}
    straight = train("dpo", **options)
    real = loop.train_step

    def interrupted(engine: Any, work: Any) -> StepOutcome:
        if work.step == 14:
            raise KeyboardInterrupt
        return real(engine, work)

    monkeypatch.setattr(loop, "train_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train("dpo", **options)
    monkeypatch.undo()
    cut = straight.directory.with_name("run2")
    resumed = train("dpo", **options, output=str(cut), resume="auto")
    assert lines(resumed, "notices.jsonl") == lines(straight, "notices.jsonl") != []
    assert resumed.steps == straight.steps


def _two_ranks(rank: int, size: int, port: int, settings: dict[str, Any]) -> None:
    """One of two processes of a run that leaves step 2 out, for a row that one rank alone has, and stops early."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    from tropism.config import METHODS
    from tropism.runner import run

    patch = pytest.MonkeyPatch()
    if rank == 1:
        spoil(patch, {2})
    run(METHODS["dpo"](**settings))


def test_two_ranks_agree_on_what_is_left_out_and_when_to_stop(tiny_model_dir: Path, data_of: dict[str, Path],
                                                              tmp_path: Path) -> None:
    """N1, X1: a NaN on one rank is every rank's step left out; both stop early at the same step, and none hangs."""
    settings = {"model": str(tiny_model_dir), "data": str(data_of["dpo"]), "output": str(tmp_path / "run"),
                "store": str(tmp_path / "store"), "samples": 0, "batch_size": 8, "max_steps": 20, "learning_rate": 1e-9,
                "on_nonfinite": "skip", "eval_fraction": 0.2, "eval_every": 2, "stop_metric": "rewards/margins",
                "stop_patience": 2, "stop_delta": 1.0, "parallel": {"shard": "on"}}
    assert run_ranks(2, _two_ranks, settings) == [0, 0]
    found = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["skipped"]) for line in found if "skipped" in line] == [(2, 1)]
    assert max(line["step"] for line in found) == 4
    skipped, = [json.loads(line) for line in (tmp_path / "run" / "skipped.jsonl").read_text().splitlines()]
    assert (skipped["cause"], len(skipped["rows"])) == ("log-prob", 1)
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["stopped_by"] == "stop_metric"
    assert not (tmp_path / "run" / "lock").exists()
