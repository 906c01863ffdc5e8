"""Null keys that table libraries add to nested objects, so that all objects of a column have the same keys."""

from collections.abc import Mapping
from typing import Any

Path = tuple[str, ...]


def without_none(value: Any, feature: Any = None) -> Any:
    """The value without None entries in nested objects, which columnar data adds.

    Args:
        value: of a column.
        feature: type of the column in `datasets`. Objects of its type `Json` are as the user wrote them.
    """
    if type(feature).__name__ == "Json":
        return value
    if isinstance(value, dict):
        types = feature if isinstance(feature, dict) else {}
        return {key: without_none(entry, types.get(key)) for key, entry in value.items() if entry is not None}
    if isinstance(value, list):
        inner = feature[0] if isinstance(feature, list) and feature else getattr(feature, "feature", None)
        return [without_none(entry, inner) for entry in value]
    return value


def without_nested_none(record: Any, features: Mapping[str, Any] | None = None) -> Any:
    """A record without None entries in nested objects. Its own columns are kept."""
    if not isinstance(record, dict):
        return record
    types = features or {}
    return {name: without_none(value, types.get(name)) for name, value in record.items()}


class TableList(list[Any]):
    """A list that was an array of numpy, as tables of pandas have where users write lists."""


class AddedNulls:
    """Tells null keys that a table library has added to records from those that a user wrote.

    Rows of a table that became a list again, as by `Dataset.to_list` or `DataFrame.to_dict`, cannot be told by their
    type. In a column of theirs all objects at one place have the same keys, and a key is null in some objects because
    another one has a value. Null keys are removed from such columns, and from all arrays. What users write by hand
    hardly looks so: only messages with calls have `tool_calls`, and only some parameters of a schema have a `default`.
    """

    def __init__(self) -> None:
        self._keys: dict[Path, frozenset[str]] = {}
        self._nulls: set[Path] = set()
        self._given: set[Path] = set()
        self._fractions: set[Path] = set()
        self._own: set[str] = set()  # columns whose objects have keys of their own
        self._seen = False

    def see(self, record: Any) -> None:
        """Note the keys of a record's nested objects."""
        self._seen = True
        for column, value in record.items() if isinstance(record, dict) else ():
            if isinstance(value, dict | list):
                self._see(value, (column,))

    def _see(self, value: Any, path: Path) -> None:
        if isinstance(value, list):
            for entry in value:
                if isinstance(entry, dict | list):
                    self._see(entry, (*path, ""))
            return
        keys = frozenset(value)
        if self._keys.setdefault(path, keys) != keys:
            self._own.add(path[0])
        for key, entry in value.items():
            inner = (*path, key)
            (self._nulls if entry is None else self._given).add(inner)
            if isinstance(entry, dict | list):
                self._see(entry, inner)
            elif isinstance(entry, float) and not entry.is_integer():
                self._fractions.add(inner)

    def removed(self, record: Any) -> Any:
        """A record without the null keys that were added, after all records that can be known were seen."""
        if not isinstance(record, dict) or (self._seen and not self._nulls):
            return record
        return {column: self._without(value, (column,)) if isinstance(value, dict | list) else value
                for column, value in record.items()}

    def _without(self, value: Any, path: Path, in_table: bool = False) -> Any:
        if isinstance(value, list):
            in_table = in_table or isinstance(value, TableList)
            return [self._without(entry, (*path, ""), in_table) for entry in value]
        if not isinstance(value, dict):
            # pandas has floats in a column of integers where other rows have null.
            integer = in_table and isinstance(value, float) and path in self._nulls and path not in self._fractions
            return int(value) if integer else value
        return {key: self._without(entry, (*path, key), in_table) for key, entry in value.items()
                if not (entry is None and (in_table or ((*path, key) in self._given and path[0] not in self._own)))}
