"""What was read and written, and what the new file does not have any more."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tropism.commands.convert.parts import ConvertedRecord, ConvertPart
from tropism.commands.convert.records import SHAPES, is_mark
from tropism.data.rows import Dropped, Row

_SHOWN, _LISTED = 5, 1000  # rows left out that a terminal and a file list with their reasons; all are counted

_OF_FORMATS = {
    ("ultrafeedback", "paired"): "scores of answers, other notes on them, and the answers between best and worst",
    ("ultrafeedback", "unpaired"): "scores of answers, which decided what is desirable, and other notes on them",
    ("oasst", "paired"): "ranks and other notes on replies, and the replies between first and last",
    ("oasst", "unpaired"): "ranks and other notes on replies, which decided what is desirable",
    ("anthropic-hh", "paired"): "white space around the turns of transcripts, which are messages now",
    ("feedback", "unpaired"): "what follows the last marked answer",
    ("feedback", "single"): "what follows the last marked answer",
}
"""What the rows of a format and view leave out of their records."""


@dataclass
class Account:
    """The account of one conversion.

    Args:
        source: what was read.
        to: the shape that was written.
        formats: how its parts were understood.
        read: records.
        written: rows.
        dropped: rows left out, by reason, and the first of them.
        columns: of how many records each column was left behind; `carried`, of how many it was taken along.
        renamed: new names of columns that were carried under another one.
        lost: what else is not in the file, with a count.
        changed: what is in the file in another form, with a count.
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

    def drop(self, row: Dropped) -> None:
        """A row that is left out."""
        self.dropped[str(row.reason)] += 1
        if len(self.first) < _LISTED:
            self.first.append(row)

    def look_at(self, part: ConvertPart, found: ConvertedRecord) -> None:
        """Note what the rows of a record do not say."""
        known, view = part.reading.format, part.reading.shape.view
        self.lost.update(f"{name}: columns that one renamed by --columns replaced" for name in found.replaced)
        kept = [row for row in found.rows if isinstance(row, Row)]
        if not kept:
            return
        if view == "paired" and self.to == "unpaired":
            if len(kept) == 2:
                self.changed["pairs are two rows each, tied by their prompt; --pair-by-prompt makes them pairs again"
                             ] += 1
            else:
                self.lost["sides of pairs; --pair-by-prompt may give the other side to another pair of its prompt"] += 1
        if part.first_side:
            self.lost["rejected sides of pairs"] += 1
        if part.labels & found.raw.record.keys():
            self.lost["labels of completions to imitate"] += len(kept)
        if known.name == "rating" and part.reading.options.label_threshold is not None:
            self.changed[f"ratings decided what is desirable, from {part.reading.options.label_threshold:g} on"] += 1
        if (known.name, view) in _OF_FORMATS:
            self.lost[f"{_OF_FORMATS[known.name, view]} (records)"] += 1
        if known.name == "openai":
            for key in found.raw.record["input"].keys() - {"messages", "tools"}:
                self.columns[f"input.{key}"] += 1

    def look_at_chat(self, row: Row) -> None:
        """Note what a row that is written as a chat becomes, where it was something else."""
        (completion,) = row.completions
        if isinstance(completion, str):
            self.changed["rows of plain text are chats now, with the prompt as the user's message"] += 1
            return
        if len(completion) > 1:
            self.changed["completions of several messages; of a chat, only the last message is the completion"] += 1
        marks = sum(is_mark(message, key) for message in (*row.prompt, *completion) if isinstance(message, dict)
                    for key in message)
        if marks:
            self.lost["marks on single messages"] += marks

    def summary(self) -> str:
        """One line: `4 read, 6 rows written as unpaired (prompt, completion, label)`."""
        return f"{self.read} read, {self.written} rows written as {self.to} ({SHAPES[self.to]})"

    def lines(self) -> list[str]:
        """The account for a person: the summary, and below it what is left out, lost and changed."""
        found = [f"{self.source}: {self.summary()}", *(f"  {text}" for text in self.formats)]
        if self.dropped:
            found.append("  rows left out: " + ", ".join(
                f"{count} {reason}" for reason, count in self.dropped.most_common()))
            found += [f"    {drop.place}: {drop.reason}: {drop.detail}" for drop in self.first[:_SHOWN]]
            more = self.dropped.total() - len(self.first[:_SHOWN])
            found += [f"    and {more} more; --json lists them"] if more else []
        for title, columns, hint in (("columns left behind", self.columns, "; --keep-columns takes them along"),
                                     ("columns taken along", self.carried, "")):
            if columns:
                found.append(f"  {title}: " + ", ".join(
                    self._column(name, count) for name, count in columns.items())
                    + (hint if any("." not in name for name in columns) else ""))
        found += [f"  not in the file: {count} {text}" for text, count in self.lost.items()]
        found += [f"  changed: {count} {text}" for text, count in self.changed.items()]
        return found

    def _column(self, name: str, count: int) -> str:
        new = f" as {self.renamed[name]}" if name in self.renamed else ""
        return f"{name}{new} ({count} records)"

    def to_json(self) -> dict[str, Any]:
        """The same for programs."""
        return {"source": self.source, "to": self.to, "formats": self.formats,
                "rows": {"read": self.read, "written": self.written, "dropped": dict(self.dropped)},
                "columns": {"left_behind": dict(self.columns), "carried": dict(self.carried), "renamed": self.renamed},
                "lost": dict(self.lost), "changed": dict(self.changed),
                "dropped_rows": [{"place": drop.place, "reason": str(drop.reason), "detail": drop.detail}
                                 for drop in self.first]}
