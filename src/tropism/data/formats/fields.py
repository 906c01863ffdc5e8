"""The parts of a record, checked: texts, messages, labels, ratings, tool schemas."""

import json
import math
from typing import Any

from tropism.data.rows import Message
from tropism.errors import DataError

Content = str | tuple[Message, ...]
"""A prompt or an answer: plain text, or messages."""

SPEAKERS = {
    "human": "user", "user": "user", "prompter": "user",
    "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant", "bot": "assistant", "model": "assistant",
    "system": "system",
    "tool": "tool", "observation": "tool", "function_response": "tool",
    "function_call": "assistant",
}
"""Names of speakers in messages that have `from` instead of `role`, and the role that chat templates know."""

_SPELLED = {"true": True, "1": True, "false": False, "0": False}
_THUMBS = {"up": True, "thumbs_up": True, "down": False, "thumbs_down": False}


def part(value: Any, name: str, place: str) -> Content:
    """A field of text or messages. None is an empty text: the row is dropped, not the run.

    Args:
        value: what the record holds.
        name: the column.

    Raises:
        DataError: if it is neither text nor messages.
    """
    if value is None:
        return ""
    if isinstance(value, str):
        return text(value, name, place)
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list | tuple):
        raise DataError(f"{place}: '{name}' must be text or a list of messages, not {type(value).__name__}")
    return tuple(message(entry, name, place) for entry in value)


def conversation(value: Any, name: str, place: str) -> tuple[Message, ...]:
    """A field that must hold messages; None is no message.

    Raises:
        DataError: if it is something else.
    """
    spoken = part(value, name, place)
    if isinstance(spoken, str):
        if spoken:
            raise DataError(f"{place}: '{name}' must be a list of messages")
        return ()
    return spoken


def message(value: Any, name: str, place: str) -> Message:
    """A message with `role` and `content`, or with `from` and `value` or `content`; other keys stay as they are.

    Keys that hold null are none: some programs write those of one message into all.

    Raises:
        DataError: for an unknown speaker, or content that is not text.
    """
    if isinstance(value, dict) and "role" not in value and isinstance(value.get("from"), str):
        value = _with_role(value, name, place)
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise DataError(f"{place}: each message of '{name}' needs a 'role' and a 'content'")
    content = value.get("content")
    value = {key: entry for key, entry in value.items() if entry is not None or key == "content"}
    if isinstance(content, list):
        texts = []
        for piece in content:
            kind = piece.get("type") if isinstance(piece, dict) else type(piece).__name__
            if kind != "text":
                raise DataError(f"{place}: '{name}' holds content of type '{kind}'; only text can be trained on")
            texts.append(text(piece.get("text"), name, place))
        return {**value, "content": "".join(texts)}
    if content is not None and not isinstance(content, str):
        raise DataError(f"{place}: the content of a message of '{name}' must be text, not {type(content).__name__}")
    return {**value, "content": text(content, name, place)} if content else value


def _with_role(value: dict[str, Any], name: str, place: str) -> Message:
    speaker = value["from"].strip().lower()
    if speaker not in SPEAKERS:
        raise DataError(f"{place}: '{name}' has a message from {brief(value['from'])}; known are {', '.join(SPEAKERS)}")
    content = value["value"] if "value" in value else value.get("content")
    others = {key: entry for key, entry in value.items() if key not in ("from", "value", "content")}
    if speaker == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": _calls(content, name, place), **others}
    return {"role": SPEAKERS[speaker], "content": content, **others}


def _calls(content: Any, name: str, place: str) -> list[dict[str, Any]]:
    """Tool calls written as JSON in the place of a message's text."""
    try:
        calls = json.loads(content) if isinstance(content, str) else content
    except (ValueError, RecursionError):
        calls = None
    calls = [calls] if isinstance(calls, dict) else calls
    if not isinstance(calls, list) or not calls or not all(isinstance(call, dict) and "name" in call for call in calls):
        raise DataError(f"{place}: a function_call of '{name}' must be JSON with a 'name' and 'arguments'")
    return [{"type": "function", "function": call} for call in calls]


