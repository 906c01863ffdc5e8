"""Arguments of tool calls that are stored as JSON text, as in OpenAI's format. Most chat templates need an object."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tropism.data.rows import Message, Row


class JsonArguments(dict[str, Any]):
    """An object for templates that render arguments as JSON, and its text for those that write text as it is.

    Args:
        values: of the arguments.
        text: as given.
    """

    def __init__(self, values: dict[str, Any], text: str) -> None:
        super().__init__(values)
        self.text = text

    def __str__(self) -> str:
        return self.text

    def __add__(self, other: str) -> str:
        return self.text + other

    def __radd__(self, other: str) -> str:
        return other + self.text

    def changed(self, change: Callable[[Any], Any]) -> "JsonArguments":
        """The same with `change` applied to values and text."""
        return JsonArguments(change(dict(self)), change(self.text))


def with_argument_objects(row: Row) -> Row:
    """A row whose tool calls have objects as arguments. Text that is not JSON of an object is unchanged."""
    if isinstance(row.prompt, str):
        return row
    return replace(row, prompt=tuple(map(_with_objects, row.prompt)), completions=tuple(
        tuple(map(_with_objects, side)) if isinstance(side, tuple) else side for side in row.completions))


def _with_objects(message: Message) -> Message:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_call(call) for call in calls]} if isinstance(calls, list) else message


def _call(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _call(call["function"])}
    text = call.get("arguments")
    if not isinstance(text, str):
        return call
    try:
        values = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return call
    return {**call, "arguments": JsonArguments(values, text)} if isinstance(values, dict) else call
