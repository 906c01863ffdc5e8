"""Every known format: recognized by its columns, and read as the rows that it means."""

from pathlib import Path
from typing import Any, get_args

import pytest

from tropism.data.formats import FORMATS, View, pair_by_prompt, recognize, rows_of_record, view_of
from tropism.data.formats.options import FormatName, FormatOptions
from tropism.data.formats.recognize import renamed
from tropism.data.rows import Dropped, RawRow, Reason, Row
from tropism.errors import DataError


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def raw(*records: dict[str, Any]) -> list[RawRow]:
    return [RawRow(f"f:{number}", record) for number, record in enumerate(records, start=1)]


def read(view: View, *records: dict[str, Any], **options: Any) -> tuple[str, list[Row | Dropped]]:
    """Name of the format that was seen, and the rows."""
    chosen = FormatOptions(**options)
    rows = renamed(raw(*records), chosen.renames)
    reading = recognize(rows, view, "f", chosen)
    found = [row for record in rows for row in rows_of_record(record, reading)]
    return reading.format.name, pair_by_prompt(found) if chosen.pair_by_prompt else found


def short(row: Row | Dropped) -> tuple[Any, ...]:
    """Prompt and answers, messages as `role: content`; and the label."""
    if isinstance(row, Dropped):
        return (row.reason,)

    def said(part: Any) -> Any:
        return part if isinstance(part, str) else [f"{m['role'][0]}: {m['content']}" for m in part]

    label = () if row.desirable is None else (row.desirable,)
    return (said(row.prompt), *map(said, row.completions), *label)


