"""Reads the records of one file: JSON, JSONL, Parquet, Arrow, CSV or TSV, plain or compressed."""

import csv
import gzip
import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from tropism.borders import border, check_regular
from tropism.data.reading_limits import Expansion, ReadingLimits
from tropism.data.rows import RawRow
from tropism.data.sources import columnar
from tropism.data.sources.streams import Lines, Unpacked
from tropism.errors import DataError

KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet", ".arrow": "arrow",
         ".feather": "arrow", ".csv": "csv", ".tsv": "tsv"}
PACKINGS = (".gz", ".zst")
_SCANNED_BYTES = 8 * 2**20
"""A packed file up to this size is read once before its rows are used, so that a bomb is refused at once."""
_FIRST = re.compile(rb"\S")


@dataclass(frozen=True, slots=True)
class DataFile:
    """A data file.

    Args:
        path: of the file.
        name: shown in the places of its rows.
        limits: of what is read.
    """

    path: Path
    name: str
    limits: ReadingLimits = field(default_factory=ReadingLimits)

    @property
    def kind(self) -> str | None:
        """Kind by the file name; None if unknown."""
        suffixes = [suffix.lower() for suffix in self.path.suffixes]
        if suffixes and suffixes[-1] in PACKINGS:
            suffixes.pop()
        return KINDS.get(suffixes[-1]) if suffixes else None

    def check_kind(self) -> str:
        """Its kind.

        Raises:
            DataError: if it is unknown.
        """
        if self.kind is None:
            raise DataError(f"{self.path}: unsupported file type '{self.path.suffix}'. Known: {', '.join(KINDS)}, each "
                            f"optionally with {' or '.join(PACKINGS)}")
        return self.kind

    def rows(self) -> Iterator[RawRow]:
        """Yield the rows of the file.

        Raises:
            DataError: if its kind is unknown or a row cannot be read.
        """
        kind = self.check_kind()
        with border(f"{self.path}: cannot be read", DataError):
            check_regular(self.path, self.path.stat(), DataError)
            if self.packed and self.size <= _SCANNED_BYTES:
                with self.open() as stream:
                    while stream.read(2**20):
                        pass
            yield from _READERS[kind](self)

    @property
    def packed(self) -> bool:
        """Whether the file is compressed as a whole."""
        return self.path.suffix.lower() in PACKINGS

    @property
    def size(self) -> int:
        """Bytes on the disk."""
        return self.path.stat().st_size

    def expansion(self) -> Expansion:
        """Counts what the file expands to."""
        return Expansion(self.name, self.size, self.limits)

    def open(self) -> BinaryIO:
        """The decompressed bytes of the file."""
        packing = self.path.suffix.lower()
        if not self.packed:
            return self.path.open("rb")
        if packing == ".gz":
            packed: Any = gzip.GzipFile(self.path, "rb")
        else:
            import pyarrow  # slow to import, and most data is JSONL

            if not pyarrow.Codec.is_available("zstd"):
                raise DataError(f"{self.path}: this build of pyarrow cannot decompress zstd. Install pyarrow from "
                                "PyPI, or decompress the file.")
            packed = pyarrow.input_stream(str(self.path), compression="zstd")
        return Unpacked(packed, self.expansion()).buffered()


def mapping(record: Any, place: str) -> dict[str, Any]:
    """The record, if it is an object.

    Raises:
        DataError: for anything else.
    """
    if not isinstance(record, dict):
        raise DataError(f"{place}: a row must be an object with named fields, not {type(record).__name__}")
    return record


def _parse(content: bytes, name: str, line: int = 1) -> Any:
    """Parse JSON that begins at `line` of a file.

    Raises:
        DataError: if it is invalid, with line and column of the error.
    """
    try:
        return json.loads(content)
    except UnicodeDecodeError as error:
        line += content.count(b"\n", 0, error.start)
        start = error.start - (content.rfind(b"\n", 0, error.start) + 1)
        raise DataError(f"{name}:{line}: not UTF-8 ({error.reason} at byte {start})") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{name}:{line + error.lineno - 1}: not valid JSON: {error.msg} at column {error.colno}"
                        ) from None
    except RecursionError:
        raise DataError(f"{name}:{line}: the JSON is nested too deeply") from None
    except ValueError as error:  # a number with thousands of digits
        raise DataError(f"{name}:{line}: cannot be read: {error}") from None


