"""The outcome of an optimizer step, for the log. The host does not wait for the device here."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tropism.losses.scored import Scored
from tropism.methods import Units
from tropism.observe.metrics import Tally
from tropism.shapes import PerUnit
from tropism.train.engine import Engine
from tropism.train.reference_point import ReferencePoint
from tropism.train.step_packs import Pack, StepPacks


@dataclass
class StepOutcome:
    """The outcome of a step, for the log. All tensors are still on the device."""

    step: int
    tally: Tally
    grad_norm: Tensor
    finite: Tensor
    point: ReferencePoint | None
    losses: list[tuple[Tensor, tuple[int, ...]]] = field(default_factory=list)
    """`[4, U]` for the units of each of this process's packs, with their rows: the loss, NaN if a log-prob is not
    finite; then 0, or NaN if a log-prob of the policy, or of the reference, is not finite; then the log-ratio, of the
    chosen side of a pair."""
    learning_rate: float = 0.0
    size: Tensor | None = None
    """Sum of the absolute losses of this process's packs; 0 if there is nothing to learn."""


class StepLog:
    """Collects the outcome of a step, pack by pack.

    Args:
        engine: of the run.
        step: the packs of this process.
    """

    def __init__(self, engine: Engine, step: StepPacks) -> None:
        self.engine, self.step, self.tally = engine, step.step, Tally()
        self._losses: list[tuple[Tensor, tuple[int, ...]]] = []
        self._nonfinite, self._size = (
            torch.zeros((), dtype=torch.float64, device=engine.model.device) for _ in range(2))

    def add(self, pack: Pack, units: Units, scored: Scored, losses: Sequence[PerUnit], share: Tensor) -> None:
        """Record one pack after its backward pass.

        Args:
            losses: of each term, per unit.
            share: the scalar that was differentiated.
        """
        self._size += share.detach().abs()
        if not pack.rows:
            return
        method = self.engine.method
        self.tally.add(method.metrics(scored, units, losses, pack.counts, self.engine.noise(scored)))
        # A saturated loss can hide an infinite log-ratio. Times 0 it is NaN, and anything finite is 0.
        policy, reference = (0.0 * logps.detach()[units.members].sum(dim=1)
                             for logps in (scored.logps, scored.reference_logps))
        values = torch.stack(list(losses)).detach().sum(0) + policy + reference
        self._nonfinite += (~torch.isfinite(values)).sum()
        ratios = method.compared(scored).logratios.detach()[units.members[:, 0]]
        self._losses.append((torch.stack((values, policy, reference, ratios)), pack.rows))

    def finite(self) -> Tensor:
        """True if the losses of all units on all processes are finite; a scalar on the device."""
        return self.engine.world.sum(self._nonfinite) == 0

    def outcome(self, norm: Tensor, finite: Tensor, point: ReferencePoint | None, rate: float) -> StepOutcome:
        """The outcome of the step.

        Args:
            norm: of the gradient before clipping.
            finite: the update was applied.
            rate: learning rate of the step.
        """
        return StepOutcome(self.step, self.tally, norm.detach(), finite, point, self._losses, rate, self._size)
