"""The file of `--feedback`: rows that `tropism kto` or `tropism dpo` reads, appended one by one."""

import json
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tropism.data.rows import Message
from tropism.errors import DataError, OutputError, UsageError, first_line
from tropism.files import append_line, check_output

Prompt = str | Sequence[Message]
"""Plain text, or the messages of a conversation."""

_FIELDS = {False: ("prompt", "completion", "label"), True: ("prompt", "chosen", "rejected")}


@dataclass
class Feedback:
    """A file of rows.

    Args:
        path: of the file.
        paired: its rows are pairs; else labeled completions.
        rows: that it holds.
        added: of these, the rows of this session.
    """

    path: Path
    paired: bool
    rows: int = 0
    added: int = 0

    @classmethod
    def open(cls, name: str, paired: bool) -> "Feedback":
        """Check before a model is loaded that rows can be appended.

        Raises:
            UsageError: if the name does not end in .jsonl, or is not that of a regular file.
            DataError: with FILE:LINE, for a line that is not a row of this kind.
            OutputError: if the file cannot be written.
        """
        path = Path(name).expanduser()
        if path.suffix != ".jsonl":
            raise UsageError(f"--feedback {name}: the rows are JSON lines. Choose a name that ends in .jsonl.")
        check_output(path)
        return cls(path, paired, _count(path, paired))

    def label(self, prompt: Prompt, answer: str, desirable: bool) -> None:
        """Append a labeled completion.

        Raises:
            OutputError: if it cannot be written; the file is then as before.
        """
        self._append(prompt, answer, desirable)

    def prefer(self, prompt: Prompt, chosen: str, rejected: str) -> None:
        """Append a pair.

        Raises:
            OutputError: as in `label`.
        """
        self._append(prompt, chosen, rejected)

    @property
    def command(self) -> str:
        """The command that trains on the file."""
        return "dpo" if self.paired else "kto"

    def _append(self, prompt: Prompt, *values: Any) -> None:
        def completed(value: Any) -> Any:
            is_text = isinstance(value, str) and not isinstance(prompt, str)
            return [{"role": "assistant", "content": value}] if is_text else value

        content = [prompt if isinstance(prompt, str) else list(prompt), *map(completed, values)]
        row = json.dumps(dict(zip(_FIELDS[self.paired], content, strict=True)), ensure_ascii=False)
        append_line(self.path, row if self._ends() else f"\n{row}", sync=True)
        self.rows += 1
        self.added += 1

    def _ends(self) -> bool:
        """Whether the file is empty or ends with a line end, which editors may leave out."""
        try:
            with self.path.open("rb") as file:
                if not file.seek(0, os.SEEK_END):
                    return True
                file.seek(-1, os.SEEK_END)
                return file.read() == b"\n"
        except FileNotFoundError:
            return True
        except OSError as error:
            raise OutputError.because(self.path, error) from error


def _count(path: Path, paired: bool) -> int:
    """The number of rows in a file, all of the kind that is appended."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UsageError(f"--feedback {path}: is not a regular file. Choose another name.")
        with path.open("a+b") as file:  # permissions are those of the system alone
            file.seek(0)
            return sum(_is_row(line, f"{path}:{number}", paired) for number, line in enumerate(file, start=1))
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise OutputError.because(path, error) from error


def _is_row(line: bytes, place: str, paired: bool) -> bool:
    """Whether a line has a row; False for an empty line."""
    if not line.strip():
        return False
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not valid JSON: {first_line(error)}. Choose another file for --feedback, or fix the "
                        "line.") from None
    found = set(record) if isinstance(record, dict) else set()
    if not found >= set(_FIELDS[paired]):
        pairs, labels = "pairs (prompt, chosen, rejected)", "labeled answers (prompt, completion, label)"
        other = found >= set(_FIELDS[not paired])
        holds = (f"the file has {labels if paired else pairs}" if other else "this is no row of feedback")
        raise DataError(f"{place}: {holds}, but this session adds {pairs if paired else labels}. Choose another file "
                        "for --feedback" + (f", or {'omit' if paired else 'add'} --compare." if other else "."))
    return True
