"""The store of a teacher's likeliest tokens, beside the reference scores.

    STORE/<fingerprint of teacher, k, temperature>/meta.json
                                                  /<hash>.safetensors

A file holds, for some (prompt, completion) keys, `keys [n, 16]`, `offsets [n + 1]`, and per supervised token
`ids [N, k]`, `logps [N, k]` and `tail [N]`. Its name is the hash of its content, checked when it is opened; rows are
read from the disk when a step asks for them, so memory does not grow with the store.
"""

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import safe_open
from safetensors.numpy import save

from tropism.errors import OutputError, ReferenceMismatchError
from tropism.train.frozen.store_files import publish

TopkEntry = tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]
"""ids `[n, k]`, logps `[n, k]`, tail `[n]` of one completion's supervised tokens."""

_NAMES = ("keys", "offsets", "ids", "logps", "tail")


def bytes_per_token(k: int, vocabulary: int, float_bytes: int) -> int:
    """What a supervised token takes in the store."""
    return k * (_id_dtype(vocabulary).itemsize + float_bytes) + float_bytes


def _id_dtype(vocabulary: int) -> np.dtype[Any]:
    return np.dtype(np.uint16 if vocabulary <= 2**16 else np.int32)


class TopKStore:
    """Likeliest tokens under one teacher.

    Args:
        root: the store's directory.
        fingerprint: of the teacher, its numerics, k and the temperature.
        meta: what a person wants to know of it; written once.
    """

    def __init__(self, root: Path, fingerprint: str, meta: dict[str, Any]) -> None:
        self.path = root / fingerprint
        self.meta = meta
        self.damaged: list[Path] = []
        self._files: dict[Path, Any] = {}
        self._where: dict[bytes, tuple[Path, int, int]] = {}

    def open(self) -> None:
        """Find all whole entries. A damaged file is left out (its entries are computed again) and listed, also if it
        has been written anew by the time of another call.

        Raises:
            ReferenceMismatchError: if an intact file holds what no teacher says.
        """
        for file in sorted(self.path.glob("*.safetensors")):
            if file not in self._files and not self._open(file) and file not in self.damaged:
                self.damaged.append(file)

    def _open(self, file: Path) -> bool:
        try:
            opened = safe_open(file, framework="numpy")
            arrays = {name: opened.get_tensor(name) for name in _NAMES}
        except Exception:  # a damaged file fails in many ways, all of which mean the same
            return False
        if _checksum(arrays) != file.stem:
            return False
        total = np.exp(arrays["logps"].astype(np.float64)).sum(-1) + np.exp(arrays["tail"].astype(np.float64))
        if not np.allclose(total, 1.0, atol=1e-3):
            raise ReferenceMismatchError(f"{file}: holds probabilities that do not add up to 1; remove the store with "
                                         f"`tropism store clean --store {self.path.parent}`")
        self._files[file] = opened
        offsets = arrays["offsets"]
        for number, key in enumerate(arrays["keys"]):
            self._where.setdefault(key.tobytes(), (file, int(offsets[number]), int(offsets[number + 1])))
        return True

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, key: bytes) -> bool:
        return key in self._where

    def read(self, key: bytes) -> TopkEntry:
        """What the teacher says of the supervised tokens of one completion.

        Raises:
            ReferenceMismatchError: if it is not there.
        """
        if key not in self._where:
            raise ReferenceMismatchError(f"a completion has no entry in the teacher's store {self.path}; with several "
                                         "machines the store must lie on a disk that all of them see")
        file, start, end = self._where[key]
        opened = self._files[file]
        ids, logps, tail = (opened.get_slice(name)[start:end] for name in ("ids", "logps", "tail"))
        return ids, logps, tail

    def add(self, entries: Mapping[bytes, TopkEntry], vocabulary: int) -> None:
        """Write entries as one file.

        Raises:
            OutputError: if the disk refuses.
        """
        if not entries:
            return
        ids, logps, tail = (np.concatenate([entry[part] for entry in entries.values()]) for part in range(3))
        arrays: dict[str, npt.NDArray[Any]] = {
            "keys": np.frombuffer(b"".join(entries), dtype=np.uint8).reshape(len(entries), 16),
            "offsets": np.cumsum([0, *(len(entry[2]) for entry in entries.values())], dtype=np.int64),
            "ids": ids.astype(_id_dtype(vocabulary)), "logps": logps, "tail": tail}
        content = save({key: np.ascontiguousarray(value) for key, value in arrays.items()})
        publish(self.path, self.meta, f"{_checksum(arrays)}.safetensors", content, "teacher's")

    def check_space(self, needed_bytes: int) -> None:
        """Find out before the teacher's pass whether it fits on the disk.

        Raises:
            OutputError: saying how much is needed and how much is free.
        """
        parent = next(path for path in (self.path, *self.path.parents) if path.exists())
        free = shutil.disk_usage(parent).free
        if free < needed_bytes * 1.05:
            raise OutputError(f"{self.path.parent}: the teacher's top-k will take {needed_bytes / 2**30:.2f} GiB, and "
                              f"{free / 2**30:.2f} GiB are free; a smaller --top-k, or another place with --store")


def _checksum(arrays: Mapping[str, npt.NDArray[Any]]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in _NAMES:
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape} ".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()
