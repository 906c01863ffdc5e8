"""Turns records into rows, pairs into unpaired rows, and unpaired rows into pairs."""

import json
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace

from tropism.data.formats import fields
from tropism.data.formats.columns_read import WatchedRecord
from tropism.data.formats.context import context_columns, with_context
from tropism.data.formats.fields import Content
from tropism.data.formats.format import Draft, Drafts
from tropism.data.formats.json_text import decoded
from tropism.data.formats.recognize import Reading
from tropism.data.formats.repeated_prompt import without_repeated_prompt
from tropism.data.formats.turn_marks import without_marks
from tropism.data.rows import Dropped, RawRow, Reason, Row
from tropism.errors import DataError


def rows_of_record(raw: RawRow, reading: Reading, read: set[str] | None = None) -> list[Row | Dropped]:
    """The rows of a record, and the reasons for those that are dropped.

    Rows have the view `reading.wanted`. Labeled completions that will be paired by prompt are the exception: they stay
    unpaired until `pair_by_prompt` has all of them. The first row has the record's id, the next ones `ID#2`, `ID#3`.

    Args:
        raw: the record.
        reading: how it becomes rows.
        read: takes the names of the columns that are read; None to skip that.

    Raises:
        DataError: for an invalid label, message or text.
    """
    try:
        return _rows(raw, reading, read)
    except RecursionError:
        raise DataError(f"{raw.place}: the record is nested too deeply") from None


def _rows(raw: RawRow, reading: Reading, read: set[str] | None) -> list[Row | Dropped]:
    raw = decoded(raw, reading.json_columns)
    if read is not None:
        raw = RawRow(raw.place, WatchedRecord(raw.record, read))
    record, view = raw.record, reading.shape.view
    first = fields.identifier(record.get("id"), raw.place)
    tools = fields.tool_schemas(record.get("tools"), raw.place)
    weight = fields.weight(record, raw.place)
    fields.check_masked_speaker(record, raw.place)
    drafts = [_decided(draft, raw.place, reading) for draft in reading.drafts(raw)]
    if view == "paired" and reading.wanted == "unpaired":
        drafts = [side for draft in drafts for side in _split_pair(draft, raw.place)]
    rows: list[Row | Dropped] = []
    for draft in drafts:
        row = _checked_row(draft, raw, reading) if isinstance(draft, Draft) else draft
        if isinstance(row, Row):
            number = 1 + len(rows)
            row = replace(row, id=first if number == 1 else f"{first}#{number}", tools=row.tools or tools,
                          weight=weight)
        rows.append(row)
    return rows


def _decided(draft: Draft | Dropped, place: str, reading: Reading) -> Draft | Dropped:
    """A draft whose label is read."""
    if isinstance(draft, Dropped) or draft.votes is None:
        return draft
    verdict = reading.labels.decide(draft.votes, draft.label_name, place)
    if isinstance(verdict, Dropped):
        return verdict
    if len(draft.completions) == 1:
        return replace(draft, desirable=verdict, votes=None)
    sides = list(draft.completions.items())
    return replace(draft, completions=dict(sides if verdict else reversed(sides)), votes=None)


def _checked_row(given: Draft, raw: RawRow, reading: Reading) -> Row | Dropped:
    place = raw.place
    if reading.wanted == "single" and given.desirable is False:
        return Dropped(place, Reason.UNDESIRABLE,
                       "it is rated undesirable, and this method trains on desirable completions only")
    draft = without_repeated_prompt(given, place)
    if isinstance(draft, Dropped):
        return draft
    for name, completion in draft.completions.items():
        if fields.is_blank(completion):
            return Dropped(place, Reason.EMPTY_COMPLETION, f"'{name}' is empty")
    prompt = with_context(raw.record, draft.prompt, place, reading.format.chat)
    completions: tuple[Content, ...] = tuple(draft.completions.values())
    if reading.chat or context_columns(raw.record) or any(
            isinstance(content, tuple) for content in (prompt, *completions)):
        prompt = fields.as_messages(prompt, "user")
        conversations = [fields.as_messages(completion, "assistant") for completion in completions]
        for messages in conversations:
            if messages[-1].get("role") != "assistant":
                raise DataError(f"{place}: a completion must end with a message of role 'assistant', "
                                f"not {fields.short_repr(messages[-1]['role'])}")
        completions = tuple(conversations)
    desirable = None if reading.wanted == "single" else draft.desirable
    return Row(place, place, prompt, completions, desirable, fields.tool_schemas(draft.tools, place))


def _split_pair(draft: Draft | Dropped, place: str) -> Drafts:
    """A pair as a desirable and an undesirable row."""
    if isinstance(draft, Dropped):
        return [draft]
    (chosen_name, chosen), (rejected_name, rejected) = draft.completions.items()
    if chosen == rejected:
        return [Dropped(place, Reason.IDENTICAL_PAIR, "chosen and rejected are equal")]
    return [replace(draft, completions={chosen_name: chosen}, desirable=True),
            replace(draft, completions={rejected_name: rejected}, desirable=False)]


def pair_by_prompt(rows: Sequence[Row | Dropped]) -> list[Row | Dropped]:
    """Pair labeled completions: the first desirable one of a prompt with its first undesirable one, and so on.

    A pair has the id and place of its desirable row, and the position of the later of the two rows.

    Raises:
        DataError: if their weights differ.
    """
    waiting: dict[str, tuple[deque[int], deque[int]]] = defaultdict(lambda: (deque(), deque()))
    paired: dict[int, Row | Dropped] = {}
    for number, row in enumerate(rows):
        if isinstance(row, Dropped):
            paired[number] = row
            continue
        prompt = row.prompt if isinstance(row.prompt, str) else tuple(map(without_marks, row.prompt))
        key = json.dumps([prompt, row.tools], sort_keys=True, default=str)
        same, opposite = waiting[key] if row.desirable else waiting[key][::-1]
        if not opposite:
            same.append(number)
            continue
        partner = rows[opposite.popleft()]
        assert isinstance(partner, Row)
        chosen, rejected = (row, partner) if row.desirable else (partner, row)
        weights = [1.0 if one.weight is None else one.weight for one in (chosen, rejected)]
        if weights[0] != weights[1]:
            raise DataError(f"{rejected.place}: the weight {weights[1]:g} differs from {weights[0]:g}, the weight of "
                            f"{chosen.place}, with which --pair-by-prompt pairs it. Give both the same weight.")
        paired[number] = replace(chosen, completions=chosen.completions + rejected.completions, desirable=None)
    for queues in waiting.values():
        for queue, missing in zip(queues, ("undesirable", "desirable"), strict=True):
            for number in queue:
                paired[number] = Dropped(rows[number].place, Reason.UNPAIRED,
                                         f"no {missing} completion of the same prompt to pair it with")
    return [paired[number] for number in sorted(paired)]
