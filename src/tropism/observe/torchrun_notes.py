"""Notes between processes that one torchrun started on a machine, in the directory that torchrun creates.

torchrun names a file for each process in `DIRECTORY/attempt_K/LOCAL_RANK`, where K counts restarts. Each torchrun has
its own directory and does not delete it. Without torchrun there are no notes.
"""

import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_STOPPED = "tropism-stopped"


def say_once(text: str, say: Callable[[str], None]) -> None:
    """Print a message unless another process of this attempt has printed the same to the same console.

    A process with an own log file, as with torchrun's --redirects, prints there. Repeated messages of one process are
    printed, and so is everything if the notes cannot be read.
    """
    try:
        directory, console = _directory(), os.fstat(2)
        if directory is None:
            raise FileNotFoundError
        rank = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent.name
        line = f"{console.st_dev} {console.st_ino} {text!r}"
        with (directory / "tropism-said").open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # a killed process releases it
            file.seek(0)
            said = [one.partition(" ") for one in file.read().decode().split("\n")]
            if any(what == line and who != rank for who, _, what in said):
                return
            say(text)
            file.write(f"{rank} {line}\n".encode())
    except OSError:
        say(text)


def note_stop() -> None:
    """Record that this attempt was stopped on purpose."""
    directory = _directory()
    if directory is not None:
        with suppress(OSError):
            (directory / _STOPPED).touch()


def follows_stop() -> bool:
    """Whether torchrun restarted the processes after they stopped on purpose: it treats every exit code but 0 as a
    failure."""
    directory, count = _directory(), _count()
    return directory is not None and count > 0 and (directory.parent / f"attempt_{count - 1}" / _STOPPED).exists()


def _count() -> int:
    value = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return int(value) if value.isdecimal() else 0


def _directory() -> Path | None:
    """The directory of this attempt, if torchrun created one."""
    file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    directory = file.parent.parent
    return directory if directory.name == f"attempt_{_count()}" and directory.is_dir() else None
