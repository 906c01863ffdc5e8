"""Read the parts of a source as rows, each with the record that it comes from."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

from tropism.config import ConvertOptions
from tropism.data.formats import FORMATS, Reading, View, recognize, rows_of_record, view_of
from tropism.data.formats.context import CONTEXT_COLUMNS
from tropism.data.formats.recognize import renamed
from tropism.data.rows import Dropped, RawRow, Row
from tropism.data.sources import resolve as sources
from tropism.errors import DataError

PEEKED = 10_000  # records of a part that decide its format

WANTED: dict[str, View] = {"unpaired": "unpaired", "paired": "paired", "single": "single", "messages": "single"}
"""The view that each shape is written from."""

_JUDGED = ("feedback", "rating")  # formats whose earlier completions may be bad
_COMMON = {"id", "tools", *CONTEXT_COLUMNS}  # columns that every format takes

READ_BY_NAME = _COMMON | {
    column for known in FORMATS.values() for shape in known.shapes for column in shape.columns
    if not (known.name == "rating" and column == shape.label)}  # ratings are ignored without --label-threshold
"""Columns that can change how a file is read."""


@dataclass(frozen=True, slots=True)
class ConvertedRecord:
    """A record and its rows.

    Args:
        raw: the record, with renamed columns.
        rows: its rows, and why others were dropped.
        replaced: columns that were replaced by a renamed one.
    """

    raw: RawRow
    rows: list[Row | Dropped]
    replaced: list[str]


@dataclass(frozen=True, slots=True)
class ConvertPart:
    """A part of a source whose format is recognized.

    Args:
        source: where its records come from.
        reading: how they become rows.
        first_side: take only the chosen side of each pair.
        head: its first records, unchanged.
        rest: the other records.
    """

    source: sources.SourcePart
    reading: Reading
    first_side: bool
    head: list[RawRow]
    rest: Iterator[RawRow]

    def __str__(self) -> str:
        """How the part is read, in one sentence."""
        if not self.first_side:
            return str(self.reading)
        return (f"read as {self.reading.format.name} {self.reading.shape}, the chosen side of each pair; override with "
                "--format and --columns")

    def rows(self) -> Iterator[ConvertedRecord]:
        """Each record with its rows, once. Pairs that are split alternate their order, as in training."""
        names = self.reading.options.renames
        split = (self.reading.shape.view, self.reading.wanted) == ("paired", "unpaired")
        for number, given in enumerate(chain(self.head, self.rest)):
            (raw,) = renamed([given], names)
            rows = rows_of_record(raw, self.reading)
            if self.first_side:
                rows = [replace(row, desirable=None) if isinstance(row, Row) else row for row in rows[:1]]
            elif split and number % 2:
                rows.reverse()
            yield ConvertedRecord(raw, rows, [new for old, new in names.items()
                                    if {old, new} <= given.record.keys() and new not in names])

    @property
    def labels(self) -> set[str]:
        """Columns that decide which completions are imitated."""
        return _labels(self.reading)

    def used(self, record: dict[str, Any]) -> set[str]:
        """Columns of a record that its rows are built from."""
        known = self.reading.format
        shape = known.shape_for(record, self.reading.shape.view)
        used = {*shape.columns, *_COMMON, *self.labels}
        return used | {"input"} if known.chat and shape.prompt == "instruction" else used


def open_parts(source: sources.DataSource, options: ConvertOptions) -> list[ConvertPart]:
    """The parts of a source, each recognized by its first records.

    Raises:
        DataError: if one is missing, empty, or cannot be converted to the wanted shape.
    """
    opened = []
    for part in sources.resolve_source(source, options):
        rest = part.read()
        opened.append((part, list(islice(rest, PEEKED)), rest))
    for part, head, _ in opened:
        if not head:
            raise DataError(f"{part.name}: no rows")
    for column in options.renames:
        if not any(column in raw.record for _, head, _ in opened for raw in head):
            found = dict.fromkeys(key for _, head, _ in opened for raw in head[:1000] for key in raw.record)
            raise DataError(f"{opened[0][0].name}: column '{column}' of --columns not found in any row. "
                            f"Columns found: {', '.join(found) or 'none'}")
    return [ConvertPart(part, *_reading(part.name, renamed(head, options.renames), options), head, rest)
            for part, head, rest in opened]


def _reading(name: str, head: list[RawRow], options: ConvertOptions) -> tuple[Reading, bool]:
    """How records are read, and whether only the chosen side of each pair is taken."""
    wanted = WANTED[options.to]
    try:
        reading, first_side = recognize(head, wanted, name, options), False
    except DataError as error:
        if wanted != "single" or options.pair_by_prompt or view_of(head, options) != "paired":
            raise DataError(f"{error}{_others(name, head, options)}") from None
        reading, first_side = recognize(head, "unpaired", name, options), True
    if options.turns == "all":
        judged = next((label for label in _labels(reading) for raw in head if label in raw.record), "")
        if judged or reading.shape.view != "single" or reading.format.name in _JUDGED:
            what = f"the column '{judged}'" if judged else f"{reading.format.name} {reading.shape}"
            raise DataError(f"{name}: --turns all needs conversations to imitate, but {what} labels single "
                            "completions, so earlier turns may be bad. Use --turns last.")
    return reading, first_side


def _labels(reading: Reading) -> set[str]:
    known = reading.format
    return {shape.label for shape in known.shapes if shape.label} if reading.wanted == "single" and (
        known.name != "rating") else set()


def _others(name: str, head: list[RawRow], options: ConvertOptions) -> str:
    """Which shapes the part can be converted to."""
    possible = []
    for to, wanted in WANTED.items():
        try:
            recognize(head, wanted, name, options)
        except DataError:
            continue
        possible.append(f"--to {to}")
    return f" Use {' or '.join(possible)}." if possible else ""


def turns_of(row: Row) -> list[Row]:
    """One row per assistant turn of a conversation, in order; the last one is the row itself.

    An assistant's opening greeting answers no prompt. It is only context of the turns after it.
    """
    (completion,) = row.completions
    if isinstance(row.prompt, str) or isinstance(completion, str):
        return [row]
    spoken = (*row.prompt, *completion)
    answers = [number for number, message in enumerate(spoken)
               if message.get("role") == "assistant" and (str(message.get("content") or "").strip()
                                                          or message.get("tool_calls"))
               and any(earlier.get("role") not in ("system", "developer") for earlier in spoken[:number])]
    return [replace(row, id=row.id if count == 0 else f"{row.id}#{count + 1}", prompt=spoken[:number],
                    completions=((spoken[number],),)) for count, number in enumerate(answers)]
