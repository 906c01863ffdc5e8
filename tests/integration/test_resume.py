"""Stopping and going on: the same run as one that was never stopped, to the bit."""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from integration.resuming import (
    STEPS,
    Start,
    answers,
    assert_same_run,
    during,
    lines,
    manifest,
    settings,
    start,
    stop_after,
    straight,
    teacher_dir,
)
from tropism.cli.app import main
from tropism.errors import StoppedEarly
from tropism.observe.lock import owned
from tropism.train.checkpoints import files as checkpoint

__all__ = ["answers", "during", "settings", "start", "stop_after", "straight", "teacher_dir"]

EVERYWHERE = tuple(range(1, STEPS + 1))
SOMEWHERE = (2, 3, 5)  # in mid-window, at a record, and between an evaluation and a record


@pytest.mark.some(4)
@pytest.mark.parametrize(("case", "stops"), [("sft", SOMEWHERE), ("dpo", SOMEWHERE), ("kto", EVERYWHERE),
                                             ("bco", SOMEWHERE), ("kd", SOMEWHERE), ("top_k", SOMEWHERE)])
def test_stopping_anywhere_and_going_on_is_the_straight_run(
    case: str, stops: tuple[int, ...], start: Start, straight: Callable[..., Path], stop_after: Callable[..., None],
    tmp_path: Path,
) -> None:
    """C1, R2: after one step after the other, within one run that is stopped again and again."""
    wanted, output = straight(case), tmp_path / "run"
    for step in stops:
        stop_after(step)
        with pytest.raises(StoppedEarly, match=f"received SIGTERM. Resume with: tropism resume {output}"):
            start(case, output, resume="auto")
        assert manifest(output)["status"] == "stopped"
    stop_after(0)
    start(case, output, resume="auto")
    assert_same_run(output, wanted)
    found = manifest(output)
    assert [sitting["step"] for sitting in found["resumed"]] == list(stops)
    assert found["status"] == "done"
    assert found["reference" if case in ("dpo", "kto", "bco") else "policy"] == manifest(wanted)[
        "reference" if case in ("dpo", "kto", "bco") else "policy"]


@pytest.mark.parametrize("case", ["dpo", "kto"])
def test_a_resumed_run_keeps_the_baselines_of_the_initial_policy(
    case: str, start: Start, straight: Callable[..., Path], stop_after: Callable[..., None], tmp_path: Path,
) -> None:
    """C1: with updates so large that the trained policy would have others."""
    wanted = straight(case, learning_rate=0.1)
    stop_after(3)
    with pytest.raises(StoppedEarly):
        start(case, tmp_path / "run", learning_rate=0.1)
    trainer = json.loads((tmp_path / "run" / "checkpoints" / "step-00000003" / "trainer.json").read_text())
    initial = {name: value for name, value in lines(wanted)[0].items() if name.startswith("baselines/")}
    assert initial == trainer["baselines"] != {}
    stop_after(0)
    start(case, tmp_path / "run", learning_rate=0.1, resume="auto")
    assert_same_run(tmp_path / "run", wanted)


def test_a_signal_leaves_no_time_for_another_evaluation(
    start: Start, straight: Callable[..., Path], stop_after: Callable[..., None], tmp_path: Path,
) -> None:
    """C1: the record of a stop in mid-window, and none twice; a kill may follow, so nothing comes after the save."""
    stop_after(5, signal.SIGUSR1)
    with pytest.raises(StoppedEarly, match="SIGUSR1"):
        start("dpo", tmp_path / "run")
    assert [(line["step"], line["split"]) for line in lines(tmp_path / "run")] == [
        (0, "eval"), (2, "eval"), (3, "train"), (4, "eval")]
    trainer = json.loads((tmp_path / "run" / "checkpoints" / "step-00000005" / "trainer.json").read_text())
    assert len(trainer["window"]["rows"]) == 2
    assert trainer["offsets"]["metrics.jsonl"] == (tmp_path / "run" / "metrics.jsonl").stat().st_size
    stop_after(0)
    start("dpo", tmp_path / "run", resume="auto")
    assert_same_run(tmp_path / "run", straight("dpo"))


@pytest.mark.parametrize("changes", [{"save_every": 2}, {"save_every": 1, "keep": 0, "checkpoint_model": True},
                                     {"save_every": "0.4ep", "prefetch": 2, "keep_best": "loss"}])