def refused(view: View, *records: dict[str, Any], **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        read(view, *records, **options)
    return str(caught.value)


CHAT = [user("p"), answer("a")]
FROM_VALUE = [{"from": "human", "value": "p"}, {"from": "gpt", "value": "a"}]
FROM_CONTENT = [{"from": "human", "content": "p"}, {"from": "assistant", "content": "a"}]
TREE = {"message_tree_id": "t", "prompt": {"text": "p", "role": "prompter", "replies": [
    {"text": "worse", "role": "assistant", "rank": 1, "replies": []},
    {"text": "best", "role": "assistant", "rank": 0, "replies": [
        {"text": "q", "role": "prompter", "replies": [
            {"text": "x", "role": "assistant", "rank": 2, "replies": []},
            {"text": "y", "role": "assistant", "rank": 0, "replies": []},
            {"text": "z", "role": "assistant", "rank": 1, "replies": []},
            {"text": "gone", "role": "assistant", "rank": 3, "deleted": True, "replies": []},
            {"text": "late", "role": "assistant", "rank": None, "replies": []}]}]}]}}
ULTRA = {"instruction": "p", "completions": [
    {"response": "middle", "overall_score": 6.0}, {"response": "best", "overall_score": "8.5"},
    {"response": "worst", "fine-grained_score": 2.0}, {"response": "unscored", "overall_score": None}]}
SCORED = {"prompt": "p", "responses": ["b", "a", "c"], "scores": [1, 5, 3]}
REQUEST = {"input": {"messages": [user("p")], "tools": [{"name": "f"}]},
           "preferred_output": [answer("a")], "non_preferred_output": [answer("b")]}
HH = {"chosen": "\n\nHuman: p\n\nAssistant: one\n\nHuman: q\n\nAssistant: a\n\nwith two parts",
      "rejected": "\n\nHuman: p\n\nAssistant: one\n\nHuman: q\n\nAssistant: b"}
MARKED = {"messages": [user("p"), {**answer("a"), "thumbs": "up"}, user("q"), answer("b"), user("r"),
                       {**answer("c"), "thumbs": "down"}]}


@pytest.mark.parametrize(("name", "view", "record", "rows"), [
    # trl
    ("trl", "unpaired", {"prompt": "p", "completion": "a", "label": True}, [("p", "a", True)]),
    ("trl", "unpaired", {"prompt": [user("p")], "completion": [answer("a")], "label": 0},
     [(["u: p"], ["a: a"], False)]),
    ("trl", "unpaired", {"messages": CHAT, "label": True}, [(["u: p"], ["a: a"], True)]),
    ("trl", "paired", {"prompt": "p", "chosen": "a", "rejected": "b"}, [("p", "a", "b")]),
    ("trl", "paired", {"chosen": CHAT, "rejected": [user("p"), answer("b")]}, [(["u: p"], ["a: a"], ["a: b"])]),
    ("trl", "single", {"prompt": "p", "completion": "a"}, [("p", "a")]),
    ("trl", "single", {"messages": CHAT}, [(["u: p"], ["a: a"])]),
    # openai
    ("openai", "paired", REQUEST, [(["u: p"], ["a: a"], ["a: b"])]),
    # sharegpt, as LLaMA-Factory has it
    ("sharegpt", "single", {"conversations": FROM_VALUE, "system": "s"}, [(["s: s", "u: p"], ["a: a"])]),
    ("sharegpt", "single", {"conversations": CHAT}, [(["u: p"], ["a: a"])]),
    ("sharegpt", "unpaired", {"conversations": FROM_VALUE, "kto_tag": False}, [(["u: p"], ["a: a"], False)]),
    ("sharegpt", "unpaired", {"conversations": FROM_VALUE, "label": True}, [(["u: p"], ["a: a"], True)]),
    ("sharegpt", "paired", {"conversations": FROM_VALUE[:1], "chosen": FROM_VALUE[1],
                            "rejected": {"from": "gpt", "value": "b"}}, [(["u: p"], ["a: a"], ["a: b"])]),
    # alpaca
    ("alpaca", "single", {"instruction": "p", "input": "", "output": "a"}, [(["u: p"], ["a: a"])]),
    ("alpaca", "single", {"instruction": "p", "input": "more", "output": "a", "system": "s", "history": [["x", "y"]]},
     [(["s: s", "u: x", "a: y", "u: p\nmore"], ["a: a"])]),
    ("alpaca", "single", {"instruction": "p", "input": None, "output": "a", "system": None, "history": None},
     [(["u: p"], ["a: a"])]),
    ("alpaca", "unpaired", {"instruction": "p", "output": "a", "kto_tag": True}, [(["u: p"], ["a: a"], True)]),
    ("alpaca", "unpaired", {"instruction": "p", "output": "a", "label": True}, [(["u: p"], ["a: a"], True)]),
    ("alpaca", "paired", {"instruction": "p", "input": "i", "chosen": "a", "rejected": "b"},
     [(["u: p\ni"], ["a: a"], ["a: b"])]),
    # openrlhf
    ("openrlhf", "unpaired", {"input": "p", "output": "a", "label": 1}, [("p", "a", True)]),
    ("openrlhf", "unpaired", {"input": [user("p")], "output": [answer("a")], "label": 1}, [(["u: p"], ["a: a"], True)]),
    ("openrlhf", "paired", {"input": "p", "chosen": "a", "rejected": "b"}, [("p", "a", "b")]),
    ("openrlhf", "single", {"input": "p", "output": "a"}, [("p", "a")]),
    # coati
    ("coati", "unpaired", {"messages": FROM_CONTENT, "label": False}, [(["u: p"], ["a: a"], False)]),
    ("coati", "unpaired", {"prompt": FROM_CONTENT[:1], "completion": FROM_CONTENT[1], "label": True},
     [(["u: p"], ["a: a"], True)]),
    ("coati", "paired", {"context": FROM_CONTENT[:1], "chosen": FROM_CONTENT[1:],
                         "rejected": [{"from": "assistant", "content": "b"}]}, [(["u: p"], ["a: a"], ["a: b"])]),
    ("coati", "single", {"messages": FROM_CONTENT}, [(["u: p"], ["a: a"])]),
    # nemo
    ("nemo", "unpaired", {"prompt": "p", "response": "a", "preference": "chosen"}, [("p", "a", True)]),
    ("nemo", "unpaired", {"prompt": "p", "response": "a", "preference": "rejected"}, [("p", "a", False)]),
    ("nemo", "paired", {"prompt": "p", "chosen_response": "a", "rejected_response": "b", "chosen_reward": 1.0},
     [("p", "a", "b")]),
    # anthropic-hh
    ("anthropic-hh", "paired", HH, [(["u: p", "a: one", "u: q"], ["a: a\n\nwith two parts"], ["a: b"])]),
    # axolotl
    ("axolotl", "paired", {"messages": [user("p")], "chosen": answer("a"), "rejected": answer("b")},
     [(["u: p"], ["a: a"], ["a: b"])]),
    ("axolotl", "paired", {"question": "p", "system": "s", "chosen": "a", "rejected": "b"},
     [(["s: s", "u: p"], ["a: a"], ["a: b"])]),
    # ultrafeedback
    ("ultrafeedback", "paired", ULTRA, [(["u: p"], ["a: best"], ["a: worst"])]),
    ("ultrafeedback", "unpaired", ULTRA, [(["u: p"], ["a: middle"], True), (["u: p"], ["a: best"], True),
                                          (["u: p"], ["a: worst"], False)]),
    ("ultrafeedback", "paired", SCORED, [("p", "a", "b")]),
    ("ultrafeedback", "unpaired", SCORED, [("p", "b", False), ("p", "a", True), ("p", "c", True)]),
    ("ultrafeedback", "paired", {"instruction": "p", "generations": ["a", "b"], "ratings": ["5", "1"]},
     [(["u: p"], ["a: a"], ["a: b"])]),
    ("ultrafeedback", "paired", {**SCORED, "scores": [2, 2, 2]}, [(Reason.EQUAL_SCORES,)]),
    ("ultrafeedback", "unpaired", {**SCORED, "scores": [2, 2, 2.0]}, [(Reason.EQUAL_SCORES,)]),
    # oasst
    ("oasst", "paired", TREE, [(["u: p"], ["a: best"], ["a: worse"]),
                               (["u: p", "a: best", "u: q"], ["a: y"], ["a: x"])]),
    ("oasst", "unpaired", TREE, [
        (["u: p"], ["a: best"], True), (["u: p"], ["a: worse"], False),
        (["u: p", "a: best", "u: q"], ["a: y"], True), (["u: p", "a: best", "u: q"], ["a: z"], True),
        (["u: p", "a: best", "u: q"], ["a: x"], False)]),
    ("oasst", "paired", {"prompt": {"text": "p", "role": "prompter", "replies": []}}, [(Reason.NO_COMPLETION,)]),
    # feedback
    ("feedback", "unpaired", MARKED, [(["u: p"], ["a: a"], True),
                                      (["u: p", "a: a", "u: q", "a: b", "u: r"], ["a: c"], False)]),
    ("feedback", "single", MARKED, [(["u: p"], ["a: a"]), (Reason.UNDESIRABLE,)]),
    # a pair is a desirable and an undesirable completion
    ("trl", "unpaired", {"prompt": "p", "chosen": "a", "rejected": "b"}, [("p", "a", True), ("p", "b", False)]),
    ("trl", "unpaired", {"prompt": "p", "chosen": "a", "rejected": " "},
     [("p", "a", True), (Reason.EMPTY_COMPLETION,)]),
    ("trl", "unpaired", {"prompt": "p", "chosen": "a", "rejected": "a"}, [(Reason.IDENTICAL_PAIR,)]),
    ("anthropic-hh", "unpaired", HH, [(["u: p", "a: one", "u: q"], ["a: a\n\nwith two parts"], True),
                                      (["u: p", "a: one", "u: q"], ["a: b"], False)]),
])
def test_formats(name: str, view: View, record: dict[str, Any], rows: list[Any]) -> None:
    """Recognized by the columns alone, and read the same when the format is named."""
    seen, found = read(view, record)
    assert (seen, [short(row) for row in found]) == (name, rows)
    assert read(view, record, format=name)[1] == found


def test_every_format_is_an_option_and_is_documented() -> None:
    assert list(get_args(FormatName)) == list(FORMATS)
    text = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    for name, known in FORMATS.items():
        (line,) = [line for line in text.split("### Parts")[0].splitlines() if line.startswith(f"| `{name}` |")]
        assert not [str(shape) for shape in known.shapes if str(shape) not in line]


def test_ids_and_places_of_rows_of_one_record() -> None:
    """The place stays; rows after the first are told apart."""
    _, rows = read("unpaired", {"id": "x", **SCORED}, SCORED)
    assert [(row.id, row.place) for row in rows] == [
        ("x", "f:1"), ("x#2", "f:1"), ("x#3", "f:1"), ("f:2", "f:2"), ("f:2#2", "f:2"), ("f:2#3", "f:2")]


def test_tools_in_each_place() -> None:
    """T4: beside the messages, inside a request, or as JSON."""
    assert read("paired", REQUEST)[1][0].tools == ({"name": "f"},)
    _, rows = read("single", {"conversations": FROM_VALUE, "tools": '[{"name": "f"}]'})
    assert rows[0].tools == ({"name": "f"},)
    assert read("single", {"conversations": FROM_VALUE, "tools": ""})[1][0].tools is None
    assert "'tools' is text that is not valid JSON" in refused("single", {"conversations": FROM_VALUE, "tools": "lamp"})
    assert "'tools' must be a list of schemas, not dict" in refused("single", {"messages": CHAT, "tools": '{"a": 1}'})


def test_a_function_call_becomes_a_tool_call() -> None:
    call = {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'}
    _, rows = read("single", {"conversations": [FROM_VALUE[0], call, {"from": "observation", "value": "1"},
                                                FROM_VALUE[1]]})
    assert [message["role"] for message in rows[0].prompt] == ["user", "assistant", "tool"]
    assert rows[0].prompt[1]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    call["value"] = "f(1)"
    assert "a function_call of 'conversations' must be JSON" in refused("single", {"conversations": [call]})


# --- ratings ---------------------------------------------------------------------------------------------------------

RATED = [{"prompt": "p", "completion": "a", "rating": 5}, {"prompt": "p", "completion": "b", "rating": "2"},
         {"prompt": "p", "completion": "c", "rating": 3.0}, {"prompt": "p", "completion": "d", "rating": None}]


def test_ratings_need_a_line() -> None:
    """K3: where to draw it is the user's decision; the distribution helps with it."""
    said = refused("unpaired", *RATED)
    assert said.startswith("f: 'rating' is a rating")
    assert "--label-threshold NUMBER" in said
    assert said.endswith("Ratings: 2: 1 row, 3: 1 row, 5: 1 row")
    many = [{"messages": CHAT, "score": number / 10} for number in range(101)]
    assert refused("unpaired", *many).endswith("Ratings: 101 rows, from 0 to 10, quartiles 2.5, 5, 7.5")
    name, rows = read("unpaired", *RATED, label_threshold=3)
    assert name == "rating"
    assert [short(row)[-1] for row in rows] == [True, False, True, Reason.MISSING_FIELD]
    assert [short(row) for row in read("single", *RATED, label_threshold=3)[1]] == [
        ("p", "a"), (Reason.UNDESIRABLE,), ("p", "c"), (Reason.MISSING_FIELD,)]
    assert [short(row) for row in read("single", *RATED)[1]] == [("p", "a"), ("p", "b"), ("p", "c"), ("p", "d")]
    assert refused("unpaired", {**RATED[0], "rating": "good"}, label_threshold=1) == (
        "f:1: rating 'good' is not a number")


def test_a_label_column_with_ratings() -> None:
    """The error about such a label says what to do, and that does it."""
    records = [{"prompt": "p", "completion": "a", "label": 4}, {"prompt": "p", "completion": "b", "label": 1}]
    assert "--columns rating=label --label-threshold NUMBER" in refused("unpaired", *records)
    _, rows = read("unpaired", *records, columns="rating=label", label_threshold=2)
    assert [row.desirable for row in rows] == [True, False]


def test_threshold_of_scored_answers() -> None:
    _, rows = read("unpaired", SCORED, label_threshold=4)
    assert [row.desirable for row in rows] == [False, True, False]


# --- what stops the run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("view", "record", "message"), [
    ("unpaired", {"conversations": FROM_VALUE, "kto_tag": "good"}, "f:1: kto_tag 'good' is not a boolean"),
    ("unpaired", {"instruction": "p", "output": "a", "kto_tag": None}, "f:1: kto_tag None is not a boolean"),
    ("unpaired", {"prompt": "p", "response": "a", "preference": "yes"}, "f:1: preference 'yes' is not 'chosen' or"),
    ("single", {"conversations": [{"from": "martian", "value": "p"}]},
     "f:1: 'conversations' has a message from 'martian'. Known: human"),
    ("single", {"conversations": [{"value": "p"}]}, "each message of 'conversations' needs a 'role' and a 'content'"),
    ("single", {"conversations": [{"from": "human", "value": 5}]}, "must be text, not int"),
    ("unpaired", {"messages": [{**user("p"), "thumbs": "up"}, {**answer("a"), "thumbs": "up"}]},
     "message 1 of 'messages' has 'thumbs', but its role is 'user'"),
    ("unpaired", {"messages": [user("p"), {**answer("a"), "thumbs": "up", "label": 0}]}, "contradict each other"),
    ("unpaired", {"messages": [user("p"), {**answer("a"), "thumbs": "up"}, user("q"), {**answer("a"), "thumbs": "so"}]},
     "f:1: thumbs 'so' of a message is not a valid label"),
    ("paired", {"instruction": "p", "completions": [{"response": "a", "overall_score": "n/a"}]},
     "overall_score 'n/a' is not a number"),
    ("paired", {"instruction": "p", "completions": [{"response": "a"}, {"text": "b"}]},
     "each entry of 'completions' needs a 'response' and a score"),
    ("paired", {**SCORED, "scores": [1]}, "'scores' must be a list with one score for each of 'responses'"),
    ("paired", {"prompt": {"text": "p", "role": "judge", "replies": []}}, "has the role 'judge'"),
    ("single", {"instruction": "p", "output": "a", "history": "x"}, "'history' must be a list of [question, answer]"),
    ("single", {"instruction": "p", "output": "a", "history": [["x"]]}, "each entry of 'history' must be"),
    ("paired", {**REQUEST, "input": "p"}, "'input' must be an object with 'messages', not str"),
])
def test_faults_are_named_with_their_place(view: View, record: dict[str, Any], message: str) -> None:
    assert message in refused(view, record)
    assert refused(view, record).startswith("f:1: ")


