"""Which columns of records a format reads, found by watching it read them."""

from collections.abc import Mapping
from typing import Any


class WatchedRecord(dict[str, Any]):
    """A record that notes the columns whose values are looked up.

    Args:
        record: to copy.
        read: names of the columns that were read so far.
    """

    def __init__(self, record: Mapping[str, Any], read: set[str]) -> None:
        super().__init__(record)
        self._read = read

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a column, or the default."""
        self._read.add(name)
        return super().get(name, default)