def test_saving_changes_no_result(changes: dict[str, Any], start: Start, straight: Callable[..., Path],
                                  tmp_path: Path) -> None:
    """C1: nor does what is left to read."""
    start("kto", tmp_path / "run", **changes)
    assert_same_run(tmp_path / "run", straight("kto"))
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert kept[-1] == f"step-{STEPS:08d}"
    assert len(kept) == {0: STEPS}.get(changes.get("keep", 2), len(kept)) <= (STEPS if changes.get("keep") == 0 else 3)


def test_going_back_to_an_earlier_checkpoint(start: Start, straight: Callable[..., Path], tmp_path: Path) -> None:
    """C1: also of a run that is done; what came after it no longer counts."""
    output = tmp_path / "run"
    start("dpo", output, save_every=2, keep=0)
    found = start("dpo", output, save_every=2, keep=0, resume=str(output / "checkpoints" / "step-00000004"))
    assert found.steps == STEPS
    assert_same_run(output, straight("dpo"))
    assert manifest(output)["resumed"][0]["step"] == 4


def test_a_finished_run_without_checkpoints_is_not_said_to_be_extendable(
        start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """C1: it advises --save-every and a new run, as the refusal of more steps does; never what would be refused."""
    output = tmp_path / "run"
    start("sft", output, save_every=None, max_steps=2)
    capsys.readouterr()
    assert main(["resume", str(output)]) == 0
    advice = capsys.readouterr().out
    assert main(["resume", str(output), "--max-steps", "4"]) == 2
    for said in (advice, capsys.readouterr().err):
        assert re.search(rf"no checkpoint.*--model {re.escape(str(output))}/model --output NEW.*--save-every", said)
        assert "--max-steps" not in said


def test_a_finished_run_says_so_and_can_be_extended(start: Start, tmp_path: Path,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    """C1: the schedule of the learning rate is that of the new length from there on."""
    output = tmp_path / "run"
    done = start("sft", output, save_every=3)
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    capsys.readouterr()
    again = start("sft", output, save_every=3, resume="auto")
    assert (again.steps, again.before, again.after, again.samples) == (
        done.steps, done.before, done.after, done.samples)
    said = capsys.readouterr().out
    assert "7 steps" in said
    assert f"tropism resume {output} --max-steps N" in said
    assert before == {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    assert main(["resume", str(output), "--max-steps", "10"]) == 0
    out = capsys.readouterr().out
    assert "--max-steps (was 7, now 10)" in out
    assert "the learning rate schedule now spans the new number of steps" in out
    assert lines(output)[-1]["step"] == 10
    assert manifest(output)["steps"] == 10


def test_a_run_without_a_checkpoint_begins_again(start: Start, straight: Callable[..., Path], tmp_path: Path,
                                                 monkeypatch: pytest.MonkeyPatch,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    """C1: at step 1, in the same directory, without its old records."""
    import tropism.train.loop as loop

    output = tmp_path / "run"
    with monkeypatch.context() as patch:
        real = loop.train_step
        patch.setattr(loop, "train_step", lambda engine, work: 1 / 0 if work.step == 5 else real(engine, work))
        with pytest.raises(ZeroDivisionError):
            start("dpo", output)
    assert lines(output)
    start("dpo", output, resume="auto")
    assert "stopped before its first checkpoint, so it restarts at step 1" in capsys.readouterr().out
    assert_same_run(output, straight("dpo"))


def test_a_signal_in_a_pass_over_the_data_stops_at_the_next_pack(start: Start, straight: Callable[..., Path],
                                                                 tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """C1: the store keeps what was scored; an evaluation that was cut off is done again, once."""
    from tropism.train.evaluation import evaluator as evaluate
    from tropism.train.frozen import reference

    output, small = tmp_path / "run", {"microbatch_tokens": 64, "store": str(tmp_path / "store")}
    wanted = straight("dpo", microbatch_tokens=64)

    def signaling(real: Any, at: int) -> Any:
        calls = 0

        def watched(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at:
                os.kill(os.getpid(), signal.SIGTERM)
            return real(*args)

        return watched

    with monkeypatch.context() as patch:
        patch.setattr(reference, "_score_pack", signaling(reference._score_pack, 3))
        with pytest.raises(StoppedEarly, match="There is no checkpoint yet"):
            start("dpo", output, **small)
    stored = list((tmp_path / "store").rglob("*.npz"))
    assert len(stored) == 1
    packs = 0

    def counted(*args: Any) -> Any:
        nonlocal packs
        packs += 1
        return real(*args)

    real = evaluate._values
    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "_values", counted)
        start("dpo", tmp_path / "other", max_steps=1, eval_every=0, **small)
    for at in (2, packs // 2 + 2):  # of the evaluation before step 1, and of that after step 2
        with monkeypatch.context() as patch:
            patch.setattr(evaluate, "_values", signaling(evaluate._values, at))
            with pytest.raises(StoppedEarly):
                start("dpo", output, resume="auto", **small)
        assert manifest(output)["status"] == "stopped"
    assert [path.name for path in (output / "checkpoints").iterdir()] == ["step-00000002"]
    start("dpo", output, resume="auto", **small)
    assert_same_run(output, wanted)


def test_a_second_interrupt_does_not_wait(start: Start, straight: Callable[..., Path], tmp_path: Path,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """C1: the last checkpoint stays, and one that is being written is the run's until it is whole."""
    import tropism.train.loop as loop

    real, write, output, held = loop.train_step, checkpoint.write, tmp_path / "run", threading.Event()
    before = signal.getsignal(signal.SIGINT)

    def twice(engine: Any, work: Any) -> Any:
        if work.step == 4:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return real(engine, work)

    def slow(*arguments: Any) -> int:
        assert held.wait(60)
        return write(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", twice)
        patch.setattr(checkpoint, "write", slow)
        with pytest.raises(KeyboardInterrupt):
            start("kto", output, save_every=2)
    assert manifest(output)["status"] == "interrupted"
    assert signal.getsignal(signal.SIGINT) is before
    assert checkpoint.listed(output / "checkpoints") == []
    threading.Timer(0.5, held.set).start()
    start("kto", output, resume="auto")
    assert [sitting["step"] for sitting in manifest(output)["resumed"]] == [2]
    assert not (output / "lock").exists()
    assert_same_run(output, straight("kto"))


def test_the_limit_on_time_leaves_room_for_the_end(start: Start, straight: Callable[..., Path], tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """C1: with a clock that jumps by an hour per step. What is kept does not know of the last evaluation."""
    import tropism.train.loop as loop

    real, hours, clock = loop.train_step, 0, time.monotonic

    def slow(engine: Any, work: Any) -> Any:
        nonlocal hours
        hours += 1
        return real(engine, work)

    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: clock() + 3600 * hours)
        patch.setattr(loop, "train_step", slow)
        with pytest.raises(StoppedEarly, match="--max-time is reached"):
            start("kto", tmp_path / "run", max_time="4h")
    last = lines(tmp_path / "run")[-1]
    assert (last["step"], last["split"]) == (3, "eval")  # a fourth hour would have passed the limit
    trainer = json.loads((tmp_path / "run" / "checkpoints" / "step-00000003" / "trainer.json").read_text())
    assert trainer["offsets"]["metrics.jsonl"] < (tmp_path / "run" / "metrics.jsonl").stat().st_size
    start("kto", tmp_path / "run", resume="auto")
    assert_same_run(tmp_path / "run", straight("kto"))


def test_an_interrupt_while_a_save_begins_keeps_the_lock(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                         ) -> None:
    """C1: the thread runs already, and nobody else may write there until it has ended."""
    real, write, output, held = threading.Thread.start, checkpoint.write, tmp_path / "run", threading.Event()
    begun: list[threading.Thread] = []

    def interrupted(thread: threading.Thread) -> None:
        real(thread)
        if thread.name == "checkpoint":
            begun.append(thread)
            raise KeyboardInterrupt

    def slow(*arguments: Any) -> int:
        assert held.wait(60)
        return write(*arguments)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    monkeypatch.setattr(checkpoint, "write", slow)
    try:
        with pytest.raises(KeyboardInterrupt):
            start("sft", output, save_every=2)
        assert begun[0].is_alive()
        assert (output / "lock").exists()
    finally:
        held.set()
    begun[0].join()
    with owned(output):  # waits for it
        assert [one.step for one in checkpoint.listed(output / "checkpoints")] == [2]
    assert not (output / "lock").exists()
