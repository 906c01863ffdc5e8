"""Convert a source from end to end."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tropism.commands.convert.records import carried, other_columns, record_of
from tropism.commands.convert.report import ConversionReport
from tropism.commands.convert.source import PEEKED, ConvertedRecord, ConvertPart, open_parts, turns_of
from tropism.commands.convert.target import check_target, formulas, kind_of, writing
from tropism.commands.files import write_json
from tropism.config import ConvertOptions
from tropism.data.formats import pair_by_prompt
from tropism.data.rows import Dropped, RawRow, Reason, Row
from tropism.data.sources import resolve as sources
from tropism.errors import DataError, count_of
from tropism.observe.console import Voice

_REPORTED = 1000  # records between two movements of the bar


def convert(data: sources.DataSource, options: ConvertOptions, voice: Voice | None = None) -> ConversionReport:
    """Write the rows of a source in another shape.

    Args:
        data: a source as training takes it.
        options: the shape, the file, and how the records are read.
        voice: shows the progress of a long conversion.

    Returns:
        What was written, and what the file does not hold.

    Raises:
        DataError: for data that cannot be read or converted. No file is written then.
        UsageError: for a file that exists, or that cannot hold the shape.
        OutputError: if the disk refuses.
    """
    path = Path(options.output).expanduser()
    check_target(path, options.to)
    parts = open_parts(data, options)
    report = ConversionReport(str(data) if isinstance(data, str | Path) else "rows given in Python", options.to,
                      list(dict.fromkeys(map(str, parts))))
    csv = kind_of(path) == ".csv"
    long = any(len(part.head) == PEEKED for part in parts)
    with (voice.bar("convert") if voice and long else nullcontext(None)) as progress, writing(path) as write:
        for part, raw, row in _rows(parts, options, report, progress):
            if isinstance(row, Dropped):
                if options.strict:
                    raise DataError(f"{row.place}: {row.reason}: {row.detail} (--strict)")
                report.drop(row)
                continue
            turns = turns_of(row) if options.turns == "all" else [row]
            if not turns:
                report.drop(Dropped(row.place, Reason.NO_SUPERVISED_TOKEN, "no assistant message is trained on"))
            for one in turns:
                write(record := _whole_record(part, raw, one, options, report), one.place)
                report.written += 1
                report.formulas += formulas(record.values()) if csv else 0
        if not report.written:
            first = report.first[0]
            raise DataError(f"{report.source}: no row left to write: {report.read:,} read, dropped "
                            f"{', '.join(f'{count} {reason}' for reason, count in report.dropped.items())} "
                            f"(first: {first.place}: {first.detail})")
    report.formats += dict.fromkeys(filter(None, (str(part.reading.labels) for part in parts)))
    report.formulas += formulas(report.renamed.get(name, name) for name in report.carried) if csv else 0
    return report


def _rows(parts: list[ConvertPart], options: ConvertOptions, report: ConversionReport,
          progress: Callable[..., None] | None) -> Iterator[tuple[ConvertPart, RawRow, Row | Dropped]]:
    """Every row with its part and record; the report counts the records on the way."""
    found = _records(parts, options, report, progress)
    if not options.pair_by_prompt:
        yield from ((part, one.raw, row) for part, one in found for row in one.rows)
        return
    origins: dict[str, tuple[ConvertPart, RawRow]] = {}
    rows: list[Row | Dropped] = []
    for part, one in found:
        origins[one.raw.place] = part, one.raw
        rows += one.rows
    yield from ((*origins[row.place], row) for row in pair_by_prompt(rows))


def _records(parts: list[ConvertPart], options: ConvertOptions, report: ConversionReport,
             progress: Callable[..., None] | None) -> Iterator[tuple[ConvertPart, ConvertedRecord]]:
    for part in parts:
        for found in part.rows():
            report.read += 1
            report.look_at(part, found)
            columns = report.carried if options.keep_columns else report.columns
            columns.update(other_columns(found.raw.record, part).keys())
            if progress is not None and report.read % _REPORTED == 0:
                progress(report.read, None)
            yield part, found


def _whole_record(part: ConvertPart, raw: RawRow, row: Row, options: ConvertOptions,
                  report: ConversionReport) -> dict[str, Any]:
    """The record that is written: with an id if the source has one, and the columns that are kept."""
    has_id = raw.record.get("id") is not None
    if options.to == "messages":
        report.look_at_chat(row)
    if options.pair_by_prompt and (has_id or options.keep_columns):
        report.lost["id and columns of a pair's undesirable side; a pair has those of its desirable side"] += 1
    record = ({"id": row.id} if has_id else {}) | record_of(row, options.to)
    if options.keep_columns:
        extra = other_columns(raw.record, part)
        names = carried(extra, record)
        report.renamed |= {old: new for old, new in zip(extra, names, strict=True) if old != new}
        record |= names
    return record


def write_report(report: ConversionReport, path: Path) -> None:
    """Write the report as JSON.

    Raises:
        OutputError: if it cannot be written.
    """
    write_json(path, report.to_json())


def show(report: ConversionReport, path: Path, voice: Voice) -> None:
    """Print what was converted and what is not in the file."""
    for line in report.lines():
        voice.say(line)
    voice.say(f"{path}: {count_of(report.written, 'row')}")