def test_a_transcript_that_is_none() -> None:
    """Recognized by its first rows, a file must go on as it began."""
    assert "f:2: 'chosen' is not a transcript" in refused("paired", HH, {**HH, "chosen": "Hello."})
    assert [short(row) for row in read("paired", {**HH, "rejected": "Human: p"})[1]] == [(Reason.NO_COMPLETION,)]
    assert [short(row) for row in read("paired", {**HH, "rejected": "\n\nHuman: p\n\nAssistant:"})[1]] == [
        (Reason.EMPTY_COMPLETION,)]
    said = "Human: p\n\nHuman: more\n\nAssistant: "
    assert [short(row) for row in read("paired", {"chosen": said + "a", "rejected": said + "b"})[1]] == [
        (["u: p\n\nmore"], ["a: a"], ["a: b"])]


def test_a_key_that_happens_to_be_called_label() -> None:
    """Only what spells a verdict makes a chat one with marks."""
    name, rows = read("single", {"messages": [user("p"), {**answer("a"), "label": "draft 3"}]})
    assert name == "trl"
    assert rows[0].completions[0][0]["label"] == "draft 3"


# --- which format ----------------------------------------------------------------------------------------------------


def test_two_readings_are_refused() -> None:
    """What cannot be known is asked for, by the names of the candidates."""
    both = {"instruction": "p", "question": "q", "chosen": "a", "rejected": "b"}
    said = refused("paired", both)
    assert "alpaca (instruction, chosen, rejected) or axolotl (question, chosen, rejected)" in said
    assert "--format" in said
    assert read("paired", both, format="axolotl")[1][0].prompt == (user("q"),)
    assert read("paired", both, format="alpaca")[1][0].prompt == (user("p"),)


