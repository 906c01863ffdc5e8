"""Records that are more than columns of text: transcripts, scored completions, reply trees, marked messages."""

import re
from collections.abc import Iterator
from typing import Any

from tropism.data.formats import fields
from tropism.data.formats.format import Draft, Drafts, Format, Record, Shape
from tropism.data.formats.options import FormatOptions
from tropism.data.formats.plain_records import draft_of_conversations, missing_column, plain_drafts
from tropism.data.rows import Dropped, Message, RawRow, Reason
from tropism.errors import DataError

_SPEAKER = re.compile(r"(?:\A|\n\n)(Human|Assistant):")
_MARKS = ("label", "feedback", "thumbs")


# --- anthropic-hh: two transcripts -----------------------------------------------------------------------------------


def is_transcript(record: Record, shape: Shape, options: FormatOptions) -> bool:
    """True if both sides are text that begins with `Human:`."""
    return all(isinstance(record[name], str) and record[name].lstrip().startswith("Human:")
               for name in shape.completions)


def transcript_drafts(raw: RawRow, shape: Shape, options: FormatOptions) -> Drafts:
    """Two transcripts. The turns that they share from the start are the prompt."""
    if missing := shape.missing_in(raw.record):
        return [missing_column(raw.place, missing)]
    turns = {name: _turns(raw.record[name], name, raw.place) for name in shape.completions}
    return [draft_of_conversations(turns, raw.place)]


def _turns(value: Any, name: str, place: str) -> tuple[Message, ...]:
    pieces = _SPEAKER.split(fields.text(value, name, place).strip())
    if pieces[0].strip() or len(pieces) < 3:
        raise DataError(f"{place}: '{name}' is not a transcript: it must begin with 'Human:', with an empty line "
                        "before each turn")
    turns: list[Message] = []
    for speaker, content in zip(pieces[1::2], pieces[2::2], strict=True):
        role, content = fields.SPEAKERS.get(speaker.lower(), "user"), content.strip()
        if turns and turns[-1]["role"] == role:  # two turns of one speaker are joined: templates need them to alternate
            content = "\n\n".join(filter(None, (turns.pop()["content"], content)))
        turns.append({"role": role, "content": content})
    return tuple(turns)


# --- openai: a request, a preferred and a non-preferred output -------------------------------------------------------


def request_drafts(raw: RawRow, shape: Shape, options: FormatOptions) -> Drafts:
    """A record whose prompt and tools are in an object of their own."""
    if missing := shape.missing_in(raw.record):
        return [missing_column(raw.place, missing)]
    request = raw.record[shape.prompt]
    if not isinstance(request, dict):
        raise DataError(f"{raw.place}: 'input' must be an object with 'messages', not {type(request).__name__}")
    prompt = fields.conversation(request.get("messages"), "input.messages", raw.place)
    completions = {name: fields.content(raw.record[name], name, raw.place) for name in shape.completions}
    return [Draft(prompt, completions, tools=request.get("tools"))]


# --- rating: a number instead of a label -----------------------------------------------------------------------------


def has_threshold(record: Record, shape: Shape, options: FormatOptions) -> bool:
    """Ratings become labels only with `--label-threshold`."""
    return options.label_threshold is not None


def rating_drafts(raw: RawRow, shape: Shape, options: FormatOptions) -> Drafts:
    """A completion with a rating. It is desirable if the rating is at least the threshold."""
    threshold = options.label_threshold
    assert threshold is not None
    if raw.record.get(shape.label) is None:
        return [missing_column(raw.place, shape.label)]
    plain = Format("rating", (shape,), parse_label=lambda *given: fields.rating(*given) >= threshold)
    return plain_drafts(plain, raw, shape.view)


# --- ultrafeedback: several scored completions of one prompt ---------------------------------------------------------


def has_scored_list(record: Record, shape: Shape, options: FormatOptions) -> bool:
    """True for a list of objects with `response`, or for a list of texts with a list of scores."""
    given = record[shape.completions[0]]
    if not isinstance(given, list) or not given:
        return False
    return len(shape.completions) == 2 or (isinstance(given[0], dict) and "response" in given[0])


def scored_list_drafts(raw: RawRow, shape: Shape, options: FormatOptions) -> Drafts:
    """Pairs: the best completion against the worst. Unpaired: desirable from the threshold (default: the mean) on."""
    if missing := shape.missing_in(raw.record):
        return [missing_column(raw.place, missing)]
    prompt = fields.content(raw.record[shape.prompt], shape.prompt, raw.place)
    if shape.prompt == "instruction":
        prompt = fields.as_messages(prompt, "user")
    return drafts_of_scored(prompt, _scored_completions(raw, shape), shape, options.label_threshold, raw.place)


def drafts_of_scored(prompt: fields.Content, scored: list[tuple[float, fields.Content]], shape: Shape,
                     threshold: float | None, place: str) -> Drafts:
    """Drafts of completions with scores, of which higher ones are better; see `scored_list_drafts`."""
    scores = [score for score, _ in scored]
    if not scored or (len(set(scores)) < 2 and (shape.view == "paired" or threshold is None)):
        return [Dropped(place, Reason.EQUAL_SCORES, f"all scores are equal ({len(scored)} scored completions)")]
    if shape.view == "paired":
        best, worst = (scored[scores.index(pick(scores))][1] for pick in (max, min))
        return [Draft(prompt, {"chosen": best, "rejected": worst})]
    threshold = sum(scores) / len(scores) if threshold is None else threshold
    return [Draft(prompt, {shape.completions[0]: completion}, score >= threshold) for score, completion in scored]


