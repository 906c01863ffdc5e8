"""Rows as records, written so that they are read again as the same rows."""

import math
from typing import Any

from tropism.commands.convert.source import READ_BY_NAME, ConvertPart
from tropism.data.formats.fields import as_messages
from tropism.data.formats.label_words import is_word
from tropism.data.rows import Message, Row

SHAPES = {"unpaired": "prompt, completion, label", "paired": "prompt, chosen, rejected",
          "single": "prompt, completion", "messages": "messages"}
"""Columns of each shape."""

_LABELS = ("label", "feedback", "thumbs")


def record_of(row: Row, to: str) -> dict[str, Any]:
    """The columns of a shape, and the tools of the row if it has any.

    Args:
        row: with one completion, or two for `paired`; labeled for `unpaired`.
        to: a name of `SHAPES`.
    """
    if to == "messages":
        record: dict[str, Any] = {"messages": [
            _unlabeled(message) for message in (*as_messages(row.prompt, "user"),
                                               *as_messages(row.completions[0], "assistant"))]}
    else:
        names = ("chosen", "rejected") if to == "paired" else ("completion",)
        record = {"prompt": _plain(row.prompt)}
        record |= {name: _completion(row.prompt, completion)
                   for name, completion in zip(names, row.completions, strict=True)}
        if to == "unpaired":
            record["label"] = row.desirable
    return record | ({"tools": list(row.tools)} if row.tools else {}) | (
        {} if row.weight is None else {"weight": row.weight})


def _plain(part: str | tuple[Message, ...]) -> Any:
    return part if isinstance(part, str) else list(part)


def _completion(prompt: str | tuple[Message, ...], completion: str | tuple[Message, ...]) -> Any:
    """A completion. If it starts like its prompt, the prompt is repeated before it: else it is read as a repetition."""
    if isinstance(prompt, str) or isinstance(completion, str):
        return completion
    repeats = 0 < len(prompt) < len(completion) and all(
        (one.get("role"), one.get("content")) == (other.get("role"), other.get("content"))
        for one, other in zip(prompt, completion, strict=False))
    return [*(prompt if repeats else ()), *completion]


def _unlabeled(message: Message) -> Message:
    """A message without labels: with them, `messages` is read as a chat whose single messages are labeled."""
    return {key: value for key, value in message.items() if not is_label(message, key)}


def is_label(message: Message, key: str) -> bool:
    """Whether a key of a message is read as its label."""
    return key in _LABELS and message.get("role") == "assistant" and is_word(message[key])


# --- columns that no row is built from -------------------------------------------------------------------------------


def other_columns(record: dict[str, Any], part: ConvertPart) -> dict[str, Any]:
    """Columns of a record that its rows are not built from, except nulls."""
    used = part.used(record)
    if part.reading.format.name == "rating":
        used.discard(part.reading.format.shape_for(record, part.reading.shape.view).label)
    return {column: value for column, value in record.items() if column not in used and value is not None}


def carried(extra: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """Columns under names that do not change how the file is read: a name that could gets the prefix `source_`."""
    found: dict[str, Any] = {}
    for column, value in extra.items():
        name = column
        while name in READ_BY_NAME or name in record or (name != column and name in extra):
            name = f"source_{name}"
        found[name] = None if isinstance(value, float) and not math.isfinite(value) else value
    return found
