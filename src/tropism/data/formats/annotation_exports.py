"""Exports of annotation tools: Label Studio and Argilla."""

from collections.abc import Mapping
from typing import Any

from tropism.data.formats import fields
from tropism.data.formats.comparison_tables import parsed, side_of
from tropism.data.formats.format import Drafts, Record, Shape
from tropism.data.formats.label_words import is_word
from tropism.data.formats.options import FormatOptions
from tropism.data.formats.plain_records import missing_column
from tropism.data.formats.tool_exports import Votes, draft_of_fields, find_columns
from tropism.data.rows import RawRow, View
from tropism.errors import DataError, count_of

# --- Label Studio ----------------------------------------------------------------------------------------------------

_MIN_MARKS = ("annotation_id", "annotator")
_MIN_OTHERS = {*_MIN_MARKS, "id", "created_at", "updated_at", "lead_time", "agreement", "inner_id", "project",
               "predictions", "file_upload"}
_VERDICTS = {"pairwise": "selected", "choices": "choices", "rating": "rating", "number": "number"}


def is_annotated_task(record: Record, shape: Shape, options: FormatOptions) -> bool:
    """True for a task of the full JSON export whose data are a prompt with as many completions as the view has."""
    return (isinstance(record["data"], Mapping) and isinstance(record["annotations"], list)
            and find_columns(record["data"], shape.view) is not None)


def task_drafts(raw: RawRow, shape: Shape, options: FormatOptions) -> Drafts:
    """A task of Label Studio. Skipped annotations and predictions of models do not count."""
    record, place = raw.record, raw.place
    if shape.prompt != "data":
        return _min_drafts(raw, shape, options)
    if missing := shape.missing_in(record):
        return [missing_column(place, missing)]
    data = fields.entry(record["data"], "data", place)
    annotations = fields.entries(record["annotations"], "annotations", place)
    votes: Votes = {}
    done = [one for one in annotations if not one.get("was_cancelled")]
    for annotation in done:
        for item in fields.entries(annotation.get("result"), "result", place):
            key = _VERDICTS.get(str(item.get("type")).lower())
            if key is not None:
                name = str(item.get("from_name"))
                value = fields.entry(item.get("value"), "value", place).get(key)
                votes.setdefault(name, []).append(_verdict(value, name, place))
    skipped = len(annotations) - len(done)
    why = (count_of(skipped, "skipped annotation") if skipped and not done
           else "no choice, rating or comparison in its annotations")
    return [draft_of_fields(data, votes, shape.view, options, place, why)]


def _verdict(value: Any, name: str, place: str) -> Any:
    """The value of a control, which may be in a list of one or in an object.

    Raises:
        DataError: for several choices.
    """
    value = parsed(value)
    if isinstance(value, Mapping):
        value = next((value[key] for key in _VERDICTS.values() if key in value), None)
    if isinstance(value, list):
        if len(value) > 1:
            raise DataError(f"{place}: '{name}' has several choices, a label is one: {fields.short_repr(value)}")
        return _verdict(value[0], name, place) if value else None
    return value


def locate_min_task(record: Record, view: View, options: FormatOptions) -> Shape | None:
    """The columns of a task of the JSON-MIN or CSV export, where each annotation is a record."""
    if not all(name in record for name in _MIN_MARKS) or (columns := find_columns(record, view)) is None:
        return None
    prompt, completions = columns
    names = [options.label_name] if options.label_name is not None else [
        name for name in record if name not in _MIN_OTHERS and name not in (prompt, *completions)]
    for name in names:
        value = parsed(record.get(name))
        first = value[0] if isinstance(value, list) and value else value
        if (isinstance(first, Mapping) and first.keys() & set(_VERDICTS.values())) or name == options.label_name or (
                is_word(value) if view == "unpaired" else side_of(value, (completions[0], completions[-1]), record)
                in ("a", "b", "tie")):
            return Shape(view, prompt, completions, name)
    return None


