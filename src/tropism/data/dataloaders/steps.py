"""Reads the batches of a dataloader as rows and as optimizer steps."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, Literal

from tropism.data.dataloaders.rows import remarks_on, rows_of_batch
from tropism.data.formats import View
from tropism.data.rows import EncodedRow
from tropism.data.schedule import MICRO_BATCH, PUBLISHED, STEP, GivenSchedule, MicroBatchRule
from tropism.data.tree import Unsupervised
from tropism.errors import DataError, UsageError, count_of

Gather = Callable[[Any], list[Any]]
"""The values of all processes."""


def rule_of(reference_point: Any, view: View) -> MicroBatchRule | Literal["published"]:
    """What micro-batches decide, from the name of a scope or from a rule.

    Raises:
        UsageError: for an unknown scope, or one without effect on the view.
    """
    if isinstance(reference_point, MicroBatchRule):
        return reference_point
    if reference_point not in ("step", "micro_batch", "published"):
        raise UsageError(f"reference_point: must be step, micro_batch or published (got {reference_point!r})")
    if reference_point == "micro_batch" and view != "unpaired":
        raise UsageError("reference_point='micro_batch' has no effect: only KTO has a reference point. Remove it.")
    return "published" if reference_point == "published" else STEP if reference_point == "step" else MICRO_BATCH


@dataclass(frozen=True)
class ReadSteps:
    """How batches become steps.

    Args:
        view: view that the method needs.
        epochs: passes over the dataloader; ignored with `max_steps`.
        accumulation_steps: micro-batches per optimizer step.
        max_steps: optimizer steps; passes are added until there are enough.
        own_partners: use the mismatched rows of the batches.
        rule: what micro-batches decide; `published`: what they decide in the trainer whose layout the batches have.
        gather: exchanges the rows that the processes read. By default every process reads all of them.
        name: of the dataloader.
    """

    view: View
    epochs: int = 1
    accumulation_steps: int = 1
    max_steps: int | None = None
    own_partners: bool = False
    rule: MicroBatchRule | Literal["published"] = STEP
    gather: Gather | None = None
    name: str = "the dataloader"


def read_batches(loader: Iterable[Any], how: ReadSteps,
                 say: Callable[[str], None]) -> tuple[list[EncodedRow], GivenSchedule]:
    """The rows of a dataloader's batches, and the rows of each step.

    Args:
        loader: the dataloader.
        how: batches become steps.
        say: prints a notice.

    Raises:
        DataError: for a batch that cannot be read.
        UsageError: if there is no batch, no step, or no mismatched rows although they are needed.
    """
    reading = _Reading(how)
    reading.read(loader)
    reading.tell(say)
    rule = reading.rule
    rows = [reading.rows[row] for step in reading.steps for part in step for row in part]  # the last may be left over
    sizes = [[[len(part)] for part in step] for step in reading.steps]
    per_epoch, first, read = reading.rows_per_epoch, reading.first_pass, len(rows)
    if how.gather is not None:
        rows, sizes = _joined(rows, sizes, how.gather)
        per_epoch, first = (count * len(rows) // read for count in (per_epoch, first))
    starts = [0, *accumulate(sum(map(sum, step)) for step in sizes)]
    steps = tuple(tuple(range(start, end)) for start, end in pairwise(starts))
    if rule == STEP:
        return rows, GivenSchedule(steps, per_epoch, first_pass=first)
    if rule.division == "step":  # processes only share the work
        sizes = [[[sum(parts)] for parts in step] for step in sizes]
    return rows, GivenSchedule(steps, per_epoch, tuple(tuple(map(tuple, step)) for step in sizes), rule, first)


@dataclass
class _Reading:
    """The batches that were read so far.

    Attributes:
        rows: of all batches.
        steps: complete ones: each a list of micro-batches, which are lists of rows.
        open: micro-batches of the next step.
        rows_per_epoch: rows of a full pass.
        first_pass: rows of the steps that are left, as in `GivenSchedule`.
    """

    how: ReadSteps
    rows: list[EncodedRow] = field(default_factory=list)
    steps: list[list[list[int]]] = field(default_factory=list)
    open: list[list[int]] = field(default_factory=list)
    batches: int = 0
    ignored: int = 0
    rows_per_epoch: int = 0
    first_pass: int = 0
    _rule: MicroBatchRule = STEP
    _since: int = 0

    @property
    def rule(self) -> MicroBatchRule:
        """What micro-batches decide."""
        return self._rule if self.how.rule == "published" else self.how.rule

    @property
    def full(self) -> bool:
        """Enough steps were read."""
        return self.how.max_steps is not None and len(self.steps) >= self.how.max_steps

    def read(self, loader: Iterable[Any]) -> None:
        """Read all passes over a dataloader."""
        epoch, how = self.rule.first_epoch, self.how
        last = None if how.max_steps is not None else epoch + how.epochs
        first = epoch
        while not self.full if last is None else epoch < last:
            before = self.batches
            announce_epoch(loader, epoch)
            for batch in loader:
                self._add(batch)
                if self.full:
                    break
            if self.batches == before:
                raise UsageError(f"{how.name} yielded no batch" + (
                    " in its second pass. It must support several iterations." if epoch > first else ""))
            self.rows_per_epoch = self.rows_per_epoch or rows_per_pass(loader, len(self.rows), self.batches)
            if self.rule.leftover == "close":  # no step crosses an epoch
                if self.open:
                    self._close()
                self._since = 0
            epoch += 1
        if not self.steps:
            raise UsageError(f"no optimizer step: {count_of(self.batches, 'batch', 'batches')} are fewer than "
                             f"accumulation_steps {how.accumulation_steps}. Lower it, or use more data.")
        if self.rule.done >= len(self.steps):
            raise UsageError(f"nothing to train: {self.rule.done} of {count_of(len(self.steps), 'optimizer step')} "
                             "were done before. Raise the number of epochs.")
        done = sum(len(part) for step in self.steps[: self.rule.done] for part in step)
        self.first_pass = self.rows_per_epoch - done % self.rows_per_epoch
        del self.steps[: self.rule.done]

    def _add(self, batch: Any) -> None:
        how = self.how
        self.batches += 1
        number = self.batches
        published = how.rule == "published" or self.rule.published
        read = rows_of_batch(batch, how.view, number=number, keep_partners=how.own_partners or published,
                             keep_unsupervised=published)
        if not read.rows:
            raise DataError(f"batch {number}: no rows")
        if self.batches == 1:
            self._rule = PUBLISHED[read.layout.split()[0]]
        if how.view == "unpaired" and (how.own_partners or published) and not read.has_partners:
            name, other = (("kl_source='batch'", "kl_source") if how.own_partners else
                           ("reference_point='published'", "reference_point"))
            raise UsageError(f"{name} needs mismatched rows, but batch {number} has none. Set {other}='step'.")
        self.ignored += read.has_partners and not (how.own_partners or published)
        size = self.rule.size or len(read.rows)
        places = range(len(self.rows), len(self.rows) + len(read.rows))
        self.rows += read.rows
        for start in range(0, len(places), size) if self.rule.size else (0,):
            self.open.append(list(places[start : start + size]))
        self._since += 1
        if self._since % how.accumulation_steps == 0:
            self._close()

    def _close(self) -> None:
        self.steps.append(self.open)
        self.open = []

    def tell(self, say: Callable[[str], None]) -> None:
        """Say what a reader of the numbers should know about the batches."""
        for text in remarks_on(self.rows):
            say(text)
        if self.ignored:
            say(f"the mismatched (kl) rows of {count_of(self.ignored, 'batch', 'batches')} are not used: mismatched "
                "completions come from the same step. kl_source='batch' uses the given rows")
        empty = sum(isinstance(side, Unsupervised) for row in self.rows for side in row.completions)
        if empty:
            say(f"completions without a supervised token: {empty}. They count with log-ratio 0 and teach nothing, as "
                "in the published trainer.")


def announce_epoch(loader: Any, epoch: int) -> None:
    """Call `set_epoch` of whatever shuffles a dataloader, so that every epoch has its own order."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    found = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None),
             getattr(loader, "dataset", None))
    for one in {id(one): one for one in found}.values():
        if callable(set_epoch := getattr(one, "set_epoch", None)):
            set_epoch(epoch)


