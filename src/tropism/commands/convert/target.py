"""Write JSON Lines, Parquet or CSV, whole or not at all."""

import csv
import gzip
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from tropism.commands.files import check_new
from tropism.data.sources.files import DataFile
from tropism.errors import DataError, UsageError, first_line
from tropism.files import is_stream, output

KINDS = (".jsonl", ".jsonl.gz", ".parquet", ".csv")

Write = Callable[[dict[str, Any], str], None]
"""Takes a record, and its place for errors."""

_BATCH = 1024  # rows of a Parquet row group
_FORMULA = re.compile(r"[=+\-@\t\r](?!\d*\.?\d+(e[+-]?\d+)?\Z)", re.IGNORECASE)  # a number is none


def kind_of(path: Path) -> str:
    """The kind of a file, by its name; JSON Lines for a device or pipe whose name tells none.

    Raises:
        UsageError: if it is not one of `KINDS`.
    """
    for kind in KINDS:
        if path.name.lower().endswith(kind) and len(path.name) > len(kind):
            return kind
    if is_stream(path):
        return ".jsonl"
    raise UsageError(f"{path}: unsupported file type. Use {', '.join(KINDS[:-1])} or {KINDS[-1]}.")


def check_target(path: Path, to: str) -> None:
    """Check before anything is read that the file can be written.

    Raises:
        UsageError: for an unsupported kind of file, one that cannot hold the shape, or one that exists.
        OutputError: if its directory cannot be written.
    """
    if kind_of(path) == ".csv" and to == "messages":
        raise UsageError(f"{path}: CSV holds plain text only, but --to messages makes messages. Use .jsonl or "
                         ".parquet.")
    check_new(path)


@contextmanager
def writing(path: Path) -> Iterator[Write]:
    """Give a function that writes records one by one. The file exists after the block, and only if there was no error.

    The columns of Parquet and CSV are known only after the last row, so rows are first spooled as JSON Lines.

    Raises:
        UsageError: if the file was created by somebody else meanwhile.
        DataError: for a record that the kind of file cannot hold unchanged.
        OutputError: if the disk refuses.
    """
    kind = kind_of(path)
    columnar = kind in (".parquet", ".csv")
    with output(path) as temporary, ExitStack() as leftovers:
        spool, table = (temporary.with_name(temporary.name + ending) for ending in (".rows", kind))
        for left in (spool, table):
            leftovers.callback(left.unlink, missing_ok=True)
        with ExitStack() as stack:
            file: BinaryIO = stack.enter_context((spool if columnar else temporary).open("wb"))
            if kind.endswith(".gz"):  # without time and name: the same rows are the same bytes
                file = stack.enter_context(gzip.GzipFile("", "wb", fileobj=file, mtime=0))  # type: ignore[assignment]

            def write(record: dict[str, Any], place: str) -> None:
                if kind == ".csv":
                    _check_text(record, place, path)
                file.write(_line([place, record] if columnar else record))

            yield write
        if columnar:
            (_parquet if kind == ".parquet" else _csv)(spool, table, path)
            _check_again(spool, table, path)
            table.replace(temporary)
        check_new(path)


def _line(value: Any) -> bytes:
    # `default`: a column of dates, for example, is written as text.
    try:
        return (json.dumps(value, ensure_ascii=False, default=str) + "\n").encode()
    except UnicodeEncodeError:  # half a surrogate pair, in a column that is only kept
        return (json.dumps(value, default=str) + "\n").encode()


