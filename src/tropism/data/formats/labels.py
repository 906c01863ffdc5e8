"""Reads labels. The values of a whole file decide what a word means, never one value alone."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tropism.data.formats import fields
from tropism.data.formats.label_words import (
    BOOLEANS,
    MISSING,
    PAIRS,
    Pair,
    example,
    is_number,
    key_of,
    mapping_key,
    pair,
)
from tropism.data.rows import Dropped, Reason
from tropism.errors import DataError, count_of

_PLAIN = {"true", "1", "false", "0", "a", "b"}
_LISTED = 12  # values that a message counts


@dataclass(frozen=True, slots=True)
class LabelKind:
    """What the labels of a format are.

    Args:
        alone: words that are understood without their opposite.
        pairs: words that are understood once both sides of a pair appear.
        refusal: what an error says of another value.
        ties: words for rows without a preference.
        meaning: what a label says, if it is True and if it is False.
        threshold: how to read numbers as ratings; empty if they are not.
    """

    alone: Pair = BOOLEANS
    pairs: tuple[Pair, ...] = PAIRS
    refusal: str = "is not a boolean"
    ties: frozenset[str] = frozenset()
    meaning: tuple[str, str] = ("is desirable", "is undesirable")
    threshold: str = "--columns rating={name} --label-threshold NUMBER"


LABELS = LabelKind()
PREFERENCES = LabelKind(alone=pair("chosen", "rejected"), refusal="is not 'chosen' or 'rejected'")
MARKS = LabelKind(refusal="of a message is not a valid label", threshold="")
VERDICTS = LabelKind(threshold="--label-threshold NUMBER")
THUMBS = LabelKind(alone=pair("1, 1.0", "-1, -1.0"), pairs=(), ties=frozenset({"0"}), threshold="",
                   refusal="is not 1 or -1")
SIDES = LabelKind(alone=pair("a", "b"), pairs=(pair("1", "2"), pair("0", "1")), ties=frozenset({"tie"}), threshold="",
                  refusal="is not a side", meaning=("is the first completion", "is the second completion"))

Vote = tuple[Any, str, str]
"""A label, the name of its column, and its place."""


@dataclass(slots=True)
class LabelReader:
    """Reads the labels of one part of a source.

    Args:
        kind: what the labels are.
        words: the words of `--labels`: True, False, or None for rows to drop.
        threshold: of `--label-threshold`, if labels may be ratings.
        off: the column that could be a label is not one.
    """

    kind: LabelKind = LABELS
    words: Mapping[str, bool | None] = field(default_factory=dict)
    threshold: float | None = None
    off: bool = False
    _pairs: list[Pair] = field(default_factory=list)
    _counts: Counter[str] = field(default_factory=Counter)
    _first: dict[str, Vote] = field(default_factory=dict)
    _name: str | None = None
    _learned: bool = False

    def __post_init__(self) -> None:
        self._pairs = [self.kind.alone]

    def learn(self, votes: Sequence[Vote], whole: bool, lenient: bool = False) -> None:
        """Find the pair of words that a file uses in its first labels.

        Args:
            votes: its first labels.
            whole: they are all of its labels.
            lenient: the file need not have labels, and a column with other values is ignored.

        Raises:
            DataError: for a value that is not a label, or words whose meaning is not certain.
        """
        self._pairs, self._learned = [self.kind.alone, *self.kind.pairs], True
        keys = {key_of(value) for value, _, _ in votes}
        if lenient and not self.words:
            self.off = not any(keys - {MISSING} <= yes | no for yes, no in self._pairs)
            return
        if self.threshold is not None:
            return
        counts: Counter[str] = Counter()
        for vote in votes:
            if (key := key_of(vote[0])) is not None:
                counts[key] += 1
                self._first.setdefault(key, vote)
        for vote in votes:
            self._narrow(vote, counts)
        unclear = [key for key in counts if len({key in yes for yes, no in self._pairs if key in yes | no}) > 1]
        if whole or unclear:
            self._check_both(counts)
        self._first = {}
        if not unclear and self.kind is not SIDES:  # a side is one in this pair and the other in that
            self._pairs = [self.kind.alone, *self.kind.pairs]

    def read(self, value: Any, name: str, place: str) -> bool | Dropped:
        """The label of a row: True for a desirable one, or the reason why the row has none.

        Raises:
            DataError: for a value that is not a label.
        """
        if self.threshold is not None:
            return fields.rating(value, name, place) >= self.threshold
        vote = value, name, place
        key = self._narrow(vote, self._counts)
        self._first.setdefault(key, vote)
        self._counts[key] += 1
        if key in self.kind.ties:
            return Dropped(place, Reason.TIE, f"{name} is a tie")
        verdict = self._verdict(key)
        if verdict is None:
            return Dropped(place, Reason.NO_LABEL, f"{name} is {fields.short_repr(value)}, which --labels drops")
        return verdict

    def decide(self, votes: Sequence[Any], name: str, place: str) -> bool | Dropped:
        """The label of several annotators: that of most of them. Empty labels do not count.

        Raises:
            DataError: for a value that is not a label, or for a label of another name than in the rows before.
        """
        if self._name not in (None, name) and self.kind is not MARKS:
            raise DataError(f"{place}: the label is '{name}', but that of earlier rows is '{self._name}'. Choose one "
                            "with --label-name NAME.")
        self._name = name
        found = [self.read(vote, name, place) for vote in votes
                 if key_of(vote) != MISSING or (MISSING in self.words and self.threshold is None)]
        if not found:
            return Dropped(place, Reason.NO_LABEL, f"no label '{name}'")
        counts = Counter(verdict if isinstance(verdict, bool) else str(verdict.reason) for verdict in found)
        (most, number), *others = counts.most_common(2)
        if others and others[0][1] == number:
            return Dropped(place, Reason.DISAGREEMENT, f"the {len(found)} labels '{name}' have no majority")
        return next(one for one in found if most == (one if isinstance(one, bool) else str(one.reason)))

    def undesirable(self, value: Any, name: str, place: str) -> bool:
        """True if the label of a completion to imitate is not desirable. A column of other values is ignored.

        Raises:
            DataError: for a value that is not a label, in a column of labels.
        """
        key = key_of(value)
        if self.off or (key in (None, MISSING) and not self.words):
            return False
        if not self._learned and not any(key in side for side in self.kind.alone):
            return False
        return self.read(value, name, place) is not True

    def finish(self) -> None:
        """Check the words of the whole file.

        Raises:
            DataError: if only one side of a pair appeared.
        """
        self._check_both(self._counts)

    def _verdict(self, key: str) -> bool | None:
        if self.words:
            return self.words[mapping_key(key)]
        return any(key in yes for yes, _ in self._pairs)

    def _narrow(self, vote: Vote, counts: Counter[str]) -> str:
        """The key of a label. The pairs that do not have it are no candidates any more."""
        key = key_of(vote[0])
        if key is not None and self.words and mapping_key(key) in self.words:
            return key
        if key is not None and not self.words:
            left = [both for both in self._pairs if key in both[0] | both[1]]
            self._pairs = left or self._pairs
            if left or key in self.kind.ties:
                return key
        raise self._error(vote, counts)

    def _check_both(self, counts: Counter[str]) -> None:
        seen = set(counts) - self.kind.ties
        if self.words or self.off or seen <= self.kind.alone[0] | self.kind.alone[1]:
            return
        if not any(seen <= yes | no and seen & yes and seen & no for yes, no in self._pairs):
            lone = next(key for key in counts if key in seen)
            raise self._error(self._first[lone], counts, ", and its opposite does not occur")

    def _error(self, vote: Vote, counts: Counter[str], why: str = "") -> DataError:
        value, name, place = vote
        key = key_of(value)
        if key is not None and key not in counts:
            counts = counts + Counter([key])
        order = [one for one, _ in counts.most_common(_LISTED)]
        if key in counts and key not in order:
            order[-1] = str(key)
        values = ", ".join(f"{fields.short_repr(self._first.get(one, vote)[0])} ({count_of(counts[one], 'row')})"
                           for one in order)
        more = f", and {count_of(len(counts) - _LISTED, 'more value')}" if len(counts) > _LISTED else ""
        listed = f" Values: {values}{more}." if len(counts) > 1 or why else ""
        return DataError(f"{place}: {name} {fields.short_repr(value)} {self.kind.refusal}{why}.{listed} "
                         f"{self._remedy(name, order)}")

    def _remedy(self, name: str, keys: list[str]) -> str:
        if self.kind is SIDES:
            return ("Use a and b, left and right, or the names of the two columns, and tie for neither. Numbers are "
                    "understood once 1 and 2, or 0 and 1, appear.")
        use = f"Use true/false or 0/1, or say what each value means, as in --labels {example(keys or ['up', 'down'])}."
        if self.kind.threshold and all(is_number(key) or key == MISSING for key in keys):
            use += f" For ratings, use {self.kind.threshold.format(name=name)}."
        return use

    def __str__(self) -> str:
        """`labels: up is desirable (12 rows), down is undesirable (3 rows)`; empty for words that say so themselves."""
        if self.off or (not self.words and set(self._counts) <= _PLAIN | self.kind.ties):
            return ""
        said = []
        for key, count in self._counts.most_common(_LISTED):
            value, verdict = self._first[key][0], None if key in self.kind.ties else self._verdict(key)
            meaning = "is dropped" if verdict is None else self.kind.meaning[0 if verdict else 1]
            spelled = value.strip() if isinstance(value, str) and key != MISSING else fields.short_repr(value)
            said.append(f"{spelled} {meaning} ({count_of(count, 'row')})")
        return f"labels: {', '.join(said)}"
