"""Stopping and going on where something else happens at the same step: it ends like the run that was never stopped."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.conftest import weights
from integration.resuming import during, lines
from tropism import runner
from tropism.errors import OutputError, StoppedEarly, TropismError, UsageError
from tropism.model import save
from tropism.train import disk_space, loop
from tropism.train.checkpoints import files as checkpoint
from tropism.train.checkpoints import saver as keep
from tropism.train.step_log import StepOutcome

__all__ = ["during"]
Train = Callable[..., Any]


def same(ours: Path, theirs: Path) -> None:
    """Weights and metrics, to the bit."""
    assert lines(ours) == lines(theirs)
    one, other = weights(ours / "model"), weights(theirs / "model")
    assert all(torch.equal(one[name], other[name]) for name in one)


def kept(directory: Path) -> list[int]:
    return [one.step for one in checkpoint.listed(directory / "checkpoints")]


def best(directory: Path) -> dict[str, Any]:
    def refused(constant: str) -> Any:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads((directory / "checkpoints" / "best.json").read_text(), parse_constant=refused)


def stopped_and_resumed(train: Train, during: Callable[..., None], output: Path, step: int, method: str,
                        **options: Any) -> Any:
    during(step)
    with pytest.raises(StoppedEarly):
        train(method, output=str(output), **options)
    during()
    return train(method, output=str(output), resume="auto", **options)


@pytest.mark.parametrize("stop", [2, 3, 4])
def test_a_window_with_a_step_that_was_left_out(train: Train, during: Callable[..., None], tmp_path: Path,
                                                monkeypatch: pytest.MonkeyPatch, stop: int) -> None:
    """C1, N1: what a checkpoint keeps of it is read back."""
    from tropism.train import step

    real, options = step.clip, {"max_steps": 6, "log_every": 5, "on_nonfinite": "skip"}
    current = 0

    def counted(engine: Any, work: Any) -> StepOutcome:
        nonlocal current
        current = work.step
        return step.train_step(engine, work)

    monkeypatch.setattr(loop, "train_step", counted)
    monkeypatch.setattr(step, "clip", lambda *args: real(*args) * (float("nan") if current == 2 else 1))
    straight = train("dpo", **options)

    def stopping(engine: Any, work: Any) -> StepOutcome:
        if work.step == stop:
            os.kill(os.getpid(), signal.SIGTERM)
        return counted(engine, work)

    monkeypatch.setattr(loop, "train_step", stopping)
    with pytest.raises(StoppedEarly):
        train("dpo", output=str(tmp_path / "cut"), **options)
    monkeypatch.setattr(loop, "train_step", counted)
    resumed = train("dpo", output=str(tmp_path / "cut"), resume="auto", **options)
    same(resumed.directory, straight.directory)
    assert lines(straight.directory)[0]["skipped"] == 1
    assert (resumed.directory / "skipped.jsonl").read_text() == (straight.directory / "skipped.jsonl").read_text()


ENDS = {"eval_fraction": 0.2, "eval_every": 2, "log_every": 3, "stop_metric": "rewards/margins", "stop_patience": 2,
        "stop_delta": 100.0}
"""Step 0 is the best and nothing beats it, so the run ends at step 4, in mid-window."""


@pytest.mark.parametrize("saves", [{}, {"save_every": 3}])
def test_an_early_end_found_by_the_evaluation_that_was_owed(train: Train, during: Callable[..., None], tmp_path: Path,
                                                            saves: dict[str, Any]) -> None:
    """C1: no further step, and the record of the unfinished window."""
    straight = train("dpo", **ENDS, **saves)
    resumed = stopped_and_resumed(train, during, tmp_path / "cut", 4, "dpo", **ENDS, **saves)
    assert (resumed.steps, straight.steps) == (4, 4)
    same(resumed.directory, straight.directory)
    assert kept(straight.directory) == ([3, 4] if saves else [])  # an early end saves no more than another
    if saves:
        trainer = checkpoint.verify(resumed.directory / "checkpoints" / "step-00000004")
        assert not trainer["evaluation_due"]


def test_a_run_killed_after_the_save_of_its_early_end(train: Train, tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """C1: it has ended already."""
    straight = train("dpo", **ENDS, save_every=3)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "export_result", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train("dpo", output=str(tmp_path / "cut"), **ENDS, save_every=3)
    resumed = train("dpo", output=str(tmp_path / "cut"), resume="auto", **ENDS, save_every=3)
    assert resumed.steps == 4
    same(resumed.directory, straight.directory)


def test_another_stop_metric_begins_anew(train: Train, during: Callable[..., None], tmp_path: Path) -> None:
    """C1: the best loss is no margin that a later one would have to beat."""
    options = {"eval_fraction": 0.2, "eval_every": 1, "max_steps": 6, "stop_patience": 2, "learning_rate": 1e-2}
    during(2)
    with pytest.raises(StoppedEarly):
        train("dpo", output=str(tmp_path / "cut"), stop_metric="loss", **options)
    during()
    train("dpo", output=str(tmp_path / "cut"), resume="auto", stop_metric="rewards/margins", save_every=1, keep=0,
          **options)
    first = checkpoint.verify(tmp_path / "cut" / "checkpoints" / "step-00000003")["guards"]["stopper"]
    seen = {line["step"]: line["rewards/margins"] for line in lines(tmp_path / "cut") if line["split"] == "eval"}
    assert first["metric"] == "rewards/margins"
    assert first["best"] in (seen[2], seen[3])


@pytest.mark.parametrize("stop", [5, 6])
def test_the_end_is_where_the_run_was_stopped(train: Train, during: Callable[..., None], tmp_path: Path,
                                              stop: int) -> None:
    """C1: the record of the unfinished window and the last evaluation are written, with no step left."""
    options = {"log_every": 4, "eval_fraction": 0.2, "eval_every": 3, "save_every": 3, "schedule": "constant"}
    straight = train("dpo", max_steps=stop, **options)
    during(stop)
    with pytest.raises(StoppedEarly):
        train("dpo", output=str(tmp_path / "cut"), max_steps=9, **options)
    during()
    resumed = train("dpo", output=str(tmp_path / "cut"), resume="auto", max_steps=stop, **options)
    assert resumed.steps == stop
    same(resumed.directory, straight.directory)
    assert not checkpoint.verify(tmp_path / "cut" / "checkpoints" / f"step-{stop:08d}")["window"]["rows"]


def test_stopped_twice_in_the_same_evaluation_on_a_full_disk(train: Train, tmp_path: Path,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    """C1, C2: the checkpoint of that step stays until another one of it is complete."""
    options = {"max_steps": 4, "eval_fraction": 0.2, "eval_every": 2}
    straight, output = train("dpo", **options), tmp_path / "cut"
    real = runner.Run._evaluate

    def stopping(self: runner.Run, *args: Any) -> dict[str, float]:
        if (output / "metrics.jsonl").exists():
            raise StoppedEarly("in the middle")
        return real(self, *args)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(runner.Run, "_evaluate", stopping)
        with pytest.raises(StoppedEarly):
            train("dpo", output=str(output), **options)
        with monkeypatch.context() as disk:
            disk.setattr(checkpoint, "write_tensors", full)
            with pytest.raises(OutputError, match="Earlier checkpoints are unchanged"):
                train("dpo", output=str(output), resume="auto", **options)
    assert kept(output) == [2]
    same(train("dpo", output=str(output), resume="auto", **options).directory, straight.directory)


# --- the best checkpoint ----------------------------------------------------------------------------------------------


def evaluating(patch: pytest.MonkeyPatch, losses: list[float]) -> None:
    """The evaluations of steps 0, 2, 4, ... say these losses."""
    real = loop.TrainingLoop._emit

    def said(self: Any, record: loop.Record) -> None:
        if record.split == "eval":
            record = loop.Record(record.step, "eval", record.metrics | {"loss": losses[record.step // 2]})
        real(self, record)

    patch.setattr(loop.TrainingLoop, "_emit", said)


BEST = {"max_steps": 8, "eval_fraction": 0.2, "eval_every": 2, "keep": 1, "keep_best": "loss"}


@pytest.mark.parametrize(("save_every", "losses", "step", "steps"), [
    (3, [0.1, 0.9, 0.5, 0.6, 0.7], 4, [4, 8]),  # not step 0's 0.1; 6 was saved, and 3 is not judged by 2's
    (3, [0.1, float("nan"), 0.8, 0.9, float("nan")], 4, [4, 8]),
    (None, [0.1, 0.9, 0.5, 0.6, 0.7], 4, [4]),  # by itself
    (None, [0.1, 0.9, 0.8, 0.7, 0.6], 8, [8])])
def test_the_best_was_evaluated_at_its_own_step(train: Train, monkeypatch: pytest.MonkeyPatch, save_every: int | None,
                                                losses: list[float], step: int, steps: list[int]) -> None:
    """C1: an evaluation judges the weights that it saw, and NaN is not the best."""
    evaluating(monkeypatch, losses)
    result = train("dpo", save_every=save_every, **BEST)
    assert best(result.directory) == {"checkpoint": f"step-{step:08d}", "step": step, "metric": "loss",
                                      "value": losses[step // 2]}
    assert kept(result.directory) == steps


def test_a_stopped_run_has_the_same_best(train: Train, during: Callable[..., None], tmp_path: Path,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """C1: the evaluation that was owed makes the checkpoint of the stop the best."""
    evaluating(monkeypatch, [1.0, 0.9, 0.5, 0.6, 0.7])
    straight = train("dpo", save_every=3, **BEST)
    resumed = stopped_and_resumed(train, during, tmp_path / "cut", 4, "dpo", save_every=3, **BEST)
    assert best(resumed.directory) == best(straight.directory)
    assert kept(resumed.directory) == kept(straight.directory) == [4, 8]


def test_going_back_names_the_best_of_those_that_count(train: Train, during: Callable[..., None], tmp_path: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """C1: before the first step; the best may have come later than where it goes back to."""
    output = tmp_path / "run"
    evaluating(monkeypatch, [1.0, 0.9, 0.8, 0.7, 0.6])
    train("dpo", output=str(output), save_every=2, **{**BEST, "keep": 0})
    assert best(output)["step"] == 8

    def failing() -> None:
        raise ZeroDivisionError

    during(5, failing)
    with pytest.raises(ZeroDivisionError):
        train("dpo", output=str(output), save_every=2, resume=str(output / "checkpoints" / "step-00000004"),
              **{**BEST, "keep": 0})
    assert best(output)["step"] == 4


# --- what a save costs, and what becomes of its failures --------------------------------------------------------------


@pytest.mark.parametrize(("save_every", "copies"), [("1ep", 2), ("0.5ep", 4), ("24h", 1), (5, 2), (3, 4), (100, 1)])
def test_the_space_that_is_asked_for_is_that_of_the_saves(train: Train, monkeypatch: pytest.MonkeyPatch,
                                                          save_every: Any, copies: int) -> None:
    """C2: a run of ten steps, two epochs, is not refused for ten checkpoints."""
    asked: list[int] = []
    monkeypatch.setattr(save, "model_bytes", lambda *args: 0)
    monkeypatch.setattr(disk_space, "check_space", lambda place, needed, what: asked.append(needed))
    monkeypatch.setattr(keep.Saver, "estimate_bytes", lambda self: 1)
    result = train("dpo", max_steps=10, save_every=save_every, keep=0)
    assert max(asked) == len(kept(result.directory)) == copies


def test_a_save_that_fails_beside_another_failure_is_told(train: Train, during: Callable[..., None],
                                                          monkeypatch: pytest.MonkeyPatch,
                                                          capsys: pytest.CaptureFixture[str]) -> None:
    """C2: in one line, and the other failure is the one that is raised."""
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    def failing() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    during(3, failing)
    monkeypatch.setattr(keep.Saver, "failed", property(lambda self: False))  # the next step is as fast as that
    with pytest.raises(ZeroDivisionError):
        train("dpo", max_steps=4, save_every=2)
    told = [line for line in capsys.readouterr().out.splitlines() if "could not be written" in line]
    assert len(told) == 1
    assert "No space left on device" in told[0]


def test_state_that_cannot_be_had_is_an_error_of_every_rank(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """X1, C2: `World.on_main` forwards errors of Tropism alone."""
    def broken(*args: Any, **named: Any) -> None:
        raise KeyError("weight")

    monkeypatch.setattr(keep.TrainingState, "of", broken)
    with pytest.raises(TropismError, match="the state after step 2 cannot be saved: KeyError"):
        train("dpo", max_steps=2, save_every=2)


def test_keep_best_needs_an_optimizer_that_can_be_kept(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """C2: as save_every does."""
    monkeypatch.setattr(keep, "why_not_kept", lambda updater: "the optimizer is odd")
    with pytest.raises(UsageError, match=r"keep_best: the optimizer is odd. Remove keep_best"):
        train("dpo", **{**BEST, "keep": 2})


def test_what_was_killed_before_its_rename_goes_on(train: Train, during: Callable[..., None], tmp_path: Path) -> None:
    """C1: a complete checkpoint that is not in its place yet counts, and later ones tidy it up."""
    options = {"max_steps": 6, "save_every": 2}
    straight, output = train("dpo", **options), tmp_path / "cut"
    during(3)
    with pytest.raises(StoppedEarly):
        train("dpo", output=str(output), **options)
    during()
    place = output / "checkpoints" / "step-00000003"
    place.rename(place.with_name("step-00000003.new"))
    shutil.copytree(output / "checkpoints" / "step-00000002", place)
    (place / "COMPLETE").unlink()
    resumed = train("dpo", output=str(output), resume="auto", **options)
    same(resumed.directory, straight.directory)
    assert sorted(path.name for path in (output / "checkpoints").iterdir()) == ["step-00000004", "step-00000006"]
