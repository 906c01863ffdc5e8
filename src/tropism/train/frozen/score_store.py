"""The content-addressed store of log-probs under frozen weights.

    STORE/<fingerprint of weights, config and numerics>/meta.json
                                                       /<hash>.npz   keys [n, 16] uint8, logps [n] float64, checksum

An entry is filed under a hash of (prompt ids, completion ids), so tokenizer, template and limits act through the
ids and a stale hit is impossible. Files are written whole under another name and then renamed: a killed run leaves
complete files only, and two runs may write side by side.
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
from tropism.train.frozen.store_files import publish
from tropism.train.frozen.topk_store import TopKStore

ROWS = "rows"
"""Directory of the store that holds rendered rows: blocks by their content (see `data.encode`)."""


class ScoreStore:
    """Scores under one fingerprint.

    Args:
        root: the store's directory.
        fingerprint: of the frozen weights, their config and the numerics.
        meta: what a person wants to know of them; written once.
    """

    def __init__(self, root: Path, fingerprint: str, meta: dict[str, Any]) -> None:
        self.path = root / fingerprint
        self.meta = meta
        self.damaged: list[Path] = []

    def load(self) -> dict[bytes, float]:
        """All whole entries. A damaged file is left out (its entries are computed again) and listed.

        Raises:
            ReferenceMismatchError: if an entry of an intact file is no log-prob (not finite, or above 0).
        """
        known: dict[bytes, float] = {}
        self.damaged = []
        for file in sorted(self.path.glob("*.npz")):
            entries = _read(file)
            if entries is None:
                self.damaged.append(file)
                continue
            for key, value in entries.items():
                if not math.isfinite(value) or value >= 0:
                    raise ReferenceMismatchError(f"{file}: holds {value} as a log-prob; remove the store with "
                                                 f"`tropism store clean --store {self.path.parent}`")
                known.setdefault(key, value)
        return known

    def add(self, entries: dict[bytes, float]) -> None:
        """Write entries as one file.

        Raises:
            OutputError: if the disk refuses.
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
    """Entries of a file whose content has the hash that its name says, else None."""
    try:
        with np.load(file, allow_pickle=False) as content:
            keys, logps = content["keys"], content["logps"]
    except Exception:  # a damaged zip fails in many ways, all of which mean the same
        return None
    if keys.ndim != 2 or len(keys) != len(logps) or _checksum(keys, logps) != file.stem:
        return None
    return {key.tobytes(): float(value) for key, value in zip(keys, logps, strict=True)}


@dataclass(frozen=True, slots=True)
class StoredModel:
    """One line of `tropism store list`.

    Args:
        path: where it lies.
        meta: what is known of the model.
        scores: completions that it scores.
        size_bytes: of its files.
    """

    path: Path
    meta: dict[str, Any]
    scores: int
    size_bytes: int


def entries(root: Path) -> list[StoredModel]:
    """What a store holds, one entry per frozen model."""
    found = []
    for path in _models(root):
        try:
            meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            meta = {}
        files = [*path.glob("*.npz"), *path.glob("*.safetensors")]
        scores = sum(len(read) for file in files if file.suffix == ".npz" and (read := _read(file)) is not None)
        best = TopKStore(root, path.name, {})
        with contextlib.suppress(ReferenceMismatchError):  # a run would say so; a list shows what is there
            best.open()
        found.append(StoredModel(path, meta, scores + len(best), sum(file.stat().st_size for file in files)))
    return found


def rendered_rows(root: Path) -> tuple[int, int]:
    """Blocks of rendered rows that are kept beside the scores, and their bytes."""
    files = list((root / ROWS).glob("*/*.arrow"))
    return len(files), sum(file.stat().st_size for file in files)


def clean(root: Path, fingerprint: str | None = None) -> int:
    """Remove the scores of one fingerprint (or its beginning), or all with the rendered rows; returns how many models
    were removed."""
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
    """Directories of the store that hold scores; whatever else lies there is not ours."""
    files = (file for pattern in ("*/meta.json", "*/*.npz", "*/*.safetensors") for file in root.glob(pattern))
    return sorted({file.parent for file in files if re.fullmatch("[0-9a-f]{32}", file.parent.name)})
