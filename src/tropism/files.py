"""Write files so that a full disk, a vanished directory or a kill leaves the previous content intact.

`replacing` is for files of our own directories: the name itself is replaced, also where it is a link. `output` is for
names that a user chose: links are followed, and devices, pipes and open descriptors are written through.
"""

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from tropism.errors import OutputError, TropismError

_TEMPORARY = re.compile(r"\.(.+?)\.\d+\.\d+")
_DESCRIPTOR = re.compile(rf"/(?:dev|proc/(?:self|thread-self|{os.getpid()}))/fd/(\d+)")
_STANDARD = {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}


def meant_by(name: str) -> str | None:
    """The name of the file that a temporary file was written for; None for any other file."""
    found = _TEMPORARY.fullmatch(name)
    return found[1] if found else None


@contextmanager
def replacing(path: Path, what: str = "cannot be written", needed_bytes: int = 0, parents: bool = False,
              ) -> Iterator[Path]:
    """Write a file under a temporary name, then rename it: readers see the old content or the new one. An existing
    file keeps its mode, owner and extended attributes.

    Args:
        path: of the file.
        what: what failed, for the error.
        needed_bytes: size of the file; 0 if unknown.
        parents: create missing parent directories.

    Yields:
        The path to write to, in the same directory. If the block fails, the file there is removed.

    Raises:
        OutputError: with the reason; on a full disk with the bytes needed and free.
    """
    temporary = _beside(path)
    try:
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        before = _existing(path)
        if before is not None:  # nobody reads the new content who could not read the old one
            os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        yield temporary
        if before is not None:
            _look_like(temporary, path, before)
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)  # the needed bytes are those of the whole file, so the free ones too
        raise OutputError.because(path, error, needed_bytes and bytes_on_disk([needed_bytes], path), what) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextmanager
def system_errors() -> Iterator[None]:
    """Raise `OSError` for what a library in Rust raises when the system refuses: a class of its own or `Exception`.
    Errors of Tropism, which may quote one, pass unchanged."""
    try:
        yield
    except Exception as error:
        found = re.search(r"\(os error (\d+)\)", str(error))
        if isinstance(error, OSError | TropismError) or found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1]))) from error


