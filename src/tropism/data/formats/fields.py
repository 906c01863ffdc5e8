"""Checks of the fields of a record: texts, messages, labels, ratings, tool schemas."""

import json
import math
from typing import Any

import numpy as np

from tropism.data.rows import Message
from tropism.errors import DataError

Content = str | tuple[Message, ...]
"""A prompt or a completion: plain text or messages."""

SPEAKERS = {
    "human": "user", "user": "user", "prompter": "user",
    "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant", "bot": "assistant", "model": "assistant",
    "system": "system",
    "tool": "tool", "observation": "tool", "function_response": "tool",
    "function_call": "assistant",
}
"""Speakers in messages that have `from` instead of `role`, and the roles that chat templates use for them."""

_SPELLED = {"true": True, "1": True, "false": False, "0": False}
_THUMBS = {"up": True, "thumbs_up": True, "down": False, "thumbs_down": False}


def content(value: Any, name: str, place: str) -> Content:
    """A field of text or messages. None is an empty text, for which the row is dropped.

    Args:
        value: of the field.
        name: of its column.
        place: of the record, for errors.

    Raises:
        DataError: for anything else.
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
    """A field of messages; none for None or an empty text.

    Raises:
        DataError: for anything else.
    """
    messages = content(value, name, place)
    if isinstance(messages, str):
        if messages:
            raise DataError(f"{place}: '{name}' must be a list of messages, not text")
        return ()
    return messages


def message(value: Any, name: str, place: str) -> Message:
    """A message with `role` and `content`, or with `from` and `value` or `content`. Other keys are kept.

    Keys with a null value are removed, since some programs write the keys of one message into all. A message of a list
    may be JSON text, as `datasets` writes its type Json into files.

    Raises:
        DataError: for an unknown speaker or content that is not text.
    """
    value = _from_json(value) if isinstance(value, str) else value
    if isinstance(value, dict) and "role" not in value and isinstance(value.get("from"), str):
        value = _with_role(value, name, place)
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise DataError(f"{place}: each message of '{name}' needs a 'role' and a 'content'")
    given = value.get("content")
    value = {key: entry for key, entry in value.items() if entry is not None or key == "content"}
    calls = value.get("tool_calls")
    if isinstance(calls, str) or (isinstance(calls, list) and any(isinstance(call, str) for call in calls)):
        value["tool_calls"] = _calls_of_text(calls, name, place)
    if isinstance(given, list):
        texts = []
        for piece in given:
            kind = piece.get("type") if isinstance(piece, dict) else type(piece).__name__
            if kind != "text":
                raise DataError(f"{place}: '{name}' has content of type '{kind}'; only text is supported")
            texts.append(text(piece.get("text"), name, place))
        return {**value, "content": "".join(texts)}
    if given is not None and not isinstance(given, str):
        raise DataError(f"{place}: the content of a message of '{name}' must be text, not {type(given).__name__}")
    return {**value, "content": text(given, name, place)} if given else value


def _with_role(value: dict[str, Any], name: str, place: str) -> Message:
    speaker = value["from"].strip().lower()
    if speaker not in SPEAKERS:
        raise DataError(f"{place}: '{name}' has a message from {short_repr(value['from'])}. "
                        f"Known: {', '.join(SPEAKERS)}")
    said = value["value"] if "value" in value else value.get("content")
    others = {key: entry for key, entry in value.items() if key not in ("from", "value", "content")}
    if speaker == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": _tool_calls(said, name, place), **others}
    return {"role": SPEAKERS[speaker], "content": said, **others}


def _calls_of_text(value: str | list[Any], name: str, place: str) -> list[Any]:
    """The key `tool_calls`, or its entries, as JSON text; none for an empty text."""
    calls = value if isinstance(value, list) else _from_json(value) if value.strip() else []
    calls = [_from_json(call) if isinstance(call, str) else call for call in calls] if isinstance(calls, list) else [""]
    if not all(isinstance(call, dict) for call in calls):
        raise DataError(f"{place}: 'tool_calls' of a message of '{name}' must be a list of calls or its JSON, not "
                        f"{short_repr(value)}")
    return calls


def _tool_calls(value: Any, name: str, place: str) -> list[dict[str, Any]]:
    """Tool calls written as JSON instead of a message's text."""
    try:
        calls = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        calls = None
    calls = [calls] if isinstance(calls, dict) else calls
    if not isinstance(calls, list) or not calls or not all(isinstance(call, dict) and "name" in call for call in calls):
        raise DataError(f"{place}: a function_call of '{name}' must be JSON with a 'name' and 'arguments'")
    return [{"type": "function", "function": call} for call in calls]


def text(value: Any, name: str, place: str) -> str:
    """A text that tokenizers accept.

    Raises:
        DataError: for anything else, including text with a lone surrogate.
    """
    if not isinstance(value, str):
        raise DataError(f"{place}: '{name}' must be text, not {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{place}: '{name}' has a lone surrogate ({value[error.start]!r}), which tokenizers do not "
                        "accept. Fix the text's encoding.") from None
    return value


