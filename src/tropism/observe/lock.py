"""A run directory has one owner at a time: `RUN/lock` says who.

The file is written under another name and gets its own by an operation that only one process can win, so it always says
whose it is. A process that was killed leaves it behind; the next one sees that its owner is gone, and takes over. Of a
process on another machine, or in another container, nobody can see that: an owner touches its lock every minute, and
one that has not done so for long counts as gone.
"""

import atexit
import errno
import fcntl
import json
import os
import shlex
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from tropism.errors import OutputError, OutputLockedError
from tropism.observe.files import temporary_of

_PATIENCE_S = 1.0  # a lock without content has just been made where there are no links; its owner writes it at once
_NO_LINKS = {errno.EPERM, errno.EACCES, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK}
_BEAT_S = 60.0
_SILENT_S = 600.0
_writers: dict[Path, threading.Thread | None] = {}
"""By directory that this process owns: what writes there, and may outlive its owner's block."""
_releases: dict[Path, threading.Thread] = {}
"""By directory: what gives up the lock after such a writer."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A process that owns a run directory.

    Args:
        host: its machine.
        boot: identity of the machine's boot; empty where it has none.
        pid: process number.
        started: when the process began, in the kernel's clock ticks after boot; empty where that is not known. A
            number that another process has got since does not have it.
        since: UTC time of the lock.
        command: what it runs.
        namespace: in which its number counts; empty where there is none, or an earlier release wrote the lock.
            Containers on one machine may have its name and its boot, and none sees another's processes.
    """

    host: str
    boot: str
    pid: int
    started: str
    since: str
    command: str
    namespace: str = ""

    @classmethod
    def here(cls) -> "Owner":
        """This process."""
        return cls(socket.gethostname(), _boot(), os.getpid(), _started(os.getpid()),
                   datetime.now(UTC).isoformat(timespec="seconds"), shlex.join(sys.argv), _namespace())

    @property
    def elsewhere(self) -> bool:
        """Whether it runs on another machine, or in another container of this one: nobody can look from here."""
        if self.host != socket.gethostname():
            return True
        return self.boot == _boot() and self.namespace not in ("", _namespace())

    @property
    def gone(self) -> bool:
        """Whether it is sure that the process does not run any more."""
        if self.elsewhere:
            return False
        if self.boot != _boot():
            return True
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:  # somebody else's process: alive
            pass
        return self.started != _started(self.pid)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since} ({self.command})"


@contextmanager
def owned(directory: Path, say: Callable[[str], None] = lambda text: None) -> Iterator[None]:
    """Own a run directory while the block runs, and until the thread that `lend` named has ended.

    Args:
        directory: that exists.
        say: takes the note that a lock of a process that is gone, or silent elsewhere, was taken over.

    Raises:
        OutputLockedError: if another process owns it, or may own it.
        OutputError: if the lock cannot be written.
    """
    path, place = directory / "lock", directory.resolve()
    if place in _releases:  # this process has left in a hurry, and may still write
        _releases[place].join()
    mine = Owner.here()
    _acquire(path, mine, say)
    _writers[place] = None
    ended = threading.Event()
    threading.Thread(target=_beat, args=(path, mine, ended), name="lock", daemon=True).start()

    def release() -> None:
        ended.set()
        with suppress(OSError):  # a directory that has vanished holds no lock
            if _read(path) == mine:
                path.unlink()

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
    """Let a thread write in a directory that this process owns: until it ends, nobody else owns it. Call it before the
    thread starts; one that never does holds nothing.

    Whoever is interrupted does not wait for it; the next run in this process does, and others are refused. Of a
    directory that another process owns, the main one of a run, nothing is noted.
    """
    place = directory.resolve()
    if place in _writers:
        _writers[place] = writer


class Ownership(ExitStack):
    """A run directory that is owned from when it is taken until the block ends.

    Args:
        directory: of the run; made if it is not there.
        say: as `owned` says.
    """

    def __init__(self, directory: Path, say: Callable[[str], None]) -> None:
        super().__init__()
        self.directory = directory
        self.say = say
        self._taken = False

    def take(self) -> None:
        """Own it, if it is not owned already.

        Raises:
            OutputLockedError: as `owned` says.
            OutputError: if it cannot be made or written.
        """
        if self._taken:
            return
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError.because(self.directory, error) from error
        self.enter_context(owned(self.directory, self.say))
        self._taken = True


