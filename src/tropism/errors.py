"""The errors that a user can meet. Each says where, what, and what to do; none shows a traceback."""

import difflib
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type if it has no text; a heading is joined with the line below it."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    return " ".join(line.strip() for line in lines[:2 if lines[0].rstrip().endswith(":") else 1])


def did_you_mean(name: str, known: Iterable[str], style: str = "{}") -> str:
    """A question that names the closest known name, or the list of known names if none is close.

    Args:
        name: as the user wrote it.
        known: valid names.
        style: how a name is shown, such as `--{}`.
    """
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"Did you mean {style.format(close[0])}?" if close else f"Known: {', '.join(map(style.format, names))}"


def count_of(count: int, noun: str) -> str:
    """A count with its noun: `1 row`, `2 rows`, `12,000 rows`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


class TropismError(Exception):
    """Base of all errors meant for a user's eyes. `exit_code` is what the command line returns."""

    exit_code = 1


class UsageError(TropismError):
    """An option, or a combination of options, that cannot work."""

    exit_code = 2


class DataError(TropismError):
    """A file, row or label that cannot be trained on. The text starts with FILE:LINE where there is one."""

    exit_code = 2


class OutputExistsError(TropismError):
    """The output directory already holds something."""

    exit_code = 2


class OutputLockedError(TropismError):
    """Another process writes to the run directory."""

    exit_code = 2


class ModelError(TropismError):
    """A model or tokenizer that cannot be loaded or served exactly."""

    exit_code = 2


class ReferenceMismatchError(TropismError):
    """The reference disagrees with the policy before training, or its stored scores cannot be used."""


class NonFiniteError(TropismError):
    """A loss, gradient or log-prob was NaN or infinite. The update was not applied; the rows are named."""


class NothingLearnedError(TropismError):
    """A step with a learning rate above 0 changed no trainable weight."""


class OutputError(TropismError):
    """The run directory or the store could not be written."""

    @classmethod
    def because(cls, path: Path, error: BaseException, needed_bytes: int = 0, what: str = "cannot be written",
                ) -> "OutputError":
        """What could not be written and why; where the disk is full, how much is needed and how much is free.

        Args:
            path: of the file or directory.
            error: of the system.
            needed_bytes: that were to be written; 0 where that is not known.
            what: happened, in words.
        """
        reason = getattr(error, "strerror", None) or first_line(error)
        room = ""
        if needed_bytes:
            with suppress(OSError):
                parent = next(parent for parent in path.absolute().parents if parent.exists())
                room = f" ({needed_bytes:,} bytes are needed, {shutil.disk_usage(parent).free:,} are free)"
        return cls(f"{path}: {what}: {reason}{room}")


class CheckpointError(TropismError):
    """A checkpoint, or a run that shall go on, that cannot be used in full. The text says which part."""

    exit_code = 2


class StoppedEarly(TropismError):
    """The run was asked to stop before its end, and can go on where it stopped."""

    exit_code = 75