def _jsonl(file: DataFile) -> Iterator[RawRow]:
    with file.open() as stream:
        lines: Lines[bytes] = Lines(stream, file.name, file.limits)
        for number, line in enumerate(lines, start=1):
            text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if text.strip():
                place = f"{file.name}:{number}"
                yield RawRow(place, mapping(_parse(text.rstrip(b"\r\n"), file.name, number), place))


def _json(file: DataFile) -> Iterator[RawRow]:
    """A JSON array of rows, an object with such an array under `data`, or JSONL in a file named .json."""
    with file.open() as stream:
        content = stream.read(file.limits.max_record_bytes).removeprefix(b"\xef\xbb\xbf")
        found = _FIRST.search(content)
        if found is None or found.group() in b"[{":  # else it is no JSON of rows, however long it is
            if found is None and len(content) == file.limits.max_record_bytes:
                raise DataError(f"{file.name}: begins with {len(content):,} spaces")
            content += stream.read()
    if found is not None and found.group() == b"{" and _is_jsonl(content[found.start():]):
        yield from _jsonl(file)
        return
    value = _parse(content, file.name)
    if isinstance(value, dict) and isinstance(value.get("data"), list):
        value = value["data"]
    if not isinstance(value, list):
        raise DataError(f"{file.name}: expected an array of rows, or an object with an array under 'data'")
    for number, record in enumerate(value, start=1):
        place = f"{file.name}:row {number}"
        yield RawRow(place, mapping(record, place))


def _is_jsonl(content: bytes) -> bool:
    """True if the first line is a row, and not an object with all rows under `data`."""
    first, _, rest = content.partition(b"\n")
    try:
        row = json.loads(first)
    except (ValueError, RecursionError):
        return False
    return bool(rest.strip()) or not isinstance(row.get("data"), list)


def _csv(file: DataFile) -> Iterator[RawRow]:
    csv.field_size_limit(min(file.limits.max_record_bytes, 2**31 - 1))
    try:
        with io.TextIOWrapper(file.open(), encoding="utf-8-sig", newline="") as stream:
            lines: Lines[str] = Lines(stream, file.name, file.limits, several=True)
            reader = csv.reader(lines, strict=True, delimiter="\t" if file.kind == "tsv" else ",")
            header = next(reader, [])
            end = reader.line_num
            for cells in reader:
                place, end = f"{file.name}:{end + 1}", reader.line_num
                lines.used = 0
                if len(cells) > len(header):
                    raise DataError(f"{place}: more fields than in the header. Quote fields that contain the "
                                    "separator.")
                if cells:  # empty for a blank line; fields missing at the end are absent, not null
                    yield RawRow(place, dict(zip(header, cells, strict=False)))
    except UnicodeDecodeError:
        raise DataError(_undecodable(file)) from None
    except csv.Error as error:
        raise DataError(f"{file.name}:{reader.line_num}: not readable as CSV: {error}"
                        + (". Raise --max-record-bytes if it is meant to be this long."
                           if "field limit" in str(error) else "")) from None


def _undecodable(file: DataFile) -> str:
    """The error for the first line that is not UTF-8. Text streams decode in blocks and do not know the line."""
    with file.open() as lines:
        for number, line in enumerate(lines, start=1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return f"{file.name}:{number}: not UTF-8 ({error.reason} at byte {error.start})"
    return f"{file.name}: not UTF-8"


_READERS: dict[str, Callable[[DataFile], Iterator[RawRow]]] = {
    "jsonl": _jsonl, "json": _json, "parquet": columnar.parquet_rows, "arrow": columnar.arrow_rows, "csv": _csv,
    "tsv": _csv}
