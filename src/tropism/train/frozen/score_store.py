"""The content-addressed store of log-probs under frozen weights.

    STORE/<fingerprint of weights, config and numerics>/meta.json
                                                       /<hash>.npz   keys [n, 16] uint8, logps [n] float64, checksum

The key of an entry is a hash of (prompt ids, completion ids). Tokenizer, template and limits act through the ids, so a
stale hit is impossible. Files are written under a temporary name and then renamed: a killed run leaves complete files
only, and several runs can write at the same time.
"""

import contextlib
import hashlib
import io
import json
import math
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tropism.errors import OutputError, ReferenceMismatchError
from tropism.train.frozen.topk_store import TopKStore
from tropism.train.frozen.write_store import publish
from tropism.train.reward_rounding import MOST_STORED

ROWS = "rows"
"""Directory of the store that holds rendered rows (see `data.encode`)."""


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

    def load(self) -> dict[bytes, float]:
        """All entries of intact files. Corrupted files go to `damaged`; their entries are computed again.

        Raises:
            ReferenceMismatchError: if an entry of an intact file is not a log-prob: not finite, or above 0 by more than
                rounding.
        """
        known: dict[bytes, float] = {}
        self.damaged = []
        for file in sorted(self.path.glob("*.npz")):
            entries = _read(file)
            if entries is None:
                self.damaged.append(file)
                continue
            for key, value in entries.items():
                if not math.isfinite(value) or value > MOST_STORED:
                    raise ReferenceMismatchError(f"{file}: invalid log-prob {value}. Remove the stored scores with: "
                                                 f"tropism store clean --store {self.path.parent}")
                known.setdefault(key, value)
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
        publish(self.path, self.meta, f"{_checksum(keys, logps)}.npz", content.getvalue(), "reference")


def _checksum(keys: Any, logps: Any) -> str:
    return hashlib.blake2b(keys.tobytes() + logps.tobytes(), digest_size=16).hexdigest()


def _read(file: Path) -> dict[bytes, float] | None:
    """Entries of a file; None if its content does not have the hash in its name."""
    try:
        with np.load(file, allow_pickle=False) as content:
            keys, logps = content["keys"], content["logps"]
    except Exception:  # a corrupted zip file fails in many ways
        return None
    if keys.ndim != 2 or len(keys) != len(logps) or _checksum(keys, logps) != file.stem:
        return None
    return {key.tobytes(): float(value) for key, value in zip(keys, logps, strict=True)}


@dataclass(frozen=True, slots=True)
class StoredModel:
    """One line of `tropism store list`.

    Args:
        path: its directory.
        meta: description of the model.
        scores: number of completions with scores.
        size_bytes: size of its files.
    """

    path: Path
    meta: dict[str, Any]
    scores: int
    size_bytes: int


def entries(root: Path) -> list[StoredModel]:
    """The frozen models in a store."""
    found = []
    for path in _models(root):
        try:
            meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            meta = {}
        files = [*path.glob("*.npz"), *path.glob("*.safetensors")]
        scores = sum(len(read) for file in files if file.suffix == ".npz" and (read := _read(file)) is not None)
        best = TopKStore(root, path.name, {})
        with contextlib.suppress(ReferenceMismatchError):  # a run would raise it; a list shows all files
            best.open()
        found.append(StoredModel(path, meta, scores + len(best), sum(file.stat().st_size for file in files)))
    return found


def rendered_rows(root: Path) -> tuple[int, int]:
    """Number of stored blocks of rendered rows, and their size in bytes."""
    files = list((root / ROWS).glob("*/*.arrow"))
    return len(files), sum(file.stat().st_size for file in files)


def clean(root: Path, fingerprint: str | None = None) -> int:
    """Remove the scores of one fingerprint (or its prefix), or all scores and rendered rows. Returns the number of
    removed models."""
    removed = 0
    if fingerprint is None:
        shutil.rmtree(root / ROWS, ignore_errors=True)
    for path in _models(root):
        if fingerprint is None or path.name.startswith(fingerprint):
            try:
                shutil.rmtree(path)
            except OSError as error:
                raise OutputError(f"{path}: cannot be removed: {error.strerror}") from error
            removed += 1
    return removed


def _models(root: Path) -> list[Path]:
    """Directories of the store that hold scores. Other files in it are not touched."""
    files = (file for pattern in ("*/meta.json", "*/*.npz", "*/*.safetensors") for file in root.glob(pattern))
    return sorted({file.parent for file in files if re.fullmatch("[0-9a-f]{32}", file.parent.name)})
