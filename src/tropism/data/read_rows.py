"""A source to encoded rows and their audit."""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from tropism.data.audit.audit import Audit
from tropism.data.audit.findings import ORIGINS
from tropism.data.formats import Reading, View, pair_by_prompt, recognize, rows_of_record, view_of
from tropism.data.formats.options import FormatOptions
from tropism.data.formats.recognize import renamed
from tropism.data.row_blocks import RowTable, TableBuilder
from tropism.data.rows import Dropped, EncodedRow, RawRow, Row
from tropism.data.sources.resolve import DataSource, resolve_source
from tropism.data.tokenization.encode import Encoder, default_workers
from tropism.data.tokenization.render import Renderer
from tropism.errors import DataError

_HEAD = 10_000  # records of a part by whose columns its format is recognized

ReportProgress = Callable[[int, int | None], None]


def read_rows(
    source: DataSource, renderer: Renderer, view: View, *, strict: bool = False, workers: int | None = 0,
    options: FormatOptions | None = None, cache: Path | None = None, most: int | None = None,
    report: ReportProgress = lambda done, total: None,
) -> Audit:
    """Read, understand, render and truncate every row of a source.

    Memory does not grow with the tokens where there is a cache: rows stream through blocks of columns (see `table`),
    and full blocks are files. Pairs made of single completions are the exception, since they look at all rows.

    Args:
        source: files as `sources.resolve_source` takes them, or rows as dicts.
        renderer: turns rows into ids.
        view: the shape that the method needs.
        strict: a row that would be left out stops the run instead.
        workers: processes that render large data; None for one per CPU. The order of rows does not depend on it.
        options: how the records are to be understood.
        cache: directory in which rendered blocks are kept by their content.
        most: stop when this many rows are kept: a source may be longer than a run.
        report: told (records read, None) now and then.

    Returns:
        the audit; its `format` is the sentence that says how the records were read.

    Raises:
        DataError: on an unreadable row, a bad label, missing or ambiguous columns, or if no row is left.
    """
    options = options or FormatOptions()
    parts = _open(source, options, most)
    readings = [recognize(part.head, view, part.name, options) for part in parts]
    audit = Audit(source=str(source) if isinstance(source, str | Path) else "rows given in Python",
                  format="; ".join(dict.fromkeys(map(str, readings))))
    origins = [name for name in ORIGINS if any(part.has(name) for part in parts)]
    understood = (row for part, reading in zip(parts, readings, strict=True) for row in _rows(part, reading))
    if options.pair_by_prompt:
        known = list(understood)
        records = {row.place: record for row, record in known}
        understood = ((row, records[row.place]) for row in pair_by_prompt([row for row, _ in known]))
    intake = _Intake(understood, origins)
    encoder = Encoder(renderer, cache, default_workers() if workers is None else workers)
    table = TableBuilder()
    while True:
        room = None if most is None else most - table.kept
        for rows, block in encoder.blocks(islice(intake, room)):
            for number, row in enumerate(rows):
                for drop in (*intake.dropped_before(table.rows + number), block.dropped(number, row.place)):
                    if drop is not None:
                        _leave_out(audit, drop, strict)
            table.add(block, [row.id for row in rows], [row.place for row in rows], [row.desirable for row in rows])
            report(sum(part.read for part in parts), None)
        if intake.ended or table.kept == most:
            break
    for drop in intake.dropped_before(table.rows):
        _leave_out(audit, drop, strict)
    audit.rows = table.table()
    audit.read = sum(part.read for part in parts)
    audit.origins = {name: [values[number] for number in table.kept_numbers()]
                     for name, values in intake.origins.items()}
    if not audit.rows:
        name = ", ".join(dict.fromkeys(part.name for part in parts))
        raise DataError(f"{name}: no row is left to train on; {audit.summary()} "
                        f"(first: {audit.dropped[0].place}: {audit.dropped[0].detail})")
    return audit


def view_of_source(source: DataSource, options: FormatOptions | None = None) -> View:
    """What a source holds: pairs, labeled completions, or completions.

    Raises:
        DataError: if it cannot be read.
    """
    options = options or FormatOptions()
    return view_of([row for part in _open(source, options) for row in part.head], options)


