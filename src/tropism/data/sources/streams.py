"""Streams that stop at a limit: lines of bounded length, and decompressed bytes of bounded number."""

import io
from collections.abc import Iterator
from typing import Any, BinaryIO, Generic, TypeVar

from tropism.data.reading_limits import Expansion, ReadingLimits
from tropism.errors import DataError

T = TypeVar("T", str, bytes)


class Lines(Generic[T]):
    """The lines of a stream. No more than the limit of a row is in memory.

    Args:
        stream: with a `readline` that takes a size.
        name: of the file, for errors.
        limits: of the reading.
        several: a row can have several lines, and the caller sets `used` to 0 after each row.

    Attributes:
        used: size of the lines of the current row.
    """

    def __init__(self, stream: Any, name: str, limits: ReadingLimits, several: bool = False) -> None:
        self._stream, self._name, self._most, self._several = stream, name, limits.max_record_bytes, several
        self.used = 0

    def __iter__(self) -> Iterator[T]:
        number = 0
        while line := self._stream.readline(self._most + 1):
            number += 1
            self.used = len(line) + (self.used if self._several else 0)
            if self.used > self._most:
                raise DataError(f"{self._name}:{number}: the row has more than {self._most:,} bytes. If it is meant to "
                                "be this long, raise --max-record-bytes.")
            yield line


class Unpacked(io.RawIOBase):
    """The decompressed bytes of a file, counted.

    Args:
        packed: decompresses when it is read.
        expansion: counts the bytes, and stops at too many.
    """

    def __init__(self, packed: Any, expansion: Expansion) -> None:
        self._packed, self._expansion = packed, expansion

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        content = self._packed.read(len(target))
        self._expansion.add(len(content))
        target[: len(content)] = content
        return len(content)

    def close(self) -> None:
        if not self.closed:
            self._packed.close()
        super().close()

    def buffered(self) -> BinaryIO:
        """The same bytes with lines."""
        return io.BufferedReader(self, 2**20)
