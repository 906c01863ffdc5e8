"""Directories that a run writes: free space, and whether a file can be written."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tropism.errors import first_line
from tropism.store import size_text
from tropism.train.options import default_root

_LITTLE = 2 * 10**9  # bytes: a small model with one checkpoint
_SHARED = Path("/dev/shm")  # noqa: S108  (looked at, not written)
_LITTLE_SHARED = 2**30  # bytes; Docker gives 64 MiB


def places(store: Path | None, faults: list[str], notes: list[str]) -> dict[str, dict[str, Any]]:
    """Path, free bytes and usability of each directory.

    Args:
        store: the cache directory; None for the default.
        faults: gets what a run cannot do without.
        notes: gets what may matter.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, where, needed, remedy in _wanted(store):
        try:
            path = Path(os.path.abspath(where().expanduser()))
        except (OSError, RuntimeError) as error:
            (faults if needed else notes).append(f"{name}: no directory: {first_line(error)}. {remedy}.")
            found[name] = {"path": None, "writable": False, "free_bytes": None}
            continue
        there = next(place for place in (path, *path.parents) if os.path.lexists(place))
        why, free = _refusal(there), _free(there)
        found[name] = {"path": str(path), "writable": why is None, "free_bytes": free}
        if why is not None:
            (faults if needed else notes).append(f"{name}: {path} cannot be written: {why}. {remedy}.")
        elif free is not None and free < _LITTLE:
            notes.append(f"{name}: {path} has only {size_text(free)} free. {remedy}, or free space.")
    return found


def _wanted(store: Path | None) -> Iterator[tuple[str, Callable[[], Path], bool, str]]:
    """Name, place, whether every run needs it, and where to choose another one."""
    yield "store", lambda: store or default_root(), True, "Choose another with --store or TROPISM_STORE"
    yield "temporary files", lambda: Path(tempfile.gettempdir()), True, "Choose another with TMPDIR"
    yield "working directory", Path.cwd, False, "Choose another with --output"
    yield "Hugging Face cache", _hub_cache, False, "Choose another with HF_HOME"


def _hub_cache() -> Path:
    """Where huggingface_hub keeps downloads, by its own rule."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(os.path.expandvars(named or os.path.join(home, "hub")))


def _refusal(directory: Path) -> str | None:
    """Why no file can be written to a directory; None if one was. It has no name, so nothing is left."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(4096))
            file.flush()
    except OSError as error:
        return error.strerror or first_line(error)
    return None


def _free(directory: Path) -> int | None:
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return None


def shared_memory(processes: int, notes: list[str]) -> dict[str, int | None]:
    """Bytes of /dev/shm, through which processes on one machine exchange data.

    Args:
        processes: that a run could have: GPUs.
        notes: gets a remedy if there is little for several processes.
    """
    try:
        usage = shutil.disk_usage(_SHARED)
    except OSError:
        return {"total_bytes": None, "free_bytes": None}
    if processes > 1 and usage.free < _LITTLE_SHARED:
        notes.append(f"{_SHARED} has only {size_text(usage.free)} free, and NCCL needs it to connect GPUs. In a "
                     "container, raise it: docker run --shm-size 8g")
    return {"total_bytes": usage.total, "free_bytes": usage.free}
