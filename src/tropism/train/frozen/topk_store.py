"""The store of a teacher's most likely tokens.

    STORE/<fingerprint of teacher, k, temperature>/meta.json
                                                  /<hash>.safetensors

A file holds, for some (prompt, completion) keys, `keys [n, 16]`, `offsets [n + 1]`, and per supervised token
`ids [N, k]`, `logps [N, k]` and `tail [N]`. Its name is a hash of its content and of the directory's name, which is
checked when it is opened.
A step reads its rows from the disk, so memory does not grow with the store.
"""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import safe_open
from safetensors.numpy import save

from tropism import store
from tropism.errors import OutputError, ReferenceMismatchError
from tropism.files import free_bytes
from tropism.train.frozen.write_store import advice, publish

TopkEntry = tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]
"""ids `[n, k]`, logps `[n, k]`, tail `[n]` of one completion's supervised tokens."""

_NAMES = ("keys", "offsets", "ids", "logps", "tail")


def bytes_per_token(k: int, vocabulary: int, float_bytes: int) -> int:
    """Size of a supervised token in the store."""
    return k * (_id_dtype(vocabulary).itemsize + float_bytes) + float_bytes


def _id_dtype(vocabulary: int) -> np.dtype[Any]:
    return np.dtype(np.uint16 if vocabulary <= 2**16 else np.int32)


class TopKStore:
    """Most likely tokens under one teacher.

    Args:
        root: the store's directory.
        fingerprint: of the teacher, its numerics, k and the temperature.
        meta: description of the teacher for people; written once.
        k, vocabulary: number of tokens in an entry, and of ids that student and teacher share; None if nothing is
            trained on what is read.
    """

    def __init__(self, root: Path, fingerprint: str, meta: dict[str, Any], k: int | None = None,
                 vocabulary: int | None = None) -> None:
        self.path = root / fingerprint
        self.meta = meta
        self.k, self.vocabulary = k, vocabulary
        self.damaged: list[Path] = []
        self._files: dict[Path, Any] = {}
        self._where: dict[bytes, tuple[Path, int, int]] = {}

    def open(self) -> None:
        """Find all entries of intact files. Corrupted files go to `damaged`, and stay there if a later call finds them
        rewritten; their entries are computed again.

        Raises:
            ReferenceMismatchError: if an intact file holds invalid probabilities.
        """
        for file in sorted(self.path.glob("*.safetensors")):
            if file not in self._files and not self._open(file) and file not in self.damaged and store.exists(file):
                self.damaged.append(file)

    def _open(self, file: Path) -> bool:
        if not store.is_file(file):
            return False
        try:
            opened = safe_open(file, framework="numpy")
            arrays = {name: opened.get_tensor(name) for name in _NAMES}
        except Exception:  # a corrupted file fails in many ways
            return False
        if not _fit(arrays) or _checksum(self.path.name, arrays) != file.stem:
            return False
        total = np.exp(arrays["logps"].astype(np.float64)).sum(-1) + np.exp(arrays["tail"].astype(np.float64))
        if not np.allclose(total, 1.0, atol=1e-3):
            raise ReferenceMismatchError(f"{file}: probabilities do not sum to 1. {advice(self.path.parent)}")
        ids = arrays["ids"]
        if self.vocabulary is not None and ids.size and not 0 <= ids.min() <= ids.max() < self.vocabulary:
            raise ReferenceMismatchError(f"{file}: token ids outside of the vocabulary. {advice(self.path.parent)}")
        if self.k not in (None, ids.shape[1]):
            raise ReferenceMismatchError(f"{file}: {ids.shape[1]} tokens instead of {self.k}. "
                                         f"{advice(self.path.parent)}")
        self._files[file] = opened
        offsets = arrays["offsets"]
        for number, key in enumerate(arrays["keys"]):
            self._where.setdefault(key.tobytes(), (file, int(offsets[number]), int(offsets[number + 1])))
        return True

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, key: bytes) -> bool:
        return key in self._where

    def discard_damaged(self) -> None:
        """Remove the corrupted files that `add` has not replaced."""
        for file in self.damaged:
            if file not in self._files:
                store.discard(file)

    def file_of(self, key: bytes) -> Path:
        """The file that an entry comes from."""
        return self._where[key][0]

    def mark(self, keys: Iterable[bytes]) -> None:
        """Record that the files with these entries are used now."""
        for file in {self.file_of(key) for key in keys if key in self}:
            store.touch(file)

    def read(self, key: bytes) -> TopkEntry:
        """The teacher's most likely tokens for the supervised tokens of one completion.

        Raises:
            ReferenceMismatchError: if the store does not have it.
        """
        if key not in self._where:
            raise ReferenceMismatchError(f"a completion has no entry in the teacher's store {self.path}. With several "
                                         "machines, use a --store on a shared disk.")
        file, start, end = self._where[key]
        opened = self._files[file]
        ids, logps, tail = (opened.get_slice(name)[start:end] for name in ("ids", "logps", "tail"))
        return ids, logps, tail

    def add(self, entries: Mapping[bytes, TopkEntry], vocabulary: int) -> None:
        """Write entries as one file.

        Raises:
            OutputError: if the file cannot be written.
        """
        if not entries:
            return
        ids, logps, tail = (np.concatenate([entry[part] for entry in entries.values()]) for part in range(3))
        arrays: dict[str, npt.NDArray[Any]] = {
            "keys": np.frombuffer(b"".join(entries), dtype=np.uint8).reshape(len(entries), 16),
            "offsets": np.cumsum([0, *(len(entry[2]) for entry in entries.values())], dtype=np.int64),
            "ids": ids.astype(_id_dtype(vocabulary)), "logps": logps, "tail": tail}
        content = save({key: np.ascontiguousarray(value) for key, value in arrays.items()})
        publish(self.path, self.meta, f"{_checksum(self.path.name, arrays)}.safetensors", content, "teacher's")

    def check_space(self, needed_bytes: int) -> None:
        """Check before the teacher's pass that its result fits on the disk.

        Raises:
            OutputError: with the required and the free space.
        """
        free = free_bytes(self.path)
        if free < needed_bytes * 1.05:
            raise OutputError(f"{self.path.parent}: the teacher's top-k tokens need {store.size_text(needed_bytes)}, "
                              f"but only {store.size_text(free)} are free. Use a lower --top-k, or another --store.")


def _fit(arrays: Mapping[str, npt.NDArray[Any]]) -> bool:
    """Whether the arrays of a file have the types and shapes of what `add` writes."""
    keys, offsets, ids, logps, tail = (arrays[name] for name in _NAMES)
    typed = keys.dtype == np.uint8 and offsets.dtype == np.int64 and ids.dtype.kind in "iu" and (
        logps.dtype.kind == tail.dtype.kind == "f")
    shaped = (keys.ndim == ids.ndim == 2 and keys.shape[1] == 16 and offsets.shape == (len(keys) + 1,)
              and ids.shape == logps.shape and tail.shape == ids.shape[:1])
    return typed and shaped and bool((np.diff(offsets) >= 0).all()) and offsets[0] == 0 and offsets[-1] == len(ids)


def _checksum(fingerprint: str, arrays: Mapping[str, npt.NDArray[Any]]) -> str:
    digest = hashlib.blake2b(fingerprint.encode(), digest_size=16)
    for name in _NAMES:
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape} ".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()
