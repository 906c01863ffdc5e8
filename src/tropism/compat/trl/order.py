"""The order in which TRL sees the rows: the sampler of transformers, as accelerate seeds it."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

import torch

from tropism.data.rows import EncodedRow
from tropism.data.schedule import STEP, GivenSchedule, MicroBatchRule
from tropism.errors import UsageError


@dataclass(frozen=True)
class Batches:
    """How TRL cuts an epoch into optimizer steps.

    Args:
        size: entries of a micro-batch, on one process.
        processes: that each take a micro-batch at a time.
        accumulation: micro-batches of a process per optimizer step.
        shuffle: permute the entries in every epoch.
        seed: of the permutations.
        drop_last: omit a micro-batch that is not full.
    """

    size: int
    processes: int
    accumulation: int
    shuffle: bool
    seed: int
    drop_last: bool

    @property
    def step_size(self) -> int:
        """Entries of a full optimizer step."""
        return self.size * self.processes * self.accumulation

    def epoch(self, entries: int, number: int) -> list[list[int]]:
        """The optimizer steps of an epoch (from 0), each as entry numbers in order."""
        order = list(range(entries))
        if self.shuffle:
            order = torch.randperm(entries, generator=torch.Generator().manual_seed(self.seed + number)).tolist()
        if self.drop_last:
            order = order[: entries // (self.size * self.processes) * self.size * self.processes]
        return [order[start : start + self.step_size] for start in range(0, len(order), self.step_size)]

    def steps(self, entries: int, epochs: float, max_steps: int | None) -> list[list[int]]:
        """The optimizer steps of a run.

        Raises:
            UsageError: if an epoch has no step.
        """
        per_epoch = len(self.epoch(entries, 0))
        if not per_epoch:
            raise UsageError(f"dataloader_drop_last leaves no batch of {self.size * self.processes} among {entries} "
                             "rows. Lower per_device_train_batch_size, or add rows.")
        total = math.ceil(epochs * per_epoch) if max_steps is None else max_steps
        numbers = range(math.ceil(total / per_epoch))
        return list(islice(chain.from_iterable(self.epoch(entries, number) for number in numbers), total))

    def sizes(self, step: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Entries that each process has of each micro-batch of a step."""
        full, rest = divmod(len(step), self.size)
        own = [self.size] * full + [rest] * bool(rest)
        return tuple(tuple(own[start : start + self.processes]) for start in range(0, len(own), self.processes))


def schedule_of(rows: Sequence[EncodedRow], batches: Batches, epochs: float, max_steps: int | None,
                rule: MicroBatchRule = STEP, *, needs_partners: bool = False,
                blocks: Sequence[Sequence[int]] | None = None) -> GivenSchedule:
    """The steps of a run.

    Args:
        rule: what the micro-batches of a step decide.
        needs_partners: a step whose rows have one prompt is merged into the one before it (KTO).
        blocks: rows of each entry that the sampler orders; by default each row is one.
    """
    steps = batches.steps(len(rows if blocks is None else blocks), epochs, max_steps)
    sizes = tuple(batches.sizes(step) for step in steps) if rule != STEP else ()
    if blocks is not None:
        steps = [[row for entry in step for row in blocks[entry]] for step in steps]
    if needs_partners:
        steps = list(_merged(steps, rows))
    return GivenSchedule(tuple(map(tuple, steps)), len(rows), sizes, rule)


def with_partners(rows: Sequence[EncodedRow], size: int, max_length: int | None) -> list[EncodedRow]:
    """Rows with the mismatched completions that TRL gives them: of `size` consecutive rows, each gets the completion
    of the row before it, and the first one that of the last."""
    found: list[EncodedRow] = []
    for start in range(0, len(rows), size):
        own = rows[start : start + size]
        for index, row in enumerate(own):
            partner = own[index - 1].completions[0]
            room = None if max_length is None else max_length - len(row.prompt_ids)
            found.append(replace(row, partner=partner if room is None else partner.cut(room)))
    return found


def _merged(steps: Sequence[list[int]], rows: Sequence[EncodedRow]) -> Iterator[list[int]]:
    """Steps of which each has at least two prompts, as far as there are any."""
    held: list[int] = []
    for step in steps:
        if min(len({rows[row].prompt_key for row in part}) for part in (held, step)) > 1:
            yield held
            held = []
        held = held + step
    yield held


def packed(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Rows in blocks of at most `size` tokens: each row, longest first, goes where it leaves the least room."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    blocks: list[list[int]] = []
    room: dict[int, list[int]] = {}
    for row in order:
        fits = min((left for left in room if left >= lengths[row] and room[left]), default=None)
        if fits is None:
            blocks.append([])
            block, fits = len(blocks) - 1, size
        else:
            block = room[fits].pop(0)
        blocks[block].append(row)
        room.setdefault(fits - lengths[row], []).append(block)
    return blocks


def per_chunk(lengths: Sequence[int], size: int, chunk: int, pack: Callable[[Sequence[int], int], list[list[int]]],
              ) -> list[list[int]]:
    """Blocks of consecutive chunks of rows, each packed alone."""
    return [[start + row for row in block] for start in range(0, len(lengths), chunk)
            for block in pack(lengths[start : start + chunk], size)]
