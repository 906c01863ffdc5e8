"""The table of known formats, one row each."""

from tropism.data.formats import comparisons, fields, nested_records
from tropism.data.formats.format import Format, Record, Shape
from tropism.data.formats.options import FormatOptions
from tropism.data.rows import View

_PAIR = ("chosen", "rejected")


def _has_from_and_content(record: Record, shape: Shape, options: FormatOptions) -> bool:
    """True if the messages have the keys `from` and `content`."""
    return any(isinstance(first, dict) and "from" in first and "content" in first
               for name in (shape.prompt, *shape.completions) if name
               for first in (record[name] if isinstance(record[name], list) else [record[name]])[:1])


def _has_no_instruction(record: Record, shape: Shape, options: FormatOptions) -> bool:
    """With an `instruction`, `input` is only a part of the prompt."""
    return "instruction" not in record


def _is_chat(record: Record, shape: Shape, options: FormatOptions) -> bool:
    return isinstance(record[shape.prompt or shape.completions[0]], list)


def _rating_shapes(view: View) -> tuple[Shape, ...]:
    return tuple(Shape(view, prompt, completions, column)
                 for prompt, completions in (("prompt", ("completion",)), ("", ("messages",)))
                 for column in ("rating", "score"))


def _scored_list_shapes(view: View) -> tuple[Shape, ...]:
    lists = (("completions",), ("responses", "scores"), ("generations", "ratings"))
    return tuple(Shape(view, prompt, completions)
                 for prompt in ("instruction", "prompt") for completions in lists)


_FORMATS = (
    Format("trl", (  # text, or messages with `role` and `content`
        Shape("unpaired", "prompt", ("completion",), "label"), Shape("unpaired", "", ("messages",), "label"),
        Shape("paired", "prompt", _PAIR), Shape("paired", "", _PAIR),
        Shape("single", "prompt", ("completion",)), Shape("single", "", ("messages",)),
    )),
    Format("openai", (  # `input` is an object with `messages` and optional `tools`
        Shape("paired", "input", ("preferred_output", "non_preferred_output")),
    ), make_drafts=nested_records.request_drafts),
    Format("sharegpt", (  # messages with `from` and `value`
        Shape("unpaired", "", ("conversations",), "kto_tag"), Shape("unpaired", "", ("conversations",), "label"),
        Shape("paired", "conversations", _PAIR), Shape("single", "", ("conversations",)),
    ), matches=_is_chat, chat=True),
    Format("alpaca", (
        Shape("unpaired", "instruction", ("output",), "kto_tag"),
        Shape("unpaired", "instruction", ("output",), "label"),
        Shape("paired", "instruction", _PAIR), Shape("single", "instruction", ("output",)),
    ), chat=True),
    Format("openrlhf", (  # OpenRLHF puts text into a template of its own; here it is used as it is
        Shape("unpaired", "input", ("output",), "label"), Shape("paired", "input", _PAIR),
        Shape("single", "input", ("output",)),
    ), matches=_has_no_instruction),
    Format("coati", (  # messages with `from` and `content`
        Shape("unpaired", "prompt", ("completion",), "label"), Shape("unpaired", "", ("messages",), "label"),
        Shape("paired", "context", _PAIR), Shape("single", "", ("messages",)),
    ), matches=_has_from_and_content, decisive=True),
    Format("nemo", (
        Shape("unpaired", "prompt", ("response",), "preference"),
        Shape("paired", "prompt", ("chosen_response", "rejected_response")),
    ), parse_label=fields.preference),
    Format("anthropic-hh", (Shape("paired", "", _PAIR),),
           matches=nested_records.is_transcript, decisive=True, make_drafts=nested_records.transcript_drafts),
    Format("axolotl", (  # the last shape only with --format axolotl: without the column `system` it is trl's
        Shape("paired", "messages", _PAIR), Shape("paired", "question", _PAIR),
        Shape("paired", "question", ("chosen_response", "rejected_response")), Shape("paired", "prompt", _PAIR),
    ), chat=True),
    Format("ultrafeedback", (*_scored_list_shapes("paired"), *_scored_list_shapes("unpaired")),
           matches=nested_records.has_scored_list, decisive=True, make_drafts=nested_records.scored_list_drafts),
    Format("oasst", (Shape("paired", "prompt", ()), Shape("unpaired", "prompt", ())),
           matches=nested_records.is_reply_tree, decisive=True, make_drafts=nested_records.reply_tree_drafts),
    Format("rating", (*_rating_shapes("unpaired"), *_rating_shapes("single")),
           matches=nested_records.has_threshold, decisive=True, make_drafts=nested_records.rating_drafts),
    Format("feedback", (Shape("unpaired", "", ("messages",)), Shape("single", "", ("messages",))),
           matches=nested_records.has_marked_message, decisive=True,
           make_drafts=nested_records.marked_message_drafts),
    Format("nemo-rank", (Shape("paired", "context", ("completions",)), Shape("unpaired", "context", ("completions",))),
           matches=comparisons.is_ranked_list, decisive=True, make_drafts=comparisons.ranked_list_drafts),
    Format("helpsteer", (
        Shape("paired", "context", ("response1", "response2"), "overall_preference"),
        Shape("paired", "prompt", ("response_1", "response_2"), "preference_strength"),
    ), make_drafts=comparisons.strength_drafts),
    Format("ms-swift", (  # `rejected_response` is another last answer; `query` and `response` are the older spelling
        Shape("paired", "", ("messages", "rejected_response")), Shape("paired", "", ("messages", "rejected_messages")),
        Shape("paired", "query", ("response", "rejected_response")),
        Shape("unpaired", "query", ("response",), "label"), Shape("single", "query", ("response",)),
    ), chat=True, make_drafts=comparisons.rejected_drafts),
    Format("shp", (Shape("paired", "history", ("human_ref_A", "human_ref_B"), "labels"),),
           make_drafts=comparisons.comment_drafts),
    Format("webgpt", (Shape("paired", "question", ("answer_0", "answer_1", "score_0", "score_1")),),
           make_drafts=comparisons.scored_pair_drafts),
)

FORMATS: dict[str, Format] = {known.name: known for known in _FORMATS}
"""Formats by name. If several claim a record, `recognize` decides."""