def test_trl_and_the_most_columns_come_first() -> None:
    """H3: extra columns are never fatal where the columns of trl are complete."""
    pair = {"prompt": "p", "chosen": "a", "rejected": "b"}
    for extra in ({"instruction": "i"}, {"messages": CHAT}, {"question": "q", "system": "s"}, {"score": 1}):
        assert read("paired", {**pair, **extra})[0] == "trl"
    assert read("single", {"instruction": "p", "input": "i", "output": "a"})[0] == "alpaca"
    assert read("paired", {**pair, "system": "s"}, format="axolotl")[1][0].prompt[0]["role"] == "system"


def test_few_odd_rows_do_not_decide() -> None:
    """They are left out one by one."""
    usual = {"instruction": "p", "output": "a", "kto_tag": True}
    odd = {"prompt": "p", "completion": "a", "label": True}
    name, rows = read("unpaired", usual, odd, usual, usual)
    assert (name, rows[1]) == ("alpaca", Dropped("f:2", Reason.MISSING_FIELD, "no 'instruction'"))


def test_a_format_without_the_view() -> None:
    said = refused("unpaired", {"prompt": "p", "completion": "a"}, format="openai")
    assert said.startswith("f: format openai does not contain labeled completions")
    assert said.endswith("(input, preferred_output, non_preferred_output)")
    assert "no row has the columns (instruction, chosen, rejected)" in refused("paired", HH, format="alpaca")


