"""What exports of tools have in common, and those of feedback tools: Open WebUI and Langfuse."""

from collections.abc import Mapping, Sequence
from typing import Any

from tropism.data.formats import fields
from tropism.data.formats.comparison_tables import find_completion, find_prompt, find_sides, parsed, prompt_of, side_of
from tropism.data.formats.context import with_context
from tropism.data.formats.fields import Content
from tropism.data.formats.format import Draft, Drafts, Record, Shape
from tropism.data.formats.label_words import is_word, key_of, mapping_key
from tropism.data.formats.options import FormatOptions
from tropism.data.formats.plain_records import missing_column
from tropism.data.rows import Dropped, Message, RawRow, Reason, View
from tropism.errors import DataError

Votes = dict[str, list[Any]]
"""Labels of all annotators by the name of the question, score or control."""


def find_columns(record: Record, view: View) -> tuple[str, tuple[str, ...]] | None:
    """The names of the prompt and of the one or two completions among the fields of a tool's record."""
    prompt, sides = find_prompt(record), find_sides(record)
    if prompt is None or (sides is None) != (view == "unpaired"):
        return None
    if sides is not None:
        return prompt, sides
    completion = find_completion({name: value for name, value in record.items() if name != prompt})
    return None if completion is None else (prompt, (completion,))


def draft_of_fields(record: Record, votes: Votes, view: View, options: FormatOptions, place: str,
                    why: str) -> Draft | Dropped:
    """A row from the fields of a record and the labels that annotators gave it.

    Args:
        record: the fields by name.
        votes: the labels.
        view: kind of row.
        options: as the user gave them.
        place: of the record.
        why: it has no label, if it has none.

    Raises:
        DataError: for several names of labels, or for fields that are not text or messages.
    """
    columns = find_columns(record, view)
    if columns is None:
        what = "a prompt and two completions" if view == "paired" else "a prompt and a completion"
        return Dropped(place, Reason.MISSING_FIELD, f"no fields for {what} among {', '.join(record) or 'none'}")
    name = choose(votes, options, place)
    if name is None:
        return _unlabeled(votes, options, place, why)
    prompt, completions = columns
    given = votes[name]
    if len(completions) == 2:
        given = [side_of(vote, (completions[0], completions[1]), record) for vote in given]
    return Draft(with_context(record, prompt_of(record, prompt, place), place, chat=False), {
        column: fields.content(record[column], column, place) for column in completions}, votes=tuple(given),
        label_name=name)


def _unlabeled(votes: Votes, options: FormatOptions, place: str, why: str) -> Dropped:
    """The reason for dropping a record without the label that counts."""
    others = [name for name, values in votes.items() if values]
    if others and options.label_name is not None:
        why = f"no label '{options.label_name}', only {', '.join(map(repr, others))}"
    return Dropped(place, Reason.NO_LABEL, why)


def choose(votes: Votes, options: FormatOptions, place: str) -> str | None:
    """The name whose labels count: that of `--label-name`, or the only one that can be a label; None without labels.

    Raises:
        DataError: if there are several.
    """
    given = {name: values for name, values in votes.items() if values}
    if options.label_name is not None:
        return options.label_name if options.label_name in given else None
    if len(given) > 1:
        likely = [name for name, values in given.items() if all(_can_be_label(value, options) for value in values)]
        if len(likely) != 1:
            raise DataError(f"{place}: several labels: {', '.join(map(repr, given))}. Choose one with "
                            f"--label-name {next(iter(given))}.")
        return likely[0]
    return next(iter(given), None)


def _can_be_label(value: Any, options: FormatOptions) -> bool:
    """False for free text, as in a comment."""
    return (not isinstance(value, str) or is_word(value) or mapping_key(value) in options.words
            or side_of(value, ("a", "b"), {}) in ("a", "b", "tie"))


# --- Open WebUI ------------------------------------------------------------------------------------------------------


