"""Records that hold more than columns of text: transcripts, scored answers, reply trees, marked messages."""

import re
from collections.abc import Iterator
from typing import Any

from tropism.data.formats import fields
from tropism.data.formats.options import FormatOptions
from tropism.data.formats.plain_records import Draft, Drafts, Format, Record, Shape, of_two, plain_drafts
from tropism.data.rows import Dropped, Message, RawRow, Reason
from tropism.errors import DataError

_TURN = re.compile(r"(?:\A|\n\n)(Human|Assistant):")
_MARKS = ("label", "feedback", "thumbs")


# --- anthropic-hh: two transcripts -----------------------------------------------------------------------------------


def is_transcript(record: Record, shape: Shape, options: FormatOptions) -> bool:
    """Whether both sides are text that opens with a person's turn."""
    return all(isinstance(record[name], str) and record[name].lstrip().startswith("Human:") for name in shape.answers)


def transcripts(raw: RawRow, shape: Shape, options: FormatOptions) -> Drafts:
    """Two transcripts; the turns that they share from the start are the prompt."""
    for name in shape.columns:
        if name not in raw.record:
            return [Dropped(raw.place, Reason.MISSING_FIELD, f"no '{name}'")]
    return [of_two({name: _turns(raw.record[name], name, raw.place) for name in shape.answers}, raw.place)]


def _turns(value: Any, name: str, place: str) -> tuple[Message, ...]:
    said = _TURN.split(fields.text(value, name, place).strip())
    if said[0].strip() or len(said) < 3:
        raise DataError(f"{place}: '{name}' is not a transcript: it must begin with 'Human:', and each turn must "
                        "stand behind an empty line")
    turns: list[Message] = []
    for speaker, content in zip(said[1::2], said[2::2], strict=True):
        role, content = fields.SPEAKERS.get(speaker.lower(), "user"), content.strip()
        if turns and turns[-1]["role"] == role:  # a speaker who goes on; chat templates want turns to alternate
            content = "\n\n".join(filter(None, (turns.pop()["content"], content)))
        turns.append({"role": role, "content": content})
    return tuple(turns)


# --- openai: a request, a preferred and a non-preferred output -------------------------------------------------------


def requests(raw: RawRow, shape: Shape, options: FormatOptions) -> Drafts:
    """The prompt and its tools stand in an object of their own."""
    for name in shape.columns:
        if name not in raw.record:
            return [Dropped(raw.place, Reason.MISSING_FIELD, f"no '{name}'")]
    request = raw.record[shape.prompt]
    if not isinstance(request, dict):
        raise DataError(f"{raw.place}: 'input' must be an object with 'messages', not {type(request).__name__}")
    prompt = fields.conversation(request.get("messages"), "input.messages", raw.place)
    answers = {name: fields.part(raw.record[name], name, raw.place) for name in shape.answers}
    return [Draft(prompt, answers, tools=request.get("tools"))]


# --- rating: a number in place of a label ----------------------------------------------------------------------------


def is_rated(record: Record, shape: Shape, options: FormatOptions) -> bool:
    """Without a threshold nobody can say what a rating means."""
    return options.label_threshold is not None


def rated(raw: RawRow, shape: Shape, options: FormatOptions) -> Drafts:
    """A completion with a rating: desirable from the threshold on."""
    threshold = options.label_threshold
    assert threshold is not None
    if raw.record.get(shape.label) is None:
        return [Dropped(raw.place, Reason.MISSING_FIELD, f"no '{shape.label}'")]
    plain = Format("rating", (shape,), verdict=lambda *given: fields.rating(*given) >= threshold)
    return plain_drafts(plain, raw, shape.view)


# --- ultrafeedback: several scored answers to one prompt -------------------------------------------------------------

Scored = list[tuple[float, fields.Content]]


def is_scored(record: Record, shape: Shape, options: FormatOptions) -> bool:
    """Whether the answers are a list: of objects with `response`, or beside a list of scores."""
    answers = record[shape.answers[0]]
    if not isinstance(answers, list) or not answers:
        return False
    return len(shape.answers) == 2 or (isinstance(answers[0], dict) and "response" in answers[0])


def scored(raw: RawRow, shape: Shape, options: FormatOptions) -> Drafts:
    """Pairs: the best answer against the worst. Unpaired: at or above the threshold, else the mean, is desirable."""
    for name in shape.columns:
        if name not in raw.record:
            return [Dropped(raw.place, Reason.MISSING_FIELD, f"no '{name}'")]
    prompt = fields.part(raw.record[shape.prompt], shape.prompt, raw.place)
    if shape.prompt == "instruction":
        prompt = fields.as_messages(prompt, "user")
    answers = _scored_answers(raw, shape)
    name = shape.answers[0]
    values = [score for score, _ in answers]
    if not answers or (len(set(values)) < 2 and (shape.view == "paired" or options.label_threshold is None)):
        return [Dropped(raw.place, Reason.EQUAL_SCORES, f"its {len(answers)} scored answers do not differ in score")]
    if shape.view == "paired":
        best, worst = (answers[values.index(pick(values))][1] for pick in (max, min))
        return [Draft(prompt, {"chosen": best, "rejected": worst})]
    line = sum(values) / len(values) if options.label_threshold is None else options.label_threshold
    return [Draft(prompt, {name: answer}, score >= line) for score, answer in answers]


