"""Console output: messages, progress bars, and tables of results."""

import errno
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

_FIRST_COUNT = 50_000  # first line of a progress without a known end


class _Console(Console):
    """Stays silent once its reader has left, as in `| head` or after the terminal was closed. A run continues; rich by
    itself would end it."""

    def print(self, *args: Any, **options: Any) -> None:
        try:
            super().print(*args, **options)
        except OSError as error:
            if error.errno != errno.EIO:  # of a terminal that is closed
                raise
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # also for what is flushed at exit


class Voice:
    """Prints on the main process only. Without a terminal, progress is printed as lines instead of a bar."""

    def __init__(self, *, loud: bool = True, console: Console | None = None) -> None:
        self.console = console or _Console(quiet=not loud, highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        self._speaking = False  # plain lines: a nested stage prints nothing

    def say(self, text: str) -> None:
        """Print a message."""
        self.console.print(text, markup=False)

    def warn(self, text: str) -> None:
        """Print a note that the user should read."""
        self.console.print(f"[yellow]note:[/yellow] {_escape(text)}")

    @contextmanager
    def bar(self, title: str) -> Iterator[Callable[..., None]]:
        """A progress bar. Yields a function that takes (done, total, **fields)."""
        if not self.console.is_terminal:
            inner, self._speaking = self._speaking, True
            try:
                yield (lambda *done, **fields: None) if inner else self._lines(title)
            finally:
                self._speaking = inner
            return
        if self._progress is not None:  # a nested stage: one more line of the same display
            task = self._progress.add_task(title, total=None, text="")
            try:
                yield self._update(self._progress, task)
            finally:
                self._progress.remove_task(task)
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
                   TextColumn("{task.fields[text]}"), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        with Progress(*columns, console=self.console, transient=True) as progress:
            self._progress = progress
            try:
                yield self._update(progress, progress.add_task(title, total=None, text=""))
            finally:
                self._progress = None

    @staticmethod
    def _update(progress: Progress, task: TaskID) -> Callable[..., None]:
        shown: dict[str, Any] = {}

        def update(done: int, total: int | None, **fields: Any) -> None:
            shown.update(fields)  # an update without fields keeps the earlier ones
            text = "  ".join(f"{name} {value}" for name, value in shown.items())
            progress.update(task, completed=done, total=total, text=text)

        return update

    def _lines(self, title: str) -> Callable[..., None]:
        """About 20 lines in total for any number of steps. If it is unknown, lines come at doubling intervals."""
        said = -1
        next_count = _FIRST_COUNT

        def update(done: int, total: int | None, **fields: Any) -> None:
            nonlocal said, next_count
            if total is None:
                if done >= next_count:
                    next_count = 2 * done
                    self.say(f"{title} {done}")
                return
            twentieth = done * 20 // max(total, 1)
            if twentieth > said or done == total:
                said = twentieth
                text = "  ".join(f"{name} {value}" for name, value in fields.items())
                self.say(f"{title} {done}/{total}  {text}".rstrip())

        return update

    def figures(self, title: str, record: Mapping[str, float]) -> None:
        """Print a table of one record, with intervals after their values."""
        table = Table(title=title, title_justify="left")
        table.add_column("metric")
        table.add_column("value", justify="right")
        for key in record:
            if not key.endswith(("_low", "_high")):
                table.add_row(key, _cell(record, key))
        self.console.print(table)

    def before_after(self, title: str, before: Mapping[str, float], after: Mapping[str, float],
                     leave_out: Collection[str] = ()) -> None:
        """Print a table of metrics before and after training."""
        table = Table(title=title, title_justify="left")
        for name, justify in (("metric", "left"), ("before", "right"), ("after", "right")):
            table.add_column(name, justify=justify)  # type: ignore[arg-type]
        for key in after:
            if key.endswith(("_low", "_high")) or key in leave_out:
                continue
            table.add_row(key, _cell(before, key), _cell(after, key))
        self.console.print(table)


def _cell(record: Mapping[str, float], key: str) -> str:
    if key not in record:
        return "-"
    text = f"{record[key]:.4f}"
    text = text if float(text) else f"{0:.4f}"  # no minus sign before zero
    if f"{key}_low" in record:
        text += f" [{record[f'{key}_low']:.3f}, {record[f'{key}_high']:.3f}]"
    return _escape(text)


def _escape(text: str) -> str:
    return text.replace("[", r"\[")
