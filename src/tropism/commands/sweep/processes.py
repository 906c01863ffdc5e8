"""Trains the runs of a sweep one after another, each in a process of its own."""

import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from tropism.commands.sweep.plan import Run
from tropism.errors import StoppedEarly
from tropism.observe.console import Voice
from tropism.observe.manifest import read_manifest
from tropism.observe.rundir import RunDirectory

Status = Literal["done", "stopped", "failed", "not run"]

_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP", "SIGXCPU")
"""Those that a run answers by stopping."""
_OURS = "tropism: "  # the error of a command
_COMMAND = (sys.executable, "-P", "-m", "tropism")  # -P: files of the current directory are no modules


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a run.

    Args:
        error: why it failed or stopped.
    """

    status: Status
    error: str = ""


class _Relay:
    """Hands signals to the run that is training. It has a process group of its own, so that a Ctrl-C reaches it once.

    Attributes:
        heard: name of the first signal; empty without one.
    """

    def __init__(self) -> None:
        self.heard = ""
        self._process: subprocess.Popen[str] | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Relay signals inside the block."""
        before = {}
        try:
            for name in _SIGNALS:
                number = signal.Signals[name]
                if signal.getsignal(number) is not signal.SIG_IGN:
                    before[number] = signal.signal(number, self._answer)
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _answer(self, number: int, frame: FrameType | None) -> None:
        self.heard = self.heard or signal.Signals(number).name
        if self._process is not None:
            self._process.send_signal(number)

    def run(self, command: Sequence[str], voice: Voice) -> tuple[int, str]:
        """Run a command, with its output indented. Returns its exit code and the last error that it printed."""
        error = ""
        with subprocess.Popen(  # noqa: S603 (ourselves)
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                errors="backslashreplace", process_group=0) as process:
            self._process = process
            if self.heard:  # while it was started
                process.send_signal(signal.Signals[self.heard])
            assert process.stdout is not None
            for line in process.stdout:
                line = line.rstrip("\n")
                error = line.removeprefix(_OURS) if line.startswith(_OURS) else error
                voice.say(f"  {line}")
        self._process = None
        return process.returncode, error


def status_of(path: Path) -> str:
    """The status in the manifest of a run; empty if there is none."""
    try:
        return str(read_manifest(path / "manifest.json").get("status", ""))
    except (FileNotFoundError, ValueError):
        return ""


def train_all(runs: Sequence[Run], directory: Path, code: Sequence[str], voice: Voice) -> dict[str, Outcome]:
    """Train every run that is not done. One that fails does not stop the others.

    Args:
        directory: of the sweep.
        code: options of the command line that decide which code may run.

    Raises:
        StoppedEarly: after a signal, when the run that it met has stopped.
    """
    found: dict[str, Outcome] = {}
    relay = _Relay()
    with relay.listening():
        for number, run in enumerate(runs, start=1):
            title = f"run {number} of {len(runs)}: {run.name}"
            if status_of(run.path) == "done":
                voice.say(f"{title}: done")
                found[run.name] = Outcome("done")
                continue
            held = RunDirectory(run.path).holds_run
            voice.say(f"{title}: resuming" if held else title)
            words = ["resume", str(run.path)] if held else list(run.command)
            found[run.name] = outcome = _outcome(*relay.run([*_COMMAND, *words, *code], voice))
            if relay.heard:
                done = sum(one.status == "done" for one in found.values())
                raise StoppedEarly(f"received {relay.heard}. {done} of {len(runs)} runs are done. Resume the sweep "
                                   f"with: tropism resume {shlex.quote(str(directory))}")
            if outcome.status == "failed":
                voice.warn(f"{run.name} failed: {outcome.error}", word="warning")
    return found


def _outcome(code: int, error: str) -> Outcome:
    if code in (0, StoppedEarly.exit_code):
        return Outcome("stopped" if code else "done", error if code else "")
    if code < 0:
        name = signal.Signals(-code).name if -code in {*signal.Signals} else f"signal {-code}"
        return Outcome("failed", f"the process was ended by {name}"
                                 + (". Memory may have run out" if -code == signal.SIGKILL else ""))
    return Outcome("failed", error or f"exit code {code}")

