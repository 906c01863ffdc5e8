"""The rows of each step: a pure function of (data, options, seed, step), so resuming needs one integer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Literal, Protocol

import numpy as np

from tropism.errors import UsageError


@dataclass(frozen=True)
class MicroBatchRule:
    """How a step is formed from the micro-batches of a dataloader, and what its micro-batches decide.

    Args:
        point: where KTO's z0 is pooled: over the `step`; over each `micro_batch`, averaged over its processes and then
            clamped at 0; or over each `process`'s part of a micro-batch, clamped and then averaged.
        division: the losses of a step are divided by the counts of the `step`; or those of each process's part of a
            micro-batch by its own counts, and then averaged over processes, and averaged (`mean`) or added (`sum`) over
            micro-batches.
        leftover: what becomes of micro-batches that an epoch leaves over: they `close` it as a last step, or they are
            `carry`-ed into the next step as its first micro-batches. Those of the last epoch are then left out.
        size: rows of a micro-batch. Default: a batch of the dataloader is one.
        published: pair completions as the batch does, and keep rows without a supervised token. Their log-ratio is 0.
        first_epoch: number of the first pass over the dataloader.
        done: optimizer steps at the beginning that were done before.
        average: compare completions, mismatched ones too, by their mean log-prob per token.
        per_token: the likelihood of pairs is divided by the tokens of a part of a micro-batch, as in TRL, instead of
            each row's own tokens and the rows, as in OpenRLHF. Only with `mean` or `sum`.
    """

    point: Literal["step", "micro_batch", "process"] = "step"
    division: Literal["step", "mean", "sum"] = "step"
    leftover: Literal["close", "carry"] = "close"
    size: int | None = None
    published: bool = False
    first_epoch: int = 0
    done: int = 0
    average: bool = False
    per_token: bool = False


STEP = MicroBatchRule()
"""Micro-batches decide nothing."""
MICRO_BATCH = MicroBatchRule("micro_batch")
"""The reference point is pooled over each micro-batch."""
PUBLISHED: dict[str, MicroBatchRule] = {
    "OpenRLHF": MicroBatchRule("micro_batch", "mean", "carry", published=True),
    "coati": MicroBatchRule("micro_batch", "sum", "carry", published=True),
    "NeMo-Aligner": MicroBatchRule("process", "mean", "close", published=True),
}
"""The rules of published trainers."""


@dataclass(frozen=True)
class Parts:
    """The rows of a step, in its order, as the parts of micro-batches that its processes contribute.

    Args:
        sizes: rows of each part, in the order of the step; micro-batch after micro-batch.
        rule: what they decide.
    """

    sizes: tuple[tuple[int, ...], ...]
    rule: MicroBatchRule = STEP

    @property
    def number(self) -> int:
        """How many parts there are."""
        return sum(map(len, self.sizes))

    @property
    def flat(self) -> tuple[int, ...]:
        """Rows of each part."""
        return tuple(chain.from_iterable(self.sizes))

    @property
    def micro_batches(self) -> list[int]:
        """The micro-batch of each part."""
        return [number for number, parts in enumerate(self.sizes) for _ in parts]

    def ranges(self) -> list[range]:
        """The places in the step of the rows of each part."""
        ends = np.cumsum(self.flat).tolist()
        return [range(end - size, end) for size, end in zip(self.flat, ends, strict=True)]


ONE = Parts(((0,),))
"""One part, of any size."""


class Steps(Protocol):
    """The rows of each step."""

    @property
    def total_steps(self) -> int:
        """Planned optimizer steps."""
        ...

    def step(self, number: int) -> list[int]:
        """Rows of step `number` (from 1), in step order."""
        ...

    def parts(self, number: int) -> Parts:
        """The parts of step `number`."""
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
        sizes: of the parts of each step, as in `Parts`; empty if micro-batches decide nothing.
        rule: what they decide.
        first_pass: rows, from the first on, that belong to the pass in which the first step begins. Default: all.
    """

    steps: tuple[tuple[int, ...], ...]
    rows_per_epoch: int
    sizes: tuple[tuple[tuple[int, ...], ...], ...] = ()
    rule: MicroBatchRule = STEP
    first_pass: int | None = field(default=None, repr=False, compare=False)

    @property
    def total_steps(self) -> int:
        """See `Steps`."""
        return len(self.steps)

    def step(self, number: int) -> list[int]:
        """See `Steps`."""
        return list(self.steps[number - 1])

    def parts(self, number: int) -> Parts:
        """See `Steps`."""
        if not self.sizes:
            return Parts(((len(self.steps[number - 1]),),))
        return Parts(self.sizes[number - 1], self.rule)

    @property
    def whole(self) -> Parts:
        """The parts of all steps together."""
        return Parts(tuple(chain.from_iterable(self.sizes)), self.rule)

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

    def parts(self, number: int) -> Parts:
        """The only part of step `number`."""
        return Parts(((len(self.step(number)),),))

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