def test_renamed_columns() -> None:
    """A user's own names; the column that had the name before gives way."""
    record = {"question": "p", "answer": "a", "ok": True, "prompt": "old"}
    name, rows = read("unpaired", record, columns="prompt=question, completion=answer,label=ok")
    assert (name, short(rows[0])) == ("trl", ("p", "a", True))
    assert FormatOptions(columns={"prompt": "question", "label": "ok"}).columns == "prompt=question,label=ok"
    with pytest.raises(ValueError, match="is not NAME=COLUMN"):
        FormatOptions(columns="prompt")


def test_sentence() -> None:
    reading = recognize(raw({"prompt": "p", "chosen": "a", "rejected": "b"}), "unpaired", "f")
    assert str(reading) == ("read as trl (prompt, chosen, rejected), each pair as a desirable and an undesirable row; "
                            "override with --format and --columns")


def test_views() -> None:
    assert view_of(raw(HH)) == "paired"
    assert view_of(raw(MARKED)) == "unpaired"
    assert view_of(raw(RATED[0])) == "single"
    assert view_of(raw(RATED[0]), FormatOptions(label_threshold=2)) == "unpaired"
    labeled = raw({"instruction": "p", "output": "a", "kto_tag": True})
    assert view_of(labeled) == "unpaired"
    assert view_of(labeled, FormatOptions(pair_by_prompt=True)) == "paired"


