"""Reads a data source: its encoded rows and their audit."""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from tropism.data.audit.audit import Audit
from tropism.data.audit.findings import ORIGINS, Finding
from tropism.data.audit.unused_columns import ColumnUse, find_leading_space, find_plain_text, find_unused
from tropism.data.formats import View, pair_by_prompt, recognize, rows_of_record, view_of
from tropism.data.formats.options import FormatOptions
from tropism.data.formats.recognize import renamed
from tropism.data.row_blocks import RowTable, TableBuilder
from tropism.data.rows import Dropped, EncodedRow, RawRow, Row
from tropism.data.sources.resolve import DataSource, SourcePart, SplitChoice, resolve_source
from tropism.data.tokenization.encode import Encoder, default_workers
from tropism.data.tokenization.render import Renderer
from tropism.errors import DataError

_HEAD = 10_000  # records of a part by which its format is recognized

ReportProgress = Callable[[int, int | None], None]


def read_rows(
    source: DataSource, renderer: Renderer, view: View, *, strict: bool = False, workers: int | None = 0,
    options: FormatOptions | None = None, cache: Path | None = None, most: int | None = None,
    split: SplitChoice | None = None, streaming: bool = False, report: ReportProgress = lambda done, total: None,
) -> Audit:
    """Read, tokenize and truncate all rows of a source.

    With a cache, memory does not grow with the number of tokens: rows stream through blocks of columns (see
    `row_blocks`), and full blocks are files. With `--pair-by-prompt` all records are in memory.

    Args:
        source: files as in `sources.resolve.resolve_source`, or rows as dicts.
        renderer: turns rows into ids.
        view: view that the method needs.
        strict: raise instead of dropping a row.
        workers: processes that render large data; None for one per CPU. The result does not depend on it.
        options: how to read the records.
        cache: directory of rendered blocks, by content.
        most: stop after this many kept rows.
        split: of a directory with several; by default that of the options.
        streaming: read datasets on the Hub as their rows are needed.
        report: called with (records read, None) after each block.

    Returns:
        the audit with its rows.

    Raises:
        DataError: for an unreadable row, an invalid label, missing or ambiguous columns, or if no row is kept.
    """
    options = options or FormatOptions()
    parts = _open(source, options, most, split, streaming)
    readings = [recognize(part.head, view, part.name, options, whole=part.whole) for part in parts]
    audit = Audit(source=str(source) if isinstance(source, str | Path) else "rows given in Python",
                  format="; ".join(dict.fromkeys([*(part.split for part in parts if part.split),
                                                  *map(str, readings)])))
    audit.commits = {part.name: part.commit for part in parts if part.commit}
    uses = [ColumnUse(reading, part.head) for part, reading in zip(parts, readings, strict=True)]
    origins = [name for name in ORIGINS if any(part.has(name) for part in parts)]
    rows_read = (row for part, use in zip(parts, uses, strict=True) for row in _rows(part, use))
    if options.pair_by_prompt:
        unpaired = list(rows_read)
        records = {row.place: record for row, record in unpaired}
        rows_read = ((row, records[row.place]) for row in pair_by_prompt([row for row, _ in unpaired]))
    stream = _KeptRows(rows_read, origins)
    encoder = Encoder(renderer, cache, default_workers() if workers is None else workers)
    table = TableBuilder()
    while True:
        room = None if most is None else most - table.kept
        for rows, block in encoder.blocks(islice(stream, room)):
            for number, row in enumerate(rows):
                for drop in (*stream.dropped_before(table.rows + number), block.dropped(number, row.place)):
                    if drop is not None:
                        _drop(audit, drop, strict)
            table.add(block, [row.id for row in rows], [row.place for row in rows], [row.desirable for row in rows],
                      [row.weight for row in rows])
            report(sum(part.read for part in parts), None)
        if stream.ended or table.kept == most:
            break
    for drop in stream.dropped_before(table.rows):
        _drop(audit, drop, strict)
    for reading in readings:
        reading.labels.finish()
    audit.label_words = "; ".join(dict.fromkeys(filter(None, (str(reading.labels) for reading in readings))))
    audit.rows = table.table()
    audit.read = sum(part.read for part in parts)
    audit.columns_not_used = list(dict.fromkeys(name for use in uses for name in use.unused()))
    audit.plain_rows = stream.plain_rows
    if renderer.limits.overlong == "truncate":
        audit.decided = frozenset(("prompt_cut", "completion_cut"))
    audit.of_source = [*find_unused(uses, view), *_of_plain_text(stream, renderer)]
    audit.origins = {name: [values[number] for number in table.kept_numbers()]
                     for name, values in stream.origins.items()}
    if not audit.rows:
        name = ", ".join(dict.fromkeys(part.name for part in parts))
        raise DataError(f"{name}: no row is left to train on: {audit.summary()}. First dropped row: "
                        f"{audit.dropped[0].place}: {audit.dropped[0].detail}")
    return audit


def view_of_source(source: DataSource, options: FormatOptions | None = None) -> View:
    """The view of a source: pairs, labeled completions, or completions.

    Raises:
        DataError: if it cannot be read.
    """
    options = options or FormatOptions()
    return view_of([row for part in _open(source, options) for row in part.head], options)


