"""Limits of what is read from a data file, so that a corrupted or hostile one cannot exhaust memory or disk."""

from typing import ClassVar

from pydantic import Field

from tropism.errors import DataError
from tropism.options import Options

_MIB = 2**20
FREE_BYTES = 2**30
"""Any file may expand to this many bytes, whatever its size."""


class ReadingLimits(Options):
    """Limits of a data file."""

    heading: ClassVar[str] = "Data"

    max_record_bytes: int = Field(64 * _MIB, ge=1)
    """Maximum size of a row in the file, in bytes. Raise it for rows above 64 MiB."""
    max_expansion: float = Field(200.0, gt=1.0)
    """Maximum ratio between the decompressed size of a data file and its size on disk. Applies to files that expand to
    more than 1 GiB."""


class Expansion:
    """Counts the bytes that come out of a compressed or columnar file.

    Args:
        name: of the file, for an error.
        size: on the disk, in bytes.
        limits: of the reading.
    """

    def __init__(self, name: str, size: int, limits: ReadingLimits) -> None:
        self._name, self._most = name, max(FREE_BYTES, size * limits.max_expansion)
        self._size, self._ratio = size, limits.max_expansion
        self.count = 0

    def add(self, count: int) -> None:
        """Count more bytes.

        Raises:
            DataError: if the file has expanded too much.
        """
        self.count += count
        if self.count > self._most:
            raise DataError(f"{self._name}: the file expands to more than {self._ratio:g} times its size of "
                            f"{self._size:,} bytes. If it is meant to, raise --max-expansion.")