class _LoadedPart:
    """Records of a part of a source, the first of which have been looked at.

    Attributes:
        head: the first records.
        read: how many records have been taken.
    """

    def __init__(self, name: str, rows: Iterator[RawRow], renames: Mapping[str, str], head: int) -> None:
        self.name, self._renames = name, renames
        first = list(islice(rows, head))
        if not first:
            raise DataError(f"{name}: no rows")
        self.columns = dict.fromkeys(key for row in first for key in row.record)
        self.head = renamed(first, renames)
        self._rest = rows
        self.read = 0

    def has(self, column: str) -> bool:
        """Whether one of the first records has a column, by the name that it has in the end."""
        return any(column in row.record for row in self.head)

    def __iter__(self) -> Iterator[RawRow]:
        for row in self.head:
            self.read += 1
            yield row
        self.head = []
        for row in self._rest:
            self.read += 1
            yield renamed([row], self._renames)[0] if self._renames else row


def _open(source: DataSource, options: FormatOptions, most: int | None = None) -> list[_LoadedPart]:
    """The parts of a source; each has a format of its own."""
    head = _HEAD if most is None else min(_HEAD, most)
    parts = [_LoadedPart(part.name, part.read(), options.renames, head) for part in resolve_source(source)]
    for column in options.renames:
        if not any(column in part.columns for part in parts):
            found = dict.fromkeys(key for part in parts for key in part.columns)
            raise DataError(f"{parts[0].name}: no row has the column '{column}' that --columns names; found: "
                            f"{', '.join(found) or 'none'}")
    return parts


Understood = tuple[Row | Dropped, Mapping[str, Any]]
"""A row, or why there is none, and the record that it comes from."""


def _rows(part: Iterable[RawRow], reading: Reading) -> Iterator[Understood]:
    """The rows of records, in file order.

    Of two neighboring pairs that are split, the first gives its desirable side first and the second its undesirable
    one: in file order no class comes in runs, and as partners for the reference point, which are taken from the next
    prompt, both classes serve.
    """
    split = reading.shape.view == "paired" and reading.wanted == "unpaired"
    for number, raw in enumerate(part):
        rows = rows_of_record(raw, reading)
        for row in reversed(rows) if split and number % 2 else rows:
            yield row, raw.record


class _Intake:
    """Rows on their way to be rendered; remembers what was left out before each of them, and where they come from.

    Attributes:
        origins: for each column of origins, its value in the record of each row that was passed on.
        ended: whether the source has no more.
    """

    def __init__(self, understood: Iterator[Understood], columns: Sequence[str]) -> None:
        self._understood = understood
        self._passed = 0
        self._dropped: deque[tuple[int, Dropped]] = deque()
        self.origins: dict[str, list[str | None]] = {name: [] for name in columns}
        self.ended = False

    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        for row, record in self._understood:
            if isinstance(row, Dropped):
                self._dropped.append((self._passed, row))
                continue
            self._passed += 1
            for name, values in self.origins.items():
                value = record.get(name)
                values.append(sys.intern(str(value)) if isinstance(value, str | int) else None)
            return row
        self.ended = True
        raise StopIteration

    def dropped_before(self, row: int) -> Iterator[Dropped]:
        """What was left out before row number `row`, and has not been told yet."""
        while self._dropped and self._dropped[0][0] <= row:
            yield self._dropped.popleft()[1]


def _leave_out(audit: Audit, row: Dropped, strict: bool) -> None:
    if strict:
        raise DataError(f"{row.place}: {row.reason}: {row.detail} (--strict)")
    audit.drop(row)


def check_embedding(rows: Sequence[EncodedRow], embedding_rows: int, spell: Any) -> None:
    """Every id must have an embedding.

    Raises:
        DataError: naming the first token that has none, and its row.
    """
    if isinstance(rows, RowTable):
        first = rows.first_beyond(embedding_rows)
        rows = [] if first is None else [first]
    for row in rows:
        partner = () if row.partner is None else (row.partner,)
        for ids in (row.prompt_ids, *(completion.ids for completion in (*row.completions, *partner))):
            if len(ids) and int(ids.max()) >= embedding_rows:
                bad = int(ids.max())
                raise DataError(f"{row.place}: token {spell(bad)!r} has id {bad}, but the model embeds only "
                                f"{embedding_rows} tokens; tokenizer and model do not belong together")
