"""What a conversion read and wrote, and what the new file does not hold."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tropism.commands.convert.records import SHAPES, is_label
from tropism.commands.convert.source import ConvertedRecord, ConvertPart
from tropism.data.formats.fields import WEIGHTS
from tropism.data.rows import Dropped, Row
from tropism.errors import count_of

_SHOWN, _LISTED = 5, 1000  # dropped rows that a terminal and a file list with their reasons; all are counted

_OF_FORMATS = {
    ("ultrafeedback", "paired"): "scores and other notes on completions, and the completions between best and worst",
    ("ultrafeedback", "unpaired"): "scores of completions, which decided what is desirable, and other notes on them",
    ("oasst", "paired"): "ranks and other notes on replies, and the replies between first and last",
    ("oasst", "unpaired"): "ranks and other notes on replies, which decided what is desirable",
    ("anthropic-hh", "paired"): "white space around the turns of transcripts, which became messages",
    ("feedback", "unpaired"): "messages after the last labeled completion",
    ("feedback", "single"): "messages after the last labeled completion",
}
"""What the rows of a format and view do not take from their records."""


@dataclass
class ConversionReport:
    """What one conversion read, wrote, lost and changed.

    Args:
        source: the data.
        to: the shape that was written.
        formats: how each part of the source was read.
        read: records read.
        written: rows written.
        dropped: dropped rows by reason.
        first: the first dropped rows.
        columns: dropped columns, each with its number of records.
        carried: kept columns, each with its number of records.
        renamed: new names of kept columns that had to be renamed.
        lost: what else the file does not hold, with counts.
        changed: what the file holds in another form, with counts.
        formulas: cells of a CSV file that a spreadsheet would run.
    """

    source: str
    to: str
    formats: list[str] = field(default_factory=list)
    read: int = 0
    written: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    first: list[Dropped] = field(default_factory=list)
    columns: Counter[str] = field(default_factory=Counter)
    carried: Counter[str] = field(default_factory=Counter)
    renamed: dict[str, str] = field(default_factory=dict)
    lost: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)
    formulas: int = 0

    def drop(self, row: Dropped) -> None:
        """Count a dropped row."""
        self.dropped[str(row.reason)] += 1
        if len(self.first) < _LISTED:
            self.first.append(row)

    def look_at(self, part: ConvertPart, found: ConvertedRecord) -> None:
        """Count what the rows of a record do not hold."""
        known, view = part.reading.format, part.reading.shape.view
        self.lost.update(f"column {name}, replaced by a column that --columns renamed" for name in found.replaced)
        kept = [row for row in found.rows if isinstance(row, Row)]
        if not kept:
            return
        if view == "paired" and self.to == "unpaired":
            if len(kept) == 2:
                self.changed["each pair became two rows with the same prompt; --pair-by-prompt joins them again"] += 1
            else:
                self.lost["one side of a pair; --pair-by-prompt may join the other to another row of its prompt"] += 1
        if part.first_side:
            self.lost["rejected sides of pairs"] += 1
        if part.labels & found.raw.record.keys():
            self.lost["labels of desirable completions"] += len(kept)
        if known.name == "rating" and part.reading.options.label_threshold is not None:
            threshold = part.reading.options.label_threshold
            self.changed[f"ratings of {threshold:g} or more became desirable, others undesirable"] += 1
        for name in WEIGHTS[1:]:
            if found.raw.record.get(name) not in (None, ""):
                self.changed[f"column {name} became {WEIGHTS[0]}"] += 1
        if (known.name, view) in _OF_FORMATS:
            self.lost[_OF_FORMATS[known.name, view]] += 1
        if known.name == "openai":
            for key in found.raw.record["input"].keys() - {"messages", "tools"}:
                self.columns[f"input.{key}"] += 1

    def look_at_chat(self, row: Row) -> None:
        """Count what changes when a row is written as a chat."""
        (completion,) = row.completions
        if isinstance(completion, str):
            self.changed["plain text became a chat with the prompt as the user's message"] += 1
            return
        if len(completion) > 1:
            self.changed["a completion of several messages: in a chat only its last message is the completion"] += 1
        labels = sum(is_label(message, key) for message in (*row.prompt, *completion) if isinstance(message, dict)
                    for key in message)
        if labels:
            self.lost["labels of single messages"] += labels

    def summary(self) -> str:
        """One line: `4 read, 6 rows written as unpaired (prompt, completion, label)`."""
        return f"{self.read:,} read, {count_of(self.written, 'row')} written as {self.to} ({SHAPES[self.to]})"

    def lines(self) -> list[str]:
        """The report as text: the summary, then what was dropped, lost and changed."""
        found = [f"{self.source}: {self.summary()}", *(f"  {text}" for text in self.formats)]
        if self.dropped:
            found.append("  dropped: " + ", ".join(
                f"{count} {reason}" for reason, count in self.dropped.most_common()))
            found += [f"    {drop.place}: {drop.reason}: {drop.detail}" for drop in self.first[:_SHOWN]]
            more = self.dropped.total() - len(self.first[:_SHOWN])
            found += [f"    and {more:,} more; --json lists the first {_LISTED:,} dropped rows"] if more else []
        for title, columns, hint in (("dropped columns", self.columns, "; --keep-columns keeps them"),
                                     ("kept columns", self.carried, "")):
            if columns:
                found.append(f"  {title}: " + ", ".join(
                    self._column(name, count) for name, count in columns.items())
                    + (hint if any("." not in name for name in columns) else ""))
        found += [f"  not in the file ({count:,}): {text}" for text, count in self.lost.items()]
        found += [f"  changed ({count:,}): {text}" for text, count in self.changed.items()]
        if self.formulas:
            found.append(f"  formulas ({self.formulas:,}): cells that begin with =, +, -, @, tab or carriage return. "
                         "The file has the exact text, which a spreadsheet would run. To open it in one, import all "
                         "columns as text.")
        return found

    def _column(self, name: str, count: int) -> str:
        new = f" as {self.renamed[name]}" if name in self.renamed else ""
        return f"{name}{new} ({count_of(count, 'record')})"

    def to_json(self) -> dict[str, Any]:
        """The report for programs."""
        return {"source": self.source, "to": self.to, "formats": self.formats,
                "rows": {"read": self.read, "written": self.written, "dropped": dict(self.dropped)},
                "columns": {"left_behind": dict(self.columns), "carried": dict(self.carried), "renamed": self.renamed},
                "lost": dict(self.lost), "changed": dict(self.changed), "formulas": self.formulas,
                "dropped_rows": [{"place": drop.place, "reason": str(drop.reason), "detail": drop.detail}
                                 for drop in self.first]}
