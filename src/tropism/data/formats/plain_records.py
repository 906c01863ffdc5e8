"""What a format is: the columns by which it is known, and how one record of it is taken apart."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tropism.data.formats import fields
from tropism.data.formats.fields import Content
from tropism.data.formats.options import FormatOptions
from tropism.data.rows import Dropped, Message, RawRow, Reason, View
from tropism.errors import DataError

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """Columns that make a row.

    Args:
        view: what the row is.
        prompt: column of the prompt; empty if the conversations of the answers begin with it.
        answers: column of the answer, or of the chosen and the rejected one.
        label: column that says whether an unpaired answer is desirable.
    """

    view: View
    prompt: str
    answers: tuple[str, ...]
    label: str = ""

    @property
    def columns(self) -> tuple[str, ...]:
        """All of them, none of which may be absent."""
        return tuple(name for name in (self.prompt, *self.answers, self.label) if name)

    def __str__(self) -> str:
        return "(" + ", ".join(self.columns) + ")"


@dataclass(frozen=True, slots=True)
class Draft:
    """A row to be: the parts of a record, under the names that an error gives them.

    Args:
        prompt: before the answers.
        answers: one, or chosen and rejected, by the column that each comes from.
        desirable: label of an unpaired row.
        tools: schemas that stand elsewhere than in the column `tools`.
    """

    prompt: Content
    answers: dict[str, Content]
    desirable: bool | None = None
    tools: Any = None


Drafts = list[Draft | Dropped]


@dataclass(frozen=True, slots=True)
class Format:
    """A format that files come in.

    Args:
        name: for `--format`.
        shapes: of its rows; of two that fit a record the first is taken.
        fits: whether a record that has the columns of a shape is of this format.
        decisive: `fits` looks at values, so that no other format claims what it accepts.
        chat: text is what a person says to an assistant, and the columns `system`, `history` and (beside
            `instruction`) `input` belong to it. Without, text is taken as it is written.
        verdict: reads a label.
        drafts: takes a record apart; None for the plain way, `plain_drafts`.
    """

    name: str
    shapes: tuple[Shape, ...]
    fits: Callable[[Record, Shape, FormatOptions], bool] = lambda record, shape, options: True
    decisive: bool = False
    chat: bool = False
    verdict: Callable[[Any, str, str], bool] = fields.label
    drafts: "Callable[[RawRow, Shape, FormatOptions], Drafts] | None" = None

    def shape_for(self, record: Record, view: View) -> Shape:
        """The first shape whose columns the record has; else the one that it comes closest to."""
        shapes = [shape for shape in self.shapes if shape.view == view]
        return max(shapes, key=lambda shape: (all(name in record for name in shape.columns),
                                              sum(name in record for name in shape.columns)))


def plain_drafts(known: Format, raw: RawRow, view: View) -> Drafts:
    """Take a record apart by its columns.

    Returns:
        the one row that it holds, or why it holds none.

    Raises:
        DataError: for a label, message or text that is none.
    """
    record, place = raw.record, raw.place
    shape = known.shape_for(record, view)
    # Before anything can drop the row: a label that is no label means that the file is not what it seems.
    desirable = None
    if shape.label:
        if shape.label not in record:
            return [Dropped(place, Reason.MISSING_FIELD, f"no '{shape.label}'")]
        desirable = known.verdict(record[shape.label], shape.label, place)
    elif view == "single" and (refused := _disliked(known, record)):
        return [Dropped(place, Reason.UNDESIRABLE, f"its {refused}, and this method imitates what it is given")]
    for name in shape.columns:
        if name not in record:
            return [Dropped(place, Reason.MISSING_FIELD, f"no '{name}'")]
    answers = {name: fields.part(record[name], name, place) for name in shape.answers}
    if shape.prompt:
        return [Draft(asked(known, raw, shape), answers, desirable)]
    if len(answers) == 2:
        found = of_two(answers, place)
    else:
        found = of_one(_with_lead(known, raw, fields.conversation(record[shape.answers[0]], shape.answers[0], place)),
                       shape.answers[0], desirable, place)
    return [found]


def _disliked(known: Format, record: Record) -> str:
    """Why an answer that would be imitated should not be; empty if nothing says so."""
    for shape in known.shapes:
        if shape.label in record and shape.label:
            value = str(record[shape.label]).strip().lower()
            if value in ("false", "0", "rejected"):
                return f"{shape.label} is {'false' if value == '0' else value}"
    return ""


def of_one(spoken: tuple[Message, ...], name: str, desirable: bool | None, place: str) -> Draft | Dropped:
    """A conversation whose last message is the answer."""
    if not spoken or spoken[-1].get("role") != "assistant":
        return Dropped(place, Reason.NO_COMPLETION, "the last message is not the assistant's")
    return Draft(spoken[:-1], {name: spoken[-1:]}, desirable)


def of_two(answers: dict[str, Content], place: str) -> Draft | Dropped:
    """Two conversations that share their start, which is the prompt."""
    (one, chosen), (other, rejected) = answers.items()
    if not (isinstance(chosen, tuple) and isinstance(rejected, tuple)):
        return Dropped(place, Reason.MISSING_FIELD, "no 'prompt'; plain text needs one")
    shared = fields.shared_start(chosen, rejected)
    if shared == len(chosen) == len(rejected):
        return Dropped(place, Reason.IDENTICAL_PAIR, "both sides are the same conversation")
    if shared in (len(chosen), len(rejected)):
        side = one if shared == len(chosen) else other
        return Dropped(place, Reason.NO_COMPLETION, f"'{side}' has no answer after the shared messages")
    for name, branch in ((one, chosen), (other, rejected)):
        if branch[shared].get("role") != "assistant":
            return Dropped(place, Reason.NO_COMPLETION,
                           f"'{name}' goes on with role {fields.brief(branch[shared]['role'])} after the shared "
                           "messages, so the two sides do not answer one prompt")
    return Draft(chosen[:shared], {one: chosen[shared:], other: rejected[shared:]})


def asked(known: Format, raw: RawRow, shape: Shape) -> Content:
    """The prompt of a record that has a column for it."""
    prompt = fields.part(raw.record[shape.prompt], shape.prompt, raw.place)
    if not known.chat:
        return prompt
    if isinstance(prompt, str) and shape.prompt == "instruction":
        more = raw.record.get("input")
        prompt = "\n".join(given for given in (prompt, fields.text(more or "", "input", raw.place)) if given)
    return _with_lead(known, raw, fields.as_messages(prompt, "user"))


def _with_lead(known: Format, raw: RawRow, spoken: tuple[Message, ...]) -> tuple[Message, ...]:
    """Messages behind the system message and the earlier turns that stand in columns of their own."""
    record, place = raw.record, raw.place
    if not known.chat:
        return spoken
    lead: list[Message] = []
    system = record.get("system")
    if system and not (spoken and spoken[0].get("role") == "system"):
        lead.append({"role": "system", "content": fields.text(system, "system", place)})
    history = record.get("history") or []
    if not isinstance(history, list | tuple):
        raise DataError(f"{place}: 'history' must be a list of [question, answer], not {type(history).__name__}")
    for turn in history:
        if not isinstance(turn, list | tuple) or len(turn) != 2:
            raise DataError(f"{place}: each entry of 'history' must be [question, answer]")
        lead += [{"role": role, "content": fields.text(said, "history", place)}
                 for role, said in zip(("user", "assistant"), turn, strict=True)]
    return (*lead, *spoken)
