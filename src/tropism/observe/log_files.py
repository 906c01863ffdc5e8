"""Reads the files of a run that grow line by line, and checks what they hold."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from tropism.errors import DataError, first_line

_LONGEST_BYTES = 2**24
_SPLITS = ("train", "eval")


def read_log(file: Path, size: int | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the content of each line. An incomplete last line, which a kill can leave, is skipped.

    Args:
        file: one of the growing files of a run; none if absent.
        size: bytes to read, which must end with a complete line; None for the complete file.

    Raises:
        DataError: with FILE:LINE, for a line that no run writes.
    """
    try:
        with file.open("rb") as opened:
            left = opened.seek(0, 2) if size is None else size
            opened.seek(0)
            number = 0
            while left > 0:
                line = opened.readline(min(left, _LONGEST_BYTES))
                left -= len(line)
                number += 1
                if not line.endswith(b"\n"):
                    if size is None and (left <= 0 or not line):
                        return
                    raise DataError(f"{file}:{number}: line is too long or incomplete")
                yield number, _parsed(file, number, line)
    except FileNotFoundError:
        return
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}") from error


def check_log(file: Path, size: int | None = None) -> None:
    """Read the file to its end.

    Raises:
        DataError: as in `read_log`.
    """
    for _ in read_log(file, size):
        pass


def disorder(file: Path) -> list[str]:
    """Lines of a file that are damaged or out of order, one phrase each; empty if the file is as a run writes it.

    Steps never fall. In `metrics.jsonl` they rise within each split, in `skipped.jsonl` always.
    """
    found: list[str] = []
    highest, last = 0, dict[str, int]()
    try:
        for number, record in read_log(file):
            step = record.get("step")
            if step is None:
                continue
            kind = record.get("split", "")
            rises = file.name in ("metrics.jsonl", "skipped.jsonl")
            if step < highest or (rises and step == last.get(kind)):
                found.append(f"line {number}: step {step} follows step {highest}")
            highest, last[kind] = max(highest, step), step
    except DataError as error:
        found.append("line " + str(error).removeprefix(f"{file}:").strip())
    return found


def _parsed(file: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8"), parse_constant=_refuse, parse_int=_whole)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}:{number}: not valid JSON: {first_line(error)}") from None
    wrong = _what_is_wrong(file.name, record)
    if wrong:
        raise DataError(f"{file}:{number}: {wrong}")
    return record


def _what_is_wrong(name: str, record: Any) -> str:
    """Why a line is not one of this file; empty if it is."""
    if not isinstance(record, dict):
        return "not a JSON object"
    if name in ("samples.jsonl", "eval_rows.jsonl", "moved.jsonl"):
        return ""
    if type(step := record.get("step")) is not int or not 0 <= step < 2**63:
        return "'step' is not a step number"
    if name != "metrics.jsonl":
        return ""
    if record.get("split") not in _SPLITS:
        return f"'split' is not {' or '.join(_SPLITS)}"
    for key, value in record.items():
        if key != "split" and value is not None and not (type(value) in (int, float) and abs(value) < math.inf):
            return f"{key!r} is not a number"
    return ""


def _whole(digits: str) -> int:
    if len(digits) > 20:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON value")
