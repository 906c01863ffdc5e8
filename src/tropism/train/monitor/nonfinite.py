"""What was not finite in a step that therefore changed nothing, and what to do about it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tropism.data.rows import EncodedRow
from tropism.distributed.world import World
from tropism.errors import NonFiniteError
from tropism.train.step_log import StepOutcome

MOST_IN_A_ROW = 10
"""Steps that may be left out one after the other: beyond them the weights do not come back by themselves."""

_LISTED = 10

Cause = Literal["reference", "log-prob", "loss", "reference point", "gradient"]
_SAID: dict[Cause, str] = {
    "reference": "the log-prob of the reference is not finite",
    "log-prob": "the log-prob of the policy is not finite",
    "loss": "log-probs are finite, and the loss is not",
    "reference point": "KTO's reference point is not finite, through the log-prob of a mismatched completion of the "
                       "step, and so no loss of these rows is",
    "gradient": "all losses are finite, but the gradient is not",
}


@dataclass(frozen=True, slots=True)
class BadStep:
    """A step that was not applied.

    Args:
        step: its number.
        cause: the first thing on the way from the reference to the gradient that was not finite.
        rows: id and place of those to look at: the ones it began with, or all of the step where none is to blame.
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
            return f"step {self.step}: {_SAID['gradient']} (norm {self.grad_norm}); rows of the step: {listed}{more}"
        return (f"step {self.step}: the loss of {len(self.rows)} rows is not finite: {listed}{more}: "
                f"{_SAID[self.cause]}")

    def to_json(self) -> dict[str, Any]:
        """A line of `skipped.jsonl`."""
        return {"step": self.step, "cause": self.cause, "why": _SAID[self.cause], "grad_norm": self.grad_norm,
                "rows": [{"id": name, "place": place} for name, place in self.rows]}

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> "BadStep":
        """What `to_json` wrote."""
        return cls(line["step"], line["cause"], tuple((row["id"], row["place"]) for row in line["rows"]),
                   line["grad_norm"])


def diagnose(world: World, outcome: StepOutcome, rows: Sequence[EncodedRow]) -> BadStep:
    """Find what was not finite. All ranks call this together.

    Args:
        outcome: of a step that was not finite.
        rows: those of the run.
    """
    found: list[tuple[Cause, int]] = []
    for values, indices in outcome.losses:
        for loss, policy, reference, index in zip(*values.tolist(), indices, strict=True):
            if not math.isfinite(reference):
                found.append(("reference", index))
            elif not math.isfinite(policy):
                found.append(("log-prob", index))
            elif not math.isfinite(loss):
                found.append(("loss", index))
            else:
                found.append(("gradient", index))  # not to blame, and named only if none is
    everywhere = [entry for part in world.of_parts(found) for entry in part]
    point = outcome.point
    order: tuple[Cause, ...] = ("reference", "log-prob", "loss", "gradient")
    # What comes from the whole step carries one row's NaN into the losses of others, which are not to blame.
    cause: Cause = next((cause for cause in order if any(entry[0] == cause for entry in everywhere)), "gradient")
    blamed = sorted(index for of_row, index in everywhere if of_row == cause)
    named = tuple((rows[index].id, rows[index].place) for index in blamed)
    if cause == "loss" and point is not None and not math.isfinite(float(point.raw)):
        cause = "reference point"
    return BadStep(outcome.step, cause, named, str(float(outcome.grad_norm)))


class Tolerance:
    """Whether a run goes on after a step that was not finite.

    Args:
        mode: `stop` at the first one, or `skip` up to ten in a row.
    """

    def __init__(self, mode: Literal["stop", "skip"] = "stop") -> None:
        self.mode = mode
        self.in_a_row = 0

    def see(self, world: World, outcomes: Sequence[StepOutcome], finite: Sequence[bool],
            rows: Sequence[EncodedRow]) -> list[BadStep]:
        """Steps of a window that were not applied. All ranks call this together.

        Raises:
            NonFiniteError: under `stop` for the first of them, under `skip` for the tenth in a row.
        """
        bad: list[BadStep] = []
        for outcome, fine in zip(outcomes, finite, strict=True):
            self.in_a_row = 0 if fine else self.in_a_row + 1
            if fine:
                continue
            bad.append(diagnose(world, outcome, rows))
            if self.mode == "stop":
                raise NonFiniteError(f"{bad[-1]}. The step changed nothing. A lower learning rate or --max-grad-norm, "
                                     "or fp32 instead of bf16, may help; look at these rows first. --on-nonfinite skip "
                                     "leaves such steps out")
            if self.in_a_row >= MOST_IN_A_ROW:
                raise NonFiniteError(f"{self.in_a_row} steps in a row were not finite and changed nothing, so the run "
                                     f"stops although --on-nonfinite is skip. The last: {bad[-1]}")
        return bad

    def state(self) -> dict[str, Any]:
        """What decides when to stop, as plain JSON."""
        return {"in_a_row": self.in_a_row}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state()`."""
        self.in_a_row = int(state["in_a_row"])
