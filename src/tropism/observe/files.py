"""Files written so that a full disk, a vanished directory or a kill leaves what was there as it was."""

import errno
import os
import re
import threading
from contextlib import suppress
from pathlib import Path

from tropism.errors import OutputError

_TEMPORARY = re.compile(r"\.(.+?)\.\d+(?:\.\d+)?")


def temporary_of(path: Path) -> Path:
    """Where this thread writes a file before it gets its name, in the same directory."""
    return path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")


def meant_by(name: str) -> str | None:
    """The name of the file that a temporary one was to become, also by releases that gave the process only; None for
    the name of anything else."""
    found = _TEMPORARY.fullmatch(name)
    return found[1] if found else None


def write_whole(path: Path, content: bytes, what: str = "cannot be written") -> None:
    """Write a file under another name, then rename it: readers see the old content or the new.

    Args:
        what: happened if the disk refuses, for the error.

    Raises:
        OutputError: saying why; where something did not fit, how much it needs and how much is free.
    """
    temporary = temporary_of(path)
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:
        failure = OutputError.because(path, error, len(content), what)  # before the half that was written is removed
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise failure from error


def append_line(path: Path, line: str) -> None:
    """Add a line to a file, or nothing: lines stay whole.

    Raises:
        OutputError: as `write_whole` says.
    """
    content = (line + "\n").encode()
    size = None
    try:
        with path.open("ab", buffering=0) as file:
            size = file.tell()
            if file.write(content) != len(content):  # a disk that fills up takes a part without complaint
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        failure = OutputError.because(path, error, len(content))
        if size is not None:
            with suppress(OSError):
                os.truncate(path, size)
        raise failure from error