def is_rated_chat(record: Record, shape: Shape, options: FormatOptions) -> bool:
    """True for a rating with a snapshot of its chat."""
    return (isinstance(record["data"], Mapping) and "rating" in record["data"] and isinstance(record["meta"], Mapping)
            and isinstance(record["snapshot"], Mapping))


def rated_chat_drafts(raw: RawRow, shape: Shape, options: FormatOptions) -> Drafts:
    """The rated message of a chat, after the messages that lead to it."""
    record, place = raw.record, raw.place
    if missing := shape.missing_in(record):
        return [missing_column(place, missing)]
    data, meta, chat = record["data"] or {}, record["meta"] or {}, record["snapshot"]
    while isinstance(chat, Mapping) and "history" not in chat and isinstance(chat.get("chat"), Mapping):
        chat = chat["chat"]
    if not isinstance(chat, Mapping) or not isinstance(data, Mapping) or not isinstance(meta, Mapping):
        return [Dropped(place, Reason.MISSING_FIELD, "no chat in 'snapshot', or no rating in 'data'")]
    path = _path_to(chat, str(meta.get("message_id")))
    if not path:
        return [Dropped(place, Reason.MISSING_FIELD, f"message {meta.get('message_id')} is not in the snapshot")]
    if any(message.get("files") for message in path):
        return [Dropped(place, Reason.MISSING_FIELD, "a message has an attached file, which is not in the export")]
    parameters = chat.get("params")
    system = chat.get("system") or (parameters.get("system") if isinstance(parameters, Mapping) else None)
    messages = [{"role": message.get("role"), "content": message.get("content")} for message in path]
    turns = fields.conversation(
        [*([{"role": "system", "content": system}] if system else []), *messages], "snapshot", place)
    if turns[-1]["role"] != "assistant":
        raise DataError(f"{place}: the rated message is from {fields.short_repr(turns[-1]['role'])}, not the assistant")
    return [Draft(turns[:-1], {"snapshot": turns[-1:]}, votes=(data.get("rating"),), label_name="rating")]


def _path_to(chat: Mapping[str, Any], wanted: str) -> list[Message]:
    """The messages from the first one of a chat to the wanted one."""
    history = chat.get("history")
    known = history.get("messages") if isinstance(history, Mapping) else None
    if not isinstance(known, Mapping):
        known = {}
    path: list[Message] = []
    name: Any = wanted
    while isinstance(name, str) and isinstance(known.get(name), dict) and len(path) <= len(known):
        path.insert(0, known[name])
        name = known[name].get("parentId")
    if path:
        return path
    listed = [message for message in chat.get("messages") or [] if isinstance(message, dict)]
    ends = [number for number, message in enumerate(listed) if message.get("id") == wanted]
    return listed[: ends[0] + 1] if ends else []


# --- Langfuse --------------------------------------------------------------------------------------------------------

_TRACE_MARKS = {"traceId", "trace_id", "userId", "user_id", "sessionId", "session_id", "bookmarked", "latency",
                "environment", "release", "htmlPath", "projectId", "project_id", "traceName", "trace_name", "timestamp",
                "startTime", "start_time", "parentObservationId"}
_NO_SCORES = {"tags", "comments", "observations", "scores", "toolCalls", "toolCallNames", "toolDefinitions", "metadata"}
_ASKED = ("messages", "input", "query", "question", "prompt", "text", "content", "message")
_SAID = ("output", "answer", "response", "completion", "text", "content", "message", "result", "messages")


def locate_trace(record: Record, view: View, options: FormatOptions) -> Shape | None:
    """The columns of a trace or an observation: input, output, and its scores or the column of one score."""
    if view != "unpaired" or not {"input", "output"} <= record.keys():
        return None
    if _scores(record.get("scores")):
        return Shape("unpaired", "input", ("output",), "scores")
    if len(_TRACE_MARKS & record.keys()) < 2 or "instruction" in record:
        return None
    names = [name for name, value in record.items()
             if name not in _NO_SCORES and name not in ("input", "output") and _score_list(value)]
    if options.label_name is not None:
        names = [name for name in [options.label_name] if name in record]
    if len(names) > 1:
        names = ["scores"]
    return Shape("unpaired", "input", ("output",), names[0]) if names else None


