"""Rows from Python, whose values may come from numpy, torch, pandas or pyarrow, as plain Python values.

A float of one of these libraries stays a `numpy.float64`, which is a float too. So labels that a library has turned
into 1.0 and 0.0 differ from 1.0 in a JSON file, which is a rating.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from tropism.data.sources.null_keys import AddedNulls, TableList, without_nested_none, without_none
from tropism.errors import DataError

_PLAIN = frozenset((str, int, bool, float, bytes, type(None), np.float64))
_NUMBERS_AND_TEXT = "biufUO"  # kinds of numpy dtypes; the others have no plain value that reads the same


def plain_records(records: Iterable[Any]) -> Iterator[Any]:
    """The rows of a list, a stream, or a table of pyarrow or pandas, as dicts of plain values where they can be.

    Null keys that a table library has added to nested objects are removed, see `null_keys`. Those of a stream that is
    not one of `datasets` are kept, since its rows are not known in advance.

    Raises:
        DataError: for a row that is nested too deeply.
    """
    records = _as_arrow(records)
    nulls = AddedNulls()
    if isinstance(records, list | tuple) or hasattr(records, "itertuples"):
        for _ in _converted(records, nulls.see):
            pass
    of_datasets = any(kind.__module__.partition(".")[0] == "datasets" for kind in type(records).__mro__)
    features = getattr(records, "features", None)
    yield from _converted(records, (lambda record: without_nested_none(record, features)) if of_datasets
                          else nulls.removed)


def _as_arrow(table: Any) -> Any:
    """A table of polars as one of pyarrow; anything else unchanged."""
    return table.to_arrow() if hasattr(table, "to_arrow") and hasattr(table, "iter_rows") else table


def _converted(records: Iterable[Any], change: Callable[[Any], Any]) -> Iterator[Any]:
    """Each record as plain values, with `change` applied."""
    for number, record in enumerate(_single_rows(records), start=1):
        # A row of pandas: a Series, or a tuple with names.
        convert = getattr(record, "to_dict", None) or getattr(record, "_asdict", None)
        try:
            yield change(plain(convert() if convert is not None else record))
        except RecursionError:
            raise DataError(f"row {number}: the record is nested too deeply") from None


def _single_rows(records: Iterable[Any]) -> Iterator[Any]:
    for record in _rows_of_table(records) or records:
        rows = _rows_of_table(record)  # `datasets` with the format arrow or pandas yields tables of one row
        yield from [record] if rows is None else rows


def _rows_of_table(table: Any) -> Iterator[dict[str, Any]] | None:
    """The rows of a table of pyarrow or pandas; None for anything else."""
    if hasattr(table, "to_pylist") and hasattr(table, "column_names"):
        parts = table.to_batches(1024) if hasattr(table, "to_batches") else [table]
        return ({name: _from_column(without_none(value)) for name, value in row.items()}
                for part in parts for row in part.to_pylist())
    if hasattr(table, "itertuples"):
        names = [str(name) for name in table.columns]
        return (dict(zip(names, map(_from_column, row), strict=True))
                for row in table.itertuples(index=False, name=None))
    return None


def _from_column(value: Any) -> Any:
    """The value of a typed column: its floats are those of the library."""
    return np.float64(value) if type(value) is float else value


def plain(value: Any) -> Any:
    """Scalars as Python values, arrays and tensors as lists, mappings as dicts, at any depth; others unchanged."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Mapping):
        return {plain(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value)) if type(value) in (list, tuple) else [plain(entry) for entry in value]
    if isinstance(value, np.generic | np.ndarray) and value.dtype.kind not in _NUMBERS_AND_TEXT:
        return value
    if hasattr(value, "as_py"):  # a scalar of pyarrow
        return plain(_from_column(value.as_py()))
    if hasattr(value, "to_pylist"):  # an array of pyarrow
        return plain(value.to_pylist())
    if hasattr(value, "tolist") and hasattr(value, "dtype"):  # an array, a tensor, or a scalar of one
        found = value.tolist()
        return TableList(map(plain, found)) if isinstance(found, list) else _from_column(found)
    return value
