"""Records that compare two completions of a prompt, or rank several, in the words of a public data set."""

from tropism.data.formats import fields
from tropism.data.formats.fields import Content
from tropism.data.formats.format import Draft, Drafts, Format, Record, Shape
from tropism.data.formats.nested_records import drafts_of_scored
from tropism.data.formats.options import FormatOptions
from tropism.data.formats.plain_records import draft_of_conversations, missing_column, plain_drafts
from tropism.data.rows import Dropped, RawRow, Reason
from tropism.errors import DataError

_STRENGTH = 3
"""Largest strength of a preference of HelpSteer."""


def _compared(raw: RawRow, prompt: Content, names: tuple[str, ...], verdict: float, columns: str) -> Drafts:
    """A pair of completions. The second one is chosen if the verdict is positive; 0 is a tie."""
    if not verdict:
        return [Dropped(raw.place, Reason.EQUAL_SCORES, f"a tie by {columns}")]
    chosen, rejected = reversed(names) if verdict > 0 else names
    return [Draft(prompt, {name: fields.content(raw.record[name], name, raw.place) for name in (chosen, rejected)})]


# --- helpsteer: the strength of a preference, negative for the first response ----------------------------------------


def strength_drafts(raw: RawRow, shape: Shape, options: FormatOptions) -> Drafts:
    """A pair with a preference from -3 (the first is much better) to 3 (the second is)."""
    record, place = raw.record, raw.place
    column = shape.label
    if (missing := shape.missing_in(record)) or fields.is_missing(record[column]):
        return [missing_column(place, missing or column)]
    strength = fields.rating(record[column], column, place)
    if abs(strength) > _STRENGTH:
        raise DataError(f"{place}: {column} {fields.short_repr(record[column])} is not a preference from -3 to 3")
    prompt = fields.content(record[shape.prompt], shape.prompt, place)
    return _compared(raw, prompt, shape.completions, strength, f"'{column}'")


# --- shp: two comments on a post, with a label and scores ------------------------------------------------------------


def comment_drafts(raw: RawRow, shape: Shape, options: FormatOptions) -> Drafts:
    """A pair of comments. `labels` is 1 if the first is preferred, and 0 if the second is."""
    record, place = raw.record, raw.place
    if missing := shape.missing_in(record):
        return [missing_column(place, missing)]
    column = shape.label
    first = fields.label(record[column], column, place)
    scores = [fields.rating(record[name], name, place) for name in ("score_A", "score_B")
              if not fields.is_missing(record.get(name))]
    if len(scores) == 2 and (scores[0] < scores[1] if first else scores[0] > scores[1]):
        raise DataError(f"{place}: {column} {fields.short_repr(record[column])} contradicts score_A {scores[0]:g} and "
                        f"score_B {scores[1]:g}. Fix or remove the row.")
    prompt = fields.as_messages(fields.content(record[shape.prompt], shape.prompt, place), "user")
    return _compared(raw, prompt, shape.completions, -1 if first else 1, f"'{column}'")


# --- webgpt: two answers with scores ---------------------------------------------------------------------------------


def scored_pair_drafts(raw: RawRow, shape: Shape, options: FormatOptions) -> Drafts:
    """A pair of answers. The one with the higher score is chosen."""
    record, place = raw.record, raw.place
    *names, one, other = shape.completions
    for name in shape.columns:
        if name not in record or (name in (one, other) and fields.is_missing(record[name])):
            return [missing_column(place, name)]
    question = record[shape.prompt]
    if isinstance(question, dict) and "full_text" in question:
        question = question["full_text"]
    prompt = fields.as_messages(fields.content(question, shape.prompt, place), "user")
    scores = [fields.rating(record[name], name, place) for name in (one, other)]
    return _compared(raw, prompt, tuple(names), scores[1] - scores[0], f"'{one}' and '{other}'")


# --- nemo-rank: completions with their ranks -------------------------------------------------------------------------


def is_ranked_list(record: Record, shape: Shape, options: FormatOptions) -> bool:
    """True for a list of objects with `rank` and `completion`."""
    given = record[shape.completions[0]]
    return (isinstance(given, list) and bool(given) and isinstance(given[0], dict)
            and {"rank", "completion"} <= given[0].keys())


def ranked_list_drafts(raw: RawRow, shape: Shape, options: FormatOptions) -> Drafts:
    """Pairs: the best rank, which is the lowest, against the worst. Unpaired: desirable from the mean rank on."""
    if missing := shape.missing_in(raw.record):
        return [missing_column(raw.place, missing)]
    (name,), place = shape.completions, raw.place
    given = raw.record[name]
    if not isinstance(given, list) or not all(isinstance(entry, dict) and {"rank", "completion"} <= entry.keys()
                                              for entry in given):
        raise DataError(f"{place}: '{name}' must be a list of objects with 'rank' and 'completion'")
    ranked = [(-fields.rating(entry["rank"], "rank", place), fields.content(entry["completion"], "completion", place))
              for entry in given if not fields.is_missing(entry["rank"])]
    prompt = fields.content(raw.record[shape.prompt], shape.prompt, place)
    return drafts_of_scored(prompt, ranked, shape, None, place)


# --- ms-swift: a conversation, and another end of it -----------------------------------------------------------------


def rejected_drafts(raw: RawRow, shape: Shape, options: FormatOptions) -> Drafts:
    """A conversation and the rejected last answer, or a rejected conversation."""
    record, place = raw.record, raw.place
    if missing := shape.missing_in(record):
        return [missing_column(place, missing)]
    if shape.prompt:
        return plain_drafts(Format("ms-swift", (shape,), chat=True), raw, shape.view)
    name, other = shape.completions
    chosen = fields.conversation(record[name], name, place)
    rejected = fields.as_messages(fields.content(record[other], other, place), "assistant")
    if not rejected:
        return [Dropped(place, Reason.EMPTY_COMPLETION, f"'{other}' is empty")]
    if len(rejected) == 1:
        rejected = (*chosen[:-1], *rejected)
    elif all(message["role"] not in ("user", "system") for message in rejected):  # calls of tools and the answer
        turns = [number for number, message in enumerate(chosen, start=1) if message["role"] == "user"]
        rejected = (*chosen[: turns[-1] if turns else 0], *rejected)
    return [draft_of_conversations({name: chosen, other: rejected}, place)]
