"""Formats of public comparisons: ranks, strengths of a preference, two scores, rejected answers."""

from typing import Any

import pytest
from test_formats_known import answer, read, refused, short, user

from tropism.data.rows import Reason

ASKED = [{"role": "system", "content": "s"}, user("p")]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
RESULT = {"role": "tool", "content": "1"}
HELP3 = {"domain": "stem", "language": "english", "context": [user("p")], "response1": "one", "response2": "two",
         "individual_preference": [{"score": 2, "reasoning": "r", "feedback1": "f", "feedback2": "f"}]}
HELP2 = {"split": "train", "prompt": "p", "response_1": "one", "response_2": "two", "preference_statement": "x"}
SHP = {"post_id": "t", "domain": "askbaking_train", "history": "p", "human_ref_A": "A", "human_ref_B": "B",
       "score_ratio": 2.0, "seconds_difference": 3.0}
WEBGPT = {"question": {"dataset": "eli5", "id": "1", "full_text": "p"}, "quotes_0": {"title": ["t"], "extract": ["e"]},
          "answer_0": "A [1].", "answer_1": "B", "tokens_0": {"prefix": [], "completion": []}}


def ranked(*ranks: Any) -> dict[str, Any]:
    return {"task_name": "t", "context": ASKED, "completions": [
        {"rank": rank, "completion": [answer(f"{number}")]} for number, rank in enumerate(ranks)]}


TREE_PROMPT = ["s: s", "u: p"]


@pytest.mark.parametrize(("name", "record", "pair"), [
    ("nemo-rank", ranked(0, 1), (TREE_PROMPT, ["a: 0"], ["a: 1"])),
    ("nemo-rank", ranked(3, 2, 1), (TREE_PROMPT, ["a: 2"], ["a: 0"])),
    ("nemo-rank", ranked(1, 0, None, 1), (TREE_PROMPT, ["a: 1"], ["a: 0"])),
    ("nemo-rank", ranked(1, 1), (Reason.EQUAL_SCORES,)), ("nemo-rank", ranked(0), (Reason.EQUAL_SCORES,)),
    ("helpsteer", {**HELP3, "overall_preference": -3}, (["u: p"], ["a: one"], ["a: two"])),
    ("helpsteer", {**HELP3, "overall_preference": 1}, (["u: p"], ["a: two"], ["a: one"])),
    ("helpsteer", {**HELP3, "overall_preference": "2"}, (["u: p"], ["a: two"], ["a: one"])),
    ("helpsteer", {**HELP3, "overall_preference": 0}, (Reason.EQUAL_SCORES,)),
    ("helpsteer", {**HELP3, "overall_preference": None}, (Reason.MISSING_FIELD,)),
    ("helpsteer", {**HELP2, "preference_strength": -1}, ("p", "one", "two")),
    ("helpsteer", {**HELP2, "preference_strength": 2}, ("p", "two", "one")),
    ("shp", {**SHP, "labels": 1, "score_A": 4, "score_B": 2}, (["u: p"], ["a: A"], ["a: B"])),
    ("shp", {**SHP, "labels": 0, "score_A": 1, "score_B": 2}, (["u: p"], ["a: B"], ["a: A"])),
    ("shp", {**SHP, "labels": "1"}, (["u: p"], ["a: A"], ["a: B"])),
    ("webgpt", {**WEBGPT, "score_0": 0.5, "score_1": -0.5}, (["u: p"], ["a: A [1]."], ["a: B"])),
    ("webgpt", {**WEBGPT, "score_0": -1.0, "score_1": 1.0}, (["u: p"], ["a: B"], ["a: A [1]."])),
    ("webgpt", {**WEBGPT, "score_0": 0.0, "score_1": -0.0}, (Reason.EQUAL_SCORES,)),
    ("webgpt", {**WEBGPT, "question": "p", "score_0": 1, "score_1": 0}, (["u: p"], ["a: A [1]."], ["a: B"])),
    ("webgpt", {**WEBGPT, "score_0": None, "score_1": 1.0}, (Reason.MISSING_FIELD,)),
    ("ms-swift", {"messages": [*ASKED, answer("a")], "rejected_response": "b"}, (TREE_PROMPT, ["a: a"], ["a: b"])),
    ("ms-swift", {"messages": [user("p"), answer("a")], "rejected_response": [answer("b")], "system": "s"},
     (TREE_PROMPT, ["a: a"], ["a: b"])),
    ("ms-swift", {"messages": [user("x"), answer("y"), user("p"), answer("a")], "rejected_response": answer("b")},
     (["u: x", "a: y", "u: p"], ["a: a"], ["a: b"])),
    ("ms-swift", {"messages": [*ASKED, answer("a")], "rejected_messages": [*ASKED, answer("b")]},
     (TREE_PROMPT, ["a: a"], ["a: b"])),
    ("ms-swift", {"messages": [user("p"), CALL, RESULT, answer("a")], "rejected_response": "b"},
     (["u: p", "a: None", "t: 1"], ["a: a"], ["a: b"])),
    ("ms-swift", {"messages": [user("p"), CALL, RESULT, answer("a")],
                  "rejected_response": [{**CALL, "content": "x"}, RESULT, answer("b")]},
     (["u: p"], ["a: None", "t: 1", "a: a"], ["a: x", "t: 1", "a: b"])),
    ("ms-swift", {"messages": [user("p"), answer("a")], "rejected_response": "a"}, (Reason.IDENTICAL_PAIR,)),
    ("ms-swift", {"messages": [user("p"), answer("a")], "rejected_response": " "}, (Reason.EMPTY_COMPLETION,)),
    ("ms-swift", {"messages": [user("p"), answer("a")], "rejected_response": None}, (Reason.EMPTY_COMPLETION,)),
    ("ms-swift", {"query": "p", "response": "a", "rejected_response": "b", "system": "s"},
     (TREE_PROMPT, ["a: a"], ["a: b"])),
])
def test_pairs(name: str, record: dict[str, Any], pair: tuple[Any, ...]) -> None:
    """H3: known by the columns, read the same by name, and split for KTO."""
    seen, found = read("paired", record)
    assert (seen, [short(row) for row in found]) == (name, [pair])
    assert read("paired", record, format=name)[1] == found
    if len(pair) == 3 and name != "nemo-rank":
        prompt, chosen, rejected = pair
        assert [short(row) for row in read("unpaired", record)[1]] == [
            (prompt, chosen, True), (prompt, rejected, False)]


