"""Console output: messages, progress bars, and tables of results. Everything that Tropism prints passes here.

A terminal gets lines that wrap between words. Paths, and commands in backticks or at the end of a message, are not
divided: they can be copied. A file or pipe gets each message as one line. With `--log-format json` each is a JSON
object, and with `--quiet` only warnings, errors and results are printed: see `tropism.observe.log_format`.

A text is never read as markup, and nothing in it acts on the terminal: see `tropism.printable`.
"""

import errno
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, Self

from rich.console import Console
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table
from rich.text import Text

from tropism.observe.log_format import JsonStream, json_line, log_format
from tropism.observe.wrapping import wrapped
from tropism.printable import one_line, passage

_FIRST_COUNT = 50_000  # first line of a progress without a known end
_PAUSE_S = 5.0  # between two lines of a stage before or after training
_BAR, _WIDEST = 20, 10_000  # columns
_Content = tuple[tuple[str, ...], list[tuple[str, ...]]]  # names of the columns, and rows


class _Console(Console):
    """Stays silent once its reader has left, as in `| head` or after the terminal was closed, or once its disk is full.
    A run continues; rich by itself would end it."""

    def print(self, *args: Any, **options: Any) -> None:
        try:
            super().print(*args, **options)
        except OSError as error:
            if error.errno != errno.EIO and not self.stderr:  # EIO: of a terminal that is closed
                _lost.append(error)
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())  # also for what is flushed at exit


_lost: list[OSError] = []


def take_lost() -> OSError | None:
    """Why standard output lost text since the last call; None if it did not. A reader that has left is no reason."""
    found = _lost[0] if _lost else None
    _lost.clear()
    return found


