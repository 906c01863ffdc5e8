"""Intervals of steps, epochs or time: how often to log, evaluate and save."""

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Unit = Literal["steps", "epochs", "seconds"]

_SECONDS = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(min|[smhd])")
FORMS = "steps (50), epochs (0.25ep) or time (90s, 30min, 2h)"
_HAIR = 1e-9  # tolerance, as a share of the interval: epochs are sums of fractions


def seconds_of(text: str) -> float | None:
    """`90s`, `30min`, `2h`, `1h30min` in seconds; None if it is not a duration."""
    text = text.strip().lower()
    parts = _DURATION.findall(text)
    if not parts or "".join(re.sub(r"\s", "", text).split()) != "".join(number + unit for number, unit in parts):
        return None
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


@dataclass(frozen=True, slots=True)
class Interval:
    """A number of steps, epochs or seconds; 0 means never.

    Args:
        every: length, in `unit`.
        unit: what is counted.
    """

    every: float
    unit: Unit = "steps"

    @classmethod
    def parse(cls, value: int | str) -> "Interval":
        """The interval that an option names.

        Raises:
            ValueError: with the forms that are accepted.
        """
        text = str(value).strip().lower()
        if re.fullmatch(r"\d+", text):
            return cls(int(text))
        if (found := re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*ep(?:ochs?)?", text)) and float(found[1]) > 0:
            return cls(float(found[1]), "epochs")
        if seconds := seconds_of(text):
            return cls(seconds, "seconds")
        raise ValueError(f"{value!r} is not a valid interval. Use {FORMS}.")


class Due:
    """Decides after each step whether an interval has passed.

    Args:
        interval: how often.
        epochs_after: epochs completed after a step.
        clock: seconds.
    """

    def __init__(self, interval: Interval, epochs_after: Callable[[int], float],
                 clock: Callable[[], float] = time.monotonic) -> None:
        self.interval = interval
        self._epochs_after = epochs_after
        self._clock = clock
        self._last = clock()

    def after(self, step: int) -> bool:
        """Whether the interval has passed. For steps and epochs this depends on the step number alone."""
        interval = self.interval
        if not interval.every:
            return False
        if interval.unit == "steps":
            return step % int(interval.every) == 0
        if interval.unit == "seconds":
            return self._clock() - self._last >= interval.every
        return self._multiples(step) > (self._multiples(step - 1) if step > 1 else 0)

    def done(self) -> None:
        """Start the next interval of time."""
        self._last = self._clock()

    def _multiples(self, step: int) -> int:
        return math.floor(self._epochs_after(step) / self.interval.every + _HAIR)
