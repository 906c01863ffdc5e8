"""How lines are printed: as text, or as JSON objects, one per line; and whether only results are.

The command line sets both. Elsewhere, TROPISM_LOG_FORMAT and TROPISM_QUIET do.
"""

import io
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TextIO

from tropism.errors import UsageError
from tropism.printable import lines, one_line

FORMATS = ("text", "json")
_WORDS = {"0": False, "false": False, "1": True, "true": True}


@dataclass(frozen=True, slots=True)
class LogFormat:
    """How lines are printed.

    Args:
        json: each as one JSON object.
        quiet: only warnings, errors and results.
    """

    json: bool = False
    quiet: bool = False


_given: LogFormat | None = None


def log_format() -> LogFormat:
    """The format in use: that of the command line, else that of the environment.

    Raises:
        UsageError: for an invalid value in the environment.
    """
    if _given is not None:
        return _given
    return LogFormat(json=is_json(*from_environment("TROPISM_LOG_FORMAT", "text")),
                     quiet=is_true(*from_environment("TROPISM_QUIET", "false")))


def from_environment(name: str, default: str) -> tuple[str, str]:
    """The value of a variable that is set and not empty, or the default; and its name for messages."""
    return os.environ.get(name) or default, name


@contextmanager
def printing(chosen: LogFormat) -> Iterator[None]:
    """Print in a format inside the block. An exception keeps it, since its traceback is yet to be printed."""
    global _given
    before, _given = _given, chosen
    yield
    _given = before


def is_json(value: str, place: str) -> bool:
    """Whether a format is JSON.

    Raises:
        UsageError: if it is none of the formats.
    """
    if value not in FORMATS:
        raise UsageError(f"{place}: {value!r} is not one of {', '.join(FORMATS)}")
    return value == "json"


def is_true(value: str, place: str) -> bool:
    """A switch of the command line or the environment.

    Raises:
        UsageError: if it is neither on nor off.
    """
    if value.lower() not in _WORDS:
        raise UsageError(f"{place}: {value!r} is not true or false")
    return _WORDS[value.lower()]


def json_line(kind: str, text: str, **fields: Any) -> str:
    """One line of the log, in ASCII.

    Args:
        kind: info, warning, error, metrics or answer.
        text: as the text format prints it. Its lines stay lines.
        fields: others, by name.
    """
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return json.dumps({"time": now, "kind": kind, "text": lines(text), **_plain(fields)}, allow_nan=False)


def _plain(value: Any) -> Any:
    """A value that JSON can hold. A number that is not finite is null, as in `metrics.jsonl`."""
    if isinstance(value, Mapping):
        return {one_line(str(key)): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int) else lines(str(value))


class JsonStream(io.TextIOBase):
    """Writes each line that a library prints as a JSON object.

    Args:
        inner: the stream to write to.
    """

    def __init__(self, inner: TextIO) -> None:
        self.inner = inner
        self._pending = ""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the stream inside."""
        return self.inner.encoding

    def write(self, text: str) -> int:
        """Write the lines that are complete. What a progress bar draws over counts as lines."""
        *complete, self._pending = (self._pending + text).replace("\r", "\n").split("\n")
        for line in complete:
            self._write(line)
        return len(text)

    def flush(self) -> None:
        """Flush the stream inside. An incomplete line waits for its end."""
        self.inner.flush()

    def finish(self) -> None:
        """Write what has no line end."""
        self._write(self._pending)
        self._pending = ""

    def fileno(self) -> int:
        """The descriptor of the stream inside."""
        return self.inner.fileno()

    def writable(self) -> bool:
        """It is."""
        return True

    def _write(self, line: str) -> None:
        if line.strip():
            self.inner.write(json_line("info", line) + "\n")
