"""The plain shapes of a record, the reasons for leaving one out, and the faults that stop the run."""

from typing import Any

import pytest

from helpers import case_rows, expected
from tropism.data.formats import FORMATS, Reading, View, recognize, rows_of_record
from tropism.data.formats.options import FormatOptions
from tropism.data.rows import Dropped, RawRow, Reason, Row
from tropism.errors import DataError

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}


def understood(raw: RawRow, view: View) -> Row | Dropped:
    shape = next(shape for shape in FORMATS["trl"].shapes if shape.view == view)
    (row,) = rows_of_record(raw, Reading(FORMATS["trl"], shape, view, FormatOptions()))
    return row


def paired(**record: Any) -> Row | Dropped:
    return understood(RawRow("f.jsonl:7", record), "paired")


def unpaired(**record: Any) -> Row | Dropped:
    return understood(RawRow("f.jsonl:7", record), "unpaired")


def labeled(**record: Any) -> Row | Dropped:
    return unpaired(**{"prompt": "p", "completion": "c", "label": True, **record})


# --- labels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("label", "wanted"), [
    (True, True), (False, False), (1, True), (0, False),
    ("true", True), ("False", False), ("1", True), ("0", False), (" TRUE ", True),
])
def test_accepted_labels(label: Any, wanted: bool) -> None:
    """K3: true/false, 0/1, and their spellings as text, which the message for all others documents."""
    row = labeled(label=label)
    assert isinstance(row, Row)
    assert row.desirable is wanted


@pytest.mark.parametrize("label", ["good", "yes", "", "-1", 2, -1, 0.5, 1.0, None, [], {}, float("nan"), "1.0"])
def test_refused_labels(label: Any) -> None:
    """K3: all else stops with row number and value; a rating is never taken for a label."""
    with pytest.raises(DataError) as caught:
        labeled(label=label)
    assert str(caught.value).startswith(f"f.jsonl:7: label {label!r} is not a boolean")


def test_a_bad_label_stops_even_where_the_row_would_be_dropped() -> None:
    """K3: `All else stops`: a dropped row does not hide that the file's labels are something else."""
    with pytest.raises(DataError, match="label 'good'"):
        labeled(label="good", completion="")
    with pytest.raises(DataError, match="label 3"):
        unpaired(prompt="p", label=3)


# --- reasons for leaving a row out -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("record", "reason", "detail"), [
    pytest.param({"completion": ""}, Reason.EMPTY_COMPLETION, "'completion' is empty", id="empty"),
    pytest.param({"completion": " \n\t"}, Reason.EMPTY_COMPLETION, "'completion' is empty", id="blank"),
    pytest.param({"completion": None}, Reason.EMPTY_COMPLETION, "'completion' is empty", id="null"),
    pytest.param({"completion": []}, Reason.EMPTY_COMPLETION, "'completion' is empty", id="no messages"),
    pytest.param({"completion": [{"role": "assistant", "content": " "}]}, Reason.EMPTY_COMPLETION,
                 "'completion' is empty", id="blank message"),
    pytest.param({"completion": [{"role": "assistant", "content": None}]}, Reason.EMPTY_COMPLETION,
                 "'completion' is empty", id="null message"),
])
def test_empty_completions(record: dict[str, Any], reason: Reason, detail: str) -> None:
    """D3: empty, blank and null answers are left out with their place."""
    assert labeled(**record) == Dropped("f.jsonl:7", reason, detail)


@pytest.mark.parametrize("field", ["prompt", "completion", "label"])
def test_missing_fields_unpaired(field: str) -> None:
    """D3: a row without a field is left out, and the field is named."""
    record = {"prompt": "p", "completion": "c", "label": True}
    del record[field]
    assert unpaired(**record) == Dropped("f.jsonl:7", Reason.MISSING_FIELD, f"no '{field}'")


@pytest.mark.parametrize("field", ["chosen", "rejected"])
def test_missing_fields_paired(field: str) -> None:
    """D3: the same for pairs; plain answers need a prompt."""
    record = {"prompt": "p", "chosen": "c", "rejected": "r"}
    del record[field]
    assert paired(**record) == Dropped("f.jsonl:7", Reason.MISSING_FIELD, f"no '{field}'")
    assert paired(chosen="c", rejected="r") == Dropped(
        "f.jsonl:7", Reason.MISSING_FIELD, "no 'prompt', which plain text needs")


