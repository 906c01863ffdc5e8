"""Reads the batches of a dataloader as rows and as optimizer steps."""

from collections.abc import Callable, Iterable
from typing import Any

from tropism.data.dataloaders.rows import rows_of_batch
from tropism.data.formats import View
from tropism.data.rows import EncodedRow
from tropism.data.schedule import GivenSchedule
from tropism.errors import DataError, UsageError, count_of


def read_batches(loader: Iterable[Any], view: View, epochs: int, accumulation_steps: int, max_steps: int | None,
                 own_partners: bool, say: Callable[[str], None]) -> tuple[list[EncodedRow], GivenSchedule]:
    """The rows of a dataloader's batches, and the rows of each step.

    Args:
        loader: the dataloader.
        view: view that the method needs.
        epochs: passes over the dataloader; ignored with `max_steps`.
        accumulation_steps: batches per optimizer step.
        max_steps: optimizer steps; passes are added until there are enough.
        own_partners: use the mismatched rows of the batches.
        say: prints a notice.

    Raises:
        DataError: for a batch that cannot be read.
        UsageError: if there is no batch, or no mismatched rows although `own_partners` is set.
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
                raise DataError(f"batch {number}: no rows")
            if own_partners and not read.has_partners:
                raise UsageError(f"kl_source='batch' needs mismatched rows, but batch {number} has none. Set "
                                 "kl_source='step'.")
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
            raise UsageError("the dataloader yielded no batch" + (
                " in its second pass. It must support several iterations." if epoch else ""))
        epoch += 1
        first_pass = first_pass or rows_per_pass(loader, len(rows), number)
    if ignored:
        say(f"the mismatched (kl) rows of {count_of(ignored, 'batch', 'batches')} are not used: mismatched completions "
            "come from the same step. kl_source='batch' uses the given rows")
    return rows, GivenSchedule(tuple(steps), first_pass)


def rows_per_pass(loader: Any, rows: int, batches: int) -> int:
    """Rows of a full pass over a dataloader, of which `max_steps` may have used only the beginning."""
    try:
        return round(rows * len(loader) / batches)
    except TypeError:  # it has no length
        return rows
