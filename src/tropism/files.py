"""Write files so that a full disk, a vanished directory or a kill leaves the previous content intact."""

import errno
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tropism.errors import OutputError

_TEMPORARY = re.compile(r"\.(.+?)\.\d+\.\d+")


def meant_by(name: str) -> str | None:
    """The name of the file that a temporary file was written for; None for any other file."""
    found = _TEMPORARY.fullmatch(name)
    return found[1] if found else None


@contextmanager
def replacing(path: Path, what: str = "cannot be written", needed_bytes: int = 0, parents: bool = False,
              ) -> Iterator[Path]:
    """Write a file under a temporary name, then rename it: readers see the old content or the new one.

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
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise OutputError.because(path, error, needed_bytes, what) from error  # before the incomplete file is removed
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes, what: str = "cannot be written", parents: bool = False) -> None:
    """Write a file with this content, as `replacing` does.

    Raises:
        OutputError: as in `replacing`.
    """
    with replacing(path, what, len(content), parents) as temporary:
        temporary.write_bytes(content)


def append_line(path: Path, line: str) -> None:
    """Append a line to a file completely or not at all.

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


def _beside(path: Path) -> Path:
    # Two containers that share a disk may have the same process number, hence the random one.
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.randbits(32)}")