class Voice:
    """Prints on the main process only. Without a terminal, progress is printed as lines instead of a bar.

    Args:
        loud: print at all.
        errors: print to standard error.
        console: to print to.
    """

    def __init__(self, *, loud: bool = True, errors: bool = False, console: Console | None = None) -> None:
        how = log_format()
        self._json = how.json and console is None
        self._quiet = how.quiet and console is None
        self.console = console or _console(errors, quiet=not loud, json=self._json)
        self._on_the_way = False
        self._progress: Progress | None = None
        self._streamed = ""
        self._speaking = False  # plain lines: a nested stage prints nothing

    def preparing(self) -> Self:
        """From now on, messages are about the way to a result. `--quiet` omits them."""
        self._on_the_way = True
        return self

    def concluding(self) -> None:
        """From now on, messages are the result. `--quiet` prints them too."""
        self._on_the_way = False

    def say(self, *lines: str) -> None:
        """Print a message of one line, or of several."""
        for line in lines:
            self.styled((line, ""))

    def warn(self, text: str, word: str = "note") -> None:
        """Print a note that the user should read.

        Args:
            word: `warning` for what most likely spoils the result.
        """
        self.styled((f"{word}:", "yellow"), (f" {text}", ""), kind="warning")

    def error(self, text: str, **fields: Any) -> None:
        """Print an error of one line, or of several, which JSON keeps together.

        Args:
            fields: further ones of the JSON object.
        """
        if self._json:
            self._object("error", text, **fields)
            return
        for line in text.split("\n"):
            self.styled((line, ""), kind="error")

    def measured(self, stage: str, step: int, total: int, text: str, metrics: Mapping[str, float]) -> None:
        """Print the metrics of one step.

        Args:
            stage: `train` or `eval`.
            text: how a line shows the metrics.
            metrics: all of them, for JSON.
        """
        text = f"{stage} {step}/{total}  {text}".rstrip()
        if self._json and not self._omits("metrics"):
            self._object("metrics", text, stage=stage, step=step, total=total, metrics=metrics)
        else:
            self.say(text)

    def _omits(self, kind: str) -> bool:
        return self._quiet and self._on_the_way and kind in ("info", "metrics")

    def _object(self, kind: str, text: str, **fields: Any) -> None:
        self.console.print(Text(json_line(kind, text, **fields)))

    def styled(self, *parts: tuple[str, str], kind: str = "info") -> None:
        """Print one line of texts, each with its style.

        Args:
            kind: what JSON calls the line: info, warning or error.
        """
        if self._omits(kind):
            return
        if self._json:
            line = "".join(text for text, _ in parts)
            if line.strip():
                self._object(kind, one_line(line))
            return
        text = Text.assemble(*((self._shown(text), style) for text, style in parts))
        self.console.print(wrapped(text, self.console.width) if self.console.is_terminal else text)

    def stream(self, text: str) -> None:
        """Print a part of a text, without a line end after it. Line ends and tabs in it stay. JSON keeps it for the
        object of the whole text."""
        if self._json:
            self._streamed += text
        else:
            self.console.print(Text(self._encoded(passage(text)), end=""), end="")

    def end_stream(self) -> None:
        """Print the line end after a text of `stream`; in JSON the text, of kind `answer`."""
        if self._json:
            text, self._streamed = self._streamed, ""
            self._object("answer", text)
        else:
            self.say("")

    def _shown(self, text: str) -> str:
        """A text that does nothing to the terminal, with escapes for characters that its encoding lacks."""
        return self._encoded(one_line(text))

    def _encoded(self, text: str) -> str:
        encoding = getattr(self.console.file, "encoding", None) or "utf-8"
        return text.encode(encoding, "backslashreplace").decode(encoding)

    @contextmanager
    def bar(self, title: str, lasting: bool = False, every: bool = False) -> Iterator[Callable[..., None]]:
        """A progress bar. Yields a function that takes (done, total, metrics, **fields), with the metrics for JSON.

        Args:
            lasting: in a terminal too, leave the lines that a file gets.
            every: a line for every report.
        """
        if self._quiet:
            yield lambda *done, **fields: None
            return
        if not self.console.is_terminal:
            inner, self._speaking = self._speaking, True
            try:
                pause_s = 0.0 if lasting else _PAUSE_S
                yield (lambda *done, **fields: None) if inner else self._lines(title, every, pause_s)
            finally:
                self._speaking = inner
            return
        if self._progress is not None:  # a nested stage: one more line of the same display
            task = self._progress.add_task(self._shown(title), total=None, text="")
            try:
                yield self._update(self._progress, task)
            finally:
                self._progress.remove_task(task)
            return
        cut = Column(no_wrap=True, overflow="crop")  # not every encoding has an ellipsis
        columns = (TextColumn("{task.description}", markup=False, table_column=cut), BarColumn(_BAR),
                   MofNCompleteColumn(table_column=cut),
                   TextColumn("{task.fields[text]}", markup=False, table_column=cut),
                   TimeElapsedColumn(table_column=cut), TimeRemainingColumn(table_column=cut),
                   TextColumn("left", table_column=cut))
        with Progress(*columns, console=self.console, transient=True) as progress:
            self._progress = progress
            lines = self._lines(title, every) if lasting else None
            try:
                yield self._update(progress, progress.add_task(self._shown(title), total=None, text=""), lines)
            finally:
                self._progress = None

    def _update(self, progress: Progress, task: TaskID, lines: Callable[..., None] | None = None,
                ) -> Callable[..., None]:
        shown: dict[str, Any] = {}

        def update(done: int, total: int | None, metrics: Mapping[str, float] | None = None, **fields: Any) -> None:
            shown.update(fields)  # an update without fields keeps the earlier ones
            progress.update(task, completed=done, total=total, text=self._shown(_listed(shown)))
            if lines is not None:
                lines(done, total, **fields)

        return update

    def _lines(self, title: str, every: bool, pause_s: float = 0.0) -> Callable[..., None]:
        """At most 27 lines in total for any number of steps, at round numbers, or one for each report. If the number is
        unknown, lines come at doubling intervals.

        Args:
            pause_s: shortest time between two lines, so that a short stage has none.
        """
        said = -1
        next_count = _FIRST_COUNT
        last = time.monotonic()

        def update(done: int, total: int | None, metrics: Mapping[str, float] | None = None, **fields: Any) -> None:
            nonlocal said, next_count, last
            if time.monotonic() - last < pause_s and not (done == total and said >= 0):  # the last one follows others
                return
            if total is None:
                if done >= next_count:
                    next_count = 2 * done
                    last = time.monotonic()
                    self.say(f"{title} {done:,}")
                return
            reached = done // _interval(total)
            if every or reached > said or done == total:
                said, last = reached, time.monotonic()
                if metrics is not None:
                    self.measured(title, done, total, _listed(fields), metrics)
                else:
                    self.say(f"{title} {done}/{total}  {_listed(fields)}".rstrip())

        return update

    def figures(self, title: str, record: Mapping[str, float]) -> None:
        """Print a table of one record, with intervals after their values."""
        if self._omits("metrics"):
            return
        if self._json:
            self._object("metrics", title, metrics=record)
            return
        self.table(title, ("metric", "value"), [(key, _cell(record, key)) for key in record
                                                 if not key.endswith(("_low", "_high"))])

    def before_after(self, title: str, before: Mapping[str, float], after: Mapping[str, float],
                     leave_out: Collection[str] = ()) -> None:
        """Print a table of metrics before and after training."""
        if self._omits("metrics"):
            return
        if self._json:
            self._object("metrics", title, before=before, after=after)
            return
        self.table(title, ("metric", "before", "after"), [
            (key, _cell(before, key), _cell(after, key)) for key in after
            if not (key.endswith(("_low", "_high")) or key in leave_out)])

    def side_by_side(self, title: str, names: Sequence[str], records: Sequence[Mapping[str, float]]) -> None:
        """Print a table of several records, one column each, with the metrics that all of them have.

        In a terminal that is too narrow for it, the columns are divided among several tables.
        """
        if self._omits("metrics"):
            return
        if self._json:
            self._object("metrics", title, models=[{"name": name, "metrics": record}
                                                   for name, record in zip(names, records, strict=True)])
            return
        rows = [(key, *(_cell(record, key) for record in records)) for key in records[0]
                if not key.endswith(("_low", "_high")) and all(key in record for record in records)]
        self.styled((title, "italic"))
        start = 0
        while start < len(names):
            count = next((count for count in range(len(names) - start, 1, -1)
                          if self._fits(_part(names, rows, start, count))), 1)
            part = _part(names, rows, start, count)
            if not self._fits(part):
                self.say(f"{names[start]}:")
            self._print_table(part)
            start += count

    def table(self, title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
        """Print a table with a title."""
        if self._omits("info"):
            return
        if self._json:
            self._object("info", title, columns=columns, rows=rows)
            return
        self.styled((title, "italic"))
        self._print_table((columns, rows))

    def _print_table(self, content: _Content) -> None:
        """A table whose first column is on the left, and all others on the right. In a terminal that is too narrow for
        it, a line for each row."""
        if self._fits(content):
            table = self._laid_out(content)
            table.width = self._width(table)
            self.console.print(table)
            return
        names, rows = content
        self.say(*(f"  {row[0]}: {' -> '.join(row[1:])}" if len(names) <= 3 else
                   f"  {row[0]}: {', '.join(f'{name} {cell}' for name, cell in zip(names[1:], row[1:], strict=True))}"
                   for row in rows))

    def _laid_out(self, content: _Content) -> Table:
        columns, rows = content
        table = Table()
        for name in columns:
            table.add_column(Text(self._shown(name)), justify="right" if name != columns[0] else "left",
                             overflow="fold")
        for row in rows:
            table.add_row(*(Text(self._shown(cell)) for cell in row))
        return table

    def _width(self, table: Table) -> int:
        return Measurement.get(self.console, self.console.options.update_width(_WIDEST), table).maximum

    def _fits(self, content: _Content) -> bool:
        return not self.console.is_terminal or self._width(self._laid_out(content)) <= self.console.width


def attended() -> bool:
    """Whether a person sits at a terminal: standard input and output are one."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))


def _part(names: Sequence[str], rows: list[tuple[str, ...]], start: int, count: int) -> _Content:
    """Some columns of a table, with the first one."""
    end = start + count
    return ("metric", *names[start:end]), [(row[0], *row[1 + start:1 + end]) for row in rows]


def _console(errors: bool, quiet: bool, json: bool) -> Console:
    """A console on a standard stream. rich asks a named stream only for its encoding, and else assumes UTF-8."""
    stream = sys.stderr if errors else sys.stdout
    if json:
        return _Console(file=stream.inner if isinstance(stream, JsonStream) else stream, stderr=errors, quiet=quiet,
                        force_terminal=False, color_system=None, highlight=False, soft_wrap=True)
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return _Console(file=None if encoding.lower().startswith("utf") else stream, stderr=errors, quiet=quiet,
                    highlight=False, soft_wrap=True)


def _interval(total: int) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50, ... of which the total has at most 25."""
    return next(digit * 10**power for power in count() for digit in (1, 2, 5) if digit * 10**power * 25 >= total)


def _listed(fields: Mapping[str, Any]) -> str:
    return "  ".join(f"{name} {value}" for name, value in fields.items())


def _cell(record: Mapping[str, float], key: str) -> str:
    if key not in record:
        return "-"
    text = f"{record[key]:.4f}"
    text = text if float(text) else f"{0:.4f}"  # no minus sign before zero
    if f"{key}_low" in record:
        text += f" [{record[f'{key}_low']:.3f}, {record[f'{key}_high']:.3f}]"
    return text
