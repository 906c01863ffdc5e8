"""Tables with two completions of a prompt and a column that names the better one; the votes of LMArena."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tropism.data.formats import fields
from tropism.data.formats.fields import Content
from tropism.data.formats.format import Draft, Drafts, Record, Shape
from tropism.data.formats.label_words import MISSING, key_of, mapping_key
from tropism.data.formats.options import FormatOptions
from tropism.data.formats.plain_records import draft_of_conversations, missing_column
from tropism.data.rows import Dropped, Message, RawRow, View
from tropism.errors import DataError

PROMPTS = ("prompt", "question", "instruction", "query", "input", "request", "user_prompt", "user_input",
           "user_message", "user", "messages", "conversation", "context", "dialogue", "chat")
COMPLETIONS = ("completion", "answer", "response", "output", "reply", "generation", "assistant", "assistant_message",
               "model_output", "model_response", "text", "summary")
"""Usual names of the columns of a prompt and of a completion."""

_WINNERS = ("winner", "preferred", "preference", "choice", "better", "best", "preferred_response", "preferred_answer",
            "preferred_output", "preferred_completion", "better_response", "better_answer",
            "better_response_id")
_PERHAPS = ("selected", "human_preference", "verdict", "vote", "label", "annotation", "result", "chosen")
"""Columns that name the winner, and columns that may have another meaning, whose values decide."""

_STEMS = {"response", "answer", "completion", "output", "reply", "generation", "candidate", "assistant", "text",
          "summary", "result", "option", "message", "content", "translation"}
_QUALIFIERS = {"model", "llm", "ai", "bot", "chatbot", "generated", "the"}
_SIDES = (("a", "b", "c"), ("left", "right"), ("first", "second", "third"), ("1", "2", "0", "3"), ("0", "1", "2"),
          ("one", "two", "three"))
"""Words for the first and the second of two completions, and words that show that there are more than two."""
_AROUND = _STEMS | _QUALIFIERS | {
    "side", "is", "was", "better", "best", "wins", "won", "win", "winner", "preferred", "prefer", "much", "slightly",
    "clearly", "significantly", "strongly", "chosen", "good"}
_TIES = {"tie", "tied", "draw", "equal", "equally good", "equally bad", "both", "neither", "none", "same", "similar",
         "no preference", "both good", "both bad", "bothbad", "bothgood", "tie (bothbad)", "tie (both bad)",
         "tie bothbad", "tie both bad", "about the same", "a=b", "=", "0.5", "1.5"}
_TOKENS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_ORDER = re.compile(r"\[*\s*([ab])\s*([<>])+\s*([ab])\s*\]*")


def words_of(name: str) -> list[str]:
    """The words of a column name: `response_a`, `responseA` and `Response A` are `response`, `a`."""
    return [word.lower() for word in _TOKENS.findall(name)]


def find_prompt(record: Record) -> str | None:
    """The column of the prompt, by its usual names."""
    return _first_of(record, PROMPTS)


def find_completion(record: Record) -> str | None:
    """The column of a single completion, by its usual names."""
    return _first_of(record, COMPLETIONS)


def _first_of(record: Record, names: Sequence[str]) -> str | None:
    plain = {"_".join(words_of(name)): name for name in reversed(list(record))}
    return next((plain[name] for name in names if name in plain), None)


def find_sides(record: Record) -> tuple[str, str] | None:
    """The columns of the two completions, such as `response_a` and `response_b`; None unless there are exactly two."""
    sided = _sided(record)
    found = [names for stem, names in sided if stem & _STEMS and stem <= _STEMS | _QUALIFIERS]
    if not found and "conversation_a" not in record:
        found = [names for stem, names in sided if stem <= {"model"}]
    return found[0] if len(found) == 1 else None


def _sided(record: Record) -> list[tuple[set[str], tuple[str, str]]]:
    """Columns whose names differ in a word for the first and the second, with the words that they share."""
    by_words = {tuple(words_of(name)): name for name in record}
    found = []
    for words, name in by_words.items():
        for first, second, *more in _SIDES:
            if words.count(first) != 1:
                continue
            others = [by_words.get(tuple(mark if word == first else word for word in words))
                      for mark in (second, *more)]
            if others[0] is not None and not any(others[1:]):
                found.append((set(words) - {first}, (name, others[0])))
    return found


def side_of(value: Any, names: tuple[str, str], record: Record) -> Any:
    """The winner as `a`, `b` or `tie`; a number that the columns do not explain, and any other value, unchanged.

    Args:
        value: of the column of the winner.
        names: of the two completions.
        record: with the completions and, in some tables, the names of the models.
    """
    key = key_of(value)
    if key is None or key == MISSING:
        return value if key is None else None
    if key in _TIES:
        return "tie"
    if order := _ORDER.fullmatch(key):
        first, sign, second = order.groups()
        return (first if sign == ">" else second) if first != second else value
    equal = [side for side, name in zip("ab", names, strict=True)
             if key in (key_of(name), key_of(record.get(name)), *_models(record, side))]
    if len(equal) == 1:
        return equal[0]
    words = words_of(str(value)) if isinstance(value, str) else [mapping_key(value)]
    marks = [word for word in words if word not in _AROUND]
    if len(marks) != 1 or isinstance(value, bool):
        return value
    own = [set(words_of(name)) for name in names]
    for first, second, *_ in _SIDES:
        if marks[0] in (first, second) and (not first.isdigit() or (first in own[0] and second in own[1])):
            return "a" if marks[0] == first else "b"
    return marks[0] if marks[0] in ("0", "1", "2") else value


def _models(record: Record, side: str) -> set[str | None]:
    """The names of the model that wrote a completion."""
    return {key_of(record[names[side == "b"]]) for stem, names in _sided(record)
            if stem and stem <= {"model", "name", "id"}}


def locate(record: Record, view: View, options: FormatOptions) -> Shape | None:
    """The columns of a table with two completions and a winner."""
    sides, prompt = find_sides(record), find_prompt(record)
    if view != "paired" or sides is None or prompt is None or prompt in sides or "annotation_id" in record:
        return None
    plain = {"_".join(words_of(name)): name for name in reversed(list(record))}
    for name in (*_WINNERS, *_PERHAPS):
        winner = plain.get(name)
        if winner is None or winner in sides or winner == prompt or isinstance(record[winner], list | dict):
            continue
        if name in _WINNERS or side_of(record[winner], sides, record) in ("a", "b", "tie", "0", "1", "2"):
            return Shape("paired", prompt, sides, winner)
    return None


def is_comparison(record: Record, shape: Shape, options: FormatOptions) -> bool:
    """True for a table with two completions and a winner."""
    return locate(record, shape.view, options) is not None


def comparison_drafts(raw: RawRow, shape: Shape, options: FormatOptions) -> Drafts:
    """A record with two completions and the name of the better one."""
    if missing := shape.missing_in(raw.record):
        return [missing_column(raw.place, missing)]
    first, second = shape.completions
    winner = side_of(raw.record[shape.label], (first, second), raw.record)
    return [Draft(prompt_of(raw.record, shape.prompt, raw.place), {
        name: fields.content(raw.record[name], name, raw.place) for name in (first, second)
    }, votes=(winner,), label_name=shape.label)]


def prompt_of(record: Record, name: str, place: str) -> Content:
    """The prompt of a record; an instruction is a user's message, with its `input` on the next line."""
    prompt = fields.content(record[name], name, place)
    if name != "instruction" or not isinstance(prompt, str):
        return prompt
    more = record.get("input")
    return fields.as_messages("\n".join(filter(None, (prompt, more if isinstance(more, str) else ""))), "user")


