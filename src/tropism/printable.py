"""Text as it is printed. Names, paths and rows come from others, and nothing in them may act on a terminal."""

import unicodedata
from collections.abc import Callable

_LONGEST = 2400  # characters of a line; a longer one keeps its beginning, and its end with the remedy
_HEAD, _TAIL = 1500, 500


def escaped(text: str) -> str:
    """A text on one line: line ends, control characters, bidirectional overrides, halves of surrogate pairs and all
    other unprintable characters are written as escapes, such as `\\x1b`."""
    return _escaped(text, _as_escape)


def one_line(text: str) -> str:
    """A text as `escaped`, cut in the middle if it is very long."""
    if len(text) > _LONGEST:
        text = f"{text[:_HEAD]} ... {len(text) - _HEAD - _TAIL:,} characters ... {text[-_TAIL:]}"
    return escaped(text)


def lines(text: str) -> str:
    """A text of several lines, each as `one_line`. For output of libraries, whose line ends cannot be told from those
    of the names in it."""
    return "\n".join(map(one_line, text.split("\n")))


def passage(text: str) -> str:
    """A text of any length as `escaped`, with its line ends, tabs, spaces of all kinds and joiners as they are. Scripts
    and emoji need these, and they only move what follows."""
    return _escaped(text, lambda char: char if _is_layout(char) else _as_escape(char))


def json_text(text: str) -> str:
    """JSON with the unprintable characters in its strings as JSON escapes. The values stay the same."""
    return "\n".join(_escaped(line, _in_json) for line in text.split("\n"))


def _as_escape(char: str) -> str:
    return char.encode("unicode_escape", "surrogatepass").decode()


def _is_layout(char: str) -> bool:
    return char in "\n\t\u200c\u200d" or unicodedata.category(char) == "Zs"


def _in_json(char: str) -> str:
    units = char.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[start:start + 4]}" for start in range(0, len(units), 4))


def _escaped(text: str, escape: Callable[[str], str]) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() else escape(c) for c in text)
