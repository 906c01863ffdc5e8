"""The content-addressed store of log-probs under frozen weights.

    STORE/<fingerprint of weights, config and numerics>/meta.json
                                                       /<hash>.npz   keys [n, 16] uint8, logps [n] float64

The key of an entry is a hash of (prompt ids, completion ids). Tokenizer, template and limits act through the ids, so a
stale hit is impossible. The name of a file is a hash of its content and of the fingerprint. Files are written under a
temporary name and then renamed: a killed run leaves complete files only, and several runs can write at the same time.
"""

import hashlib
import io
import math
import zipfile
from collections.abc import Container
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tropism import store
from tropism.errors import ReferenceMismatchError
from tropism.store import META, ROWS
from tropism.train.frozen.topk_store import TopKStore
from tropism.train.frozen.write_store import advice, described, publish
from tropism.train.reward_rounding import MOST_STORED


class ScoreStore:
    """Scores under one fingerprint.

    Args:
        root: the store's directory.
        fingerprint: of the frozen weights, their config and the numerics.
        meta: description of the model for people; written once.
    """

    def __init__(self, root: Path, fingerprint: str, meta: dict[str, Any]) -> None:
        self.path = root / fingerprint
        self.meta = meta
        self.damaged: list[Path] = []

    def load(self, needed: Container[bytes] | None = None) -> dict[bytes, float]:
        """Entries of intact files. Corrupted files go to `damaged`; their entries are computed again.

        Args:
            needed: keys to load; None for all.

        Raises:
            ReferenceMismatchError: if an entry of an intact file is not a log-prob: not finite, or above 0 by more than
                rounding.
        """
        known: dict[bytes, float] = {}
        self.damaged = []
        for file in sorted(self.path.glob("*.npz")):
            entries = _read(file)
            if entries is None:
                if store.exists(file):  # otherwise another run has just removed it
                    self.damaged.append(file)
                continue
            found = {key: value for key, value in entries.items() if needed is None or key in needed}
            for key, value in found.items():
                if not math.isfinite(value) or value > MOST_STORED:
                    raise ReferenceMismatchError(f"{file}: invalid log-prob {value}. {advice(self.path.parent)}")
                known.setdefault(key, value)
            if found:
                store.touch(file)
        return known

    def add(self, entries: dict[bytes, float]) -> None:
        """Write entries as one file.

        Raises:
            OutputError: if the file cannot be written.
        """
        if not entries:
            return
        keys = np.frombuffer(b"".join(entries), dtype=np.uint8).reshape(len(entries), 16)
        logps = np.array(list(entries.values()), dtype=np.float64)
        content = io.BytesIO()
        np.savez(content, keys=keys, logps=logps)
        publish(self.path, self.meta, f"{_checksum(self.path.name, keys, logps)}.npz", content.getvalue(), "reference")

    def discard_damaged(self) -> None:
        """Remove the corrupted files that `add` has not replaced."""
        for file in self.damaged:
            if _read(file) is None:
                store.discard(file)

    def file_of(self, key: bytes) -> Path:
        """The file that an entry comes from; the directory if it is gone."""
        return next((file for file in sorted(self.path.glob("*.npz")) if key in (_read(file) or ())), self.path)


def _checksum(fingerprint: str, keys: Any, logps: Any) -> str:
    return hashlib.blake2b(fingerprint.encode() + keys.tobytes() + logps.tobytes(), digest_size=16).hexdigest()


def _read(file: Path) -> dict[bytes, float] | None:
    """Entries of a file; None if its content does not have the hash in its name."""
    try:
        if not store.is_file(file) or not _is_plain(file):
            return None
        with np.load(file, allow_pickle=False) as content:
            keys, logps = content["keys"], content["logps"]
    except Exception:  # a corrupted zip file fails in many ways
        return None
    if (keys.dtype, logps.dtype) != (np.uint8, np.float64) or keys.shape != (logps.size, 16) or logps.ndim != 1:
        return None
    if _checksum(file.parent.name, keys, logps) != file.stem:
        return None
    return {key.tobytes(): float(value) for key, value in zip(keys, logps, strict=True)}


def _is_plain(file: Path) -> bool:
    """Whether a file has nothing compressed, so that its arrays are no larger than the file."""
    with zipfile.ZipFile(file) as archive:
        return all(entry.compress_type == zipfile.ZIP_STORED and entry.file_size == entry.compress_size
                   for entry in archive.infolist())


@dataclass(frozen=True, slots=True)
class StoredModel:
    """One line of `tropism store list`.

    Args:
        path: its directory.
        meta: description of the model.
        scores: number of completions with scores.
        size_bytes: size of its files.
        used: time of their last use, in seconds since the epoch.
    """

    path: Path
    meta: dict[str, Any]
    scores: int
    size_bytes: int
    used: float


def entries(root: Path) -> list[StoredModel]:
    """The frozen models in a store."""
    found = []
    for path in _models(root):
        files = [(file, facts) for file, facts in store.files(path) if file.suffix in (".npz", ".safetensors")]
        scores = sum(len(read) for file, _ in files if file.suffix == ".npz" and (read := _read(file)) is not None)
        best = TopKStore(root, path.name, {})
        with suppress(ReferenceMismatchError):  # a run would raise it; a list shows all files
            best.open()
        found.append(StoredModel(path, described(path), scores + len(best), sum(facts.st_size for _, facts in files),
                                 max((facts.st_mtime for _, facts in store.files(path)), default=0.0)))
    return found


def rendered_rows(root: Path) -> tuple[int, int, float]:
    """Number of stored blocks of rendered rows, their size in bytes, and the time of their last use."""
    blocks = [facts for directory in store.directories(root) if directory.parent.name == ROWS
              for file, facts in store.files(directory) if file.suffix == ".arrow"]
    return (len(blocks), sum(facts.st_size for facts in blocks),
            max((facts.st_mtime for facts in blocks), default=0.0))


def clean(root: Path, fingerprint: str | None = None) -> int:
    """Remove the scores of one fingerprint (or its prefix), or all scores and rendered rows. Returns the number of
    removed models.

    Raises:
        OutputError: if something cannot be removed.
    """
    models = [path for path in _models(root) if path.name.startswith(fingerprint or "")]
    rows = [path for path in store.directories(root) if path.parent.name == ROWS] if fingerprint is None else []
    for path in (*models, *rows):
        store.remove(path)
    if rows:
        with suppress(OSError):  # something else is in it
            (root / ROWS).rmdir()
    return len(models)


def _models(root: Path) -> list[Path]:
    """Directories of the store that hold scores. Other files in it are not touched."""
    return [path for path in store.directories(root) if path.parent == root and any(
        file.name == META or file.suffix in (".npz", ".safetensors") for file, _ in store.files(path))]
