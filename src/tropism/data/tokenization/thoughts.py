"""Thoughts in an assistant's message: in its content or under a key of their own."""

import re
from collections.abc import Iterator

from tropism.data.rows import Message

KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message that hold its thought."""

_NAME = r"(?:\w+:)?(?:think|thinking|thought|reasoning)"
_OPEN = rf"(?:<{_NAME}>|\[{_NAME}\])"
_CLOSE = rf"(?:</{_NAME}>|\[/{_NAME}\])"
_opening = re.compile(_OPEN, re.IGNORECASE)
_closing = re.compile(_CLOSE, re.IGNORECASE)
_opened = re.compile(rf"{_OPEN}\s*\Z", re.IGNORECASE)
_closed = re.compile(rf"{_CLOSE}\s*\Z", re.IGNORECASE)
_leading = re.compile(rf"\s*{_OPEN}", re.IGNORECASE)


def is_mark(name: str) -> bool:
    """True for a token that opens or closes a thought."""
    return bool(_opening.fullmatch(name) or _closing.fullmatch(name))


def opening_of(prompt: str) -> str:
    """The open thought with which a generation prompt ends; empty if there is none."""
    found = _opened.search(prompt[-200:])
    return found.group() if found else ""


def closes(text: str) -> bool:
    """True if a text closes a thought."""
    return _closing.search(text) is not None


def begins(text: str) -> bool:
    """True if a text begins with a thought."""
    return _leading.match(text) is not None


def is_closed(prompt: str) -> bool:
    """True if a generation prompt ends with a closed thought."""
    return _closed.search(prompt[-200:]) is not None


def answer_of(content: str) -> str:
    """The text after the last thought."""
    ends = [match.end() for match in _closing.finditer(content)]
    return content[ends[-1] :] if ends else content


def without_opening(content: str, prompt: str) -> str:
    """The content as it continues a generation prompt that has opened its thought."""
    found = _leading.match(content)
    body = content[found.end() :] if found else content
    return body.lstrip("\n") if prompt[-1:].isspace() else body


def thoughts_of(message: Message) -> Iterator[str]:
    """The thoughts of a message, without white space around them."""
    content = message.get("content")
    if isinstance(content, str) and closes(content):
        whole = content[: len(content) - len(answer_of(content))]
        whole = whole[: [match.start() for match in _closing.finditer(whole)][-1]]
        found = _leading.match(whole)
        yield (whole[found.end() :] if found else whole).strip()
    yield from under_keys(message)


def under_keys(message: Message) -> Iterator[str]:
    """The thoughts of a message that have a key of their own."""
    for key in KEYS:
        if isinstance(value := message.get(key), str):
            yield value.strip()
