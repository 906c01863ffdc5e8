"""Reads the records of Parquet and Arrow files, which can describe far more rows than they have bytes."""

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tropism.borders import border
from tropism.data.rows import RawRow
from tropism.data.sources.null_keys import without_nested_none
from tropism.errors import DataError

if TYPE_CHECKING:
    from tropism.data.sources.files import DataFile

_ROWS = 1024
_BATCH_BYTES = 2**30
_ROW_BYTES = 8
"""A row counts as at least this many bytes, since columns of nulls have none."""


def parquet_rows(file: "DataFile") -> Iterator[RawRow]:
    """The records of a Parquet file.

    Raises:
        DataError: if it cannot be read or expands too much.
    """
    import pyarrow.parquet as parquet  # slow to import, and most data is JSONL

    with border(f"{file.name}: not readable as Parquet", DataError), file.open() as stream:
        # Parquet needs random access, which compressed files do not have.
        content = parquet.ParquetFile(io.BytesIO(stream.read()) if file.packed else stream)
        facts = content.metadata
        groups = [facts.row_group(number) for number in range(facts.num_row_groups)]
        described = sum(max(group.total_byte_size, group.num_rows * _ROW_BYTES) for group in groups)
        file.expansion().add(described)
        # A dictionary makes each row of a batch as large as the largest value, which is at most a column of a group.
        largest = max((group.column(number).total_uncompressed_size for group in groups
                       for number in range(group.num_columns)), default=0)
        rows = max(1, min(_ROWS, _BATCH_BYTES // max(largest, 1)))
        if file.size <= file.limits.max_record_bytes:  # what expands too much is refused before its rows are used
            scanned = file.expansion()
            for batch in content.iter_batches(batch_size=rows):
                scanned.add(_expanded(batch, file.name))
        yield from _of_batches(file, content.iter_batches(batch_size=rows))


def arrow_rows(file: "DataFile") -> Iterator[RawRow]:
    """The records of Arrow's file format (also Feather), or of its stream format, which the datasets library writes.

    Raises:
        DataError: if it cannot be read or expands too much.
    """
    import pyarrow

    with border(f"{file.name}: not readable as Arrow", DataError), file.open() as stream:
        source: Any = stream
        if file.packed:
            source = io.BytesIO(stream.read())
        head = source.read(6)
        source.seek(0)
        if head == b"ARROW1":
            reader = pyarrow.ipc.open_file(source)
            batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:
            batches = iter(pyarrow.ipc.open_stream(source))
        yield from _of_batches(file, batches)


def _of_batches(file: "DataFile", batches: Any) -> Iterator[RawRow]:
    number, expansion = 0, file.expansion()
    for batch in batches:
        batch.validate(full=True)  # offsets of a corrupted file may point outside of it
        size = _expanded(batch, file.name)
        expansion.add(size)
        rows = max(1, min(_ROWS, _BATCH_BYTES * batch.num_rows // max(size, 1)))
        for first in range(0, batch.num_rows, rows):
            for record in batch.slice(first, rows).to_pylist():
                number += 1
                # Null columns are kept. Null keys of nested objects are removed: they come from other rows.
                yield RawRow(f"{file.name}:row {number}", without_nested_none(record))


def _expanded(batch: Any, name: str) -> int:
    """Bytes of a batch whose texts are written out, which dictionaries store once.

    Raises:
        DataError: for a column whose values may overlap in other ways.
    """
    return max(batch.num_rows * _ROW_BYTES, sum(_size(column, name) for column in batch.columns))


def _size(column: Any, name: str) -> int:
    import pyarrow.compute as compute
    import pyarrow.types as types

    kind = column.type
    if types.is_dictionary(kind):
        values = column.dictionary
        if types.is_string(values.type) or types.is_large_string(values.type):
            return int(compute.sum(compute.binary_length(values).take(column.indices)).as_py() or 0)
        return int(values.nbytes * len(column))
    if types.is_struct(kind):
        return sum(_size(child, name) for child in column.flatten())
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _size(column.flatten(), name)
    if types.is_map(kind):
        return _size(column.keys, name) + _size(column.items, name)
    if types.is_string_view(kind) or types.is_binary_view(kind):
        return int(compute.sum(compute.binary_length(column)).as_py() or 0)
    if types.is_run_end_encoded(kind) or types.is_list_view(kind) or types.is_large_list_view(kind):
        raise DataError(f"{name}: a column has the Arrow type {kind}, which is unsupported. Save it as a plain type.")
    return int(column.nbytes)
