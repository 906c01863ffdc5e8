"""Check the header of a GGUF file, whose reader believes every count in it."""

import struct
from pathlib import Path
from typing import BinaryIO

from tropism.borders import border, check_regular
from tropism.errors import ModelError

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_SMALLEST_ENTRY, _SMALLEST_TENSOR = 13, 24


def check_gguf(path: Path) -> None:
    """Check that the counts and lengths in a GGUF file fit into it.

    Raises:
        ModelError: with the first one that does not.
    """
    with border(f"{path}: cannot be read as GGUF"):
        check_regular(path, path.stat())
        with path.open("rb") as file:
            _Header(file, path.stat().st_size).check()


class _Header:
    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size

    def check(self) -> None:
        if self._file.read(4) != b"GGUF":
            raise ModelError(f"{self._file.name}: not a GGUF file")
        version = self._number("<I")
        if version not in (2, 3):  # version 1 is obsolete; a big-endian file has its bytes reversed
            raise ModelError(f"{self._file.name}: GGUF version {version} is unsupported")
        tensors, entries = self._number("<Q"), self._number("<Q")
        self._fits(tensors, _SMALLEST_TENSOR, "tensors")
        self._fits(entries, _SMALLEST_ENTRY, "entries")
        for _ in range(entries):
            self._skip(self._number("<Q"), 1, "bytes in a name")
            self._value(self._number("<I"))

    def _value(self, kind: int, depth: int = 0) -> None:
        if kind in _SIZES:
            self._skip(1, _SIZES[kind], "values")
        elif kind == _STRING:
            self._skip(self._number("<Q"), 1, "bytes in a text")
        elif kind == _ARRAY and depth < 4:
            inner, count = self._number("<I"), self._number("<Q")
            if inner in _SIZES:
                self._skip(count, _SIZES[inner], "values in an array")
                return
            self._fits(count, 8, "values in an array")
            for _ in range(count):
                self._value(inner, depth + 1)
        else:
            raise ModelError(f"{self._file.name}: not readable as GGUF: a value has an unknown type ({kind})")

    def _number(self, form: str) -> int:
        content = self._file.read(struct.calcsize(form))
        if len(content) < struct.calcsize(form):
            raise ModelError(f"{self._file.name}: the GGUF file is cut off in its header")
        return int(struct.unpack(form, content)[0])

    def _skip(self, count: int, size: int, what: str) -> None:
        self._fits(count, size, what)
        self._file.seek(count * size, 1)

    def _fits(self, count: int, size: int, what: str) -> None:
        left = self._size - self._file.tell()
        if count * size > left:
            raise ModelError(f"{self._file.name}: the GGUF file is corrupted: its header counts {count:,} {what}, but "
                             f"only {left:,} bytes follow")