# --- pairs of labeled completions -----------------------------------------------------------------------------------


def test_pairs_by_prompt() -> None:
    """In order, within a prompt; what has no partner is listed."""
    def one(prompt: str, text: str, label: bool) -> dict[str, Any]:
        return {"prompt": prompt, "completion": text, "label": label}

    records = [one("p", "a", True), one("q", "x", False), one("p", "b", True), one("p", "c", False),
               one("p", " ", False), one("q", "y", True), one("r", "z", True)]
    _, rows = read("paired", *records, pair_by_prompt=True)
    assert [(row.place, *short(row)) for row in rows] == [
        ("f:3", Reason.UNPAIRED), ("f:1", "p", "a", "c"), ("f:5", Reason.EMPTY_COMPLETION), ("f:6", "q", "y", "x"),
        ("f:7", Reason.UNPAIRED)]
    assert rows[0].detail == "no undesirable completion of the same prompt to pair it with"
    assert "--pair-by-prompt" in refused("paired", *records)


def test_options_without_effect_are_refused() -> None:
    """L3: an accepted option changes something."""
    labeled = {"prompt": "p", "completion": "a", "label": True}
    assert "--pair-by-prompt has no effect" in refused("unpaired", labeled, pair_by_prompt=True)
    assert "--pair-by-prompt has no effect" in refused("paired", HH, pair_by_prompt=True)
    assert "--label-threshold has no effect on trl" in refused("unpaired", labeled, label_threshold=2)


# --- the data of the project -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "view", "count"), [
    ("lf_dpo_en", "paired", 300), ("lf_kto_en", "unpaired", 300), ("llmbar_pairs", "paired", 419),
    ("oasst_tree_kto", "unpaired", 520), ("oasst_tree_pairs", "paired", 212), ("pandalm_human_kto", "unpaired", 604),
    ("pandalm_human_pairs", "paired", 842), ("qa_feedback_kto", "unpaired", 574), ("qa_feedback_pairs", "paired", 820),
    ("qa_feedback_sft", "single", 150), ("selfinstruct_human_sft", "single", 427),
    ("tulu_human_accept_kto", "unpaired", 1266), ("tulu_human_pairs", "paired", 675),
])
def test_public_data(test_data, name: str, view: View, count: int) -> None:
    from tropism.data.sources.resolve import read as rows_of

    rows = list(rows_of(test_data / "data" / f"{name}.jsonl"))
    assert view_of(rows) == view
    reading = recognize(rows, view, name)
    found = [row for record in rows for row in rows_of_record(record, reading)]
    assert (reading.format.name, len(rows), len(found)) == ("trl", count, count)
    assert not [row for row in found if isinstance(row, Dropped)]
