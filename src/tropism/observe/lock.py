"""A run directory has one owner at a time. `RUN/lock` names it.

The lock is a lease of `filelock`: a record of its owner, whose time stamp a thread renews every few seconds. This
module decides whether the owner of an existing lock is gone, and names the owner in errors. There is one rule. An owner
of the same boot and the same container can be seen, and is gone if it does not run. Any other owner, also one on a
machine of the same name, is gone after ten minutes without a heartbeat. An owner checks before each write that it is
still the owner.
"""

import atexit
import errno
import os
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, SoftFileLease, Timeout

from tropism.errors import OutputError, OutputLockedError
from tropism.observe.file_kinds import check_kind
from tropism.observe.owner import SILENT_S, Owner, boot, namespace

GUARD, BEGUN = ".lock.guard", ".lock.begun"
"""Files that exist for the moment in which a process takes the lock, and after a kill at that moment."""

_BEAT_S = 5.0
_WATCH_S = 10.0
"""Time in which a silent owner gets a last chance to send a heartbeat, longer than a beat: if machines stamp files by
their own clocks, a lock can look old although its owner lives."""
_RECORD_BYTES = 1024  # filelock reads no longer record
_GUARD_S = 30.0  # more than `_WATCH_S`
_writers: dict[Path, threading.Thread | None] = {}
"""By directory that this process owns: the thread that writes there and may outlive the owner's block."""
_releases: dict[Path, threading.Thread] = {}
"""By directory: the thread that releases the lock after such a writer."""
_claims: "dict[Path, _Claim]" = {}
"""By absolute path: what this process owns."""


@dataclass(frozen=True, slots=True)
class _Claim:
    """What shows that this process still owns a directory.

    Args:
        record: content of its lock.
        identity: of the directory.
        handle: of the directory, open so that no later one gets its identity; None where directories cannot be opened.
    """

    record: bytes
    identity: os.stat_result
    handle: int | None

    @property
    def place(self) -> str:
        """The present path of the directory; empty if it was deleted, or the system cannot tell."""
        with suppress(OSError):
            found = os.readlink(f"/proc/self/fd/{self.handle}")
            if os.path.isdir(found) and os.path.samestat(os.stat(found), self.identity):
                return found
        return ""


@contextmanager
def owned(directory: Path, say: Callable[[str], None] = lambda text: None) -> Iterator[None]:
    """Own a run directory while the block runs, and until the thread given to `lend` has ended.

    Args:
        directory: an existing directory.
        say: receives a note if the lock of a dead or silent process was taken over.

    Raises:
        OutputLockedError: if another process owns it, or may own it.
        OutputExistsError: if the lock is a link, a pipe or anything else than a file.
        OutputError: if the lock cannot be written.
    """
    place, path = directory.resolve(), Path(os.path.abspath(directory))
    if place in _releases:  # an interrupted run of this process may still be writing
        _releases[place].join()
    for name in ("lock", GUARD, BEGUN):
        check_kind(directory / name)
    lease = _take(directory / "lock", say)
    _writers[place] = None
    _claims[path] = claim = _claim(lease)

    def release() -> None:
        if _claims.get(path) is claim:
            del _claims[path]
            with suppress(OSError):  # in a directory that was renamed
                left = Path(claim.place or path, "lock")
                if left.parent != path and left.read_bytes() == claim.record:
                    left.unlink()
            if claim.handle is not None:
                os.close(claim.handle)
        with suppress(OSError):  # the directory may be gone
            lease.release()

    def release_after(writer: threading.Thread) -> None:
        writer.join()
        release()

    try:
        yield
    finally:
        writer = _writers.pop(place, None)
        if writer is not None and writer.is_alive():
            _releases[place] = threading.Thread(target=release_after, args=(writer,), name="release", daemon=True)
            _releases[place].start()
            atexit.register(release)  # the writer ends with this process
        else:
            release()


def lend(directory: Path, writer: threading.Thread) -> None:
    """Keep the lock of a directory that this process owns until a thread has ended. Call it before the thread starts.

    An interrupted run does not wait for the thread. The next run in this process waits, and other processes are
    refused. Does nothing if another process owns the directory, as the main process of a distributed run does.
    """
    place = directory.resolve()
    if place in _writers:
        _writers[place] = writer


