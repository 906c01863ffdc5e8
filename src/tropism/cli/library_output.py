"""Cleans what libraries print. Their log records, warnings and tracebacks name files, columns and tokens too."""

import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

from tropism.observe.console import Voice
from tropism.observe.log_format import JsonStream, log_format
from tropism.printable import lines

_record, _warning = logging.getLogRecordFactory(), warnings.formatwarning
_emit = logging.StreamHandler.emit


def clean_library_output() -> None:
    """From now on, nothing in the text of a log record, warning or traceback acts on the terminal."""
    logging.setLogRecordFactory(_clean_record)
    warnings.formatwarning = lambda *args, **kwargs: lines(_warning(*args, **kwargs))
    sys.excepthook = _print_traceback


@contextmanager
def library_output_as_json() -> Iterator[None]:
    """Print what libraries print as JSON inside the block, without progress bars. An exception keeps that, since its
    traceback is yet to be printed."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    before = sys.stdout, sys.stderr, warnings.showwarning, logging.StreamHandler.emit
    printed = JsonStream(sys.stdout), JsonStream(sys.stderr)
    sys.stdout, sys.stderr = printed
    warnings.showwarning = _print_warning
    logging.StreamHandler.emit = _print_record  # type: ignore[assignment, method-assign]
    yield
    sys.stdout, sys.stderr, warnings.showwarning, logging.StreamHandler.emit = before  # type: ignore[method-assign]
    for stream in printed:
        stream.finish()


def _print_warning(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
    Voice(errors=True).warn(f"{category.__name__}: {message}", "warning")


def _print_record(handler: logging.StreamHandler[Any], record: logging.LogRecord) -> None:
    """Print a log record that is for a console. Those for files stay as they are."""
    consoles = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    if not any(handler.stream is one or handler.stream is getattr(one, "inner", one) for one in consoles):
        _emit(handler, record)
        return
    with suppress(Exception):  # arguments that do not fit their message
        text = "\n".join(filter(None, (record.getMessage(), record.exc_text)))
        voice = Voice(errors=True)
        if record.levelno >= logging.ERROR:
            voice.error(text)
        elif record.levelno >= logging.WARNING:
            voice.warn(text, "warning")
        else:
            voice.say(text)


def _clean_record(*args: Any, **kwargs: Any) -> logging.LogRecord:
    record = _record(*args, **kwargs)
    with suppress(Exception):  # arguments that do not fit their message: logging reports it
        if (clean := lines(text := record.getMessage())) != text:
            record.msg, record.args = clean, ()
    if record.exc_info and record.exc_info[0]:
        record.exc_text = _formatted(*record.exc_info).rstrip("\n")
    return record


def _print_traceback(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    text = _formatted(kind, error, trace)
    if log_format().json:
        Voice(errors=True).error(f"{kind.__name__}: {error}", traceback=text)
    else:
        print(text, end="", file=sys.stderr)


def _formatted(*error: Any) -> str:
    return lines("".join(traceback.format_exception(*error)))
