"""The directory that runs share: who can write to it, what is in use, and what is removed first.

    STORE/<hash>/        scores of a frozen model, with a meta.json (see `train.frozen`)
    STORE/rows/<hash>/   rendered rows (see `data.tokenization.encode`)

The time stamp of a file is its last use. While a process uses a directory, it keeps a lease there: an empty file with a
heartbeat. What it has used since it took the lease is needed, also for processes on other machines.
"""

import atexit
import errno
import os
import re
import secrets
import shlex
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tropism.errors import OutputError
from tropism.files import meant_by, replacing

ROWS = "rows"
"""Directory of the store that holds rendered rows."""
META = "meta.json"
"""File that describes a directory of scores for people."""

_SUFFIXES = (".npz", ".safetensors", ".arrow")
_HASH = re.compile("[0-9a-f]{32}")
_LEASE = "lease"
_BEAT_S = 60.0
_SILENT_S = 600.0
_ABANDONED_S = 3600.0  # writing a file takes seconds
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)

_leases: dict[Path, Path] = {}
"""By directory that this process uses: its lease."""
_guard = threading.Lock()
_heart: threading.Thread | None = None


# --- writing ----------------------------------------------------------------------------------------------------------


def make(directory: Path) -> None:
    """Create a directory and those above it. Other users can write to it only if it is part of a store that they can
    write to; the umask decides about reading.

    Raises:
        OSError: if it cannot be created.
    """
    for path in reversed([path for path in (directory, *directory.parents) if not path.exists()]):
        path.mkdir(exist_ok=True)
        inside = path.name == ROWS or _HASH.fullmatch(path.name)
        shared = path.parent.stat().st_mode & _OTHERS if inside else 0
        with suppress(OSError):  # some disks have no permissions
            path.chmod(stat.S_IMODE(path.stat().st_mode) & ~_OTHERS | shared)


def write(path: Path, content: bytes, what: str = "cannot be written") -> None:
    """Write a file of the store, as `files.replacing` does. Those who can write to its directory can write to it.

    Raises:
        OutputError: as in `files.replacing`.
    """
    for left in (2, 1, 0):
        try:
            with replacing(path, what, len(content)) as temporary:
                make(path.parent)
                temporary.write_bytes(content)
                with suppress(OSError):
                    temporary.chmod(stat.S_IMODE(temporary.stat().st_mode) & ~_OTHERS
                                    | path.parent.stat().st_mode & _OTHERS)
        except OutputError as error:
            if not left or not isinstance(error.__cause__, FileNotFoundError):
                raise  # otherwise another run has cleaned up at this moment
        else:
            return


def is_read_only(error: OutputError) -> bool:
    """Whether a file could not be written because this user must not write there."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in _READ_ONLY


# --- reading ----------------------------------------------------------------------------------------------------------


def is_file(path: Path) -> bool:
    """Whether a path is a regular file. Opening a pipe would wait, and a device may have no end."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):
        return False


def exists(path: Path) -> bool:
    """Whether anything has this name, if only a link that leads nowhere."""
    return os.path.lexists(path)


def use(directory: Path) -> None:
    """Keep a lease in a directory until `release`, or until this process ends. Creates the directory. Without the
    right to write there is no lease."""
    global _heart
    with _guard, suppress(OSError):
        if directory in _leases:
            return
        make(directory)
        lease = directory / f".{_LEASE}.{os.getpid()}.{secrets.randbits(32)}"
        lease.touch()
        lease.write_text(str(lease.stat().st_mtime_ns), encoding="ascii")
        _leases[directory] = lease
        if _heart is None or not _heart.is_alive():  # there is none in a forked process
            _heart = threading.Thread(target=_renew, name="store", daemon=True)
            _heart.start()


def release() -> None:
    """Give up the leases of this process. A directory in which nothing was stored is removed."""
    with _guard:
        for directory, lease in _leases.items():
            with suppress(OSError):
                lease.unlink(missing_ok=True)
                directory.rmdir()
        _leases.clear()


atexit.register(release)


def _renew() -> None:
    while True:
        time.sleep(_BEAT_S)
        with _guard:
            for lease in _leases.values():
                touch(lease)


def touch(path: Path) -> None:
    """Record that a file is used now, if this user may."""
    with suppress(OSError):
        os.utime(path)


# --- listing and removing ---------------------------------------------------------------------------------------------


def directories(root: Path) -> list[Path]:
    """The directories of scores, then those of rendered rows. A link in place of such a directory is listed too, but
    nothing that lies behind a link."""
    found: list[Path] = []
    for parent in (root, *(() if (root / ROWS).is_symlink() else (root / ROWS,))):
        with suppress(OSError), os.scandir(parent) as entries:
            found += sorted(Path(entry.path) for entry in entries if _HASH.fullmatch(entry.name) and entry.is_dir())
    return found