def short_repr(value: Any) -> str:
    """A value for an error message, cut after 100 characters."""
    spelled = repr(float(value) if isinstance(value, np.floating) else value)
    return spelled if len(spelled) <= 100 else f"{spelled[:100]}..."


def is_blank(completion: Content) -> bool:
    """True if a completion has neither text nor a tool call."""
    if isinstance(completion, str):
        return not completion.strip()
    if not completion:
        return True
    last = completion[-1]
    return not (last.get("content") or "").strip() and not last.get("tool_calls")


def as_messages(given: Content, role: str) -> tuple[Message, ...]:
    """Messages unchanged; text as one message of `role`; empty text as no message."""
    if isinstance(given, tuple):
        return given
    return ({"role": role, "content": given},) if given else ()


def shared_start(one: tuple[Message, ...], other: tuple[Message, ...]) -> int:
    """Number of messages that two conversations share from the start."""
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    return shared


def tool_schemas(value: Any, place: str) -> tuple[Any, ...] | None:
    """The column `tools`: a list of schemas or its JSON; each schema an object or its JSON.

    Raises:
        DataError: for anything else.
    """
    if is_missing(value):
        return None
    if isinstance(value, str):
        if not value.strip():
            return None
        value = _from_json(value)
        if isinstance(value, str):
            raise DataError(f"{place}: 'tools' is text that is not valid JSON. Give a list of schemas or its JSON.")
    if value is not None and not isinstance(value, list | tuple):
        raise DataError(f"{place}: 'tools' must be a list of schemas, not {type(value).__name__}")
    schemas = [_schema(schema) for schema in value or ()]
    for number, schema in enumerate(schemas, start=1):
        if not isinstance(schema, dict):
            raise DataError(f"{place}: schema {number} of 'tools' must be an object or its JSON, not "
                            f"{short_repr(schema)}")
    return tuple(schemas) or None


def _schema(value: Any) -> Any:
    """A schema whose parts may be JSON text."""
    value = _from_json(value) if isinstance(value, str) else value
    if isinstance(value, dict):
        for key in ("function", "parameters"):
            if isinstance(value.get(key), str) and isinstance(inner := _from_json(value[key]), dict):
                value = {**value, key: inner}
        if isinstance(value.get("function"), dict):
            value = {**value, "function": _schema(value["function"])}
    return value


def _from_json(value: str) -> Any:
    """The value of a JSON text; the text itself if it is not JSON."""
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def label(value: Any, name: str, place: str) -> bool:
    """A label: true/false, 0/1, or either as text, as in CSV; 1.0/0.0 only of numpy and the like, see `python_values`.

    Raises:
        DataError: for anything else. A rating is never read as a label.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, int | np.floating) and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.strip().lower() in _SPELLED:
        return _SPELLED[value.strip().lower()]
    raise DataError(f"{place}: {name} {short_repr(value)} is not a boolean. Use true/false or 0/1, or map ratings with "
                    f"--columns rating={name} --label-threshold NUMBER.")


def is_label(value: Any) -> bool:
    """True if `label` accepts the value."""
    try:
        label(value, "", "")
    except DataError:
        return False
    return True


def is_missing(value: Any) -> bool:
    """True for None, and for what numpy and pandas write for a missing value."""
    return value is None or (not isinstance(value, str | list | tuple | dict)
                             and str(value) in ("nan", "NaN", "NaT", "<NA>"))


def identifier(value: Any, place: str) -> str:
    """The id of a record as text; its place if it has none.

    Raises:
        DataError: for a value that numpy, pandas or JSON write for a missing one.
    """
    if value is None:
        return place
    if is_missing(value):
        raise DataError(f"{place}: id {short_repr(value)} is a missing value. Set an id in every row, or remove the "
                        "column 'id'.")
    return str(value)


def preference(value: Any, name: str, place: str) -> bool:
    """A label that is `chosen` or `rejected`.

    Raises:
        DataError: for anything else.
    """
    if value in ("chosen", "rejected"):
        return bool(value == "chosen")
    raise DataError(f"{place}: {name} {short_repr(value)} is not 'chosen' or 'rejected'")


def thumb(value: Any, name: str, place: str) -> bool:
    """The mark of a message: a label, `up`, `down`, `thumbs_up` or `thumbs_down`.

    Raises:
        DataError: for anything else.
    """
    if isinstance(value, str) and value.strip().lower() in _THUMBS:
        return _THUMBS[value.strip().lower()]
    try:
        return label(value, name, place)
    except DataError:
        raise DataError(f"{place}: {name} {short_repr(value)} of a message is not a valid label. Use true/false, 0/1, "
                        "up/down or thumbs_up/thumbs_down.") from None


def is_thumb(value: Any) -> bool:
    """True if `thumb` accepts the value."""
    try:
        thumb(value, "", "")
    except DataError:
        return False
    return True


def rating(value: Any, name: str, place: str) -> float:
    """A finite number, or its text.

    Raises:
        DataError: for anything else.
    """
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"{place}: {name} {short_repr(value)} is not a number")
    return number