def check_owned(directory: Path, file: Path | None = None) -> None:
    """Check before a write that a directory that this process took is still there and still its own: it may have been
    deleted, renamed or replaced, and a process that was suspended may have lost it. Does nothing for other directories.

    Args:
        file: to be written, for the error.

    Raises:
        OutputError: saying what became of the directory.
    """
    claim = _claims.get(Path(os.path.abspath(directory)))
    if claim is None:
        return
    what = f"{file or directory}: cannot be written"
    try:
        same = os.path.samestat(os.stat(directory), claim.identity)
        record = (directory / "lock").read_bytes() if same else b""
    except (FileNotFoundError, NotADirectoryError):
        same, record = directory.is_dir(), b""
        what += f": {os.strerror(errno.ENOENT)}" if not same else ""
    except OSError:  # the write itself will tell
        return
    if same and record == claim.record:
        return
    if not same:
        moved = claim.place
        now = (f"It is {moved} now, with everything written so far. Resume with: tropism resume "
               f"{shlex.quote(str(moved))}" if moved else
               "Start the run again, or resume it where its directory is now.")
        raise OutputError(f"{what}. The run directory {directory} was deleted, renamed or replaced during the run. "
                          f"{now}")
    owner = Owner.of(_lease(directory / "lock"))
    by = f"{owner} took it over" if owner else "its lock was removed, so another process may use it"
    raise OutputError(f"{what}. This process no longer owns {directory}: {by}. A lock expires "
                      f"{SILENT_S / 60:.0f} minutes after its last heartbeat, for example in a suspended process.")


class Ownership(ExitStack):
    """A run directory that is owned from the call of `take` until the block ends.

    Args:
        directory: run directory, created if absent.
        say: as in `owned`.
    """

    def __init__(self, directory: Path, say: Callable[[str], None]) -> None:
        super().__init__()
        self.directory = directory
        self.say = say
        self._taken = False

    def take(self) -> None:
        """Own the directory, unless it is owned already.

        Raises:
            OutputLockedError: as in `owned`.
            OutputError: if it cannot be created or written.
        """
        if self._taken:
            return
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError.because(self.directory, error) from error
        self.enter_context(owned(self.directory, self.say))
        self._taken = True


def _lease(path: Path) -> SoftFileLease:
    return SoftFileLease(path, lease_duration=SILENT_S, heartbeat_interval=_BEAT_S, thread_local=False)


def _claim(lease: SoftFileLease) -> _Claim:
    path = Path(lease.lock_file)
    try:
        record, identity = path.read_bytes(), path.parent.stat()
        handle = None
        with suppress(OSError):
            handle = os.open(path.parent, os.O_RDONLY)
        return _Claim(record, identity, handle)
    except OSError as error:
        failure = OutputError.because(path, error)
        with suppress(OSError):
            lease.release()
        raise failure from error


def _take(path: Path, say: Callable[[str], None]) -> SoftFileLease:
    lease = _lease(path)
    try:
        path.parent.stat()  # filelock would make the directory
        with _guard(path) as interrupted:
            _clear(path, lease, interrupted, say)
            lease.acquire(blocking=False)
            _sign(path)
    except Timeout as error:  # taken at this moment, on a disk where the guard does not work
        raise OutputLockedError(_refusal(path, Owner.of(lease))) from error
    except BaseException as error:  # also a signal: nobody may find a record without its owner
        failure = OutputError.because(path, error, _RECORD_BYTES)  # before the incomplete record is removed
        with suppress(OSError):
            lease.release()
        if not isinstance(error, OSError):
            raise
        raise failure from error
    return lease


