"""Records to rows, and rows of one view to those of another."""

import json
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace

from tropism.data.formats import fields
from tropism.data.formats.fields import Content
from tropism.data.formats.plain_records import Draft, Drafts, plain_drafts
from tropism.data.formats.recognize import Reading
from tropism.data.rows import Dropped, RawRow, Reason, Row
from tropism.errors import DataError


def understand(raw: RawRow, reading: Reading) -> list[Row | Dropped]:
    """Translate a record to its rows, and to the reasons why others are left out.

    Rows have the view `reading.wanted`, except that labeled completions which are to be paired by prompt stay single
    until `pair_by_prompt` has seen them all. The first row has the record's id, the next ones `ID#2`, `ID#3`, ...

    Raises:
        DataError: if a label or a message is not what it must be; such a file needs a look before it is used.
    """
    try:
        return _rows(raw, reading)
    except RecursionError:
        raise DataError(f"{raw.place}: nested too deeply to be read") from None


def _rows(raw: RawRow, reading: Reading) -> list[Row | Dropped]:
    record, view = raw.record, reading.shape.view
    first = str(record["id"]) if record.get("id") is not None else raw.place
    tools = fields.tool_schemas(record.get("tools"), raw.place)
    known = reading.format
    if known.drafts is None:
        drafts = plain_drafts(known, raw, view)
    else:
        drafts = known.drafts(raw, known.shape_for(record, view), reading.options)
    if view == "paired" and reading.wanted == "unpaired":
        drafts = [half for draft in drafts for half in _halves(draft, raw.place)]
    rows: list[Row | Dropped] = []
    for draft in drafts:
        made = _row(draft, raw.place, reading) if isinstance(draft, Draft) else draft
        if isinstance(made, Row):
            number = 1 + len(rows)
            made = replace(made, id=first if number == 1 else f"{first}#{number}", tools=made.tools or tools)
        rows.append(made)
    return rows


def _row(draft: Draft, place: str, reading: Reading) -> Row | Dropped:
    if reading.wanted == "single" and draft.desirable is False:
        return Dropped(place, Reason.UNDESIRABLE, "it is rated undesirable, and this method imitates what it is given")
    prompt = draft.prompt
    completions = {name: _without_prompt(prompt, answer) for name, answer in draft.answers.items()}
    for name, completion in completions.items():
        if fields.blank(completion):
            return Dropped(place, Reason.EMPTY_COMPLETION, f"'{name}' is empty")
    answers: tuple[Content, ...] = tuple(completions.values())
    if any(isinstance(part, tuple) for part in (prompt, *answers)):
        prompt = fields.as_messages(prompt, "user")
        spoken = [fields.as_messages(answer, "assistant") for answer in answers]
        for messages in spoken:
            if messages[-1].get("role") != "assistant":
                raise DataError(f"{place}: a completion must end with a message of role 'assistant', "
                                f"not {fields.brief(messages[-1]['role'])}")
        answers = tuple(spoken)
    desirable = None if reading.wanted == "single" else draft.desirable
    return Row(place, place, prompt, answers, desirable, fields.tool_schemas(draft.tools, place))


def _without_prompt(prompt: Content, completion: Content) -> Content:
    """A completion that repeats the prompt's messages before its answer, as some public sets have it, without them."""
    if not isinstance(completion, tuple) or not prompt:
        return completion
    lead = fields.as_messages(prompt, "user")
    same = len(completion) > len(lead) and all(
        (one.get("role"), one.get("content")) == (other.get("role"), other.get("content"))
        for one, other in zip(lead, completion, strict=False))
    return completion[len(lead) :] if same else completion


def _halves(draft: Draft | Dropped, place: str) -> Drafts:
    """A pair as a desirable and an undesirable row."""
    if isinstance(draft, Dropped):
        return [draft]
    (one, chosen), (other, rejected) = draft.answers.items()
    if chosen == rejected:
        return [Dropped(place, Reason.IDENTICAL_PAIR, "both sides are the same, and cannot be liked and disliked")]
    return [replace(draft, answers={one: chosen}, desirable=True),
            replace(draft, answers={other: rejected}, desirable=False)]


def pair_by_prompt(rows: Sequence[Row | Dropped]) -> list[Row | Dropped]:
    """Pairs of labeled completions: the first desirable of a prompt with its first undesirable, the second with the
    second, and so on. A pair has id and place of its desirable row, and stands where the later of the two stood.
    """
    waiting: dict[str, tuple[deque[int], deque[int]]] = defaultdict(lambda: (deque(), deque()))
    paired: dict[int, Row | Dropped] = {}
    for number, row in enumerate(rows):
        if isinstance(row, Dropped):
            paired[number] = row
            continue
        key = json.dumps([row.prompt, row.tools], sort_keys=True, default=str)
        same, others = waiting[key] if row.desirable else waiting[key][::-1]
        if not others:
            same.append(number)
            continue
        partner = rows[others.popleft()]
        assert isinstance(partner, Row)
        good, bad = (row, partner) if row.desirable else (partner, row)
        paired[number] = replace(good, completions=good.completions + bad.completions, desirable=None)
    for queues in waiting.values():
        for queue, missing in zip(queues, ("undesirable", "desirable"), strict=True):
            for number in queue:
                paired[number] = Dropped(rows[number].place, Reason.UNPAIRED,
                                         f"no {missing} completion of its prompt is left to pair it with")
    return [paired[number] for number in sorted(paired)]
