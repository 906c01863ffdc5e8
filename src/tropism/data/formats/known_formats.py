"""The table of formats: one row each."""

from tropism.data.formats import fields, nested_records
from tropism.data.formats.options import FormatOptions
from tropism.data.formats.plain_records import Format, Record, Shape
from tropism.data.rows import View

_PAIR = ("chosen", "rejected")


def _has_from(record: Record, shape: Shape, options: FormatOptions) -> bool:
    """Whether the messages say `from` and `content`."""
    return any(isinstance(first, dict) and "from" in first and "content" in first
               for name in (shape.prompt, *shape.answers) if name
               for first in (record[name] if isinstance(record[name], list) else [record[name]])[:1])


def _no_instruction(record: Record, shape: Shape, options: FormatOptions) -> bool:
    """Beside an instruction, `input` is only a part of the prompt."""
    return "instruction" not in record


def _is_chat(record: Record, shape: Shape, options: FormatOptions) -> bool:
    return isinstance(record[shape.prompt or shape.answers[0]], list)


def _rated(view: View) -> tuple[Shape, ...]:
    return tuple(Shape(view, prompt, answers, column)
                 for prompt, answers in (("prompt", ("completion",)), ("", ("messages",)))
                 for column in ("rating", "score"))


def _scored(view: View) -> tuple[Shape, ...]:
    lists = (("completions",), ("responses", "scores"), ("generations", "ratings"))
    return tuple(Shape(view, prompt, answers)
                 for prompt in ("instruction", "prompt") for answers in lists)


_FORMATS = (
    Format("trl", (  # text, or messages with `role` and `content`
        Shape("unpaired", "prompt", ("completion",), "label"), Shape("unpaired", "", ("messages",), "label"),
        Shape("paired", "prompt", _PAIR), Shape("paired", "", _PAIR),
        Shape("single", "prompt", ("completion",)), Shape("single", "", ("messages",)),
    )),
    Format("openai", (  # `input` is an object with `messages` and perhaps `tools`
        Shape("paired", "input", ("preferred_output", "non_preferred_output")),
    ), drafts=nested_records.requests),
    Format("sharegpt", (  # messages with `from` and `value`
        Shape("unpaired", "", ("conversations",), "kto_tag"), Shape("unpaired", "", ("conversations",), "label"),
        Shape("paired", "conversations", _PAIR), Shape("single", "", ("conversations",)),
    ), fits=_is_chat, chat=True),
    Format("alpaca", (
        Shape("unpaired", "instruction", ("output",), "kto_tag"),
        Shape("unpaired", "instruction", ("output",), "label"),
        Shape("paired", "instruction", _PAIR), Shape("single", "instruction", ("output",)),
    ), chat=True),
    Format("openrlhf", (  # that program puts text into a template of its own; here it is taken as it is
        Shape("unpaired", "input", ("output",), "label"), Shape("paired", "input", _PAIR),
        Shape("single", "input", ("output",)),
    ), fits=_no_instruction),
    Format("coati", (  # messages with `from` and `content`
        Shape("unpaired", "prompt", ("completion",), "label"), Shape("unpaired", "", ("messages",), "label"),
        Shape("paired", "context", _PAIR), Shape("single", "", ("messages",)),
    ), fits=_has_from, decisive=True),
    Format("nemo", (
        Shape("unpaired", "prompt", ("response",), "preference"),
        Shape("paired", "prompt", ("chosen_response", "rejected_response")),
    ), verdict=fields.preference),
    Format("anthropic-hh", (Shape("paired", "", _PAIR),),
           fits=nested_records.is_transcript, decisive=True, drafts=nested_records.transcripts),
    Format("axolotl", (  # the last one only if it is asked for: without the column `system` it is what trl has
        Shape("paired", "messages", _PAIR), Shape("paired", "question", _PAIR),
        Shape("paired", "question", ("chosen_response", "rejected_response")), Shape("paired", "prompt", _PAIR),
    ), chat=True),
    Format("ultrafeedback", (*_scored("paired"), *_scored("unpaired")),
           fits=nested_records.is_scored, decisive=True, drafts=nested_records.scored),
    Format("oasst", (Shape("paired", "prompt", ()), Shape("unpaired", "prompt", ())),
           fits=nested_records.is_tree, decisive=True, drafts=nested_records.replies),
    Format("rating", (*_rated("unpaired"), *_rated("single")),
           fits=nested_records.is_rated, decisive=True, drafts=nested_records.rated),
    Format("feedback", (Shape("unpaired", "", ("messages",)), Shape("single", "", ("messages",))),
           fits=nested_records.is_marked, decisive=True, drafts=nested_records.marked),
)

FORMATS: dict[str, Format] = {known.name: known for known in _FORMATS}
"""The formats by their names. Where several claim a record, `recognize` says which has it."""