def text(value: Any, name: str, place: str) -> str:
    """A text that a tokenizer can read.

    Raises:
        DataError: if it is none, or holds half a character.
    """
    if not isinstance(value, str):
        raise DataError(f"{place}: '{name}' must hold text, not {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{place}: '{name}' holds half a character ({value[error.start]!r}, a lone surrogate), "
                        "which no tokenizer reads") from None
    return value


def brief(value: Any) -> str:
    """A value in a sentence about it, not the whole of a long one."""
    spelled = repr(value)
    return spelled if len(spelled) <= 100 else f"{spelled[:100]}..."


def blank(answer: Content) -> bool:
    """Whether an answer says nothing: no text, and no tool call."""
    if isinstance(answer, str):
        return not answer.strip()
    if not answer:
        return True
    last = answer[-1]
    return not (last.get("content") or "").strip() and not last.get("tool_calls")


def as_messages(given: Content, role: str) -> tuple[Message, ...]:
    """Messages as they are; text as a message of `role`; an empty text as none."""
    if isinstance(given, tuple):
        return given
    return ({"role": role, "content": given},) if given else ()


def shared_start(one: tuple[Message, ...], other: tuple[Message, ...]) -> int:
    """How many messages two conversations share from the start."""
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    return shared


def tool_schemas(value: Any, place: str) -> tuple[Any, ...] | None:
    """The column `tools`: a list of schemas, or JSON of one; each schema an object, or JSON of one.

    Raises:
        DataError: if it is something else.
    """
    if isinstance(value, str):
        if not value.strip():
            return None
        value = _from_json(value)
        if isinstance(value, str):
            raise DataError(f"{place}: 'tools' is text, and not JSON of a list of schemas")
    if value is not None and not isinstance(value, list | tuple):
        raise DataError(f"{place}: 'tools' must be a list of schemas, not {type(value).__name__}")
    schemas = [_from_json(schema) if isinstance(schema, str) else schema for schema in value or ()]
    for number, schema in enumerate(schemas, start=1):
        if not isinstance(schema, dict):
            raise DataError(f"{place}: schema {number} of 'tools' must be an object, or JSON of one, not "
                            f"{brief(schema)}")
    return tuple(schemas) or None


def _from_json(value: str) -> Any:
    """What a text spells as JSON; the text itself if that is nothing."""
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def label(value: Any, name: str, place: str) -> bool:
    """Accepts true/false, 0/1 and their spellings as text (CSV has nothing else).

    Raises:
        DataError: for anything else; a rating is never taken for a label.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.strip().lower() in _SPELLED:
        return _SPELLED[value.strip().lower()]
    raise DataError(f"{place}: {name} {brief(value)} is not true/false (accepted: true, false, 1, 0). For ratings, "
                    f"name the column and draw the line: --columns rating={name} --label-threshold NUMBER")


def preference(value: Any, name: str, place: str) -> bool:
    """Accepts `chosen` and `rejected`.

    Raises:
        DataError: for anything else.
    """
    if value in ("chosen", "rejected"):
        return bool(value == "chosen")
    raise DataError(f"{place}: {name} {brief(value)} is not chosen/rejected")


def thumb(value: Any, name: str, place: str) -> bool:
    """Accepts labels, and `up`, `down`, `thumbs_up`, `thumbs_down`.

    Raises:
        DataError: for anything else.
    """
    if isinstance(value, str) and value.strip().lower() in _THUMBS:
        return _THUMBS[value.strip().lower()]
    try:
        return label(value, name, place)
    except DataError:
        raise DataError(f"{place}: {name} {brief(value)} of a message is none (accepted: true, false, 1, 0, up, down, "
                        "thumbs_up, thumbs_down)") from None


def is_thumb(value: Any) -> bool:
    """Whether `thumb` accepts it."""
    try:
        thumb(value, "", "")
    except DataError:
        return False
    return True


def rating(value: Any, name: str, place: str) -> float:
    """A number, or its spelling as text.

    Raises:
        DataError: for anything else, NaN included.
    """
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"{place}: {name} {brief(value)} is not a number")
    return number
