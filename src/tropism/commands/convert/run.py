"""The conversion from end to end."""

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tropism.commands.convert.account import Account
from tropism.commands.convert.parts import PEEKED, ConvertedRecord, ConvertPart, open_parts, turns_of
from tropism.commands.convert.records import beside, carried, record_of
from tropism.commands.convert.target import check_target, writing
from tropism.config import ConvertOptions
from tropism.data.formats import pair_by_prompt
from tropism.data.rows import Dropped, RawRow, Row
from tropism.data.sources import resolve as sources
from tropism.errors import DataError
from tropism.files import write_whole
from tropism.observe.console import Voice

_REPORTED = 1000  # records between two movements of the bar


def convert(data: sources.DataSource, options: ConvertOptions, voice: Voice | None = None) -> Account:
    """Write the rows of a source in another shape.

    Args:
        data: a source as training takes it.
        options: the shape, the file, and how the records are to be understood.
        voice: shows how far a long conversion is.

    Returns:
        what was written, and what the file does not have any more.

    Raises:
        DataError: for data that cannot be read or converted; then there is no file.
        UsageError: for a file that exists, or that cannot hold the shape.
        OutputError: if the disk refuses.
    """
    path = Path(options.output).expanduser()
    check_target(path, options.to)
    parts = open_parts(data, options)
    account = Account(str(data) if isinstance(data, str | Path) else "rows given in Python", options.to,
                      list(dict.fromkeys(map(str, parts))))
    long = any(len(part.head) == PEEKED for part in parts)
    with (voice.bar("convert") if voice and long else nullcontext(None)) as report, writing(path) as write:
        for part, raw, row in _rows(parts, options, account, report):
            if isinstance(row, Dropped):
                if options.strict:
                    raise DataError(f"{row.place}: {row.reason}: {row.detail} (--strict)")
                account.drop(row)
                continue
            for one in turns_of(row) if options.turns == "all" else [row]:
                write(_whole_record(part, raw, one, options, account), one.place)
                account.written += 1
        if not account.written:
            first = account.first[0]
            raise DataError(f"{account.source}: no row is left to write; {account.read} read, left out: "
                            f"{', '.join(f'{count} {reason}' for reason, count in account.dropped.items())} "
                            f"(first: {first.place}: {first.detail})")
    return account


def _rows(parts: list[ConvertPart], options: ConvertOptions, account: Account,
          report: Callable[..., None] | None) -> Iterator[tuple[ConvertPart, RawRow, Row | Dropped]]:
    """Every row with its part and record; the account learns of the records on the way."""
    found = _records(parts, options, account, report)
    if not options.pair_by_prompt:
        yield from ((part, one.raw, row) for part, one in found for row in one.rows)
        return
    origins: dict[str, tuple[ConvertPart, RawRow]] = {}
    rows: list[Row | Dropped] = []
    for part, one in found:
        origins[one.raw.place] = part, one.raw
        rows += one.rows
    yield from ((*origins[row.place], row) for row in pair_by_prompt(rows))


def _records(parts: list[ConvertPart], options: ConvertOptions, account: Account,
             report: Callable[..., None] | None) -> Iterator[tuple[ConvertPart, ConvertedRecord]]:
    for part in parts:
        for found in part.rows():
            account.read += 1
            account.look_at(part, found)
            columns = account.carried if options.keep_columns else account.columns
            columns.update(beside(found.raw.record, part).keys())
            if report is not None and account.read % _REPORTED == 0:
                report(account.read, None)
            yield part, found


def _whole_record(part: ConvertPart, raw: RawRow, row: Row, options: ConvertOptions,
                  account: Account) -> dict[str, Any]:
    """A record with its id, where the source had one, and the columns that are taken along."""
    has_id = raw.record.get("id") is not None
    if options.to == "messages":
        account.look_at_chat(row)
    if options.pair_by_prompt and (has_id or options.keep_columns):
        account.lost["undesirable sides' ids and columns; a pair has those of its desirable side"] += 1
    record = ({"id": row.id} if has_id else {}) | record_of(row, options.to)
    if options.keep_columns:
        extra = beside(raw.record, part)
        names = carried(extra, record)
        account.renamed |= {old: new for old, new in zip(extra, names, strict=True) if old != new}
        record |= names
    return record


def write_json(account: Account, path: Path) -> None:
    """The account for programs.

    Raises:
        OutputError: if it cannot be written.
    """
    text = json.dumps(account.to_json(), ensure_ascii=False, indent=1) + "\n"
    write_whole(path, text.encode(errors="backslashreplace"), parents=True)


def show(account: Account, path: Path, voice: Voice) -> None:
    """Say what was converted and what is not in the file."""
    for line in account.lines():
        voice.say(line)
    voice.say(f"{path}: {account.written} rows")