def _joined(rows: Sequence[EncodedRow], sizes: Sequence[Sequence[Sequence[int]]],
            gather: Gather) -> tuple[list[EncodedRow], list[list[list[int]]]]:
    """Rows and sizes of the steps of all processes: micro-batch j of each process is a part of micro-batch j.

    Args:
        rows: that this process read, in the order of its steps.
        sizes: of its micro-batches.

    Raises:
        UsageError: if the processes read different numbers of micro-batches.
    """
    everyone = gather((rows, sizes))
    distinct = {tuple(_content(row) for row in own): number for number, (own, _) in reversed([*enumerate(everyone)])}
    if len(distinct) == 1:  # every process read all rows
        return list(rows), [[list(parts) for parts in step] for step in sizes]
    if len(distinct) < len(everyone):
        raise UsageError("some processes read the same batches, others read different ones. Give each process its own "
                         "part of the data with a DistributedSampler, or all of it to every process.")
    shapes = [[len(step) for step in own] for _, own in everyone]
    if any(shape != shapes[0] for shape in shapes):
        counts = ", ".join(f"process {rank} {sum(shape)}" for rank, shape in enumerate(shapes))
        raise UsageError(f"the processes read different numbers of micro-batches: {counts}. Use drop_last=True, or a "
                         "DistributedSampler, which gives each process the same number.")
    queues = [iter(own) for own, _ in everyone]
    found: list[EncodedRow] = []
    merged: list[list[list[int]]] = []
    for step, micro_batches in enumerate(shapes[0]):
        merged.append([])
        for number in range(micro_batches):
            parts = [own[step][number][0] for _, own in everyone]
            merged[-1].append(parts)
            for rank, size in enumerate(parts):
                for _ in range(size):
                    row = next(queues[rank])
                    place = f"process {rank} {row.place}"
                    found.append(replace(row, id=place, place=place))
    return found, merged


def _content(row: EncodedRow) -> tuple[Any, ...]:
    """What distinguishes a row's content."""
    return (row.prompt_key, row.desirable, *(side.key for side in (*row.completions, row.partner) if side is not None))


def rows_per_pass(loader: Any, rows: int, batches: int) -> int:
    """Rows of a full pass over a dataloader, of which `max_steps` may have used only the beginning."""
    try:
        return round(rows * len(loader) / batches)
    except TypeError:  # it has no length
        return rows
