"""Columns that nothing reads, and findings about those that look like a preference."""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tropism.data.audit.findings import ORIGINS, Finding
from tropism.data.formats import Reading, View, fields
from tropism.data.formats.label_words import is_word
from tropism.data.rows import RawRow

_NAMED = 12  # columns that a line names
_KEPT = 8  # values of a column
_LONGEST = 40  # characters of a column's name in a line
_LEFT_ALONE = {"id", "unused", *ORIGINS}  # identify a row, or were renamed to be ignored
_PREFERENCE = frozenset((
    "preferred", "preference", "preferences", "winner", "loser", "rating", "ratings", "rated", "score", "scores",
    "label", "labels", "labeled", "weight", "weights", "rank", "ranks", "ranking", "feedback", "thumb", "thumbs",
    "vote", "votes", "voted", "upvote", "upvotes", "downvote", "downvotes", "upvoted", "downvoted", "reward",
    "rewards", "good", "bad", "better", "best", "worse", "worst", "like", "likes", "liked", "dislike", "dislikes",
    "disliked", "desirable", "undesirable", "accepted", "approved", "stars", "quality", "verdict", "judgment",
    "judgement", "grade"))
_SIDES = frozenset(("chosen", "rejected"))
_DIRECTIONS = frozenset(("up", "down"))
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


class ColumnUse:
    """Columns of one part of a source, and which of them its rows are made from.

    Args:
        reading: how its records become rows.
        head: its first records, columns renamed.

    Attributes:
        read: takes the columns that are looked up in these records.
    """

    def __init__(self, reading: Reading, head: Sequence[RawRow]) -> None:
        self.reading = reading
        self.read: set[str] = set()
        self._values: dict[str, list[Any]] = {}  # some different texts and numbers of each column that has any value
        for row in head:
            for name, value in row.record.items():
                kept = self._values.get(name)
                if (kept is not None and len(kept) >= _KEPT) or fields.is_missing(value):
                    continue
                kept = self._values.setdefault(name, [])
                if isinstance(value, str | int | float) and value not in kept:
                    kept.append(value)

    def unused(self) -> dict[str, list[Any]]:
        """Columns with values that nothing reads, and some of their values."""
        return {str(name): values for name, values in self._values.items()
                if str(name) not in _LEFT_ALONE and (name not in self.read or self._is_ignored(name))}

    def _is_ignored(self, name: str) -> bool:
        """True for a column that was looked up but whose values are none that count."""
        known, shape = self.reading.format, self.reading.shape
        if name in shape.columns:
            return False
        if name == "history":
            return not known.chat and name not in self.reading.beside
        if shape.view == "single" and any(name == other.label for other in known.shapes):
            return self.reading.labels.off
        return False


def name_columns(names: Iterable[str]) -> str:
    """The first columns by name, and the number of the others."""
    given = list(names)
    shown = [name if len(name) <= _LONGEST else f"{name[:_LONGEST]}..." for name in given[:_NAMED]]
    return ", ".join(shown) + (f" and {len(given) - _NAMED:,} more" if len(given) > _NAMED else "")


def is_preference_like(name: str) -> bool:
    """True if a column has the name of a judgment: `winner`, `user_rating`, `isGood`, `thumbs_up`."""
    words = [word.lower() for word in _WORD.findall(name)]
    while len(words) > 1 and words[-1] in _DIRECTIONS:
        words.pop()
    return bool(words) and words[-1] in _PREFERENCE and not _SIDES & set(words)


def find_unused(uses: Sequence[ColumnUse], wanted: View) -> Iterator[Finding]:
    """A warning about columns that look like a preference but are not used."""
    doubtful = {name: values for use in uses for name, values in use.unused().items() if is_preference_like(name)}
    if doubtful:
        several = len(doubtful) > 1
        text = (f"the column{'s' if several else ''} {name_columns(doubtful)} look{'' if several else 's'} like a "
                f"preference, but {'are' if several else 'is'} not used. {_remedy(doubtful, uses[0].reading, wanted)}")
        yield Finding("preference_unused", "warning", text, (), {"columns": len(doubtful)})


def _remedy(doubtful: Mapping[str, list[Any]], reading: Reading, wanted: View) -> str:
    name, values = next(iter(doubtful.items()))
    short = name if len(name) <= _LONGEST and name.isprintable() and "," not in name else "NAME"
    remove = "remove the column if it does not matter"
    if "weight" in short.lower():
        return f"To weight the rows, pass --columns {shlex.quote(f'weight={short}')}, or {remove}."
    numbers = all(isinstance(value, int | float) for value in values) and not all(map(is_word, values))
    known = ("rating", "score") if numbers else ("label",)
    rename = "" if short in known else f"--columns {shlex.quote(f'{known[0]}={short}')}"
    label = " ".join(filter(None, (rename, "--label-threshold NUMBER" if numbers else "")))
    if wanted == "single":
        return f"To learn from it, use `tropism kto{f' {label}' if label else ''}`, or {remove}."
    if wanted == "unpaired" and reading.shape.view == "unpaired" and reading.shape.label:
        use = f"To use another column, pass {label}" if label else "To use another column, rename it with --columns"
        return f"The labels are those of '{reading.shape.label}'. {use}, or {remove}."
    sides = " and ".join(f"'{side}'" for side in reading.shape.completions[:2])
    return f"The preferences are those of {sides or reading.format.name}. If that is not meant, correct the rows, or " \
           f"{remove}."


def find_plain_text(rows: int) -> Finding:
    """The warning about rows of plain text for a model that has a chat template."""
    return Finding(
        "plain_text", "warning",
        "the data is plain text, but the model has a chat template. Served through the template, the model sees other "
        "text than it learned. To train with the template, pass --as-messages. To train on the text as it is, pass "
        "--plain-text.", (), {"rows": rows})


def find_leading_space(rows: int) -> Finding:
    """The notice about wrapped completions that begin with white space, which replies of a chat model do not."""
    verb = "begin" if rows > 1 else "begins"
    what = f"completions of {rows:,} rows {verb}" if rows > 1 else f"completion of {rows} row {verb}"
    return Finding("leading_space", "notice",
                   f"--as-messages: the {what} with white space, which replies of a chat model usually do not. "
                   "Messages keep it as it is. Remove it from the data if that is not intended.", (), {"rows": rows})