def test_conversations_without_an_answer() -> None:
    """D3: the last message must be the assistant's."""
    assert unpaired(messages=[USER], label=True) == Dropped(
        "f.jsonl:7", Reason.NO_COMPLETION, "the last message is not from the assistant")
    assert unpaired(messages=[], label=True).reason == Reason.NO_COMPLETION
    assert paired(chosen=[USER], rejected=[USER, ANSWER]) == Dropped(
        "f.jsonl:7", Reason.NO_COMPLETION, "'chosen' has no completion after the shared messages")
    assert paired(chosen=[USER, ANSWER], rejected=[USER]).detail.startswith("'rejected' has no completion")
    assert paired(chosen=[USER, ANSWER], rejected=[USER, ANSWER]).reason == Reason.IDENTICAL_PAIR


def test_sides_that_answer_different_prompts() -> None:
    """M2: two conversations that part at a user message have no common prompt."""
    system, other = {"role": "system", "content": "s"}, {"role": "user", "content": "Bye"}
    dropped = paired(chosen=[system, USER, ANSWER], rejected=[system, other, ANSWER])
    assert isinstance(dropped, Dropped)
    assert dropped.reason == Reason.NO_COMPLETION
    assert "'chosen' continues with role 'user'" in dropped.detail


# --- shapes ----------------------------------------------------------------------------------------------------------


def test_case_11_shared_prefix() -> None:
    """M2: implicit prompts are shared messages, never shared letters; explicit ones are taken byte for byte."""
    rows = {raw.record["id"]: understood(raw, "paired") for raw in case_rows("11-dpo-shared-prefix.jsonl")}
    assert rows["x1"].reason == Reason.NO_COMPLETION
    assert rows["x2"].reason == Reason.IDENTICAL_PAIR
    assert rows["x3"].reason == rows["x4"].reason == Reason.MISSING_FIELD
    assert "prompt" in rows["x3"].detail
    wanted = expected("11")["x5"]
    assert (rows["x5"].prompt, *rows["x5"].completions) == (wanted["prompt"], wanted["chosen"], wanted["rejected"])
    wanted = expected("11")["x6"]
    assert len(rows["x6"].prompt) == wanted["prompt_messages"]
    assert [side[-1]["content"] for side in rows["x6"].completions] == [wanted["chosen"], wanted["rejected"]]
    assert [len(side) for side in rows["x6"].completions] == [1, 1]


def test_identity_and_extra_columns() -> None:
    """H3: extra columns never matter; the id is the row's own, else its place; a number is as good as text."""
    assert labeled(score=0.5, note=None).id == "f.jsonl:7"
    assert labeled(id=12).id == "12"
    assert labeled(id=0).id == "0"
    assert labeled(id=None).id == "f.jsonl:7"
    assert labeled().place == "f.jsonl:7"


def test_text_becomes_messages_where_the_other_part_has_them() -> None:
    """H3: a text prompt with message answers, and the reverse."""
    row = labeled(prompt="Hi", completion=[ANSWER])
    assert (row.prompt, row.completions) == ((USER,), ((ANSWER,),))
    row = labeled(prompt=[USER], completion="Hello.")
    assert (row.prompt, row.completions) == ((USER,), ((ANSWER,),))
    assert labeled(prompt=None, completion="c").prompt == ""
    assert labeled(prompt="Hi", completion=ANSWER).completions == ((ANSWER,),)
    row = unpaired(messages=[USER, ANSWER], label=0)
    assert (row.prompt, row.completions, row.desirable) == ((USER,), ((ANSWER,),), False)
    assert paired(prompt="p", chosen="c", rejected="r").desirable is None


def test_content_in_parts_and_other_keys() -> None:
    """T4: text parts are joined; whatever else a message has reaches the template."""
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo."}]
    row = labeled(prompt=[{**USER, "name": "Ann"}], completion=[{"role": "assistant", "content": parts}])
    assert row.prompt[0]["name"] == "Ann"
    assert row.completions[0][0]["content"] == "Hello."
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    assert labeled(prompt=[USER], completion=[call]).completions == ((call,),)


def test_tools() -> None:
    """T4: exactly the keys that the user gave."""
    tools = [{"name": "set_lamp", "parameters": {"room": {"type": "string"}}}]
    assert labeled(tools=tools).tools == tuple(tools)
    assert labeled(tools=None).tools is None
    assert labeled(tools=[]).tools is None
    assert labeled(tools=['{"name": "f"}', {"name": "g"}]).tools == ({"name": "f"}, {"name": "g"})


