"""Words of labels: which spellings are one word, and which words are the two sides of a pair."""

import json
import re
import shlex
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

MISSING = "null"
"""The word of a label that is null, empty or not a number."""

Pair = tuple[frozenset[str], frozenset[str]]
"""The desirable and the undesirable words of a pair."""


def pair(desirable: str, undesirable: str) -> Pair:
    """A pair from two lists of words with commas."""
    return frozenset(desirable.split(", ")), frozenset(undesirable.split(", "))


BOOLEANS = pair("true, 1", "false, 0")
PAIRS = (
    pair("true, t, 1", "false, f, 0"), pair("1, +1", "-1"), pair("1.0", "0.0"), pair("1.0", "-1.0"),
    pair("yes, y", "no, n"),
    pair("up, thumb up, thumbs up, thumbup, thumbsup, 👍", "down, thumb down, thumbs down, thumbdown, thumbsdown, 👎"),
    pair("good", "bad"), pair("like, liked", "dislike, disliked"), pair("upvote, upvoted", "downvote, downvoted"),
    pair("positive, pos", "negative, neg"), pair("accept, accepted", "reject, rejected"),
    pair("approve, approved", "reject, rejected, disapprove, disapproved"), pair("chosen", "rejected"),
    pair("correct", "incorrect, wrong"), pair("right", "wrong"), pair("helpful", "unhelpful, not helpful"),
    pair("useful", "useless, not useful"), pair("desirable", "undesirable"), pair("pass, passed", "fail, failed"),
    pair("satisfied", "dissatisfied, unsatisfied, not satisfied"), pair("✅", "❌"),
)
"""Pairs that are understood once both of their sides appear in a file."""

_IGNORED = re.compile("[\ufe0e\ufe0f\u200d\U0001f3fb-\U0001f3ff]")  # variation selectors and skin tones
_BETWEEN_WORDS = re.compile(r"(?<=\w)[\s_-]+(?=\w)")
_NUMBER = re.compile(r"[+-]?\d{1,15}(\.\d{1,15})?")


def key_of(value: Any) -> str | None:
    """A label without the spelling that makes no difference. None for a list or an object.

    A float of a table library is a whole number, since such libraries turn labels into floats. Others stay apart, so
    that `1.0` alone is not a label.
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        text = _IGNORED.sub("", unicodedata.normalize("NFKC", value)).strip().casefold().replace("\u2212", "-")
        text = text[1:-1] if len(text) > 2 and text[0] == text[-1] == ":" else text
        return _BETWEEN_WORDS.sub(" ", text) or MISSING
    if isinstance(value, list | tuple | dict):
        return None
    if value is None or str(value) in ("nan", "NaN", "NaT", "<NA>"):
        return MISSING
    if isinstance(value, np.floating) and float(value).is_integer():
        return str(int(value))
    if isinstance(value, float):
        return str(value + 0.0)  # without the sign of -0.0
    return str(value) if isinstance(value, int) else None


def is_number(key: str) -> bool:
    """True if a key is a number."""
    return _NUMBER.fullmatch(key) is not None


def mapping_key(word: Any) -> str:
    """The key of a word as `--labels` compares it: 1, 1.0 and +1 are one number there."""
    key = key_of(word) or ""
    return f"{float(key):g}" if is_number(key) else key


def meaning(value: Any) -> bool | None:
    """What a word says in every pair that has it; None for other values."""
    key = key_of(value)
    return next((key in yes for yes, no in PAIRS if key in yes | no), None)


def is_word(value: Any) -> bool:
    """True if a value is a word of some pair."""
    return meaning(value) is not None


def is_pair(values: Iterable[Any]) -> bool:
    """True if all values are words of one pair, and both of its sides are among them. Missing ones do not count."""
    keys = {key for value in values if (key := key_of(value)) != MISSING}
    return any(keys <= yes | no and keys & yes and keys & no for yes, no in PAIRS)


def example(keys: Sequence[str]) -> str:
    """A value of `--labels` for these words, such as `up=true,down=false,meh=drop`."""
    words = list(keys[:4])
    said = {key: {True: "true", False: "false", None: "drop"}[meaning(key)] for key in words}
    unknown = [key for key in words if said[key] == "drop" and key != MISSING]
    for verdict in ("true", "false"):
        if verdict not in said.values() and unknown:
            said[unknown.pop(0)] = verdict
    if any("," in key for key in said):
        return shlex.quote(json.dumps({key[:30]: verdict for key, verdict in said.items()}, ensure_ascii=False))
    text = ",".join(f"{key[:30]}={verdict}" for key, verdict in said.items())
    return text if all(char.isalnum() or char in "=,.+-_" or not char.isascii() for char in text) else shlex.quote(text)
