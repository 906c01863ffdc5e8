"""Records with one column per field: prompt, completions, label."""

from typing import Any

from tropism.data.formats import fields
from tropism.data.formats.fields import Content
from tropism.data.formats.format import Draft, Drafts, Format, Record, Shape
from tropism.data.rows import Dropped, Message, RawRow, Reason, View


def plain_drafts(known: Format, raw: RawRow, view: View) -> Drafts:
    """Read a record by its columns.

    Returns:
        its one row, or the reason why it is dropped.

    Raises:
        DataError: for an invalid label, message or text.
    """
    record, place = raw.record, raw.place
    shape = known.shape_for(record, view)
    # Checked before anything can drop the row: an invalid label means that the file is not what it seems to be.
    desirable = None
    if shape.label:
        if shape.label not in record:
            return [missing_column(place, shape.label)]
        desirable = known.parse_label(record[shape.label], shape.label, place)
    elif view == "single" and (verdict := _undesirable_label(known, record)):
        return [Dropped(place, Reason.UNDESIRABLE, f"{verdict}, and this method trains on desirable completions only")]
    if missing := shape.missing_in(record):
        return [missing_column(place, missing)]
    completions = {name: fields.content(record[name], name, place) for name in shape.completions}
    if shape.prompt:
        return [Draft(_prompt(known, raw, shape), completions, desirable)]
    if len(completions) == 2:
        return [draft_of_conversations(completions, place)]
    (name,) = shape.completions
    messages = fields.conversation(record[name], name, place)
    if messages and all(message["role"] != "user" for message in messages) and record.get("prompt"):
        return [Draft(fields.content(record["prompt"], "prompt", place), {name: messages}, desirable)]
    return [draft_of_conversation(messages, name, desirable, place)]


def missing_column(place: str, name: str) -> Dropped:
    """The reason for dropping a record without a required column."""
    return Dropped(place, Reason.MISSING_FIELD, f"no '{name}'")


def _undesirable_label(known: Format, record: Record) -> str:
    """The label that marks a completion as undesirable, as in `label is false`; empty without one."""
    for shape in known.shapes:
        if shape.label in record and shape.label:
            value = record[shape.label]
            if str(value).strip().lower() == "rejected":
                return f"{shape.label} is rejected"
            if fields.is_label(value) and not fields.label(value, "", ""):
                return f"{shape.label} is false"
    return ""


def draft_of_conversation(messages: tuple[Message, ...], name: str, desirable: bool | None,
                          place: str) -> Draft | Dropped:
    """A conversation whose last message is the completion."""
    if not messages or messages[-1].get("role") != "assistant":
        return Dropped(place, Reason.NO_COMPLETION, "the last message is not from the assistant")
    return Draft(messages[:-1], {name: messages[-1:]}, desirable)


def draft_of_conversations(conversations: dict[str, Any], place: str) -> Draft | Dropped:
    """A pair of conversations. The messages that they share from the start are the prompt."""
    (first_name, chosen), (second_name, rejected) = conversations.items()
    if not (isinstance(chosen, tuple) and isinstance(rejected, tuple)):
        return Dropped(place, Reason.MISSING_FIELD, "no 'prompt', which plain text needs")
    shared = fields.shared_start(chosen, rejected)
    if shared == len(chosen) == len(rejected):
        return Dropped(place, Reason.IDENTICAL_PAIR, "chosen and rejected are the same conversation")
    if shared in (len(chosen), len(rejected)):
        short = first_name if shared == len(chosen) else second_name
        return Dropped(place, Reason.NO_COMPLETION, f"'{short}' has no completion after the shared messages")
    for name, branch in ((first_name, chosen), (second_name, rejected)):
        if branch[shared].get("role") != "assistant":
            return Dropped(place, Reason.NO_COMPLETION,
                           f"'{name}' continues with role {fields.short_repr(branch[shared]['role'])} after the shared "
                           "messages, so the two sides do not share a prompt")
    return Draft(chosen[:shared], {first_name: chosen[shared:], second_name: rejected[shared:]})


def _prompt(known: Format, raw: RawRow, shape: Shape) -> Content:
    """The prompt of a record that has a column for it."""
    prompt = fields.content(raw.record[shape.prompt], shape.prompt, raw.place)
    if not known.chat:
        return prompt
    if isinstance(prompt, str) and shape.prompt == "instruction":
        more = raw.record.get("input")
        prompt = "\n".join(text for text in (prompt, fields.text(more or "", "input", raw.place)) if text)
    return fields.as_messages(prompt, "user")
