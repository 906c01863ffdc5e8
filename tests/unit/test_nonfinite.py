"""N1: what was not finite, and how many such steps in a row a run bears."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tropism.distributed import World
from tropism.errors import NonFiniteError
from tropism.train.monitor.nonfinite import MOST_IN_A_ROW, BadStep, Tolerance, diagnose
from tropism.train.reference_point import ReferencePoint
from tropism.train.step_log import StepOutcome

ALONE = World(0, 1, torch.device("cpu"))
NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True)
class Row:
    id: str
    place: str


ROWS: Any = [Row(f"row-{index}", f"data.jsonl:{index + 1}") for index in range(40)]


def outcome(step: int = 3, values: Any = ((0.5, 0.5), (0.0, 0.0), (0.0, 0.0)), norm: float = NAN,
            raw: float | None = None, rows: tuple[int, ...] = (4, 7)) -> StepOutcome:
    point = None if raw is None else ReferencePoint(*(torch.tensor(raw) for _ in range(4)))
    return StepOutcome(step, None, torch.tensor(norm), torch.tensor(False), point,  # type: ignore[arg-type]
                       [(torch.tensor(values, dtype=torch.float64), rows)])


@pytest.mark.parametrize(("found", "cause", "rows", "text"), [
    (outcome(values=((NAN, 0.5), (0.0, 0.0), (NAN, 0.0))), "reference", ("row-4",), "log-prob of the reference"),
    (outcome(values=((0.5, NAN), (0.0, NAN), (0.0, 0.0))), "log-prob", ("row-7",), "log-prob of the policy"),
    (outcome(values=((0.5, INF), (0.0, 0.0), (0.0, 0.0))), "loss", ("row-7",), "are finite, but the loss is not"),
    # one row's NaN reaches the losses of others through what comes from the whole step
    (outcome(values=((NAN, NAN), (0.0, NAN), (0.0, 0.0)), raw=NAN), "log-prob", ("row-7",), "log-prob of the policy"),
    (outcome(values=((NAN, NAN), (0.0, 0.0), (0.0, 0.0)), raw=NAN), "reference point", ("row-4", "row-7"),
     "mismatched completion"),
    (outcome(), "gradient", ("row-4", "row-7"), "all losses are finite, but the gradient is not (norm nan)"),
])
def test_the_first_thing_that_was_not_finite_is_named(found: StepOutcome, cause: str, rows: tuple[str, ...],
                                                      text: str) -> None:
    """N1: with row ids and lines."""
    bad = diagnose(ALONE, found, ROWS)
    assert bad.cause == cause
    assert tuple(name for name, _ in bad.rows) == rows
    assert text in str(bad)
    assert f"{rows[0]} (data.jsonl:" in str(bad)
    assert str(bad).startswith("step 3: ")
    line = json.loads(json.dumps(bad.to_json(), allow_nan=False))
    assert BadStep.from_json(line) == bad


def test_long_lists_are_cut_in_the_sentence_only() -> None:
    bad = diagnose(ALONE, outcome(values=torch.zeros(3, 40).tolist(), rows=tuple(range(40))), ROWS)
    assert "row-9 (data.jsonl:10) and 30 more" in str(bad)
    assert len(bad.to_json()["rows"]) == 40


def see(tolerance: Tolerance, pattern: str) -> list[BadStep]:
    """One window; `x` is a step that was not finite."""
    outcomes = [outcome(step) for step, _ in enumerate(pattern, 1)]
    return tolerance.check(ALONE, outcomes, [mark != "x" for mark in pattern], ROWS)


def test_stop_is_the_default_and_means_the_first() -> None:
    """N1."""
    with pytest.raises(NonFiniteError, match=r"step 2: .*The step changed nothing.*--on-nonfinite skip"):
        see(Tolerance(), ".xx")
    assert see(Tolerance(), "...") == []


def test_skip_goes_on_until_ten_in_a_row() -> None:
    """N1: counted over windows, and anew after a step that was applied."""
    tolerance = Tolerance("skip")
    assert [bad.step for bad in see(tolerance, ".x.xx")] == [2, 4, 5]
    assert see(tolerance, "xxxxxxx.")[0].step == 1  # 9 in a row
    see(tolerance, "x" * (MOST_IN_A_ROW - 1))
    again = Tolerance("skip")
    again.restore(json.loads(json.dumps(tolerance.state())))
    for one in (tolerance, again):  # C1: a resumed run stops at the same step
        with pytest.raises(NonFiniteError, match=r"10 steps in a row were not finite.*--on-nonfinite skip"):
            see(one, "x")
