"""Control tokens that are spelled out in messages and tools, and the marks that stand for them."""

import re
from collections.abc import Collection, Iterator
from typing import Any

from tropism.data.tokenization.tool_arguments import JsonArguments

_FIRST_MARK = 0x29000  # of rare ideographs: printable, so templates neither escape nor change them


def texts_in(value: Any) -> Iterator[str]:
    """Every text in messages or tools, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from texts_in(list(value))
        yield from texts_in(list(value.values()))
        if isinstance(value, JsonArguments):
            yield value.text
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from texts_in(entry)


class Spelled:
    """The control tokens in the text of a row, each with a rare character of its own as its mark.

    Args:
        pattern: matches the names of control tokens.
        names: the control tokens that occur in `text`.
        text: all text of the row, which contains none of the marks.

    Attributes:
        names: the name of each mark.
    """

    def __init__(self, pattern: re.Pattern[str], names: Collection[str], text: str) -> None:
        self._pattern = pattern
        self._marks: dict[str, str] = {}
        mark = _FIRST_MARK
        for name in sorted(names):
            while chr(mark) in text:
                mark += 1
            self._marks[name] = chr(mark)
            mark += 1
        self.names = {mark: name for name, mark in self._marks.items()}

    def __bool__(self) -> bool:
        return bool(self.names)

    def mark(self, value: Any) -> Any:
        """Messages or tools with marks instead of control tokens."""
        if not self:
            return value
        if isinstance(value, str):
            return self._pattern.sub(lambda match: self._marks[match.group()], value)
        if isinstance(value, JsonArguments):
            return value.changed(self.mark)
        if isinstance(value, dict):
            return {self.mark(key): self.mark(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(entry) for entry in value]
        return value

    def in_text(self, text: str) -> bool:
        """True if a text has marks."""
        return any(mark in text for mark in self.names)

    def restore(self, text: str) -> str:
        """A text with control tokens instead of marks."""
        for mark, name in self.names.items():
            text = text.replace(mark, name)
        return text