def _spooled(spool: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with spool.open("rb") as lines:
        for line in lines:
            place, record = json.loads(line)
            yield place, record


# --- Parquet ---------------------------------------------------------------------------------------------------------


def _parquet(spool: Path, target: Path, path: Path) -> None:
    import pyarrow  # slow to import, and most data is JSONL
    from pyarrow import parquet

    def batches() -> Iterator[list[dict[str, Any]]]:
        rows = (_with_text(record) for _, record in _spooled(spool))
        while batch := list(islice(rows, _BATCH)):
            yield batch

    try:
        schemas: list[Any] = []
        for batch in batches():
            row = pyarrow.array(batch).type
            schemas = [pyarrow.unify_schemas([*schemas, pyarrow.schema(list(_in_order(row, batch)))],
                                             promote_options="permissive")]
        with parquet.ParquetWriter(target, schemas[0]) as writer:
            for batch in batches():
                writer.write_table(pyarrow.Table.from_pylist(batch, schema=schemas[0]))
    except (pyarrow.ArrowException, UnicodeEncodeError, OverflowError) as error:
        raise DataError(f"{path}: the rows have no common Parquet schema, for example because plain text and messages "
                        f"are mixed ({first_line(error)}). Use .jsonl.") from None


def _in_order(kind: Any, values: list[Any]) -> Any:
    """A type with the keys of its objects in the order of the rows. pyarrow sorts them, which templates may show."""
    import pyarrow

    if pyarrow.types.is_struct(kind):
        objects = [value for value in values if value is not None]
        return pyarrow.struct([(key, _in_order(kind.field(key).type, [entry.get(key) for entry in objects]))
                               for key in dict.fromkeys(key for entry in objects for key in entry)])
    if pyarrow.types.is_list(kind):
        return pyarrow.list_(_in_order(kind.value_type, [entry for value in values if value for entry in value]))
    return kind


def _with_text(record: dict[str, Any]) -> dict[str, Any]:
    """Write tools as JSON text: their schemas differ from row to row, and a common one would change them."""
    return {**record, "tools": json.dumps(record["tools"], ensure_ascii=False)} if "tools" in record else record


# --- CSV -------------------------------------------------------------------------------------------------------------


def _check_text(record: dict[str, Any], place: str, path: Path) -> None:
    for name in ("prompt", "completion", "chosen", "rejected"):
        if not isinstance(record.get(name, ""), str):
            raise DataError(f"{place}: '{name}' is messages, but CSV holds plain text only. Use .jsonl or .parquet "
                            f"instead of {path.name}")


def formulas(cells: Iterable[Any]) -> int:
    """Number of texts that a spreadsheet would run as formulas. CSV has no way to mark them as text, and a change would
    train on other text."""
    return sum(isinstance(cell, str) and _FORMULA.match(cell) is not None for cell in cells)


def _csv(spool: Path, target: Path, path: Path) -> None:
    """Write CSV with `id` as the last column, so that a row without one is a short line: absent, not empty."""
    columns = dict.fromkeys(key for _, record in _spooled(spool) for key in record)
    has_id = columns.pop("id", "") is None
    with target.open("w", encoding="utf-8", newline="", errors="backslashreplace") as lines:
        writer = csv.writer(lines, quoting=csv.QUOTE_ALL, lineterminator="\n")  # a bare \r would end the line
        writer.writerow([*columns, *(["id"] if has_id else [])])
        for _, record in _spooled(spool):
            cells = [_cell(record.get(key)) for key in columns]
            writer.writerow([*cells, record["id"]] if "id" in record else cells)


def _cell(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False, default=str)


# --- read again ------------------------------------------------------------------------------------------------------


def _check_again(spool: Path, target: Path, path: Path) -> None:
    """Check that a file of columns reads back as it was written.

    Raises:
        DataError: for the first row that does not; for example, such a file cannot tell a null in a message from an
            absent key.
    """
    for (place, record), raw in zip(_spooled(spool), DataFile(target, path.name).rows(), strict=True):
        found = raw.record
        for name in ("id", "prompt", "completion", "chosen", "rejected", "messages", "label", "tools"):
            if name in record and _exact(record[name], name) != _exact(found.get(name), name):
                raise DataError(f"{place}: {path.suffix.removeprefix('.')} cannot hold '{name}' exactly (for "
                                "example a null or an empty object in a message, or text that looks like JSON). "
                                "Use .jsonl.")


def _exact(value: Any, name: str) -> Any:
    """A value for comparison. The order of a message's keys does not matter; the order inside their values does."""
    if name == "tools":
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if name == "label":
        return str(value).lower()
    if isinstance(value, list):
        return [{key: json.dumps(entry) for key, entry in message.items()} if isinstance(message, dict) else message
                for message in value]
    return value
