"""Checks that what stands at a path of a run directory is what a run may open, remove or replace there."""

import os
import stat
from pathlib import Path

from tropism.errors import OutputExistsError

_KINDS = ((stat.S_ISLNK, "a symbolic link"), (stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket"),
          (stat.S_ISDIR, "a directory"), (stat.S_ISREG, "a regular file"))


def check_kind(path: Path, directory: bool = False) -> None:
    """Check that a path is absent, or a regular file or directory itself. Opens nothing: a pipe would block, and a link
    leads to a file outside the run.

    Args:
        directory: expect a directory in place of a regular file.

    Raises:
        OutputExistsError: naming what is there.
    """
    try:
        mode = os.lstat(path).st_mode
    except OSError:  # absent, or the write itself will tell
        return
    if not (stat.S_ISDIR if directory else stat.S_ISREG)(mode):
        found = next((name for matches, name in _KINDS if matches(mode)), "a device")
        raise OutputExistsError(f"{path} is {found}, but a run needs a {'directory' if directory else 'regular file'} "
                                "there. Remove it, or choose another directory with --output.")
