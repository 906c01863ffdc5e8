"""Statistics of a whole step that some losses need: reference point (KTO), ranks (AOT), mean of rewards (BCO)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tropism.data.batching.transfer import sent
from tropism.distributed.world import World
from tropism.losses.aot import partners
from tropism.losses.scored import Scored
from tropism.methods import Method, StepInputs, Units

ScoredPacks = Sequence[tuple[Scored, Units]]
"""Packs of this process with their scores, from a pass without gradients."""


class RunningMean:
    """Mean of all rewards in training, on the device. Steps that are not finite do not count.

    Args:
        sums: `[2]` sum and count so far; None before the first step.
    """

    def __init__(self, sums: Tensor | None = None) -> None:
        self.sums = sums
        self._next: Tensor | None = None

    @property
    def value(self) -> Tensor:
        """The mean; 0 before the first step."""
        if self.sums is None:
            return torch.zeros((), dtype=torch.float64)
        return self.sums[0] / self.sums[1].clamp(min=1)

    def propose(self, sums: Tensor) -> Tensor:
        """The mean including `[2]` sum and count of one more step. Call `settle` to keep it."""
        self._next = sums if self.sums is None else self.sums + sums
        return self._next[0] / self._next[1]

    def settle(self, finite: Tensor) -> None:
        """Keep the proposed sums, or drop them if `finite`, a scalar on the device, is False."""
        if self._next is not None:
            before = torch.zeros_like(self._next) if self.sums is None else self.sums
            self.sums, self._next = torch.where(finite, self._next, before), None

    def forget(self) -> None:
        """Drop the proposed sums."""
        self._next = None

    def state(self) -> list[float] | None:
        """Plain values that `restore` takes."""
        return None if self.sums is None else self.sums.tolist()

    def restore(self, state: list[float] | None, device: torch.device) -> None:
        """Continue from `state()`."""
        self.sums = None if state is None else torch.tensor(state, dtype=torch.float64, device=device)


def rewards_of_step(method: Method, found: ScoredPacks, device: torch.device) -> Tensor:
    """`[2]` sum and count of this process's rewards."""
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for scored, units in found:
        rewards = method.unit_rewards(scored, units)
        sums += torch.stack((rewards.sum(), torch.ones_like(rewards).sum()))
    return sums


def ranks_of_step(method: Method, found: ScoredPacks, rows: Sequence[tuple[int, ...]], order: Sequence[int],
                  world: World, device: torch.device) -> list[StepInputs]:
    """For each pair of this process's packs, the values at the same rank among all pairs of the step.

    Pairs are sorted in the order of their rows, so that the result does not depend on packs or processes. All of it
    stays on the device: each process fills its own lines of one table, and the sum of the tables has all lines.

    Args:
        rows: of each pack.
        order: all rows of the step over all processes, in ascending order.
    """
    place = {index: position for position, index in enumerate(order)}
    lines = [sent(torch.tensor([place[index] for index in indices], dtype=torch.int64), device) for indices in rows]
    own = torch.zeros(len(order), 4, dtype=torch.float64, device=device)
    for (scored, units), at in zip(found, lines, strict=True):
        own.index_copy_(0, at, side_values(method, scored, units).double())
    columns = sorted_partners(world.sum(own))
    inputs = []
    for at in lines:
        partner, of_chosen, of_rejected = (column.index_select(0, at) for column in columns)
        inputs.append(StepInputs(partner=partner, chosen_partner=of_chosen, rejected_partner=of_rejected))
    return inputs


def side_values(method: Method, scored: Scored, units: Units) -> Tensor:
    """`[U, 4]` of each pair: policy margin, reference margin, log-ratio of the chosen and of the rejected side."""
    chosen, rejected = method.sides(scored, units)
    return torch.stack((chosen.logps - rejected.logps, chosen.reference_logps - rejected.reference_logps,
                        chosen.logratios, rejected.logratios), dim=1).detach()


def sorted_partners(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`[N]` each: the reference margin of a pair's rank, and the other side's log-ratio for both of its sides.

    Args:
        values: `[N, 4]` of `side_values`, of all pairs that are sorted together.
    """
    policy, reference, chosen, rejected = values.unbind(1)
    return partners(policy, reference), partners(chosen, rejected), partners(rejected, chosen)
