"""Wraps lines for a terminal between words."""

import re

from rich.cells import cell_len
from rich.text import Text

_WORD = re.compile(r"((?<=: )(?:tropism|torchrun|pip) .+|`[^`]*`|\S)+")  # what one copies is one word


def wrapped(text: Text, width: int) -> Text:
    """A line of text, continued below with an indent where it is wider than the terminal.

    A word that is wider than a line, such as a path, is left to the terminal, which does not put a line end into it.
    """
    plain = text.plain
    indent = len(plain) - len(plain.lstrip()) + 2
    starts, column, end = [], 0, 0
    for word in _WORD.finditer(plain):
        added = cell_len(plain[end:word.end()])
        if column + added > width and end:
            starts.append(word.start())
            column, added = indent, cell_len(word[0])
        column, end = column + added, word.end()
    lines = text.divide(starts)
    for line in lines[:-1]:
        line.rstrip()
    return Text(f"\n{' ' * indent}").join(lines)
