"""The known shapes of a record, and their translation into `Row`.

    unpaired   prompt, completion, label          messages, label (the last message is the completion)
    paired     prompt, chosen, rejected           chosen, rejected (two conversations that share their start)
    single     prompt, completion                 messages; a row with a label must be a desirable one
"""

from collections.abc import Sequence
from typing import Any, Literal

from tropism.data.rows import Dropped, Message, RawRow, Reason, Row
from tropism.errors import DataError

View = Literal["unpaired", "paired", "single"]

FIELDS: dict[View, tuple[tuple[str, ...], ...]] = {
    "unpaired": (("prompt", "completion", "label"), ("messages", "label")),
    "paired": (("prompt", "chosen", "rejected"), ("chosen", "rejected")),
    "single": (("prompt", "completion"), ("messages",)),
}


def view_of(rows: Sequence[RawRow]) -> View:
    """What a file holds, by its fields: pairs, labelled completions, or completions."""
    for view in ("paired", "unpaired"):
        if any(all(name in row.record for name in shape) for row in rows for shape in FIELDS[view]):
            return view
    return "single"


def check_columns(rows: Sequence[RawRow], view: View, source: str) -> None:
    """Stop at once if no row of the file has the fields that the method needs.

    Raises:
        DataError: naming the fields that are needed and those that were found.
    """
    shapes = FIELDS[view]
    if any(all(name in row.record for name in shape) for row in rows for shape in shapes):
        return
    found: dict[str, None] = {}
    for row in rows[:1000]:
        found.update(dict.fromkeys(row.record))
    needed = " or ".join("(" + ", ".join(shape) + ")" for shape in shapes)
    hint = ""
    if view == "unpaired" and {"chosen", "rejected"} <= found.keys():
        hint = " These are pairs: use `tropism dpo`."
    elif view == "paired" and {"completion", "label"} <= found.keys():
        hint = " These are single labelled completions: use `tropism kto`."
    elif view == "single" and {"chosen", "rejected"} <= found.keys():
        hint = " These are pairs: use `tropism dpo`, or keep `chosen` as `completion` to imitate it."
    raise DataError(f"{source}: no row has the fields {needed}; found: {', '.join(found) or 'none'}.{hint}")


def understand(raw: RawRow, view: View) -> Row | Dropped:
    """Translate a record, or say why it is left out.

    Raises:
        DataError: if a label or a message is not what it must be; such a file needs a look before it is used.
    """
    record = raw.record
    row_id = str(record["id"]) if record.get("id") is not None else raw.place
    tools = record.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"{raw.place}: 'tools' must be a list of schemas, not {type(tools).__name__}")
    # Before anything can drop the row: a label that is no label means that the file is not what it seems.
    desirable = _label(record["label"], raw.place) if view == "unpaired" and "label" in record else None
    if view == "single" and str(record.get("label")).strip().lower() in ("false", "0"):
        return Dropped(raw.place, Reason.UNDESIRABLE, "its label is false, and this method imitates what it is given")
    parts = _paired(raw) if view == "paired" else _single(raw, labelled=view == "unpaired")
    if isinstance(parts, Dropped):
        return parts
    prompt, completions = parts
    completions = {name: _without_prompt(prompt, completion) for name, completion in completions.items()}
    for name, completion in completions.items():
        if _blank(completion):
            return Dropped(raw.place, Reason.EMPTY_COMPLETION, f"'{name}' is empty")
    conversational = any(isinstance(part, tuple) for part in (prompt, *completions.values()))
    answers: tuple[Part, ...] = tuple(completions.values())
    if conversational:
        prompt = _as_messages(prompt, "user")
        spoken = [_as_messages(answer, "assistant") for answer in answers]
        for messages in spoken:
            if messages[-1].get("role") != "assistant":
                raise DataError(f"{raw.place}: a completion must end with a message of role 'assistant', "
                                f"not '{messages[-1].get('role')}'")
        answers = tuple(spoken)
    return Row(row_id, raw.place, prompt, answers, desirable, tuple(tools) if tools else None)


Part = str | tuple[Message, ...]
Parts = tuple[Part, dict[str, Part]]


