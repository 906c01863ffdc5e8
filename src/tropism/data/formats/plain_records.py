"""Records with one column per field: prompt, completions, label."""

from collections.abc import Callable
from typing import Any

from tropism.data.formats import fields
from tropism.data.formats.fields import Content
from tropism.data.formats.format import Draft, Drafts, Format, Shape
from tropism.data.formats.label_words import key_of
from tropism.data.formats.labels import LabelReader
from tropism.data.rows import Dropped, Message, RawRow, Reason, View


def plain_drafts(known: Format, raw: RawRow, view: View, labels: LabelReader,
                 read_label: Callable[[Any, str, str], bool | Dropped] | None = None) -> Drafts:
    """Read a record by its columns.

    Args:
        known: its format.
        raw: the record.
        view: kind of row.
        labels: reads the labels of the file.
        read_label: reads a label in another way.

    Returns:
        its one row, or the reason why it is dropped.

    Raises:
        DataError: for an invalid label, message or text.
    """
    record, place = raw.record, raw.place
    shape = known.shape_for(record, view)
    # Checked before anything can drop the row: an invalid label means that the file is not what it seems to be.
    desirable: bool | None = None
    if shape.label:
        if shape.label not in record:
            return [missing_column(place, shape.label)]
        verdict = (read_label or labels.read)(record[shape.label], shape.label, place)
        if isinstance(verdict, Dropped):
            return [verdict]
        desirable = verdict
    elif view == "single":
        for name in label_columns(known):
            if name in record and labels.undesirable(record[name], name, place):
                said = "false" if (key := key_of(record[name])) == "0" else key
                return [Dropped(place, Reason.UNDESIRABLE,
                                f"{name} is {said}, and this method trains on desirable completions only")]
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


def label_columns(known: Format) -> list[str]:
    """Columns in which a format has labels."""
    return list(dict.fromkeys(shape.label for shape in known.shapes if shape.label))


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
