"""Columns beside the prompt that belong to it: the system message and earlier turns."""

from typing import Any

from tropism.data.formats import fields
from tropism.data.formats.fields import Content
from tropism.data.formats.format import Record
from tropism.data.rows import Message
from tropism.errors import DataError

SYSTEM_COLUMNS = ("system", "system_prompt")
CONTEXT_COLUMNS = (*SYSTEM_COLUMNS, "history")
"""Columns that every format takes. Text beside them becomes messages, since only messages have a system message."""

_SYSTEM_ROLES = ("system", "developer")


def leading_system(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The system messages with which a conversation begins."""
    number = 0
    while number < len(messages) and messages[number].get("role") in _SYSTEM_ROLES:
        number += 1
    return messages[:number]


def context_columns(record: Record) -> list[str]:
    """Columns of a record that add to the prompt what only messages can have."""
    if not any(record.get(name) for name in (*CONTEXT_COLUMNS, "tools")):
        return []
    found = [name for name in SYSTEM_COLUMNS if not _is_empty(record.get(name))]
    if _is_history(record.get("history")):
        found.append("history")
    if not _is_empty(record.get("tools")) and record["tools"] not in ("[]", "null"):
        found.append("tools")
    return found




def with_context(record: Record, prompt: Content, place: str, chat: bool) -> Content:
    """The prompt after the system message and the earlier turns that have columns of their own.

    Args:
        record: with the columns.
        prompt: of the record.
        place: of the record, for errors.
        chat: the format has `history`, so a value of another type is an error. Other formats ignore it.

    Raises:
        DataError: for a system message or a history of another type, or for two system messages that differ.
    """
    if not any(record.get(name) for name in CONTEXT_COLUMNS):
        return prompt
    name, system = _system(record, place)
    history = _history(record.get("history"), place) if chat or _is_history(record.get("history")) else ()
    if not system and not history:
        return prompt
    messages = fields.as_messages(prompt, "user")
    given = leading_system(messages)
    turns = messages[len(given):]
    if turns[: len(history)] != history:
        turns = (*history, *turns)
    if system and given and not _agree(system, given):
        raise DataError(f"{place}: '{name}' is {_said(system)}, but the messages begin with the system message "
                        f"{_said(given)}. Remove one of them. --columns unused={name} ignores the column.")
    return (*(given or system), *turns)


def _agree(system: tuple[Message, ...], given: tuple[Message, ...]) -> bool:
    contents = [(message.get("content") or "").strip() for message in given]
    return all((message.get("content") or "").strip() in contents for message in system)


def _said(messages: tuple[Message, ...]) -> str:
    return fields.short_repr("\n".join(message.get("content") or "" for message in messages))


def _is_empty(value: Any) -> bool:
    return not value.strip() if isinstance(value, str) else fields.is_missing(value) or (
        isinstance(value, list | tuple | dict) and not value)


def _system(record: Record, place: str) -> tuple[str, tuple[Message, ...]]:
    """Name of the column with the system message, and the message; none for null and empty ones.

    Raises:
        DataError: for a value of another type, or if both columns have one and they differ.
    """
    found = {name: messages for name in SYSTEM_COLUMNS if (messages := _system_messages(record.get(name), name, place))}
    if not found:
        return "", ()
    (name, system), *others = found.items()
    for other, messages in others:
        if not _agree(system, messages):
            raise DataError(f"{place}: '{name}' is {_said(system)}, but '{other}' is {_said(messages)}. Remove one of "
                            f"them. --columns unused={other} ignores the column.")
    return name, system


def _system_messages(value: Any, name: str, place: str) -> tuple[Message, ...]:
    if _is_empty(value):
        return ()
    if isinstance(value, list | tuple) and all(
            isinstance(part, dict) and "type" in part and not part.keys() & {"role", "from"} for part in value):
        value = {"role": "system", "content": list(value)}  # parts of one message, as in Anthropic's format
    if isinstance(value, list | tuple) and len(value) == 1 and isinstance(value[0], str):
        value = value[0]
    messages = fields.as_messages(fields.content(value, name, place), "system")
    for message in messages:
        if message["role"] not in _SYSTEM_ROLES:
            raise DataError(f"{place}: '{name}' must be text or a system message, but it has a message of role "
                            f"{fields.short_repr(message['role'])}. --columns unused={name} ignores the column.")
    return tuple(message for message in messages if (message.get("content") or "").strip())


def _is_history(value: Any) -> bool:
    """True for a list of [question, answer] or of messages, which is a history in any format."""
    return isinstance(value, list | tuple) and bool(value) and all(
        (isinstance(turn, dict) and ("role" in turn or "from" in turn)) or (
            isinstance(turn, list | tuple) and len(turn) == 2 and all(isinstance(text, str) for text in turn))
        for turn in value)


def _history(value: Any, place: str) -> tuple[Message, ...]:
    """Earlier turns: messages, or [question, answer] of each.

    Raises:
        DataError: for anything else.
    """
    if _is_empty(value):
        return ()
    if not isinstance(value, list | tuple):
        raise DataError(f"{place}: 'history' must be a list of [question, answer], not {type(value).__name__}")
    turns: list[Message] = []
    for turn in value:
        if isinstance(turn, dict):
            turns.append(fields.message(turn, "history", place))
            continue
        if not isinstance(turn, list | tuple) or len(turn) != 2:
            raise DataError(f"{place}: each entry of 'history' must be [question, answer]")
        turns += [{"role": role, "content": fields.text(text, "history", place)}
                  for role, text in zip(("user", "assistant"), turn, strict=True)]
    return tuple(turns)
