"""Errors for users. Each message gives the place, the problem and the remedy, and is shown without a traceback."""

import pickle
import shutil
from collections.abc import Iterable
from contextlib import suppress
from difflib import SequenceMatcher
from pathlib import Path

from tropism.printable import one_line

_NEAR = 0.75  # similarity from which on a name is suggested


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type if it has no text; a heading is joined with the line below it."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    return " ".join(line.strip() for line in lines[:2 if lines[0].rstrip().endswith(":") else 1])


def not_only_tensors(error: object) -> bool:
    """Whether torch refused a file because it may contain more than tensors. Its text advises to load it anyway."""
    return isinstance(error, pickle.UnpicklingError) or "weights_only" in str(error)


def clause(error: object) -> str:
    """A text to be followed by another sentence: without its own full stop."""
    return str(error).rstrip(".")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that a user probably meant; None if none is near.

    Of names that are equally near, the one with the same first letter is meant.
    """
    def likeness(other: str) -> tuple[bool, float, bool]:
        return sorted(other) == letters, SequenceMatcher(None, name, other).ratio(), other[:1] == name[:1]

    name = name[:100]  # comparing takes the square of the length
    letters = sorted(name)
    near = {other: found for other in known if (found := likeness(other))[0] or found[1] >= _NEAR}
    return max(near, key=lambda other: (near[other], other), default=None)


def did_you_mean(name: str, known: Iterable[str], style: str = "{}") -> str:
    """A question that names the closest known name, or the list of known names if none is close.

    Args:
        name: as the user wrote it.
        known: valid names.
        style: how a name is shown, such as `--{}`.
    """
    names = list(known)
    close = nearest(name, names)
    return f"Did you mean {style.format(close)}?" if close else f"Known: {', '.join(map(style.format, names))}"


def count_of(count: int, noun: str, plural: str = "") -> str:
    """A count with its noun: `1 row`, `2 rows`, `12,000 rows`; `plural` is for nouns such as batches."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


class TropismError(Exception):
    """Base class of all errors for users. `exit_code` is the exit code of the command line.

    Args:
        lines: of the message, usually one. Text from elsewhere in a line neither ends it nor acts on a terminal.
    """

    exit_code = 1

    def __init__(self, *lines: str) -> None:
        super().__init__(*map(one_line, lines))

    def __str__(self) -> str:
        """The lines of the message."""
        return "\n".join(self.args)


class UsageError(TropismError):
    """An invalid option, or an invalid combination of options."""

    exit_code = 2


class DataError(TropismError):
    """An invalid file, row or label. The message starts with FILE:LINE if there is one."""

    exit_code = 2


class OutputExistsError(TropismError):
    """The output directory is not empty."""

    exit_code = 2


class OutputLockedError(TropismError):
    """Another process uses the run directory."""

    exit_code = 2


class ModelError(TropismError):
    """A model or tokenizer that cannot be loaded, or is not supported exactly."""

    exit_code = 2


class ReferenceMismatchError(TropismError):
    """The reference disagrees with the policy before training, or its stored scores cannot be used."""


class NonFiniteError(TropismError):
    """A loss, gradient or log-prob is NaN or infinite. The update was not applied, and the message names the rows."""


class NothingLearnedError(TropismError):
    """A step with a learning rate above 0 changed no trainable weight."""


class OutputError(TropismError):
    """A file or directory cannot be written."""

    @classmethod
    def because(cls, path: Path, error: BaseException, needed_bytes: int = 0, what: str = "cannot be written",
                ) -> "OutputError":
        """An error with the path and the reason, and with the bytes needed and free if the size is known.

        Args:
            path: of the file or directory.
            error: of the operating system.
            needed_bytes: size to write; 0 if unknown.
            what: what failed.
        """
        reason = getattr(error, "strerror", None) or first_line(error)
        room = ""
        if needed_bytes:
            with suppress(OSError):
                parent = next(parent for parent in path.absolute().parents if parent.exists())
                room = f" ({needed_bytes:,} bytes are needed, {shutil.disk_usage(parent).free:,} are free)"
        return cls(f"{path}: {what}: {reason}{room}")


class CheckpointError(TropismError):
    """A checkpoint, or a run to resume, is incomplete or corrupted. The message names the part."""

    exit_code = 2


class StoppedEarly(TropismError):
    """The run was stopped before its end, and can be resumed."""

    exit_code = 75
