"""Messages that are stored as JSON text, as in CSV and in many Parquet files."""

import json
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from tropism.data.formats import fields
from tropism.data.rows import RawRow
from tropism.errors import DataError

_PRINTED = re.compile(r"\s*\[?\s*\{\s*['\"](?:role|content|from|value)['\"]\s*:")
_PROMPTS = ("prompt", "instruction", "input", "question", "query", "context", "history")
_NOT_SIDES = {*_PROMPTS, "messages", "conversations", "rejected_messages", "system", "system_prompt"}
_ASSISTANT = {speaker for speaker, role in fields.SPEAKERS.items() if role == "assistant"}


def json_columns(rows: Iterable[RawRow], names: Iterable[str]) -> frozenset[str]:
    """Columns whose texts are JSON of messages, or of the objects of a known format.

    A column is one if this is true of at least half of its texts. So a completion that happens to be JSON stays text.

    Args:
        rows: the first ones of a file.
        names: columns that can hold messages.
    """
    names = frozenset(names)
    texts: Counter[str] = Counter()
    objects: Counter[str] = Counter()
    for row in rows:
        for name, value in row.record.items():
            if name in names and isinstance(value, str) and value.strip():
                texts[name] += 1
                found = _parsed(value)
                objects[name] += (_PRINTED.match(value) is not None if found is None
                                  else _holds_objects(name, found, row.record))
    return frozenset(name for name, count in objects.items() if count and 2 * count >= texts[name])


def decoded(row: RawRow, columns: frozenset[str]) -> RawRow:
    """A row with objects instead of the JSON text of some columns. Other text is unchanged.

    Raises:
        DataError: for messages as Python or numpy print them, which would be trained as text.
    """
    if not columns:
        return row
    return RawRow(row.place, {name: _decoded(value, name, row) if name in columns and isinstance(value, str) else value
                              for name, value in row.record.items()})


def _decoded(text: str, name: str, row: RawRow) -> Any:
    found = _parsed(text)
    if found is None and _PRINTED.match(text):
        problem = ("messages in Python notation, not JSON" if text.rstrip().endswith(("}", "]"))
                   else "messages in JSON that is cut off")
        raise DataError(f"{row.place}: '{name}' has {problem}. Write them with json.dumps, or save the data as JSONL "
                        "or Parquet.")
    return found if _holds_objects(name, found, row.record) else text


def _parsed(text: str) -> Any:
    """The list or object of a JSON text; None for anything else."""
    text = text.strip()
    if text[:1] + text[-1:] not in ("[]", "{}"):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _holds_objects(name: str, value: Any, record: dict[str, Any]) -> bool:
    """True if a parsed text has the form that a column has in a known format."""
    if value is None or value == []:
        return False
    entries = value if isinstance(value, list) else [value]
    if _is_messages(value):
        return name in _NOT_SIDES or _answers(entries, record)
    if name == "history":
        return all(isinstance(turn, list) and len(turn) == 2 for turn in entries)
    if name in ("responses", "generations", "scores", "ratings"):
        return isinstance(value, list)
    keys = {"completions": {"response"}, "input": {"messages"}, "question": {"full_text"},
            "prompt": {"text", "replies"}}.get(name)
    ranked = name == "completions" and all(isinstance(entry, dict) and {"rank", "completion"} <= entry.keys()
                                           for entry in entries)
    return ranked or (keys is not None and all(isinstance(entry, dict) and keys <= entry.keys() for entry in entries))


def _is_messages(value: Any) -> bool:
    """True for a message or a list of them."""
    return bool(value) and all(map(_is_message, value if isinstance(value, list) else [value]))


def _is_message(value: Any) -> bool:
    """True for an object with the keys of a message: a role and content or tool calls, or `from` and what was said."""
    if not isinstance(value, dict):
        return False
    if isinstance(value.get("role"), str):
        said = value.get("content")
        return ("content" in value or "tool_calls" in value) and (said is None or isinstance(said, str | list))
    return isinstance(value.get("from"), str) and ("value" in value or "content" in value)


def _answers(messages: list[dict[str, Any]], record: dict[str, Any]) -> bool:
    """True if messages can be a completion of the record's prompt. Beside a prompt of text, other JSON is text."""
    roles = [str(message.get("role", message.get("from"))).strip().lower() for message in messages]
    prompts = [record[name] for name in _PROMPTS if isinstance(record.get(name), str) and record[name].strip()]
    if roles[-1] not in _ASSISTANT:
        return False
    if not prompts or roles[0] in _ASSISTANT or any(_is_messages(_parsed(prompt)) for prompt in prompts):
        return True
    said = {str(message.get("content", message.get("value"))).strip() for message in messages}
    return any(prompt.strip() in said for prompt in prompts)
