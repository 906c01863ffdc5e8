"""Intervals and time limits as NeMo-Aligner's configurations write them."""

import math
from datetime import timedelta
from typing import Any

import pytest

from tropism.compat.nemo_aligner.settings import Timer, steps
from tropism.errors import UsageError


@pytest.mark.parametrize(("interval", "number"), [
    (10, 10), (0.5, 4), (0.01, 1), (0, 0), (0.0, 0), (None, 0), (-1, 0), (-0.5, 0), (math.inf, 0), (-math.inf, 0)])
def test_what_is_no_interval_turns_it_off(interval: Any, number: int) -> None:
    assert steps(interval, 8, "save_interval") == number


@pytest.mark.parametrize("interval", ["100", True, math.nan])
def test_intervals_that_mean_nothing(interval: Any) -> None:
    with pytest.raises(UsageError, match=r"save_interval: must be a number of steps \(10\)"):
        steps(interval, 8, "save_interval")


@pytest.mark.parametrize("duration", [60, "60", "1:2:3", {"hours": 1}, object()])
def test_time_limits_that_mean_nothing(duration: Any) -> None:
    with pytest.raises(UsageError, match="run_timer: must be DD:HH:MM:SS"):
        Timer(duration)


def test_a_timedelta_is_a_time_limit() -> None:
    assert Timer(timedelta(hours=1, seconds=5)).limit == 3605