class _PartWithHead:
    """Records of one part of a source; the first ones are read ahead, to recognize its format.

    Attributes:
        split: a sentence about the split, if there are several.
        commit: of a dataset on the Hub.
        head: the first records, columns renamed.
        whole: there are no other records.
        columns: of the first records, before renaming.
        read: number of records that iteration has yielded.
    """

    def __init__(self, part: SourcePart, renames: Mapping[str, str], head: int) -> None:
        self.name, self.split, self.commit, self._renames = part.name, part.split, part.commit, renames
        rows = part.read()
        first = list(islice(rows, head))
        if not first:
            raise DataError(f"{part.name}: no rows")
        self.columns = dict.fromkeys(key for row in first for key in row.record)
        self.head = renamed(first, renames)
        self.whole = len(first) < head
        self._rest = rows
        self.read = 0

    def has(self, column: str) -> bool:
        """True if one of the first records has a column, by its new name."""
        return any(column in row.record for row in self.head)

    def __iter__(self) -> Iterator[RawRow]:
        for row in self.head:
            self.read += 1
            yield row
        self.head = []
        for row in self._rest:
            self.read += 1
            yield renamed([row], self._renames)[0] if self._renames else row


def _open(source: DataSource, options: FormatOptions, most: int | None = None,
          split: SplitChoice | None = None, streaming: bool = False) -> list[_PartWithHead]:
    """The parts of a source, each with a format of its own."""
    head = _HEAD if most is None else min(_HEAD, most)
    parts = [_PartWithHead(part, options.renames, head)
             for part in resolve_source(source, options, split or SplitChoice(options.split), streaming)]
    for column in options.renames:
        if not any(column in part.columns for part in parts):
            found = dict.fromkeys(key for part in parts for key in part.columns)
            raise DataError(f"{parts[0].name}: column '{column}' of --columns not found in any row. Columns found: "
                            f"{', '.join(found) or 'none'}")
    return parts


RowOfRecord = tuple[Row | Dropped, Mapping[str, Any]]
"""A row, or the reason for dropping it, and its record."""


def _rows(part: Iterable[RawRow], use: ColumnUse) -> Iterator[RowOfRecord]:
    """The rows of records, in file order.

    When pairs are split, every second pair yields its undesirable side first. In file order no class then comes in
    runs, and both classes serve as mismatched completions, which are taken from the next prompt.
    """
    reading = use.reading
    split = reading.shape.view == "paired" and reading.wanted == "unpaired"
    for number, raw in enumerate(part):
        rows = rows_of_record(raw, reading, use.read if number < _HEAD else None)
        for row in reversed(rows) if split and number % 2 else rows:
            yield row, raw.record


class _KeptRows:
    """Iterates over the rows that records give; keeps the dropped ones and the origins apart.

    Attributes:
        origins: for each column of origins, its value for each row that was yielded.
        plain_rows: number of rows of plain text that were yielded.
        spaced: number of those with a completion that begins with white space.
        ended: True after the last row.
    """

    def __init__(self, rows: Iterator[RowOfRecord], columns: Sequence[str]) -> None:
        self._rows = rows
        self._yielded = 0
        self._dropped: deque[tuple[int, Dropped]] = deque()
        self.origins: dict[str, list[str | None]] = {name: [] for name in columns}
        self.plain_rows = self.spaced = 0
        self.ended = False

    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        for row, record in self._rows:
            if isinstance(row, Dropped):
                self._dropped.append((self._yielded, row))
                continue
            self._yielded += 1
            if isinstance(row.prompt, str):
                self.plain_rows += 1
                self.spaced += any(str(completion)[:1].isspace() for completion in row.completions)
            for name, values in self.origins.items():
                value = record.get(name)
                values.append(sys.intern(str(value)) if isinstance(value, str | int) else None)
            return row
        self.ended = True
        raise StopIteration

    def dropped_before(self, row: int) -> Iterator[Dropped]:
        """The dropped rows before row number `row` that were not returned yet."""
        while self._dropped and self._dropped[0][0] <= row:
            yield self._dropped.popleft()[1]


def _of_plain_text(stream: _KeptRows, renderer: Renderer) -> Iterator[Finding]:
    """Findings about rows of plain text for a model with a chat template."""
    if not renderer.as_messages and not renderer.plain_text and renderer.text.tokenizer.chat_template and (
            stream.plain_rows):
        yield find_plain_text(stream.plain_rows)
    if renderer.as_messages and stream.spaced:
        yield find_leading_space(stream.spaced)


def _drop(audit: Audit, row: Dropped, strict: bool) -> None:
    if strict:
        raise DataError(f"{row.place}: {row.reason}: {row.detail} (--strict)")
    audit.drop(row)


def check_embedding(rows: Sequence[EncodedRow], embedding_rows: int, spell: Any) -> None:
    """Check that every id has an embedding.

    Raises:
        DataError: naming the first token without one, and its row.
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
                                f"{embedding_rows} tokens. Use the model's own tokenizer.")
