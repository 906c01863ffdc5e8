"""Steps that were not finite and therefore changed nothing: their cause and rows, and whether the run stops."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tropism.data.rows import EncodedRow
from tropism.distributed.world import World
from tropism.errors import NonFiniteError, count_of
from tropism.train.step_log import StepOutcome

MOST_IN_A_ROW = 10
"""Skipped steps in a row after which a run stops, since the weights do not recover by themselves."""

_LISTED = 10

Cause = Literal["reference", "log-prob", "loss", "reference point", "gradient"]
_SAID: dict[Cause, str] = {
    "reference": "the log-prob of the reference is not finite",
    "log-prob": "the log-prob of the policy is not finite",
    "loss": "the log-probs are finite, but the loss is not",
    "reference point": "KTO's reference point is not finite, because of the log-prob of a mismatched completion of the "
                       "step",
    "gradient": "all losses are finite, but the gradient is not",
}


@dataclass(frozen=True, slots=True)
class BadStep:
    """A step that was not applied.

    Args:
        step: its number.
        cause: the first quantity, from reference to gradient, that was not finite.
        rows: id and place of the rows that caused it, or of all rows of the step if no single row did.
        grad_norm: of the step, as text: JSON has no NaN.
    """

    step: int
    cause: Cause
    rows: tuple[tuple[str, str], ...]
    grad_norm: str = "nan"

    def __str__(self) -> str:
        listed = ", ".join(f"{name} ({place})" if name != place else name for name, place in self.rows[:_LISTED])
        more = f" and {len(self.rows) - _LISTED} more" if len(self.rows) > _LISTED else ""
        if self.cause == "gradient":
            return f"step {self.step}: {_SAID['gradient']} (norm {self.grad_norm}). Rows of the step: {listed}{more}"
        return (f"step {self.step}: the loss of {count_of(len(self.rows), 'row')} is not finite: {listed}{more}. "
                f"Cause: {_SAID[self.cause]}")

    def to_json(self) -> dict[str, Any]:
        """A line of `skipped.jsonl`."""
        return {"step": self.step, "cause": self.cause, "why": _SAID[self.cause], "grad_norm": self.grad_norm,
                "rows": [{"id": name, "place": place} for name, place in self.rows]}

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> "BadStep":
        """The step that `to_json` wrote."""
        return cls(line["step"], line["cause"], tuple((row["id"], row["place"]) for row in line["rows"]),
                   line["grad_norm"])


def diagnose(world: World, outcome: StepOutcome, rows: Sequence[EncodedRow]) -> BadStep:
    """Find what was not finite. All processes call this together.

    Args:
        outcome: of a step that was not finite.
        rows: those of the run.
    """
    found: list[tuple[Cause, int]] = []
    for values, indices in outcome.losses:
        for loss, policy, reference, index in zip(*values[:3].tolist(), indices, strict=True):
            if not math.isfinite(reference):
                found.append(("reference", index))
            elif not math.isfinite(policy):
                found.append(("log-prob", index))
            elif not math.isfinite(loss):
                found.append(("loss", index))
            else:
                found.append(("gradient", index))  # not the cause; named only if no row is
    everywhere = [entry for part in world.of_parts(found) for entry in part]
    point = outcome.point
    order: tuple[Cause, ...] = ("reference", "log-prob", "loss", "gradient")
    # A value of the whole step carries one row's NaN into the losses of the others, which did not cause it.
    cause: Cause = next((cause for cause in order if any(entry[0] == cause for entry in everywhere)), "gradient")
    blamed = sorted(index for of_row, index in everywhere if of_row == cause)
    named = tuple((rows[index].id, rows[index].place) for index in blamed)
    if cause == "loss" and point is not None and not math.isfinite(float(point.raw)):
        cause = "reference point"
    return BadStep(outcome.step, cause, named, str(float(outcome.grad_norm)))


class Tolerance:
    """Decides whether a run continues after a step that was not finite.

    Args:
        mode: `stop` at the first one, or `skip` up to ten in a row.
    """

    def __init__(self, mode: Literal["stop", "skip"] = "stop") -> None:
        self.mode = mode
        self.in_a_row = 0

    def check(self, world: World, outcomes: Sequence[StepOutcome], finite: Sequence[bool],
            rows: Sequence[EncodedRow]) -> list[BadStep]:
        """The steps of a window that were not applied. All processes call this together.

        Raises:
            NonFiniteError: with `stop` for the first of them, with `skip` for the tenth in a row.
        """
        bad: list[BadStep] = []
        for outcome, fine in zip(outcomes, finite, strict=True):
            self.in_a_row = 0 if fine else self.in_a_row + 1
            if fine:
                continue
            bad.append(diagnose(world, outcome, rows))
            if self.mode == "stop":
                raise NonFiniteError(f"{bad[-1]}. The step changed nothing. Check these rows, or try a lower "
                                     "--learning-rate, a lower --max-grad-norm or --precision fp32. To skip such "
                                     "steps, pass --on-nonfinite skip.")
            if self.in_a_row >= MOST_IN_A_ROW:
                raise NonFiniteError(f"{self.in_a_row} steps in a row were not finite and changed nothing, so the run "
                                     f"stops despite --on-nonfinite skip. The last was {bad[-1]}")
        return bad

    def state(self) -> dict[str, Any]:
        """The count of steps in a row, as plain JSON."""
        return {"in_a_row": self.in_a_row}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`."""
        self.in_a_row = int(state["in_a_row"])