def is_trace(record: Record, shape: Shape, options: FormatOptions) -> bool:
    """True for a record with scores that have names."""
    return bool(_scores(record["scores"]))


def trace_drafts(raw: RawRow, shape: Shape, options: FormatOptions) -> Drafts:
    """The input and output of a trace or an observation, with its scores."""
    record, place = raw.record, raw.place
    if missing := next((name for name in ("input", "output") if name not in record), None):
        return [missing_column(place, missing)]
    if shape.label == "scores" and "scores" in record:
        votes = _votes_of_scores(record)
    else:
        columns = [shape.label] if shape.label in record else [
            name for name, value in record.items() if name not in _NO_SCORES and _score_list(value)]
        votes = {name: list(found) for name in columns if (found := _score_list(record[name]))}
    name = choose(votes, options, place)
    if name is None:
        return [_unlabeled(votes, options, place, "no score")]
    asked, tools = _asked(parsed(record["input"]), place)
    return [Draft(asked, {"output": _said(parsed(record["output"]), place)}, tools=tools, votes=tuple(votes[name]),
                  label_name=name)]


def _scores(value: Any) -> list[Mapping[str, Any]]:
    """Scores with a name; none for anything else."""
    value = parsed(value)
    if isinstance(value, Mapping):
        return [{"name": name, "value": one} for name, given in value.items()
                for one in (given if isinstance(given, list) else [given])]
    found = value if isinstance(value, list) else []
    return [one for one in found if isinstance(one, Mapping) and "name" in one]


def _score_list(value: Any) -> Sequence[Any]:
    """The values in the column of a score; none for another column."""
    value = parsed(value)
    if isinstance(value, list) and value and all(isinstance(one, str | int | float) for one in value):
        return value
    return ()


def _votes_of_scores(record: Record) -> Votes:
    """Scores of the record itself, not those of the observations in it."""
    votes: Votes = {}
    for one in _scores(record["scores"]):
        observation = one.get("observationId", one.get("observation_id"))
        if observation not in (None, "", record.get("id")):
            continue
        text = one.get("stringValue", one.get("string_value"))
        value = one.get("value")
        kind = str(one.get("dataType", one.get("data_type")) or "").upper()
        if kind == "BOOLEAN" and mapping_key(value) in ("0", "1"):
            value = mapping_key(value)
        elif kind in ("CATEGORICAL", "TEXT") or (value is None and text):
            value = text if text is not None else value
        if key_of(value) is not None:
            votes.setdefault(str(one["name"]), []).append(value)
    return votes


def _asked(value: Any, place: str) -> tuple[Content, Any]:
    """The prompt in the input of a trace, and its tools."""
    tools = None
    if isinstance(value, Mapping) and "role" not in value:
        tools = value.get("tools")
        value = _inside(value, _ASKED, "input", place)
    if isinstance(value, str) or value is None:
        return fields.content(value, "input", place), tools
    return fields.content(value if isinstance(value, list) else [value], "input", place), tools


def _said(value: Any, place: str) -> Content:
    """The completion in the output of a trace."""
    if isinstance(value, Mapping) and isinstance(value.get("choices"), list) and len(value["choices"]) == 1:
        value = value["choices"][0]
    if isinstance(value, Mapping) and "role" not in value:
        value = _inside(value, _SAID, "output", place)
    return fields.content(value, "output", place)


def _inside(value: Mapping[str, Any], names: Sequence[str], column: str, place: str) -> Any:
    """The one entry of an object that has the usual name of a prompt or a completion.

    Raises:
        DataError: if there is none, or more than one.
    """
    found = [name for name in names if value.get(name) is not None]
    if "messages" in found and column == "input":
        found = ["messages"]
    if len(found) != 1:
        raise DataError(f"{place}: '{column}' is an object with {', '.join(map(repr, value)) or 'no keys'}, not text "
                        "or messages. Keep only the text or the messages of the model call.")
    return value[found[0]]