# --- LMArena ---------------------------------------------------------------------------------------------------------

_ARENA_SIDES = ("conversation_a", "conversation_b")


def is_battle(record: Record, shape: Shape, options: FormatOptions) -> bool:
    """True if a record has conversations with two models, or a list of the answers of each."""
    if shape.completions == _ARENA_SIDES:
        return all(isinstance(parsed(record[name]), list) for name in _ARENA_SIDES)
    if shape.prompt == "full_conversation":
        return isinstance(parsed(record[shape.prompt]), list)
    return "winner_model_b" in record


def battle_drafts(raw: RawRow, shape: Shape, options: FormatOptions) -> Drafts:
    """Two conversations that answer the same user, and the winner of the vote."""
    record, place = raw.record, raw.place
    if missing := shape.missing_in(record):
        return [missing_column(place, missing)]
    if shape.label == "winner_model_a":
        flags = [mapping_key(record.get(name)) for name in ("winner_model_a", "winner_model_b", "winner_tie")]
        won = [side for side, flag in zip(("a", "b", "tie"), flags, strict=True) if flag in ("1", "true")]
        winner = won[0] if len(won) == 1 else None
        sides = {name: _turns(record["prompt"], record[name], name, place) for name in shape.completions}
    else:
        winner = side_of(record[shape.label], ("model_a", "model_b"), record)
        sides = _sides_of_battle(record, place)
    draft = draft_of_conversations(sides, place)
    return [draft if isinstance(draft, Dropped) else replace(draft, votes=(winner,), label_name=shape.label)]


def _sides_of_battle(record: Record, place: str) -> dict[str, tuple[Message, ...]]:
    """The two conversations. The full one begins with the turns of earlier votes, which the models have seen."""
    own = {name: fields.conversation(parsed(record[name]), name, place) for name in _ARENA_SIDES if record.get(name)}
    full = parsed(record.get("full_conversation"))
    if not isinstance(full, list) or not all(isinstance(turn, Mapping) for turn in full):
        return {name: own.get(name, ()) for name in _ARENA_SIDES}
    whole = {name: tuple(fields.message(turn[key], "full_conversation", place) for turn in full
                         for key in ("user", f"model_side_{name[-1]}") if turn.get(key))
             for name in _ARENA_SIDES}
    if len(own) == 2 and any(whole[name][-len(turns):] != turns for name, turns in own.items()):
        return own
    return whole


def _turns(prompts: Any, answers: Any, name: str, place: str) -> tuple[Message, ...]:
    asked, said = parsed(prompts), parsed(answers)
    if not (isinstance(asked, list) and isinstance(said, list) and len(asked) == len(said)):
        raise DataError(f"{place}: 'prompt' and '{name}' must be lists of texts of the same length")
    return tuple({"role": role, "content": fields.text(text or "", name, place)}
                 for turn in zip(asked, said, strict=True)
                 for role, text in zip(("user", "assistant"), turn, strict=True))


def parsed(value: Any) -> Any:
    """The value of JSON text of a list or an object; anything else unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value
