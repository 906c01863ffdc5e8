"""Signals outside of the steps: while a run reads data or builds a model, and those that a terminal sends."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.test_kills import same
from processes import fork_server
from tropism.cli.app import main
from tropism.distributed import World
from tropism.errors import StoppedEarly
from tropism.observe import lock
from tropism.train.checkpoints import files as checkpoint
from tropism.train.preemption import Preemption, stopping_at_once


def _child(where: str, argv: list[str], log: Path, prepare: Callable[[], Any]) -> None:
    """A run as the command line makes it, that waits for a signal at one place."""
    torch.set_num_threads(1)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    for number in (signal.SIGQUIT, signal.SIGHUP):  # the tests may run where a shell or nohup ignores them
        signal.signal(number, signal.SIG_DFL)
    prepare()
    from tropism import runner
    from tropism.train import loop
    from tropism.train.setup import build, inputs, policy

    places: dict[str, tuple[Any, str]] = {
        "data": (inputs, "prepare_data"), "model": (policy.PolicyBuilder, "build"), "layout": (build, "choose_layout"),
        "samples": (runner.Sampler, "ask_together"), "checkpoint": (runner.resume, "_load"),
        "step": (loop, "train_step")}
    owner, name = places[where]
    real = getattr(owner, name)

    def slow(*args: Any, **options: Any) -> Any:
        print("at", where, file=sys.stderr, flush=True)
        for _ in range(4 if where == "step" else 400):
            try:
                time.sleep(0.05)
            except Exception:  # as libraries do
                print("caught", flush=True)
        return real(*args, **options)

    setattr(owner, name, slow)
    sys.exit(main(argv))


def _nothing() -> None:
    pass


class Started:
    """A run in a process of a fork server, and what it has said."""

    def __init__(self, where: str, argv: list[str], log: Path, prepare: Callable[[], Any] = _nothing) -> None:
        self.log = log
        self.process = fork_server().Process(target=_child, args=(where, argv, log, prepare))
        self.process.start()
        while not log.exists() or f"at {where}" not in log.read_text():
            assert self.process.is_alive(), log.read_text()
            time.sleep(0.02)

    def send(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> int | None:
        self.process.join(60)
        if self.process.is_alive():
            self.process.kill()
        return self.process.exitcode


Command = Callable[..., list[str]]


@pytest.fixture
def command(tiny_model_dir: Path, feedback: Path, tmp_path: Path) -> Command:
    def of(**changes: Any) -> list[str]:
        options = {"model": tiny_model_dir, "data": feedback, "output": tmp_path / "run", "store": tmp_path / "store",
                   "batch_size": 8, "max_steps": 6, "samples": 1, "log_every": 1, **changes}
        return ["kto", *(f"--{name.replace('_', '-')}={value}" for name, value in options.items())]

    return of


@pytest.mark.some(3)
@pytest.mark.parametrize(("where", "number"), [
    ("data", signal.SIGTERM), ("data", signal.SIGHUP), ("model", signal.SIGTERM), ("model", signal.SIGHUP),
    ("layout", signal.SIGINT), ("samples", signal.SIGUSR1)])
def test_a_signal_before_step_1_stops_at_once(where: str, number: int, command: Command, tmp_path: Path) -> None:
    """C1: exit code 75 and a sentence, nothing half-written, and the run starts again."""
    started = Started(where, command(), tmp_path / "log")
    began = time.monotonic()
    started.send(number)
    assert started.end() == 75
    assert time.monotonic() - began < 10
    said = (tmp_path / "log").read_text()
    assert f"received {signal.Signals(number).name}" in said
    assert "Traceback" not in said
    assert "caught" not in said
    if where == "data":
        assert "run the same command" in said
        assert not (tmp_path / "run").exists()
        return
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["status"] == "stopped"
    assert not (tmp_path / "run" / "lock").exists()
    assert "Resume with: tropism resume" in said
    if number == signal.SIGINT:
        assert main(["resume", str(tmp_path / "run"), "--max-steps", "2"]) == 0


def test_a_hangup_in_a_step_saves_the_run(command: Command, tmp_path: Path) -> None:
    """C1: a closed terminal is a request to stop; also while the checkpoint is loaded again, which changes nothing."""
    started = Started("step", command(), tmp_path / "log")
    started.send(signal.SIGHUP)
    assert started.end() == 75
    kept, = checkpoint.listed(tmp_path / "run" / "checkpoints")
    assert kept.step == 1
    again = Started("checkpoint", ["resume", str(tmp_path / "run")], tmp_path / "again")
    again.send(signal.SIGTERM)
    assert again.end() == 75
    assert [one.step for one in checkpoint.listed(tmp_path / "run" / "checkpoints")] == [1]
    assert main(["resume", str(tmp_path / "run")]) == 0
    assert main(command(output=tmp_path / "straight")) == 0
    same(tmp_path / "run", tmp_path / "straight")


def _ignore() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def test_nohup_is_respected(command: Command, tmp_path: Path) -> None:
    started = Started("step", command(max_steps=2), tmp_path / "log", _ignore)
    started.send(signal.SIGHUP)
    assert started.end() == 0


def test_quit_ends_a_run_as_a_kill_does(command: Command, tmp_path: Path) -> None:
    """C1: at once, whatever it is doing, and the next run takes over."""
    started = Started("step", command(save_every=1), tmp_path / "log")
    while not (tmp_path / "run" / "checkpoints" / "step-00000001" / "COMPLETE").exists():
        time.sleep(0.02)
    started.send(signal.SIGQUIT)
    assert started.end() == -signal.SIGQUIT
    assert main(["resume", str(tmp_path / "run")]) == 0
    assert not (tmp_path / "run" / "lock").exists()


def test_a_process_that_wakes_without_its_lock_writes_nothing(command: Command, tmp_path: Path) -> None:
    """It was suspended for so long that another machine took over."""
    started = Started("step", command(save_every=1), tmp_path / "log")
    started.send(signal.SIGSTOP)
    run = tmp_path / "run"
    theirs = (run / "lock").read_text().replace(f"pid={started.process.pid}\n", "pid=17\n")
    (run / "lock").unlink()
    (run / "lock").write_text(theirs)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    started.send(signal.SIGCONT)
    assert started.end() == 1
    said = (tmp_path / "log").read_text()
    assert f"no longer owns {run}: process 17 on " in said
    assert "Traceback" not in said
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*")}


def test_a_closed_terminal_stops_a_run_in_order(command: Command, tmp_path: Path) -> None:
    """Writing to it is an error from then on, and no reason to lose the checkpoint."""
    pty = pytest.importorskip("pty")
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.execv(sys.executable, [sys.executable, "-m", "tropism", *command(max_steps=500)])
    os.set_blocking(terminal, False)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not metrics.exists():
        with suppress(BlockingIOError):
            os.read(terminal, 10_000)
        assert not os.waitpid(pid, os.WNOHANG)[0]
        time.sleep(0.05)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 75
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["reason"] == "received SIGHUP"
    assert checkpoint.listed(tmp_path / "run" / "checkpoints")


def _without_reader() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    os.dup2(writing, 1)


def test_a_reader_that_leaves_does_not_end_the_run(command: Command, tmp_path: Path) -> None:
    """`tropism kto ... | head -1`."""
    started = Started("step", command(max_steps=2), tmp_path / "log", _without_reader)
    assert started.end() == 0
    assert (tmp_path / "log").read_text() == "at step\n" * 2
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["status"] == "done"


def test_a_suspended_process_does_not_count_as_slow() -> None:
    """C1: a step that was stopped for an hour says nothing about the next one."""
    preemption = Preemption(World(0, 1, torch.device("cpu")), limit_s=600)
    with preemption.listening():
        preemption.record_time("step", 1.0)
        os.kill(os.getpid(), signal.SIGCONT)
        preemption.record_time("step", 3600.0)
        preemption.record_time("step", 2.0)
        assert preemption.longest["step"] == 2.0
        os.kill(os.getpid(), signal.SIGXCPU)
        assert preemption.reason(preemption.request()) == "received SIGXCPU"
    assert signal.getsignal(signal.SIGXCPU) == signal.getsignal(signal.SIGCONT) == signal.SIG_DFL


def test_a_second_signal_on_the_way_out_changes_nothing() -> None:
    def twice() -> None:
        with stopping_at_once():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(StoppedEarly, match="received SIGTERM before step 1"):
        twice()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert lock._claims == {}