def _scored_answers(raw: RawRow, shape: Shape) -> Scored:
    name, place = shape.answers[0], raw.place
    given = raw.record[name]
    if not isinstance(given, list):
        raise DataError(f"{place}: '{name}' must be a list, not {type(given).__name__}")
    if len(shape.answers) == 2:
        other = shape.answers[1]
        values = raw.record[other]
        if not isinstance(values, list) or len(values) != len(given):
            raise DataError(f"{place}: '{other}' must be a list with one score for each of '{name}'")
        return [(fields.rating(value, other, place), fields.part(answer, name, place))
                for answer, value in zip(given, values, strict=True) if value is not None]
    found: Scored = []
    for entry in given:
        if not isinstance(entry, dict) or "response" not in entry:
            raise DataError(f"{place}: each entry of '{name}' needs a 'response' and a score")
        key = "overall_score" if entry.get("overall_score") is not None else "fine-grained_score"
        if entry.get(key) is not None:
            found.append((fields.rating(entry[key], key, place), fields.part(entry["response"], "response", place)))
    return found


# --- oasst: a tree of replies, siblings ranked -----------------------------------------------------------------------


def is_tree(record: Record, shape: Shape, options: FormatOptions) -> bool:
    """Whether the prompt is the root of a tree."""
    prompt = record[shape.prompt]
    return isinstance(prompt, dict) and "text" in prompt and "replies" in prompt


def replies(raw: RawRow, shape: Shape, options: FormatOptions) -> Drafts:
    """Ranked replies of each node. Pairs: the first against the last. Unpaired: the better half is desirable."""
    root = raw.record.get(shape.prompt)
    if not isinstance(root, dict):
        return [Dropped(raw.place, Reason.MISSING_FIELD, f"no '{shape.prompt}' with 'text' and 'replies'")]
    drafts: Drafts = []
    for asked, siblings in _ranked(root, (), raw.place):
        answers = [_node(node, raw.place) for node in siblings]
        if shape.view == "paired":
            drafts.append(Draft(asked, {"chosen": (answers[0],), "rejected": (answers[-1],)}))
        else:
            half = (len(answers) + 1) // 2
            drafts += [Draft(asked, {"text": (answer,)}, place < half) for place, answer in enumerate(answers)]
    return drafts or [Dropped(raw.place, Reason.NO_COMPLETION, "no two replies of this tree are ranked")]


def _ranked(node: Any, before: tuple[Message, ...], place: str) -> Iterator[tuple[tuple[Message, ...], list[Any]]]:
    """Each conversation of the tree that has several ranked answers, and these, best first."""
    spoken = (*before, _node(node, place))
    given = node.get("replies") or []
    if not isinstance(given, list):
        raise DataError(f"{place}: the 'replies' of a message must be a list, not {type(given).__name__}")
    below = [reply for reply in given if isinstance(reply, dict) and not reply.get("deleted")]
    answers = [reply for reply in below if reply.get("rank") is not None and reply.get("role") == "assistant"]
    if len(answers) > 1:
        yield spoken, sorted(answers, key=lambda reply: fields.rating(reply["rank"], "rank", place))
    for reply in below:
        yield from _ranked(reply, spoken, place)


def _node(node: Any, place: str) -> Message:
    speaker = str(node.get("role", "prompter")).lower()
    if speaker not in ("prompter", "assistant"):
        raise DataError(f"{place}: a message of the tree has the role {fields.brief(speaker)}; known are prompter, "
                        "assistant")
    return {"role": fields.SPEAKERS[speaker], "content": fields.text(node.get("text"), "text", place)}


# --- feedback: a chat in which single answers are marked -------------------------------------------------------------


def is_marked(record: Record, shape: Shape, options: FormatOptions) -> bool:
    """Whether an assistant message carries a mark of its own, and not just a key that happens to be called so."""
    spoken = record[shape.answers[0]]
    return isinstance(spoken, list) and any(
        fields.is_thumb(entry.get(mark)) for entry in spoken
        if isinstance(entry, dict) and entry.get("role") == "assistant" for mark in _MARKS)


def marked(raw: RawRow, shape: Shape, options: FormatOptions) -> Drafts:
    """Each marked answer is a row, with the conversation before it as its prompt."""
    name, place = shape.answers[0], raw.place
    if name not in raw.record:
        return [Dropped(place, Reason.MISSING_FIELD, f"no '{name}'")]
    spoken = fields.conversation(raw.record[name], name, place)
    bare = tuple({key: value for key, value in message.items() if key not in _MARKS} for message in spoken)
    drafts: Drafts = []
    for number, message in enumerate(spoken):
        marks = [mark for mark in _MARKS if message.get(mark) is not None]
        if not marks:
            continue
        if message["role"] != "assistant":
            raise DataError(f"{place}: message {number + 1} of '{name}' has a {marks[0]}, but its role is "
                            f"{fields.brief(message['role'])}; only an answer can be liked")
        verdicts = {fields.thumb(message[mark], mark, place) for mark in marks}
        if len(verdicts) > 1:
            raise DataError(f"{place}: message {number + 1} of '{name}': {' and '.join(marks)} contradict each other")
        drafts.append(Draft(bare[:number], {name: (bare[number],)}, verdicts.pop()))
    return drafts or [Dropped(place, Reason.MISSING_FIELD, f"no answer of '{name}' has a label, feedback or thumbs")]