def _min_drafts(raw: RawRow, shape: Shape, options: FormatOptions) -> Drafts:
    votes = {shape.label: [_verdict(raw.record.get(shape.label), shape.label, raw.place)]}
    chosen = options.model_copy(update={"label_name": shape.label})
    return [draft_of_fields(raw.record, votes, shape.view, chosen, raw.place, f"'{shape.label}' is empty")]


# --- Argilla ---------------------------------------------------------------------------------------------------------

_RESPONSES, _SUGGESTION = ".responses", ".suggestion"


def is_argilla(record: Record, shape: Shape, options: FormatOptions) -> bool:
    """True for a record with objects of fields and responses."""
    return (isinstance(record["fields"], Mapping) and isinstance(record["responses"], Mapping | list)
            and find_columns(record["fields"], shape.view) is not None)


def locate_argilla(record: Record, view: View, options: FormatOptions) -> Shape | None:
    """The columns of a flattened record: those of the fields, and `QUESTION.responses`."""
    questions = [name for name in record if name.endswith((_RESPONSES, _SUGGESTION))]
    columns = find_columns(record, view)
    if not questions or columns is None:
        return None
    return Shape(view, columns[0], columns[1])


def argilla_drafts(raw: RawRow, shape: Shape, options: FormatOptions) -> Drafts:
    """A record of Argilla. Drafts, discarded responses and suggestions of models do not count.

    `--label-name QUESTION.suggestion` reads suggestions instead.
    """
    record, place = raw.record, raw.place
    if shape.prompt == "fields":
        if missing := shape.missing_in(record):
            return [missing_column(place, missing)]
        given, votes = fields.entry(record["fields"], "fields", place), _nested_votes(record, place)
    else:
        given, votes = record, _flat_votes(record)
    suggested = (options.label_name or "").endswith(_SUGGESTION)
    votes = {name: [_ranked(value, place) for value in values] for name, values in votes.items()
             if name.endswith(_SUGGESTION) == suggested}
    return [draft_of_fields(given, votes, shape.view, options, place, "no submitted response")]


def _nested_votes(record: Record, place: str) -> Votes:
    votes: Votes = {}
    responses = record["responses"]
    if isinstance(responses, list):  # of the server: one response of a user, with the values of all questions
        pairs = [(name, {**one, "value": value.get("value") if isinstance(value, Mapping) else value})
                 for one in fields.entries(responses, "responses", place)
                 for name, value in fields.entry(one.get("values"), "values", place).items()]
    else:
        pairs = [(name, one) for name, given in fields.entry(responses, "responses", place).items()
                 for one in fields.entries(given, f"responses.{name}", place)]
    for name, one in pairs:
        if str(one.get("status") or "submitted") == "submitted":
            votes.setdefault(str(name), []).append(one.get("value"))
    suggestions = record.get("suggestions")
    for name, one in suggestions.items() if isinstance(suggestions, Mapping) else ():
        votes[f"{name}{_SUGGESTION}"] = [one.get("value") if isinstance(one, Mapping) else one]
    return votes


def _flat_votes(record: Record) -> Votes:
    votes: Votes = {}
    for name, value in record.items():
        values = parsed(value)
        if name.endswith(_SUGGESTION) and values is not None:
            votes[name] = [values]
        elif name.endswith(_RESPONSES) and isinstance(values, list):
            status = parsed(record.get(f"{name}.status"))
            states = status if isinstance(status, list) and len(status) == len(values) else ["submitted"] * len(values)
            votes[name.removesuffix(_RESPONSES)] = [
                one for one, state in zip(values, states, strict=True) if str(state or "submitted") == "submitted"]
    return votes


def _ranked(value: Any, place: str) -> Any:
    """The first of two ranked completions, or `tie`; another value unchanged."""
    if isinstance(value, list) and len(value) == 1:
        return value[0]
    if isinstance(value, list) and len(value) == 2 and all(isinstance(one, Mapping) and "rank" in one for one in value):
        ranks = [fields.rating(one["rank"], "rank", place) for one in value]
        return "tie" if ranks[0] == ranks[1] else value[ranks.index(min(ranks))].get("value")
    return value
