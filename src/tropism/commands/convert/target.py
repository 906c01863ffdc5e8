"""The file that is written: JSON Lines, Parquet or CSV; whole or not at all."""

import csv
import gzip
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from tropism.data.sources.files import DataFile
from tropism.errors import DataError, UsageError, first_line
from tropism.files import check_writable, replacing

KINDS = (".jsonl", ".jsonl.gz", ".parquet", ".csv")

Write = Callable[[dict[str, Any], str], None]
"""Takes a record and, for errors, the place that it comes from."""

_BATCH = 1024  # rows of a Parquet row group


def kind_of(path: Path) -> str:
    """The kind of a file, by its name.

    Raises:
        UsageError: if it is not one of `KINDS`.
    """
    for kind in KINDS:
        if path.name.lower().endswith(kind) and len(path.name) > len(kind):
            return kind
    raise UsageError(f"{path}: rows are written as {', '.join(KINDS[:-1])} or {KINDS[-1]}")


def check_target(path: Path, to: str) -> None:
    """Find out before anything is read whether the file can be written.

    Raises:
        UsageError: for an unknown kind of file, one that cannot hold the shape, or one that is there already.
        OutputError: if its directory cannot be written.
    """
    if kind_of(path) == ".csv" and to == "messages":
        raise UsageError(f"{path}: CSV holds plain text only, and --to messages makes messages; write .jsonl or "
                         ".parquet")
    if os.path.lexists(path):
        raise UsageError(f"{path} exists already; nothing was changed")
    check_writable(path.parent, path)


@contextmanager
def writing(path: Path) -> Iterator[Write]:
    """Give a function that writes records one by one; afterwards the file is there, and without an error only then.

    Columns of Parquet and CSV are known when all rows are, so these stand on disk as JSON Lines first.

    Raises:
        UsageError: if the file came to be there in the meantime.
        DataError: for a record that the kind of file cannot hold as it is.
        OutputError: if the disk refuses.
    """
    kind = kind_of(path)
    columnar = kind in (".parquet", ".csv")
    with replacing(path) as temporary, ExitStack() as leftovers:
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
        if os.path.lexists(path):
            raise UsageError(f"{path} exists already; nothing was changed")


def _line(value: Any) -> bytes:
    # A column of dates, say, is written as text.
    try:
        return (json.dumps(value, ensure_ascii=False, default=str) + "\n").encode()
    except UnicodeEncodeError:  # half a character, in a column that is only taken along
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
        raise DataError(f"{path}: these rows have no common Parquet schema, as plain text beside messages has none; "
                        f"write .jsonl ({first_line(error)})") from None


def _in_order(kind: Any, values: list[Any]) -> Any:
    """A type with the keys of its objects in the order of the rows; pyarrow sorts them, which a template would show."""
    import pyarrow

    if pyarrow.types.is_struct(kind):
        objects = [value for value in values if value is not None]
        return pyarrow.struct([(key, _in_order(kind.field(key).type, [entry.get(key) for entry in objects]))
                               for key in dict.fromkeys(key for entry in objects for key in entry)])
    if pyarrow.types.is_list(kind):
        return pyarrow.list_(_in_order(kind.value_type, [entry for value in values if value for entry in value]))
    return kind


def _with_text(record: dict[str, Any]) -> dict[str, Any]:
    """Schemas of tools differ from row to row; as JSON, which is read as well, none of them changes."""
    return {**record, "tools": json.dumps(record["tools"], ensure_ascii=False)} if "tools" in record else record


# --- CSV -------------------------------------------------------------------------------------------------------------


def _check_text(record: dict[str, Any], place: str, path: Path) -> None:
    for name in ("prompt", "completion", "chosen", "rejected"):
        if not isinstance(record.get(name, ""), str):
            raise DataError(f"{place}: '{name}' is messages, and CSV holds plain text only; write .jsonl or .parquet "
                            f"in place of {path.name}")


def _csv(spool: Path, target: Path, path: Path) -> None:
    """`id` is the last column: a row that has none is a short line, in which it is absent, and not empty."""
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
    """What a file of columns holds must be what was put into it.

    Raises:
        DataError: for the first row that is not; nulls inside messages, say, are not told from absent keys there.
    """
    for (place, record), raw in zip(_spooled(spool), DataFile(target, path.name).rows(), strict=True):
        found = raw.record
        for name in ("id", "prompt", "completion", "chosen", "rejected", "messages", "label", "tools"):
            if name in record and _exact(record[name], name) != _exact(found.get(name), name):
                raise DataError(f"{place}: {path.suffix.removeprefix('.')} cannot hold its '{name}' exactly (a null or "
                                "an empty object in a message, text that looks like JSON); write .jsonl")


def _exact(value: Any, name: str) -> Any:
    """A value for comparison: of messages, the order of keys does not matter; of what stands in them it does."""
    if name == "tools":
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if name == "label":
        return str(value).lower()
    if isinstance(value, list):
        return [{key: json.dumps(entry) for key, entry in message.items()} if isinstance(message, dict) else message
                for message in value]
    return value