def _single(raw: RawRow, *, labelled: bool) -> Parts | Dropped:
    record = raw.record
    if labelled and "label" not in record:
        return Dropped(raw.place, Reason.MISSING_FIELD, "no 'label'")
    if "prompt" not in record and "completion" not in record and "messages" in record:
        conversation = _part(record["messages"], "messages", raw.place)
        if not isinstance(conversation, tuple):
            raise DataError(f"{raw.place}: 'messages' must be a list of messages")
        if not conversation or conversation[-1].get("role") != "assistant":
            return Dropped(raw.place, Reason.NO_COMPLETION, "the last message is not the assistant's")
        return conversation[:-1], {"messages": conversation[-1:]}
    for name in ("prompt", "completion"):
        if name not in record:
            return Dropped(raw.place, Reason.MISSING_FIELD, f"no '{name}'")
    return (_part(record["prompt"], "prompt", raw.place),
            {"completion": _part(record["completion"], "completion", raw.place)})


def _paired(raw: RawRow) -> Parts | Dropped:
    record = raw.record
    for name in ("chosen", "rejected"):
        if name not in record:
            return Dropped(raw.place, Reason.MISSING_FIELD, f"no '{name}'")
    chosen = _part(record["chosen"], "chosen", raw.place)
    rejected = _part(record["rejected"], "rejected", raw.place)
    if "prompt" in record:
        return _part(record["prompt"], "prompt", raw.place), {"chosen": chosen, "rejected": rejected}
    if not (isinstance(chosen, tuple) and isinstance(rejected, tuple)):
        return Dropped(raw.place, Reason.MISSING_FIELD, "no 'prompt'; plain text needs one")
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    if shared == len(chosen) == len(rejected):
        return Dropped(raw.place, Reason.IDENTICAL_PAIR, "both sides are the same conversation")
    if shared in (len(chosen), len(rejected)):
        side = "chosen" if shared == len(chosen) else "rejected"
        return Dropped(raw.place, Reason.NO_COMPLETION, f"'{side}' has no answer after the shared messages")
    for name, branch in (("chosen", chosen), ("rejected", rejected)):
        if branch[shared].get("role") != "assistant":
            return Dropped(raw.place, Reason.NO_COMPLETION,
                           f"'{name}' goes on with role '{branch[shared].get('role')}' after the shared messages, so "
                           "the two sides do not answer one prompt")
    return chosen[:shared], {"chosen": chosen[shared:], "rejected": rejected[shared:]}


def _without_prompt(prompt: Part, completion: Part) -> Part:
    """A completion that repeats the prompt's messages before its answer, as some public sets have it, without them."""
    if not isinstance(completion, tuple) or not prompt:
        return completion
    lead = _as_messages(prompt, "user")
    same = len(completion) > len(lead) and all(
        (one.get("role"), one.get("content")) == (other.get("role"), other.get("content"))
        for one, other in zip(lead, completion, strict=False))
    return completion[len(lead) :] if same else completion


def _part(value: Any, name: str, place: str) -> Part:
    """A field of text or messages, checked. None is an empty text: the row is dropped, not the run."""
    if value is None:
        return ""
    if isinstance(value, str):
        return _text(value, name, place)
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise DataError(f"{place}: '{name}' must be text or a list of messages, not {type(value).__name__}")
    return tuple(_message(message, name, place) for message in value)


def _message(message: Any, name: str, place: str) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DataError(f"{place}: each message of '{name}' needs a 'role' and a 'content'")
    content = message.get("content")
    if isinstance(content, list):
        texts = []
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind != "text":
                raise DataError(f"{place}: '{name}' holds content of type '{kind}'; only text can be trained on")
            texts.append(_text(part.get("text"), name, place))
        return {**message, "content": "".join(texts)}
    if content is not None and not isinstance(content, str):
        raise DataError(f"{place}: the content of a message of '{name}' must be text, "
                        f"not {type(content).__name__}")
    return {**message, "content": _text(content, name, place)} if content else message


def _text(value: Any, name: str, place: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{place}: '{name}' must hold text, not {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{place}: '{name}' holds half a character ({value[error.start]!r}, a lone surrogate), "
                        "which no tokenizer reads") from None
    return value


def _blank(part: Part) -> bool:
    if isinstance(part, str):
        return not part.strip()
    if not part:
        return True
    last = part[-1]
    return not (last.get("content") or "").strip() and not last.get("tool_calls")


def _as_messages(part: Part, role: str) -> tuple[Message, ...]:
    if isinstance(part, tuple):
        return part
    return ({"role": role, "content": part},) if part else ()


def _label(value: Any, place: str) -> bool:
    """Accepts true/false, 0/1 and their spellings as text (CSV has nothing else)."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.strip().lower() in ("true", "false", "0", "1"):
        return value.strip().lower() in ("true", "1")
    raise DataError(f"{place}: label {value!r} is not true/false (accepted: true, false, 1, 0). "
                    "Convert ratings to true/false before training.")
