"""The rows of each step: a pure function of (data, options, seed, step), so resuming needs one integer."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from tropism.errors import UsageError


class Steps(Protocol):
    """The rows of each step."""

    @property
    def total_steps(self) -> int:
        """Planned optimizer steps."""
        ...

    def step(self, number: int) -> list[int]:
        """Rows of step `number` (from 1), in step order."""
        ...

    def epochs_after(self, number: int) -> float:
        """Epochs completed after step `number`, as a fraction of rows."""
        ...


@dataclass(frozen=True)
class GivenSchedule:
    """Steps that are given: the batches of a dataloader, in its order.

    Args:
        steps: rows of each step.
        rows_per_epoch: rows of one pass over the dataloader.
    """

    steps: tuple[tuple[int, ...], ...]
    rows_per_epoch: int

    @property
    def total_steps(self) -> int:
        """See `Steps`."""
        return len(self.steps)

    def step(self, number: int) -> list[int]:
        """See `Steps`."""
        return list(self.steps[number - 1])

    def epochs_after(self, number: int) -> float:
        """See `Steps`."""
        return sum(map(len, self.steps[:number])) / self.rows_per_epoch


@dataclass(frozen=True)
class Schedule:
    """The steps of a run.

    Each epoch has its own permutation of the rows. A step takes rows in that order until it has at least `batch_size`
    of them. No step crosses an epoch, and the last step of an epoch may be shorter.

    Args:
        prompts: for each row, the number of its prompt; prompts that are equal before truncation have equal numbers.
        batch_size: rows of a step, over all ranks.
        seed: of the permutations.
        epochs: passes over the data; ignored with `max_steps`.
        max_steps: optimizer steps; epochs are added until there are enough.
        shuffle: False keeps file order.
        group_prompts: permute prompts instead of rows, and keep all rows of a prompt in one step.
        needs_partners: a step grows until it has two distinct prompts, and a last step with one prompt is merged into
            the step before it (KTO's mismatched completions come from the same step).

    Raises:
        UsageError: if no step can have mismatched completions.
    """

    prompts: tuple[int, ...]
    batch_size: int
    seed: int
    epochs: int = 1
    max_steps: int | None = None
    shuffle: bool = True
    group_prompts: bool = False
    needs_partners: bool = False

    def __post_init__(self) -> None:
        if not self.needs_partners:
            return
        if self.batch_size < 2:
            raise UsageError("--batch-size 1 is too small: KTO needs completions of two prompts in each step. Set "
                             "--batch-size to 2 or more.")
        if len(set(self.prompts)) < 2:
            raise UsageError(f"all {len(self.prompts)} rows have the same prompt: KTO needs completions of another "
                             "prompt for its reference point. Add rows with other prompts.")

    @cached_property
    def _epochs(self) -> dict[int, list[list[int]]]:
        return {}

    def epoch(self, number: int) -> list[list[int]]:
        """Steps of an epoch, each a list of row indices."""
        if number not in self._epochs:
            self._epochs[number] = self._cut(self._order(number))
        return self._epochs[number]

    def _order(self, epoch: int) -> list[list[int]]:
        """Groups of rows that stay together, in the order of this epoch."""
        if self.group_prompts:
            groups: dict[int, list[int]] = {}
            for row, prompt in enumerate(self.prompts):
                groups.setdefault(prompt, []).append(row)
            units: Sequence[list[int]] = list(groups.values())
        else:
            units = [[row] for row in range(len(self.prompts))]
        if not self.shuffle:
            return list(units)
        generator = np.random.Generator(np.random.Philox(key=np.array([self.seed, epoch], dtype=np.uint64)))
        return [units[i] for i in generator.permutation(len(units))]

    def _cut(self, order: Sequence[list[int]]) -> list[list[int]]:
        steps: list[list[int]] = []
        step: list[int] = []
        for group in order:
            step += group
            if len(step) >= self.batch_size and self._complete(step):
                steps.append(step)
                step = []
        if step and (self._complete(step) or not steps):
            steps.append(step)
        elif step:
            steps[-1] += step
        return steps

    def _complete(self, step: Sequence[int]) -> bool:
        return not self.needs_partners or len({self.prompts[row] for row in step}) > 1

    @cached_property
    def _starts(self) -> list[int]:
        """First step (from 0) of each planned epoch, and the end."""
        starts = [0]
        while (len(starts) <= self.epochs) if self.max_steps is None else (starts[-1] < self.max_steps):
            starts.append(starts[-1] + len(self.epoch(len(starts) - 1)))
        return starts

    @property
    def total_steps(self) -> int:
        """Planned optimizer steps."""
        return self.max_steps if self.max_steps is not None else self._starts[-1]

    def step(self, number: int) -> list[int]:
        """Rows of step `number` (from 1), in step order."""
        epoch, offset = self._locate(number)
        return self.epoch(epoch)[offset]

    def epochs_after(self, number: int) -> float:
        """Epochs completed after step `number`, as a fraction of rows."""
        epoch, offset = self._locate(number)
        done = sum(len(step) for step in self.epoch(epoch)[: offset + 1])
        return epoch + done / len(self.prompts)

    def _locate(self, number: int) -> tuple[int, int]:
        if not 1 <= number <= self.total_steps:
            raise IndexError(f"step {number} of {self.total_steps}")
        epoch = int(np.searchsorted(self._starts, number - 1, side="right")) - 1
        return epoch, number - 1 - self._starts[epoch]
