"""A run directory has one owner at a time. `RUN/lock` names it.

The lock is a lease of `filelock`: a record of its owner, whose time stamp a thread renews every minute. This module
decides whether the owner of an existing lock still runs, and names the owner in errors. On this machine it looks at the
process. A process on another machine or in another container cannot be seen, so its lock expires after ten minutes
without a heartbeat.
"""

import atexit
import os
import shlex
import socket
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

GUARD, BEGUN = ".lock.guard", ".lock.begun"
"""Files that exist for the moment in which a process takes the lock, and after a kill at that moment."""

_BEAT_S = 60.0
_SILENT_S = 600.0
_RECORD_BYTES = 1024  # filelock reads no longer record
_GUARD_S = 10.0
_writers: dict[Path, threading.Thread | None] = {}
"""By directory that this process owns: the thread that writes there and may outlive the owner's block."""
_releases: dict[Path, threading.Thread] = {}
"""By directory: the thread that releases the lock after such a writer."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that a lock names.

    Args:
        pid: process number.
        started: start of the process in the kernel's clock ticks after boot; None if unknown. Tells the process from a
            later one with the same number.
        host: name of its machine.
        boot: identity of the machine's boot; empty if unknown.
        namespace: in which the number counts; empty if unknown. Containers on one machine may share its name and boot,
            and none sees the processes of another.
        since: UTC time of the lock.
        command: command line, shortened if it is long.
    """

    pid: int
    started: int | None
    host: str
    boot: str
    namespace: str
    since: str
    command: str

    @classmethod
    def of(cls, lease: SoftFileLease) -> "Owner | None":
        """The owner that the lease's file names; None for a file of another program, or an incomplete one."""
        record = lease.owner
        if record is None:
            return None
        try:
            lines = Path(lease.lock_file).read_text(encoding="utf-8").splitlines()
            ours = dict(line.split("=", 1) for line in lines[1:])
            return cls(record.pid, None if record.start is None else record.start % 2**64,
                       record.hostname.partition("?")[0], ours["boot"], ours["namespace"], ours["since"],
                       ours["command"])
        except (OSError, ValueError, KeyError):
            return None

    @property
    def visible(self) -> bool:
        """Whether this process can see whether the owner runs: same boot of the same machine, same container."""
        return (self.boot or self.host, self.namespace) == (_boot() or socket.gethostname(), _namespace())

    @property
    def runs(self) -> bool:
        """Whether a visible owner still runs."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # a process of another user
            pass
        with suppress(OSError):
            # The command's name is in brackets and may contain anything.
            state, *fields = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            return state not in "ZX" and self.started in (None, int(fields[18]))
        return True

    def gone(self, silent_s: float) -> bool:
        """Whether the lock can be taken over.

        Args:
            silent_s: seconds since the last heartbeat.
        """
        if self.visible:
            return not self.runs
        # A second machine with this name would have renewed its lock since this one was booted.
        rebooted = self.host == socket.gethostname() and self.boot != _boot() and silent_s > time.monotonic()
        return rebooted or silent_s >= _SILENT_S

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since} ({self.command})"


@contextmanager
def owned(directory: Path, say: Callable[[str], None] = lambda text: None) -> Iterator[None]:
    """Own a run directory while the block runs, and until the thread given to `lend` has ended.

    Args:
        directory: an existing directory.
        say: receives a note if the lock of a dead or silent process was taken over.

    Raises:
        OutputLockedError: if another process owns it, or may own it.
        OutputError: if the lock cannot be written.
    """
    place = directory.resolve()
    if place in _releases:  # an interrupted run of this process may still be writing
        _releases[place].join()
    lease = _take(directory / "lock", say)
    _writers[place] = None

    def release() -> None:
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


def _take(path: Path, say: Callable[[str], None]) -> SoftFileLease:
    lease = SoftFileLease(path, lease_duration=_SILENT_S, heartbeat_interval=_BEAT_S, thread_local=False)
    try:
        path.parent.stat()  # filelock would make the directory
        with _guard(path) as interrupted:
            _clear(path, lease, interrupted, say)
            lease.acquire(blocking=False)
            _sign(path)
    except Timeout as error:  # taken at this moment, on a disk where the guard does not work
        raise OutputLockedError(_refusal(path, Owner.of(lease))) from error
    except OSError as error:
        failure = OutputError.because(path, error, _RECORD_BYTES)  # before the incomplete record is removed
        with suppress(OSError):
            lease.release()
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
    if owner is not None and not owner.gone(silent_s):
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
    head = f"boot={_boot()}\nnamespace={_namespace()}\nsince={since}\ncommand=".encode()
    command = " ".join(shlex.join(sys.argv).split()).encode(errors="replace")  # in one line
    room = _RECORD_BYTES - path.stat().st_size - len(head) - 1
    with path.open("ab") as file:
        file.write(head + command[:room].decode(errors="ignore").encode() + b"\n")


def _silence_s(path: Path) -> float:
    """Seconds since the last heartbeat, by the clock of the disk: those of machines may differ."""
    with suppress(OSError), tempfile.TemporaryFile(dir=path.parent) as probe:
        return os.fstat(probe.fileno()).st_mtime - path.stat().st_mtime
    return 0.0


def _refusal(path: Path, owner: Owner | None) -> str:
    if owner is None:
        return (f"{path.parent}: its lock file does not name an owner. If no process writes to this directory, delete "
                f"{path}")
    if owner.visible:
        return (f"{path.parent}: is in use by {owner}. Wait for it to finish, stop it, or choose another directory "
                "with --output.")
    return (f"{path.parent}: is in use by {owner}. This machine cannot tell whether that process is still "
            f"running. If it is not, delete {path}, or wait: the lock expires {_SILENT_S / 60:.0f} minutes after its "
            "last heartbeat.")


def _boot() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def _namespace() -> str:
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""