def _acquire(path: Path, mine: Owner, say: Callable[[str], None]) -> None:
    content = (json.dumps(asdict(mine), indent=2, ensure_ascii=False) + "\n").encode()
    while True:
        try:
            if not path.exists() and _make(path, content):
                return
        except OSError as error:
            raise OutputError.because(path, error, len(content)) from error
        owner = _settled(path)
        if owner is None:
            continue  # released since
        silent_s = _silence_s(path) if owner.elsewhere else 0.0
        if not owner.gone and silent_s < _SILENT_S:
            raise OutputLockedError(_refusal(path, owner))
        if _clear(path, owner):
            how = f"and has given no sign of life for {silent_s / 60:.0f} minutes" if silent_s else "which is gone"
            say(f"{path.parent}: was left by {owner}, {how}; this run takes over")


def _make(path: Path, content: bytes) -> bool:
    """Make the lock with its content, unless somebody else does. A kill at any moment leaves it whole or absent.

    Raises:
        OSError: if the disk refuses; nothing is left then.
    """
    temporary = temporary_of(path)
    try:
        temporary.unlink(missing_ok=True)  # of a process that was killed and had our numbers
        _write_new(temporary, content)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return temporary.stat().st_nlink == 2  # our own: a server's first answer may be lost on its way
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            _write_new(path, content)
        return True
    except FileExistsError:
        return False
    except FileNotFoundError:
        if not path.parent.exists():
            raise
        return False  # whoever owns the directory has tidied up
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _write_new(path: Path, content: bytes) -> None:
    """Write a file that is not there yet, whole or not at all.

    Raises:
        OSError: if it is there, or the disk refuses.
    """
    with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644), "wb") as file:
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            path.unlink()  # a lock that does not say whose it is would keep everybody out
            raise


def _beat(path: Path, mine: Owner, ended: threading.Event) -> None:
    """Touch the lock until the run ends. A thread does it: no step, pass or save is too long for it."""
    while not ended.wait(_BEAT_S):
        with suppress(OSError), path.open("rb") as held:  # of that name there may be another file at any moment
            if _owner_in(held.read()) == mine:
                os.utime(held.fileno())


def _silence_s(path: Path) -> float:
    """Since when nobody has touched a lock, by the clock of the disk on which it lies: machines' own may differ."""
    with suppress(OSError), tempfile.TemporaryFile(dir=path.parent) as probe:
        return os.fstat(probe.fileno()).st_mtime - path.stat().st_mtime
    return 0.0


def _refusal(path: Path, owner: Owner) -> str:
    if owner.elsewhere:
        return (f"{path.parent}: is in use by {owner}. From here nobody can see whether that process still runs; if it "
                f"is gone, remove {path}, or wait: {_SILENT_S / 60:.0f} minutes after its last sign of life the next "
                "run takes over")
    return f"{path.parent}: is in use by {owner}. Wait for it or end it, or write to another directory with --output"


def _settled(path: Path) -> Owner | None:
    """The owner, once it has been written down; None if the lock has been released.

    Raises:
        OutputLockedError: for a file that is no lock of ours.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while path.exists():
        owner = _read(path)
        if owner is not None:
            return owner
        if time.monotonic() > deadline:
            raise OutputLockedError(f"{path.parent}: holds a lock that does not say whose it is; if no process writes "
                                    f"there, remove {path}")
        time.sleep(0.02)
    return None


def _read(path: Path) -> Owner | None:
    try:
        return _owner_in(path.read_bytes())
    except OSError:
        return None


def _owner_in(content: bytes) -> Owner | None:
    try:
        return Owner(**json.loads(content))
    except (ValueError, TypeError):
        return None


def _clear(path: Path, owner: Owner) -> bool:
    """Remove a lock whose owner is gone, unless another process was faster and the lock is its own by now."""
    try:
        with path.open("rb") as held:
            with suppress(OSError):  # a file system without such locks: the window is a few microseconds
                fcntl.flock(held, fcntl.LOCK_EX)
            if os.fstat(held.fileno()).st_ino != path.stat().st_ino or _owner_in(held.read()) != owner:
                return False
            path.unlink()
            return True
    except FileNotFoundError:
        return False
    except OSError as error:
        raise OutputError.because(path, error, what="the lock of a process that is gone cannot be removed") from error


def _boot() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def _namespace() -> str:
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def _started(pid: int) -> str:
    """When a process began; empty where it cannot be told; `ended` for one that only waits to be collected."""
    with suppress(OSError):
        # The name of the command stands in brackets and may hold anything.
        state, *fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return "ended" if state in "ZX" else fields[18]
    return ""
