"""What the processes of one machine that torchrun started together tell each other, in the directory that it made.

torchrun names a file for each process in `DIRECTORY/attempt_K/LOCAL_RANK`, where K counts how often it has started them
again. Every torchrun has a directory of its own, and leaves it behind. Without one there is nothing to tell.
"""

import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_STOPPED = "tropism-stopped"


def say_once(text: str, say: Callable[[str], None]) -> None:
    """Say something unless another process of this attempt has said the same to the same console.

    What is written to a file of its own, as by torchrun's --redirects, is said there. What this process has said itself
    it says again, and in doubt it is said.
    """
    try:
        directory, console = _directory(), os.fstat(2)
        if directory is None:
            raise FileNotFoundError
        rank = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent.name
        line = f"{console.st_dev} {console.st_ino} {text!r}"
        with (directory / "tropism-said").open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # a process that is killed while it speaks lets go, and has said nothing
            file.seek(0)
            said = [one.partition(" ") for one in file.read().decode().split("\n")]
            if any(what == line and who != rank for who, _, what in said):
                return
            say(text)
            file.write(f"{rank} {line}\n".encode())
    except OSError:
        say(text)


def note_stop() -> None:
    """Note that this attempt was stopped on purpose."""
    directory = _directory()
    if directory is not None:
        with suppress(OSError):
            (directory / _STOPPED).touch()


def follows_stop() -> bool:
    """Whether torchrun has started the processes again after they had stopped on purpose: it takes any exit code but 0
    for a failure."""
    directory, count = _directory(), _count()
    return directory is not None and count > 0 and (directory.parent / f"attempt_{count - 1}" / _STOPPED).exists()


def _count() -> int:
    value = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return int(value) if value.isdecimal() else 0


def _directory() -> Path | None:
    """Of this attempt, if torchrun has made it."""
    file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    directory = file.parent.parent
    return directory if directory.name == f"attempt_{_count()}" and directory.is_dir() else None