def _existing(path: Path) -> os.stat_result | None:
    """Status of the file that is replaced; None for a new name or a link.

    Raises:
        OSError: if it is no file.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(found.st_mode):
        return None
    if not stat.S_ISREG(found.st_mode):
        number = errno.EISDIR if stat.S_ISDIR(found.st_mode) else errno.EEXIST
        raise OSError(number, "is a directory" if stat.S_ISDIR(found.st_mode) else "exists and is not a regular file")
    return found


def _look_like(temporary: Path, path: Path, before: os.stat_result) -> None:
    """Give a file the mode, owner and extended attributes of the one that it replaces."""
    made = temporary.stat()
    if (made.st_uid, made.st_gid) != (before.st_uid, before.st_gid):
        with suppress(PermissionError):  # as any tool that renames: the file then belongs to the one who writes
            os.chown(temporary, before.st_uid, before.st_gid)
    shutil.copystat(path, temporary)
    os.utime(temporary)


# --- names that a user chose ------------------------------------------------------------------------------------------


@contextmanager
def output(path: Path, needed_bytes: int = 0) -> Iterator[Path]:
    """Write what a user asked for under a name. A regular file, and the one that a symbolic link points to, is
    replaced as by `replacing`. Into a device, a pipe or an open descriptor (`/dev/stdout`, `/dev/fd/3`) the content is
    copied at the end of the block; a named pipe then waits for its reader, and one that has read enough is no error. So
    it is into a file of another user, or in a directory that cannot be written: replaced, it would change its owner.
    Creates missing directories.

    Args:
        needed_bytes: size of the file; 0 if unknown.

    Yields:
        The path to write to.

    Raises:
        OutputError: with the reason.
    """
    if not is_stream(path) and not _must_stay(target := _target(path)):
        with replacing(target, needed_bytes=needed_bytes, parents=True) as temporary:
            yield temporary
        return
    try:
        with tempfile.TemporaryDirectory() as directory:
            content = Path(directory) / "content"
            yield content
            with suppress(BrokenPipeError), content.open("rb") as source, _opened(path) as stream:
                shutil.copyfileobj(source, stream)
    except OSError as error:
        raise OutputError.because(path, error) from error


def check_output(path: Path) -> None:
    """Check before the work that `output` can write there. Creates the directory of a file.

    Raises:
        OutputError: if it cannot.
    """
    try:
        if is_stream(path):
            _check_stream(path)
            return
        target = _target(path)
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if target.exists() and not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise OutputError.because(path, error) from error
    if not _must_stay(target):
        check_writable(target.parent, path)


def _check_stream(path: Path) -> None:
    """Check what can be known without opening a stream: that has effects, and waits for the reader of a named pipe.

    Raises:
        OSError: if it cannot be written.
    """
    number = descriptor(path)
    if number is None:
        if stat.S_ISSOCK(path.stat().st_mode):
            raise OSError(errno.ENXIO, "it is a socket")
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return
    standard = (sys.__stdin__, sys.__stdout__, sys.__stderr__)
    if number < len(standard) and standard[number] is None:  # closed at the start; the number may be another file's now
        raise OSError(errno.EBADF, "it is closed")
    try:
        mode = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE
    except (OSError, OverflowError):
        raise OSError(errno.EBADF, "it is closed") from None
    if mode == os.O_RDONLY:
        raise OSError(errno.EBADF, "it is open only for reading")


def is_stream(path: Path) -> bool:
    """Whether a name is a device, pipe, socket or open descriptor: it is written through, and holds nothing to keep.

    Raises:
        OutputError: for symbolic links in a circle, and names that the system refuses.
    """
    if descriptor(path) is not None:
        return True
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        raise OutputError.because(path, error) from error
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def descriptor(path: Path) -> int | None:
    """The open descriptor of this process that a name stands for, such as 1 for `/dev/stdout`; else None."""
    name = os.path.abspath(path)
    for _ in range(40):  # as many links as Linux follows
        if name in _STANDARD:
            return _STANDARD[name]
        if found := _DESCRIPTOR.fullmatch(name):
            return int(found[1])
        try:
            name = os.path.abspath(os.path.join(os.path.dirname(name), os.readlink(name)))
        except (OSError, ValueError):
            return None
    return None


def _opened(path: Path) -> BinaryIO:
    """A stream, for writing. A descriptor is shared, not opened again: that would begin at the start of its file."""
    _check_stream(path)
    number = descriptor(path)
    if number is None:
        return path.open("wb")
    for printed in (sys.stdout, sys.stderr):
        if printed is not None:
            printed.flush()  # what was said before stands before
    return os.fdopen(os.dup(number), "wb")


def _must_stay(target: Path) -> bool:
    """Whether a file can be written but not replaced: it belongs to somebody else, or the directory does."""
    try:
        owner = target.stat().st_uid
    except OSError:
        return False
    return os.geteuid() not in (0, owner) or not os.access(target.parent, os.W_OK)


def _target(path: Path) -> Path:
    """The file that a name means: symbolic links are followed, also to a file that does not exist yet."""
    return Path(os.path.realpath(path))


def bytes_on_disk(sizes: Iterable[int], place: Path) -> int:
    """Space that files of these sizes take: whole blocks, and a block for the entry of each.

    Args:
        place: on the disk; need not exist.
    """
    block = 4096
    with suppress(OSError):
        block = os.statvfs(_that_exists(place)).f_frsize or block
    return sum((-(-size // block) + 1) * block for size in sizes)


def check_space(place: Path, needed_bytes: int, what: str) -> None:
    """Check before the work that a result fits on the disk. Both figures are those of this moment.

    Args:
        place: on the disk; need not exist.
        needed_bytes: as of `bytes_on_disk`.
        what: `not enough disk space for the model`, for the error.

    Raises:
        OutputError: with the bytes that are needed and free.
    """
    free = free_bytes(place)
    if free < needed_bytes:
        raise OutputError(f"{place}: {what}: {needed_bytes:,} bytes are needed, {free:,} are free")


def free_bytes(place: Path) -> int:
    """Free space on the disk of a path, which need not exist."""
    return shutil.disk_usage(_that_exists(place)).free


def _that_exists(place: Path) -> Path:
    return next(parent for parent in (place.absolute(), *place.absolute().parents) if parent.exists())


def write_whole(path: Path, content: bytes, what: str = "cannot be written", parents: bool = False) -> None:
    """Write a file with this content, as `replacing` does.

    Raises:
        OutputError: as in `replacing`.
    """
    with replacing(path, what, len(content), parents) as temporary:
        temporary.write_bytes(content)


def append_line(path: Path, line: str, sync: bool = False) -> None:
    """Append a line to a file completely or not at all.

    Args:
        sync: return only when it is on the disk.

    Raises:
        OutputError: as in `replacing`.
    """
    content = (line + "\n").encode()
    size = None
    try:
        with path.open("ab", buffering=0) as file:
            size = file.tell()
            if file.write(content) != len(content):  # a disk that fills up accepts a part without an error
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if sync:
                os.fsync(file.fileno())
    except OSError as error:
        failure = OutputError.because(path, error, len(content))
        if size is not None:
            with suppress(OSError):
                os.truncate(path, size)
        raise failure from error


def check_writable(directory: Path, file: Path | None = None, what: str = "cannot be written", advice: str = "",
                   ) -> None:
    """Check that files can be written to a directory, before time is spent on their content. Creates the directory.

    Args:
        directory: to check.
        file: named by the error in place of the directory.
        what: what failed, for the error.
        advice: last sentence of the error, without its full stop.

    Raises:
        OutputError: if they cannot.
    """
    probe = _beside(directory / "writable")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        reason = str(OutputError.because(file or directory, error, what=what))
        raise OutputError(f"{reason}. {advice}." if advice else reason) from error


def check_creatable(directory: Path, what: str = "cannot be written") -> None:
    """Check, without creating anything, that a directory can be created or written.

    Args:
        directory: to check.
        what: what failed, for the error.

    Raises:
        OutputError: if not: there is a file in its place or above it, or permissions forbid it.
    """
    found = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    number = errno.ENOTDIR if not found.is_dir() else 0 if os.access(found, os.W_OK | os.X_OK) else errno.EACCES
    if number:
        raise OutputError.because(directory, OSError(number, os.strerror(number)), what=what)


def _beside(path: Path) -> Path:
    # Two containers that share a disk may have the same process number, hence the random one.
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.randbits(32)}")
