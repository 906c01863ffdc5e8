"""Where rows come from: JSON, JSONL, Parquet, CSV files, or a list of dicts."""

import csv
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tropism.data.rows import RawRow
from tropism.errors import DataError

SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def read(source: str | Path | Iterable[dict[str, Any]]) -> Iterator[RawRow]:
    """Yield the rows of a file, or of an iterable of dicts.

    Raises:
        DataError: if the file is missing, of an unknown kind, or a line of it cannot be read.
    """
    if not isinstance(source, str | Path):
        yield from (RawRow(f"row {number}", _mapping(record, f"row {number}"))
                    for number, record in enumerate(source, start=1))
        return
    path = Path(source)
    if not path.is_file():
        what = "is a directory; name a file in it" if path.is_dir() else "no such file"
        raise DataError(f"{path}: {what}")
    kind = SUFFIXES.get(path.suffix.lower())
    if kind is None:
        raise DataError(f"{path}: unknown kind of file '{path.suffix}'; known are {', '.join(SUFFIXES)}")
    try:
        yield from {"jsonl": _jsonl, "json": _json, "parquet": _parquet, "csv": _csv}[kind](path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _mapping(record: Any, place: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise DataError(f"{place}: a row must be an object with named fields, not {type(record).__name__}")
    return record


def _parse(text: str | bytes, place: str) -> Any:
    try:
        return json.loads(text)
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not UTF-8 ({error.reason} at byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: not valid JSON: {error.msg} at column {error.colno}") from None


def _jsonl(path: Path) -> Iterator[RawRow]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if text.strip():
                place = f"{path.name}:{number}"
                yield RawRow(place, _mapping(_parse(text, place), place))


def _json(path: Path) -> Iterator[RawRow]:
    """A JSON array of rows, an object with the rows under `data`, or JSONL that is called .json."""
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    first = content.lstrip()[:1]
    if first == b"{" and _is_jsonl(content.lstrip()):
        yield from _jsonl(path)
        return
    value = _parse(content, path.name)
    if isinstance(value, dict) and isinstance(value.get("data"), list):
        value = value["data"]
    if not isinstance(value, list):
        raise DataError(f"{path.name}: expected an array of rows, or an object with an array under 'data'")
    for number, record in enumerate(value, start=1):
        place = f"{path.name}:row {number}"
        yield RawRow(place, _mapping(record, place))


def _is_jsonl(content: bytes) -> bool:
    """Whether the first line is a row of its own, and not the whole file with its rows under `data`."""
    first, _, rest = content.partition(b"\n")
    try:
        row = json.loads(first)
    except ValueError:
        return False
    return bool(rest.strip()) or not isinstance(row.get("data"), list)


def _parquet(path: Path) -> Iterator[RawRow]:
    import pyarrow.parquet as parquet  # slow to import, and most data is JSONL

    try:
        file = parquet.ParquetFile(path)
        batches = file.iter_batches(batch_size=1024)
        number = 0
        for batch in batches:
            for record in batch.to_pylist():
                number += 1
                yield RawRow(f"{path.name}:row {number}", _without_filler(record))
    except (OSError, ValueError) as error:  # pyarrow's own errors are subclasses of these
        raise DataError(f"{path.name}: not readable as Parquet: {error}") from None


def _without_filler(value: Any) -> Any:
    """Drop the None entries that a columnar file adds inside nested objects: no user wrote those keys."""
    if isinstance(value, dict):
        return {key: _nested(entry) for key, entry in value.items()}
    return value


def _nested(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _nested(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list):
        return [_nested(entry) for entry in value]
    return value


def _csv(path: Path) -> Iterator[RawRow]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.reader(lines, strict=True)
            header = next(reader, [])
            end = reader.line_num
            for cells in reader:
                place, end = f"{path.name}:{end + 1}", reader.line_num
                if len(cells) > len(header):
                    raise DataError(f"{place}: more fields than the header has; is a comma unquoted?")
                if cells:  # a blank line has none; a short line leaves fields out: absent, not null
                    yield RawRow(place, {key: _cell(value) for key, value in zip(header, cells, strict=False)})
    except UnicodeDecodeError as error:
        raise DataError(f"{path.name}: not UTF-8 ({error.reason} at byte {error.start})") from None
    except csv.Error as error:
        raise DataError(f"{path.name}:{reader.line_num}: not readable as CSV: {error}") from None


def _cell(value: str) -> Any:
    """A CSV cell is text, unless it spells a list of messages."""
    if value.startswith("[{") and value.rstrip().endswith("}]"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value