def test_ranks_as_labels() -> None:
    """The better half is desirable; equal ranks are on one side."""
    for ranks, labels in (((0, 1), [True, False]), ((2, 0, 1), [False, True, True]),
                          ((0, 1, 1, 1), [True, False, False, False])):
        assert [row.desirable for row in read("unpaired", ranked(*ranks))[1]] == labels
    assert short(read("unpaired", ranked(1, 1))[1][0]) == (Reason.EQUAL_SCORES,)


def test_single_completions() -> None:
    assert short(read("single", {"query": "p", "response": "a", "history": [["x", "y"]]})[1][0]) == (
        ["u: x", "a: y", "u: p"], ["a: a"])
    assert short(read("unpaired", {"query": "p", "response": "a", "label": False})[1][0]) == (["u: p"], ["a: a"], False)


def test_the_advice_for_pairs_fits_their_columns() -> None:
    assert "use `tropism dpo`, or write the chosen sides with `tropism convert --to single`." in refused(
        "single", {**HELP3, "overall_preference": 1})


@pytest.mark.parametrize(("record", "message"), [
    ({**HELP3, "overall_preference": 4}, "f:1: overall_preference 4 is not a preference from -3 to 3"),
    ({**HELP3, "overall_preference": "better"}, "f:1: overall_preference 'better' is not a number"),
    ({**SHP, "labels": 2}, "f:1: labels 2 is not a boolean"),
    ({**SHP, "labels": 1, "score_A": 1, "score_B": 2}, "f:1: labels 1 contradicts score_A 1 and score_B 2"),
    ({**WEBGPT, "score_0": "x", "score_1": 1}, "f:1: score_0 'x' is not a number"),
    (ranked("first", 1), "f:1: rank 'first' is not a number"),
    ({"context": ASKED, "completions": [{"rank": 0, "completion": "a"}, {"text": "b"}]}, "'rank' and 'completion'"),
    ({"messages": [user("p"), answer("a")], "rejected_response": 5}, "'rejected_response' must be text or a list")])
def test_odd_values_stop_with_their_place(record: dict[str, Any], message: str) -> None:
    assert message in refused("paired", record)