def files(directory: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """The store's files in a directory. Links, pipes, directories and other files are skipped."""
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if _is_ours(entry.name):
                with suppress(OSError):
                    facts = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(facts.st_mode):
                        yield Path(entry.path), facts


def _is_ours(name: str) -> bool:
    name = meant_by(name) or name
    return name in (META, _LEASE) or name.endswith(_SUFFIXES)


def size_text(size_bytes: int) -> str:
    """A size for people."""
    if size_bytes < 2**20:
        return f"{size_bytes / 2**10:,.0f} KiB"
    return f"{size_bytes / 2**20:,.1f} MiB" if size_bytes < 2**30 else f"{size_bytes / 2**30:,.1f} GiB"


def remove(directory: Path) -> None:
    """Remove the store's files in a directory, and the directory if nothing else is in it. Follows no link.

    Raises:
        OutputError: if something cannot be removed.
    """
    try:
        if directory.is_symlink():
            directory.unlink()
            return
        for name in os.listdir(directory):
            path = directory / name
            if _is_ours(name) and (path.is_symlink() or not path.is_dir()):
                path.unlink(missing_ok=True)
        if not os.listdir(directory):
            directory.rmdir()
    except OSError as error:
        raise OutputError.because(directory, error, what="cannot be removed") from error


def discard(path: Path) -> None:
    """Remove a damaged file, unless it is one that only other users can read."""
    with suppress(OSError):
        if not is_file(path) or os.access(path, os.R_OK):
            path.unlink()


@dataclass(frozen=True, slots=True)
class Tidied:
    """What was removed from a store.

    Args:
        files, size_bytes: that were used least recently.
        left_bytes: size of the remaining files.
    """

    files: int
    size_bytes: int
    left_bytes: int


def tidy(root: Path, limit_bytes: int | None) -> Tidied:
    """Remove incomplete files of processes that were killed. Then remove the files that were used least recently until
    the store is no larger than its limit. Files that a process needs are kept.

    Args:
        limit_bytes: None for no limit.
    """
    total, unused = 0, []
    now = _now(root)
    for directory in directories(root):
        if now is None or directory.is_symlink():
            continue
        listed = [(path, facts, meant_by(path.name)) for path, facts in files(directory)]
        needed_since = min((since for path, facts, name in listed if name == _LEASE
                            if (since := _lease_began(path, now - facts.st_mtime)) is not None), default=None)
        for path, facts, name in listed:
            if name is not None:
                if now - facts.st_mtime > _ABANDONED_S or (name != _LEASE and _writer_is_gone(path.name)):
                    _unlink(path)
                continue
            total += facts.st_size
            if path.name != META and (needed_since is None or facts.st_mtime_ns < needed_since):
                unused.append((facts.st_mtime_ns, path, facts.st_size))
    removed = freed = 0
    for _, path, size in sorted(unused):
        if limit_bytes is None or total - freed <= limit_bytes:
            break
        if _unlink(path):
            removed, freed = removed + 1, freed + size
    return Tidied(removed, freed, total - freed)


def _lease_began(lease: Path, silent_s: float) -> int | None:
    """Time of a lease in nanoseconds; None if its owner has been silent for too long."""
    if silent_s > _SILENT_S:
        return None
    try:
        with lease.open("rb") as file:
            return int(file.read(32))
    except (OSError, ValueError):  # it is being written
        return 0


def _unlink(path: Path) -> bool:
    """Remove a file, and its directory with the last one. False if it is gone, or belongs to another user."""
    try:
        path.unlink()
    except OSError:
        return False
    with suppress(OSError):
        if all(other.name == META for other, _ in files(path.parent)):
            (path.parent / META).unlink(missing_ok=True)
            path.parent.rmdir()
    return True


def _now(root: Path) -> float | None:
    """The time by the clock of the disk; None if the store cannot be written."""
    try:
        os.utime(root)
        return root.stat().st_mtime
    except OSError:
        return None


def _writer_is_gone(name: str) -> bool:
    """Whether no process here has the number in the name of a temporary file. One on another machine writes again."""
    try:
        os.kill(int(name.split(".")[-2]), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError, IndexError, OverflowError):
        pass
    return False


# --- other users ------------------------------------------------------------------------------------------------------


def exposure(root: Path) -> str | None:
    """How other users can change what a store holds, and what to do; None if they cannot."""
    if not hasattr(os, "geteuid"):
        return None
    own = "use --store with a directory of your own"
    for path, facts in _with_facts(_inside(root)):
        if facts.st_mode & _OTHERS:
            return (f"{path}: other users can write to it and change the scores and rows that training uses. "
                    f"Run chmod -R go-w {shlex.quote(str(root))}, or {own}.")
        if _is_foreign(facts):
            return (f"{path}: belongs to {_owner(path)}, who can change the scores and rows that training uses. "
                    f"Unless you trust that user, {own}.")
    for path, facts in _with_facts(dict.fromkeys((*root.resolve().parents, *root.absolute().parents))):
        if facts.st_mode & _OTHERS and not facts.st_mode & stat.S_ISVTX:
            return (f"{path}: other users can write to it and replace the store {root}. "
                    f"Run chmod go-w {shlex.quote(str(path))}, or {own}.")
        if _is_foreign(facts):
            return (f"{path}: belongs to {_owner(path)}, who can replace the store {root}. Unless you trust that user, "
                    f"{own}.")
    return None


def _inside(root: Path) -> Iterator[Path]:
    yield from (root, root / ROWS)
    for directory in directories(root):
        yield directory
        yield from (path for path, _ in files(directory) if meant_by(path.name) is None)


def _with_facts(paths: Iterable[Path]) -> Iterator[tuple[Path, os.stat_result]]:
    for path in paths:
        with suppress(OSError):
            yield path, path.stat()


def _is_foreign(facts: os.stat_result) -> bool:
    return facts.st_uid not in (0, os.geteuid())


def _owner(path: Path) -> str:
    try:
        return f"user {path.owner()}"
    except (KeyError, OSError):
        return "another user"
