"""Arguments of tool calls that are stored as JSON text, as in OpenAI's format. Most chat templates need an object."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jinja2 import TemplateError

from tropism.data.rows import Message, Row


class JsonArguments(dict[str, Any]):
    """Arguments as an object, and the text that they were given as.

    Args:
        values: of the arguments.
        text: as given.
    """

    def __init__(self, values: dict[str, Any], text: str) -> None:
        super().__init__(values)
        self.text = text

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
    return _changed(message, _parsed)


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        values = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments
    return JsonArguments(values, arguments) if isinstance(values, dict) else arguments


def _changed(message: Message, change: Callable[[Any], Any]) -> Message:
    """A message with `change` applied to the arguments of its calls."""
    def changed(call: Any) -> Any:
        if not isinstance(call, dict):
            return call
        if isinstance(call.get("function"), dict):
            return {**call, "function": changed(call["function"])}
        return {**call, "arguments": change(call["arguments"])} if "arguments" in call else call

    calls = message.get("tool_calls")
    return {**message, "tool_calls": [changed(call) for call in calls]} if isinstance(calls, list) else message


def render_with_arguments(render: Callable[[list[Message]], str], messages: list[Message]) -> str:
    """The text of messages. A template that writes arguments as text gets text, all others get objects.

    Args:
        render: renders messages with a chat template.
        messages: as `with_argument_objects` makes them.
    """
    given: list[JsonArguments] = []

    def text_given(arguments: Any) -> Any:
        if isinstance(arguments, JsonArguments):
            given.append(arguments)
            return arguments.text
        return arguments

    as_given = [_changed(message, text_given) for message in messages]
    try:
        text = render(messages)
    except (TypeError, TemplateError) as error:  # as of 'text' + object
        as_text = [_changed(message, _text_of) for message in messages]
        if as_text == messages:
            raise
        try:
            return render(as_text)
        except (TypeError, TemplateError):
            raise error from None
    in_python = any(str(dict(arguments)) in text and json.dumps(arguments, ensure_ascii=False) not in text
                    for arguments in given)
    return render(as_given) if in_python else text


def _text_of(arguments: Any) -> Any:
    if isinstance(arguments, JsonArguments):
        return arguments.text
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict | list) else arguments
