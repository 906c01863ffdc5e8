"""Cleans what libraries print. Their log records, warnings and tracebacks name files, columns and tokens too."""

import logging
import sys
import traceback
import warnings
from contextlib import suppress
from types import TracebackType
from typing import Any

from tropism.printable import lines

_record, _warning = logging.getLogRecordFactory(), warnings.formatwarning


def clean_library_output() -> None:
    """From now on, nothing in the text of a log record, warning or traceback acts on the terminal."""
    logging.setLogRecordFactory(_clean_record)
    warnings.formatwarning = lambda *args, **kwargs: lines(_warning(*args, **kwargs))
    sys.excepthook = _print_traceback


def _clean_record(*args: Any, **kwargs: Any) -> logging.LogRecord:
    record = _record(*args, **kwargs)
    with suppress(Exception):  # arguments that do not fit their message: logging reports it
        if (clean := lines(text := record.getMessage())) != text:
            record.msg, record.args = clean, ()
    if record.exc_info and record.exc_info[0]:
        record.exc_text = _formatted(*record.exc_info).rstrip("\n")
    return record


def _print_traceback(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    print(_formatted(kind, error, trace), end="", file=sys.stderr)


def _formatted(*error: Any) -> str:
    return lines("".join(traceback.format_exception(*error)))
