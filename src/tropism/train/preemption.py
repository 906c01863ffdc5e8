"""Stopping in time: signals, and a limit on the time of a run. What stops is asked for at any moment and happens at the
next step, or at the next pack of a pass over the data; all ranks stop together."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from tropism.distributed.world import World
from tropism.errors import StoppedEarly

_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name))
_TIME = 1
_MARGIN_S = 2.0
"""For what is not measured: records, trackers, the interpreter's end."""
_MARGIN_SHARE = 0.02
"""Of the limit: no step is exactly as long as the longest so far."""


class Preemption:
    """Whether a run shall stop before its end.

    Args:
        world: who has to agree.
        limit_s: how long the run may take, from `began`; None for as long as it takes.
        began: when it began, of the monotonic clock.
    """

    def __init__(self, world: World, limit_s: float | None = None, began: float | None = None) -> None:
        self.world = world
        self.limit_s = limit_s
        self.began = time.monotonic() if began is None else began
        self.longest = {"step": 0.0, "evaluate": 0.0, "stall": 0.0, "save": 0.0}
        self.saved = False
        """Whether the run is on the disk as it stands: nothing needs time any more but what is going on."""
        self._signal = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Answer signals as long as this lasts. Only a main thread can, elsewhere nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._answer) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _answer(self, number: int, frame: FrameType | None) -> None:
        """A first signal asks; a second Ctrl-C does not wait."""
        if self._signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._signal = self._signal or int(number)

    def took(self, what: str, seconds: float) -> None:
        """A step, an evaluation or a save took so long; the next one may take as long as the longest so far."""
        self.longest[what] = max(self.longest.get(what, 0.0), seconds)

    def request(self, last: bool = False, evaluating: bool = False) -> int:
        """This rank's own wish, between two steps: 0 to go on, else what `agreed` takes.

        Args:
            last: no further step comes.
            evaluating: an evaluation comes before the next step.
        """
        if self._signal or self.limit_s is None:
            return self._signal << 1
        longest = self.longest
        ahead = longest["evaluate"] + longest["save"]  # what a stop takes
        if not last:
            ahead += longest["step"] + longest["evaluate"] * evaluating
        return _TIME if self._left() < ahead else 0

    def _left(self) -> float:
        assert self.limit_s is not None
        margin = _MARGIN_S + _MARGIN_SHARE * self.limit_s
        return self.limit_s - margin - (time.monotonic() - self.began)

    def reason(self, request: int) -> str:
        """A wish that all ranks agreed on, in words."""
        return "max_time is reached" if request == _TIME else f"it got {signal.Signals(request >> 1).name}"

    @staticmethod
    def leaves_time(request: int) -> bool:
        """Whether a stop is early enough for a last evaluation. After a signal a kill may follow at any moment."""
        return request == _TIME

    def check(self) -> None:
        """Stop here if that was asked for; called by all ranks alike, where nothing needs to be kept.

        Raises:
            StoppedEarly: on every rank.
        """
        own = self._signal << 1
        if not own and self.limit_s is not None and self._left() < (0.0 if self.saved else self.longest["save"]):
            own = _TIME
        request, = self.world.max([own])
        if request:
            raise StoppedEarly(self.reason(request))

    def interruptible(self, report: Callable[..., None]) -> Callable[..., None]:
        """A progress report, called by all ranks alike, that also stops a pass over the data between two packs.

        Raises:
            StoppedEarly: from the report, on every rank.
        """
        def watched(done: int, total: int) -> None:
            report(done, total)
            if done < total:
                self.check()

        return watched