def _scored_completions(raw: RawRow, shape: Shape) -> list[tuple[float, fields.Content]]:
    """Completions with their scores; those without a score are skipped."""
    name, place = shape.completions[0], raw.place
    given = raw.record[name]
    if not isinstance(given, list):
        raise DataError(f"{place}: '{name}' must be a list, not {type(given).__name__}")
    if len(shape.completions) == 2:
        other = shape.completions[1]
        scores = raw.record[other]
        if not isinstance(scores, list) or len(scores) != len(given):
            raise DataError(f"{place}: '{other}' must be a list with one score for each of '{name}'")
        return [(fields.rating(score, other, place), fields.content(completion, name, place))
                for completion, score in zip(given, scores, strict=True) if score is not None]
    found = []
    for entry in given:
        if not isinstance(entry, dict) or "response" not in entry:
            raise DataError(f"{place}: each entry of '{name}' needs a 'response' and a score")
        key = "overall_score" if entry.get("overall_score") is not None else "fine-grained_score"
        if entry.get(key) is not None:
            found.append((fields.rating(entry[key], key, place), fields.content(entry["response"], "response", place)))
    return found


# --- oasst: a tree of replies, siblings ranked -----------------------------------------------------------------------


def is_reply_tree(record: Record, shape: Shape, options: FormatOptions) -> bool:
    """True if the prompt is the root of a tree of replies."""
    prompt = record[shape.prompt]
    return isinstance(prompt, dict) and "text" in prompt and "replies" in prompt


def reply_tree_drafts(raw: RawRow, shape: Shape, options: FormatOptions) -> Drafts:
    """Ranked replies of each node. Pairs: the first against the last. Unpaired: the better half is desirable."""
    root = raw.record.get(shape.prompt)
    if not isinstance(root, dict):
        return [Dropped(raw.place, Reason.MISSING_FIELD, f"no '{shape.prompt}' with 'text' and 'replies'")]
    drafts: Drafts = []
    for prompt, siblings in _ranked_replies(root, (), raw.place):
        replies = [_tree_message(node, raw.place) for node in siblings]
        if shape.view == "paired":
            drafts.append(Draft(prompt, {"chosen": (replies[0],), "rejected": (replies[-1],)}))
        else:
            half = (len(replies) + 1) // 2
            drafts += [Draft(prompt, {"text": (reply,)}, rank < half) for rank, reply in enumerate(replies)]
    return drafts or [Dropped(raw.place, Reason.NO_COMPLETION, "no message of this tree has two ranked replies")]


def _ranked_replies(node: Any, before: tuple[Message, ...],
                    place: str) -> Iterator[tuple[tuple[Message, ...], list[Any]]]:
    """Each conversation of the tree that has several ranked replies, and those replies, best first."""
    conversation = (*before, _tree_message(node, place))
    given = node.get("replies") or []
    if not isinstance(given, list):
        raise DataError(f"{place}: 'replies' of a message must be a list, not {type(given).__name__}")
    below = [reply for reply in given if isinstance(reply, dict) and not reply.get("deleted")]
    ranked = [reply for reply in below if reply.get("rank") is not None and reply.get("role") == "assistant"]
    if len(ranked) > 1:
        yield conversation, sorted(ranked, key=lambda reply: fields.rating(reply["rank"], "rank", place))
    for reply in below:
        yield from _ranked_replies(reply, conversation, place)


def _tree_message(node: Any, place: str) -> Message:
    speaker = str(node.get("role", "prompter")).lower()
    if speaker not in ("prompter", "assistant"):
        raise DataError(f"{place}: a message of the tree has the role {fields.short_repr(speaker)}; it must be "
                        "prompter or assistant")
    return {"role": fields.SPEAKERS[speaker], "content": fields.text(node.get("text"), "text", place)}


# --- feedback: a chat with marks on single completions ---------------------------------------------------------------


def has_marked_message(record: Record, shape: Shape, options: FormatOptions) -> bool:
    """True if an assistant message has a valid mark, and not just a key of that name."""
    messages = record[shape.completions[0]]
    return isinstance(messages, list) and any(
        fields.is_thumb(entry.get(mark)) for entry in messages
        if isinstance(entry, dict) and entry.get("role") == "assistant" for mark in _MARKS)


def marked_message_drafts(raw: RawRow, shape: Shape, options: FormatOptions) -> Drafts:
    """One row for each marked message, with the conversation before it as its prompt."""
    name, place = shape.completions[0], raw.place
    if name not in raw.record:
        return [missing_column(place, name)]
    messages = fields.conversation(raw.record[name], name, place)
    unmarked = tuple({key: value for key, value in message.items() if key not in _MARKS} for message in messages)
    drafts: Drafts = []
    for number, message in enumerate(messages):
        marks = [mark for mark in _MARKS if message.get(mark) is not None]
        if not marks:
            continue
        if message["role"] != "assistant":
            raise DataError(f"{place}: message {number + 1} of '{name}' has '{marks[0]}', but its role is "
                            f"{fields.short_repr(message['role'])}. Only assistant messages can be marked.")
        verdicts = {fields.thumb(message[mark], mark, place) for mark in marks}
        if len(verdicts) > 1:
            raise DataError(f"{place}: message {number + 1} of '{name}': {' and '.join(marks)} contradict each other")
        drafts.append(Draft(unmarked[:number], {name: (unmarked[number],)}, verdicts.pop()))
    return drafts or [Dropped(place, Reason.MISSING_FIELD, f"no message of '{name}' has a label, feedback or thumbs")]