@contextmanager
def _guard(path: Path) -> Iterator[bool]:
    """Let one process at a time examine and take a lock. Yields whether the last one was killed while it did.

    Without the guard two processes could find the same owner gone, and the slower one would remove the lock of the
    faster. The kernel releases the guard with the process that holds it. There is none on a disk without such locks.
    """
    guard, begun = FileLock(path.with_name(GUARD), thread_local=False, fallback_to_soft=False), path.with_name(BEGUN)
    interrupted = False
    try:
        guard.acquire(timeout=_GUARD_S)
        interrupted = begun.exists()
        begun.touch()
    except Timeout as error:
        raise OutputLockedError(f"{path.parent}: another process has been taking the lock for {_GUARD_S:.0f} seconds. "
                                "Try again, or choose another directory with --output.") from error
    except OSError:  # the lock itself is written next, and tells what is wrong with the disk
        pass
    try:
        yield interrupted
    finally:
        for left in (begun, Path(guard.lock_file)):  # the guard before its release: who waits for it makes a new one
            with suppress(OSError):
                left.unlink(missing_ok=True)
        guard.release()


def _clear(path: Path, lease: SoftFileLease, interrupted: bool, say: Callable[[str], None]) -> None:
    """Remove the lock of an owner that is gone.

    filelock itself would do so only after it has watched the lock for ten minutes, and not on network disks, which
    cannot exchange two names. It would also take the lock from a live process that was suspended for that long.

    Raises:
        OutputLockedError: if the owner may still run, or the file is not a lock of ours.
    """
    if not os.path.lexists(path):
        return
    owner, silent_s = Owner.of(lease), _silence_s(path)
    if owner is None and not interrupted:
        raise OutputLockedError(_refusal(path, None))
    if owner is not None and (not owner.gone(silent_s) or not (owner.visible or _stays_silent(path))):
        raise OutputLockedError(_refusal(path, owner))
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError.because(path, error, what="the lock of a process that is gone cannot be removed") from error
    if owner is not None:
        why = "is no longer running" if owner.visible else f"has sent no heartbeat for {silent_s / 60:.0f} minutes"
        say(f"{path.parent}: was in use by {owner}, which {why}. This run takes over.")


def _sign(path: Path) -> None:
    """Add to filelock's record what it does not hold. filelock skips lines that it does not know."""
    since = datetime.now(UTC).isoformat(timespec="seconds")
    head = f"boot={boot()}\nnamespace={namespace()}\nsince={since}\ncommand=".encode()
    command = " ".join(shlex.join(sys.argv).split()).encode(errors="replace")  # in one line
    room = _RECORD_BYTES - path.stat().st_size - len(head) - 1
    with path.open("ab") as file:
        file.write(head + command[:room].decode(errors="ignore").encode() + b"\n")


def _silence_s(path: Path) -> float:
    """Seconds since the last heartbeat, by the clock of the disk: those of machines may differ."""
    with suppress(OSError), tempfile.TemporaryFile(dir=path.parent) as probe:
        return os.fstat(probe.fileno()).st_mtime - path.stat().st_mtime
    return 0.0


def _stays_silent(path: Path) -> bool:
    """Watch the lock of a silent owner for longer than a heartbeat takes, whatever the clocks say."""
    first, until = _stamp(path), time.monotonic() + _WATCH_S
    while time.monotonic() < until:
        time.sleep(min(0.5, _WATCH_S))
        if _stamp(path) != first:
            return False
    return True


def _stamp(path: Path) -> tuple[int, int] | None:
    """Identity and time stamp. Opens the file, because a network disk may answer from memory otherwise."""
    with suppress(OSError), path.open("rb") as file:
        now = os.fstat(file.fileno())
        return now.st_ino, now.st_mtime_ns
    return None


def _refusal(path: Path, owner: Owner | None) -> str:
    if owner is None:
        return (f"{path.parent}: its lock file does not name an owner. If no process writes to this directory, delete "
                f"{path}")
    if owner.visible:
        return (f"{path.parent}: is in use by {owner}. Wait for it to finish, stop it, or choose another directory "
                "with --output.")
    return (f"{path.parent}: is in use by {owner}. This machine cannot tell whether that process is still "
            f"running. If it is not, delete {path}, or wait: the lock expires {SILENT_S / 60:.0f} minutes after its "
            "last heartbeat.")
