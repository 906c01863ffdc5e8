"""How often: steps, epochs, time; and how they are written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tropism.config import DPOOptions
from tropism.train.interval import Due, Interval, seconds_of


@pytest.mark.parametrize(("text", "every", "unit"), [
    (50, 50, "steps"), ("50", 50, "steps"), (0, 0, "steps"), ("0.25ep", 0.25, "epochs"), ("1ep", 1, "epochs"),
    (".5ep", 0.5, "epochs"), ("2epochs", 2, "epochs"), ("1 ep", 1, "epochs"), ("90s", 90, "seconds"),
    ("30min", 1800, "seconds"), ("5m", 300, "seconds"), ("2h", 7200, "seconds"), ("1h30min", 5400, "seconds"),
    ("1.5h", 5400, "seconds")])
def test_what_is_understood(text: int | str, every: float, unit: str) -> None:
    assert Interval.parse(text) == Interval(every, unit)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "often", "-5", "5.5", "0ep", "ep", "5x", "h", "0min", "1h banana", "1ep2"])
def test_what_is_refused_names_the_forms(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a valid interval\. Use steps \(50\), epochs \(0\.25ep\) or time"):
        Interval.parse(text)


@pytest.mark.parametrize(("text", "seconds"), [("3h", 10800), ("90 s", 90), ("1d2h", 93600), ("2 h 5 min", 7500),
                                               ("3", None), ("h", None), ("3h!", None)])
def test_durations(text: str, seconds: float | None) -> None:
    assert seconds_of(text) == seconds


def epochs_of(rows: int, batch: int):
    """Epochs after each step where no step crosses an epoch."""
    per_epoch = -(-rows // batch)
    return lambda step: (step - 1) // per_epoch + min(rows, ((step - 1) % per_epoch + 1) * batch) / rows


@given(st.integers(1, 60), st.integers(1, 20), st.sampled_from([0.05, 0.1, 0.25, 0.3, 0.5, 1, 1.5, 2]))
def test_epochs_are_due_at_the_first_step_that_reaches_the_next_multiple(rows: int, batch: int, every: float) -> None:
    epochs_after = epochs_of(rows, batch)
    due = Due(Interval(every, "epochs"), epochs_after)
    reached = 0
    for step in range(1, 200):
        multiples = int(epochs_after(step) / every + 1e-9)
        assert due.after(step) == (multiples > reached)
        reached = multiples


def test_epochs_do_not_depend_on_where_one_asks_first() -> None:
    """C1: what is due is a function of the step."""
    epochs_after = epochs_of(43, 8)
    every = Interval.parse("0.25ep")
    assert [Due(every, epochs_after).after(step) for step in range(1, 30)] == list(
        map(Due(every, epochs_after).after, range(1, 30)))


def test_steps_and_never() -> None:
    due = Due(Interval(3), lambda step: 0.0)
    assert [step for step in range(1, 10) if due.after(step)] == [3, 6, 9]
    assert not any(map(Due(Interval(0), lambda step: 0.0).after, range(1, 100)))


def test_time_counts_from_the_last_time() -> None:
    now = 0.0
    due = Due(Interval.parse("90s"), lambda step: 0.0, lambda: now)
    now = 89.0
    assert not due.after(1)
    now = 95.0
    assert due.after(2)
    assert due.after(3)
    due.done()
    now = 184.0
    assert not due.after(4)
    now = 185.0
    assert due.after(5)


@pytest.mark.parametrize(("value", "kept"), [(50, 50), ("50", 50), ("1ep", "1ep"), ("30min", "30min")])
def test_options_keep_what_was_written(value: int | str, kept: int | str) -> None:
    """H2: a YAML file's number stays a number."""
    options = DPOOptions(model="m", data="d", output="o", eval_every=value, log_every=value, save_every=value)
    assert (options.eval_every, options.log_every, options.save_every) == (kept, kept, kept)
    assert DPOOptions(**{**options.model_dump(), "model": "m"}) == options
