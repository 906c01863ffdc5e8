"""A dataloader's batches as rows, and as the steps that they are."""

from collections.abc import Callable, Iterable
from typing import Any

from tropism.data.dataloaders.rows import rows_of_batch
from tropism.data.formats import View
from tropism.data.rows import EncodedRow
from tropism.data.schedule import GivenSchedule
from tropism.errors import DataError, UsageError


def read_batches(loader: Iterable[Any], view: View, epochs: int, accumulation_steps: int, max_steps: int | None,
                 own_partners: bool, say: Callable[[str], None]) -> tuple[list[EncodedRow], GivenSchedule]:
    """Rows of a dataloader's batches, and which of them each step takes.

    Args:
        epochs: passes over the dataloader; with `max_steps` as many as that takes.
        accumulation_steps: batches per step.
        own_partners: take the mismatched rows that the batches bring.
        say: takes a notice.

    Raises:
        DataError: for a batch that cannot be understood.
        UsageError: if there is none, or mismatched rows are asked for that are not there.
    """
    rows: list[EncodedRow] = []
    steps: list[tuple[int, ...]] = []
    ignored = number = epoch = first_pass = 0
    while epoch < epochs if max_steps is None else len(steps) < max_steps:
        before = number
        step: tuple[int, ...] = ()
        for batch in loader:
            number += 1
            read = rows_of_batch(batch, view, number=number, keep_partners=own_partners)
            if not read.rows:
                raise DataError(f"batch {number}: has no rows")
            if own_partners and not read.has_partners:
                raise UsageError(f"kl_source is batch, and batch {number} brings no mismatched rows")
            ignored += read.has_partners and not own_partners
            step += tuple(range(len(rows), len(rows) + len(read.rows)))
            rows += read.rows
            if (number - before) % accumulation_steps == 0:
                steps.append(step)
                step = ()
                if len(steps) == max_steps:
                    break
        if step:  # no step crosses an epoch
            steps.append(step)
        if number == before:
            raise UsageError("the dataloader gave no batch" + (" in its second pass; it must be readable again"
                                                               if epoch else ""))
        epoch += 1
        first_pass = first_pass or rows_per_pass(loader, len(rows), number)
    if ignored:
        say(f"the mismatched (kl) rows of {ignored} batches are not used: each completion is paired within its step; "
            "kl_source='batch' takes them")
    return rows, GivenSchedule(tuple(steps), first_pass)


def rows_per_pass(loader: Any, rows: int, batches: int) -> int:
    """Rows of a whole pass over a dataloader, of which `max_steps` may have asked for the beginning only."""
    try:
        return round(rows * len(loader) / batches)
    except TypeError:  # it does not know
        return rows
