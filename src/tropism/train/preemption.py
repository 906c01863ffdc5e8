"""Stopping a run early, by a signal or a time limit. A request can come at any moment; the run stops after the current
step, or after the current pack of a pass over the data. All processes stop together. Before training, while data are
read or a model is loaded, there is nothing to save, and a process stops at once.

SIGQUIT keeps its meaning: the system ends the process at once, as after `kill -9`, whatever Python is doing.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from tropism.distributed.world import World
from tropism.errors import StoppedEarly


def _known(*names: str) -> tuple[signal.Signals, ...]:
    return tuple(getattr(signal, name) for name in names if hasattr(signal, name))


_SIGNALS = _known("SIGTERM", "SIGINT", "SIGUSR1")
_UNLESS_IGNORED = _known("SIGHUP", "SIGXCPU")
"""Signals that stop a run too, unless it was started with them ignored, as `nohup` does."""
_CONTINUED = _known("SIGCONT")
_TIME = 1
_MARGIN_S = 2.0
"""Time reserve for what is not measured: records, trackers, the exit of the interpreter."""
_MARGIN_SHARE = 0.02
"""Time reserve as a share of the limit, since a step can take longer than the longest so far."""


class _Heard(BaseException):
    """A signal, on its way from its handler to the block that answers it. Libraries do not catch it as an error."""


class Preemption:
    """Decides whether a run must stop before its end.

    Args:
        world: the processes, which must agree.
        limit_s: time limit of the run from `began`; None for no limit.
        began: start of the run, by the monotonic clock.
    """

    def __init__(self, world: World, limit_s: float | None = None, began: float | None = None) -> None:
        self.world = world
        self.limit_s = limit_s
        self.began = time.monotonic() if began is None else began
        self.longest = {"step": 0.0, "evaluate": 0.0, "sample": 0.0, "stall": 0.0, "save": 0.0}
        self.saved = False
        """The current state is saved, so no time needs to be reserved for a save."""
        self._signal = 0
        self._at_once = self._was_suspended = False
        self._terminals: list[int] = []

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals inside the block. Only the main thread can; in other threads nothing changes."""
        self._terminals = [number for number in (1, 2) if _is_terminal(number)]
        answers = dict.fromkeys((*_SIGNALS, *_UNLESS_IGNORED), self._answer) | dict.fromkeys(_CONTINUED, self._wake)
        with _handled(answers):
            yield

    def _answer(self, number: int, frame: FrameType | None) -> None:
        """The first signal requests a stop; a second Ctrl-C interrupts at once."""
        if self._signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        for terminal in self._terminals:
            if not _is_terminal(terminal):  # it was closed, and writing to it would be an error
                os.dup2(os.open(os.devnull, os.O_WRONLY), terminal)
        self._signal = self._signal or int(number)
        if self._at_once:
            self._at_once = False
            raise _Heard

    def _wake(self, number: int, frame: FrameType | None) -> None:
        self._was_suspended = True

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """A stage before training that has nothing to save. One process stops in the middle of it, several processes
        stop together before or after it. All processes call this together.

        Raises:
            StoppedEarly: on every process.
        """
        try:
            self._at_once = self.world.size == 1
            self.check()
            yield
        except _Heard:
            raise StoppedEarly(self.reason(self._signal << 1)) from None
        finally:
            self._at_once = False
        self.check()

    def record_time(self, what: str, seconds: float) -> None:
        """Record how long a step, an evaluation or a save took. The longest so far is what the next one is given. A
        process that was suspended in between took no longer."""
        if self._was_suspended:
            self._was_suspended = False
            return
        self.longest[what] = max(self.longest.get(what, 0.0), seconds)

    def request(self, last: bool = False, evaluating: bool = False, sampling: bool = False) -> int:
        """This process's request between two steps: 0 to continue, else what `reason` takes.

        Args:
            last: no further step comes.
            evaluating, sampling: an evaluation, or samples, come before the next step.
        """
        if self._signal or self.limit_s is None:
            return self._signal << 1
        longest = self.longest
        ahead = longest["evaluate"] + longest["save"]  # the duration of a stop
        if not last:
            ahead += longest["step"] + longest["evaluate"] * evaluating + longest["sample"] * sampling
        return _TIME if self._left() < ahead else 0

    def _left(self) -> float:
        assert self.limit_s is not None
        margin = _MARGIN_S + _MARGIN_SHARE * self.limit_s
        return self.limit_s - margin - (time.monotonic() - self.began)

    def reason(self, request: int) -> str:
        """The request that all processes agreed on, in words."""
        return "--max-time is reached" if request == _TIME else f"received {signal.Signals(request >> 1).name}"

    @staticmethod
    def leaves_time(request: int) -> bool:
        """Whether there is time for a last evaluation. After a signal a kill can follow at any moment."""
        return request == _TIME

    def check(self) -> None:
        """Stop here if requested. All processes call this together, where nothing needs to be saved.

        Raises:
            StoppedEarly: on every process.
        """
        own = self._signal << 1
        if not own and self.limit_s is not None and self._left() < (0.0 if self.saved else self.longest["save"]):
            own = _TIME
        request, = self.world.max([own])
        if request:
            raise StoppedEarly(self.reason(request))

    def interruptible(self, report: Callable[..., None]) -> Callable[..., None]:
        """A progress report that can also stop a pass over the data between two packs. All processes call it together.

        Raises:
            StoppedEarly: from the report, on every process.
        """
        def watched(done: int, total: int) -> None:
            report(done, total)
            if done < total:
                self.check()

        return watched


@contextmanager
def stopping_at_once() -> Iterator[None]:
    """Answer signals where no run listens yet: while processes meet and data are read. Ctrl-C keeps its own answer.

    Raises:
        StoppedEarly: for the first signal.
    """
    heard = 0

    def answer(number: int, frame: FrameType | None) -> None:
        nonlocal heard
        if not heard and not isinstance(sys.exc_info()[1], StoppedEarly):  # else the run is stopping already
            heard = number
            raise _Heard

    try:
        with _handled({number: answer for number in (*_SIGNALS, *_UNLESS_IGNORED) if number != signal.SIGINT}):
            yield
    except _Heard:
        raise StoppedEarly(f"stopped: received {signal.Signals(heard).name} before step 1. To start again, run the "
                           "same command.") from None


@contextmanager
def _handled(answers: Mapping[signal.Signals, Any]) -> Iterator[None]:
    """Answer signals inside the block. Only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {}
    try:
        for number, answer in answers.items():
            if not (number in _UNLESS_IGNORED and signal.getsignal(number) is signal.SIG_IGN):
                before[number] = signal.getsignal(number)
                signal.signal(number, answer)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _is_terminal(number: int) -> bool:
    with suppress(OSError):
        return os.isatty(number)
    return False