@pytest.mark.parametrize(("record", "message"), [
    ({"prompt": 5}, "'prompt' must be text or a list of messages, not int"),
    ({"completion": True}, "'completion' must be text or a list of messages, not bool"),
    ({"prompt": [{"content": "Hi"}]}, "each message of 'prompt' needs a 'role' and a 'content'"),
    ({"prompt": ["Hi"]}, "each message of 'prompt' needs a 'role' and a 'content'"),
    ({"prompt": [{"role": "user", "content": 5}]}, "the content of a message of 'prompt' must be text, not int"),
    ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "content of type 'image'; only text"),
    ({"prompt": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "'prompt' must be text, not int"),
    ({"prompt": [USER], "completion": [USER]}, "must end with a message of role 'assistant', not 'user'"),
    ({"tools": {"name": "f"}}, "'tools' must be a list of schemas, not dict"),
    ({"tools": ["f"]}, "schema 1 of 'tools' must be an object or its JSON, not 'f'"),
    ({"label": "x" * 5000}, f"label '{'x' * 99}... is not a boolean"),
    ({"completion": "half \ud83d"}, "'completion' has a lone surrogate"),
    ({"prompt": [{"role": "user", "content": "\ud83d"}]}, "'prompt' has a lone surrogate"),
])
def test_unreadable_rows_stop_with_their_place(record: dict[str, Any], message: str) -> None:
    """H3: an unreadable row stops the run, with file, line and what to look at."""
    with pytest.raises(DataError) as caught:
        labeled(**record)
    assert str(caught.value).startswith("f.jsonl:7: ")
    assert message in str(caught.value)


# --- columns ---------------------------------------------------------------------------------------------------------


def rows_of(*records: dict[str, Any]) -> list[RawRow]:
    return [RawRow(f"f:{number}", record) for number, record in enumerate(records, start=1)]


def test_missing_columns_name_the_found_ones() -> None:
    """H3: what is needed, what was found, and the command that fits the file."""
    with pytest.raises(DataError) as caught:
        recognize(rows_of({"question": "q", "answer": "a"}, {"question": "q", "score": 1}), "unpaired", "f.jsonl")
    assert str(caught.value).startswith("f.jsonl: no row has the columns ")
    assert "(prompt, completion, label) or (messages, label)" in str(caught.value)
    assert "Found: question, answer, score." in str(caught.value)
    assert "--columns prompt=question" in str(caught.value)
    with pytest.raises(DataError, match=r"labeled completions: use `tropism kto`, or pair .* --pair-by-prompt"):
        recognize(rows_of({"prompt": "p", "completion": "c", "label": True}), "paired", "f.jsonl")
    with pytest.raises(DataError, match=r"pairs: use `tropism dpo`, or .* --columns completion=chosen"):
        recognize(rows_of({"prompt": "p", "chosen": "c", "rejected": "r"}), "single", "f.jsonl")
    with pytest.raises(DataError, match="completions without labels: use `tropism sft`"):
        recognize(rows_of({"prompt": "p", "completion": "c"}), "unpaired", "f.jsonl")
    with pytest.raises(DataError, match="Found: none"):
        recognize(rows_of({}), "paired", "f.jsonl")


def test_one_good_row_is_enough_to_go_on() -> None:
    """H3: rows that lack a field are then dropped one by one."""
    good = {"prompt": "p", "completion": "c", "label": True, "extra": 1}
    for view, rows in (("unpaired", [{"x": 1}, good]), ("unpaired", [{"messages": [], "label": True}]),
                       ("paired", [{"chosen": [], "rejected": []}])):
        assert recognize(rows_of(*rows), view, "f.jsonl").format.name == "trl"


@pytest.mark.parametrize("prompt", ["Hi", [{"role": "user", "content": "Hi"}]])
def test_sides_that_repeat_the_prompt(prompt: Any) -> None:
    """A common public shape: `prompt`, and two whole conversations that begin with it."""
    question = {"role": "user", "content": "Hi"}
    record = {"prompt": prompt, "chosen": [question, {"role": "assistant", "content": "a"}],
              "rejected": [question, {"role": "assistant", "content": "b"}]}
    row = understood(RawRow("f:1", record), "paired")
    assert isinstance(row, Row)
    assert row.prompt == (question,)
    assert [answer[0]["content"] for answer in row.completions] == ["a", "b"]
    assert [len(answer) for answer in row.completions] == [1, 1]
