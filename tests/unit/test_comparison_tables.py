"""Tables with two completions and a winner: which side won, under every usual spelling; ties are counted."""

import json
from typing import Any

import pytest

from tropism.data.formats import view_of
from tropism.data.rows import Reason
from unit.test_formats_known import answer, raw, read, refused, short, user


def table(prompt: str = "prompt", first: str = "response_a", second: str = "response_b", winner: str = "winner",
          **more: Any) -> Any:
    """Makes records of a table; the winner is the argument."""
    return lambda value: {prompt: "p", first: "x", second: "y", **more, winner: value}


FIRST, SECOND, TIE = ("p", "x", "y"), ("p", "y", "x"), (Reason.TIE,)


@pytest.mark.parametrize(("first", "second"), [
    ("response_a", "response_b"), ("answer_a", "answer_b"), ("completion_1", "completion_2"), ("output_1", "output_2"),
    ("responseA", "responseB"), ("answer1", "answer2"), ("Response A", "Response B"), ("model_a", "model_b"),
    ("model_a_response", "model_b_response"), ("response_left", "response_right"), ("first_answer", "second_answer"),
    ("answer_0", "answer_1"), ("output-a", "output-b"), ("assistant_a", "assistant_b"), ("a", "b")])
@pytest.mark.parametrize("prompt", ["prompt", "question", "query"])
def test_columns(first: str, second: str, prompt: str) -> None:
    make = table(prompt, first, second)
    name, rows = read("paired", make("a"), make("b"), make(first), make(second), make("tie"))
    assert (name, [short(row) for row in rows]) == ("comparison", [FIRST, SECOND, FIRST, SECOND, TIE])
    assert view_of(raw(make("a"))) == "paired"


@pytest.mark.parametrize(("one", "other"), [
    ("a", "b"), ("A", "B"), (" a ", "b"), ("model_a", "model_b"), ("Model A", "Model B"), ("response_a", "response_b"),
    ("left", "right"), ("first", "second"), (1, 2), ("1", "2"), (0, 1), (1.0, 2.0), ("0", "1"),
    ("Response 1", "Response 2"), ("A is better", "B is better"), ("A>B", "B>A"), ("A>>B", "A<<B"), ("[[A]]", "[[B]]"),
    ("assistant_a", "assistant_b"), ("x", "y"), ("GPT", "Llama")])
def test_spellings(one: Any, other: Any) -> None:
    """Names of sides, of columns and of models, and the winning text itself."""
    make = table(model_a="GPT", model_b="Llama")
    assert [short(row) for row in read("paired", make(one), make(other), make(one))[1]] == [FIRST, SECOND, FIRST]


@pytest.mark.parametrize("tie", ["tie", "Tie", "tie (bothbad)", "both_bad", "both", "neither", "draw", "Tie (both bad)",
                                 "equal", "no preference", "none", "a=b"])
def test_ties(tie: str) -> None:
    make = table()
    assert [short(row) for row in read("paired", make("a"), make(tie), make("b"))[1]] == [FIRST, TIE, SECOND]


@pytest.mark.parametrize("empty", [None, "", "  ", float("nan")])
def test_rows_without_a_winner(empty: Any) -> None:
    rows = read("paired", table()("a"), table()(empty))[1]
    assert [short(row) for row in rows] == [FIRST, (Reason.NO_LABEL,)]


@pytest.mark.parametrize("winner", ["winner", "preferred", "preference", "choice", "better", "Winner", "vote", "label"])
def test_columns_of_the_winner(winner: str) -> None:
    make = table(winner=winner)
    assert [short(row) for row in read("paired", make("a"), make("tie"), make("b"))[1]] == [FIRST, TIE, SECOND]
    named = read("paired", *map(table(winner="w"), "ab"), columns="winner=w")[1]
    assert [short(row) for row in named] == [FIRST, SECOND]


def test_another_name_of_the_winner() -> None:
    said = refused("paired", *map(table(winner="favourite"), ["a", "tie", "b", None]))
    assert said.endswith("The values of 'favourite' say which completion is better: use --columns winner=favourite")
    assert "say which" not in refused("paired", *map(table(winner="color"), ["red", "a"]))
    assert "say which" not in refused("paired", *map(table(winner="list"), [["a"], ["b"]]))


def test_numbers_that_name_the_columns_need_no_other() -> None:
    assert [short(row) for row in read("paired", table("prompt", "answer_1", "answer_2")(1))[1]] == [FIRST]
    assert [short(row) for row in read("paired", table("prompt", "answer_0", "answer_1")(1))[1]] == [SECOND]


@pytest.mark.parametrize("values", [[1], [1, 1, 1], ["1"], [0, 1, 2], [1, 2, 0], ["a", "b", "c"], ["a", 1], ["so so"],
                                    [True, False], ["a", ["b"]], [{"x": 1}], [3, 4]])
def test_winners_that_are_not_certain(values: list[Any]) -> None:
    """A number alone can be the first or the second; a third name is no side."""
    said = refused("paired", *map(table(), values))
    assert said.startswith("f:")


def test_published_tables() -> None:
    """Numbers that name the columns, a preference of a judge with ties, and an order as the label."""
    safe = {"prompt": "p", "response_0": "x", "response_1": "y", "is_response_0_safe": True,
            "is_response_1_safe": False, "better_response_id": 1, "safer_response_id": 0}
    assert [short(row) for row in read("paired", safe)[1]] == [SECOND]
    judged = [{"instruction": "p", "output_1": "x", "generator_1": "m", "output_2": "y", "generator_2": "n",
               "annotator": "judge", "preference": number} for number in (2.0, 1.0, 1.5)]
    assert [short(row)[-1] for row in read("paired", *judged)[1]] == [["a: x"], ["a: y"], Reason.TIE]
    ordered = [{"pair_id": "1", "question": "p", "response_A": "x", "response_B": "y", "label": label}
               for label in ("A>B", "B>A")]
    assert [short(row) for row in read("paired", *ordered)[1]] == [FIRST, SECOND]


def test_what_the_error_says() -> None:
    said = refused("paired", *map(table(), ["a", "a", "b", "x or y"]))
    assert said.startswith("f:4: winner 'x or y' is not a side. Values: 'a' (2 rows), 'b' (1 row), 'x or y' (1 row). ")


def test_three_completions_are_no_pair() -> None:
    for more in ({"response_c": "z"}, {"answer_a": "z", "answer_b": "z"}):
        assert "no row has the columns" in refused("paired", table(**more)("a"))


def test_other_views_and_prompts() -> None:
    make = table("instruction", input="more")
    assert [short(row) for row in read("paired", make("b"))[1]] == [(["u: p\nmore"], ["a: y"], ["a: x"])]
    assert [short(row) for row in read("unpaired", table()("b"))[1]] == [("p", "y", True), ("p", "x", False)]
    assert "write the chosen sides with `tropism convert --to single`" in refused("single", table()("a"))
    record = {"messages": [user("p")], "response_a": [answer("x")], "response_b": [answer("y")], "winner": "b"}
    assert [short(row) for row in read("paired", record)[1]] == [(["u: p"], ["a: y"], ["a: x"])]


# --- LMArena ---------------------------------------------------------------------------------------------------------

A, B = [user("p"), answer("x")], [user("p"), answer("y")]


def parts(text: str, role: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text, "image": None, "mimeType": None}]}


def battle(winner: Any, **more: Any) -> dict[str, Any]:
    return {"question_id": "58210e", "model_a": "chatglm-6b", "model_b": "koala-13b", "winner": winner,
            "judge": "arena_user_2", "conversation_a": A, "conversation_b": B, "turn": 1, "anony": True, **more}


def test_chatbot_arena() -> None:
    """The votes of 2023: four values of the winner, of which two are ties."""
    name, rows = read("paired", *map(battle, ["model_a", "model_b", "tie", "tie (bothbad)"]))
    assert (name, [short(row) for row in rows]) == ("arena", [
        (["u: p"], ["a: x"], ["a: y"]), (["u: p"], ["a: y"], ["a: x"]), TIE, TIE])
    stored = battle("model_b", conversation_a=json.dumps(A), conversation_b=json.dumps(B))
    assert [short(row) for row in read("paired", stored)[1]] == [(["u: p"], ["a: y"], ["a: x"])]


def test_arena_with_all_turns() -> None:
    """The votes since 2025: content in parts, and the turns of earlier votes in the full conversation."""
    def turn_of(asked: str, one: str, other: str) -> dict[str, Any]:
        return {"user": parts(asked, "user"), "model_side_a": parts(one, "assistant"),
                "model_side_b": parts(other, "assistant")}

    turn = turn_of("p", "x", "y")
    record = {"id": "1", "model_a": "m", "model_b": "n", "winner": "both_bad", "evaluation_order": 1,
              "conversation_a": [parts("p", "user"), parts("x", "assistant")],
              "conversation_b": [parts("p", "user"), parts("y", "assistant")], "full_conversation": [turn]}
    assert [short(row) for row in read("paired", record, {**record, "winner": "model_b"})[1]] == [
        TIE, (["u: p"], ["a: y"], ["a: x"])]
    late = {**record, "winner": "model_a", "full_conversation": [turn_of("o", "v", "w"), turn]}
    seen = (["u: o"], ["a: v", "u: p", "a: x"], ["a: w", "u: p", "a: y"])
    assert [short(row) for row in read("paired", late)[1]] == [seen]
    alone = {key: value for key, value in late.items() if not key.startswith("conversation_")}
    assert [short(row) for row in read("paired", alone)[1]] == [seen]
    assert [short(row) for row in read("paired", {**late, "full_conversation": None})[1]] == [
        (["u: p"], ["a: x"], ["a: y"])]


def test_arena_with_one_column_per_winner() -> None:
    """The table of the competition: lists of turns as JSON text, and three columns of 0 and 1."""
    def record(*won: Any) -> dict[str, Any]:
        return {"id": 1, "model_a": "m", "model_b": "n", "prompt": '["p", "q"]', "response_a": '["x", "z"]',
                "response_b": '["y", null]', "winner_model_a": won[0], "winner_model_b": won[1], "winner_tie": won[2]}

    name, rows = read("paired", record(1, 0, 0), record("0", "0", "1"), record(0, 0, 0))
    assert (name, [short(row) for row in rows]) == ("arena", [
        (Reason.EMPTY_COMPLETION,), TIE, (Reason.NO_LABEL,)])
    full = {**record(0, 1, 0), "response_b": '["y", "w"]'}
    assert [short(row) for row in read("paired", full)[1]] == [
        (["u: p"], ["a: y", "u: q", "a: w"], ["a: x", "u: q", "a: z"])]
    assert "must be lists of texts of the same length" in refused("paired", {**full, "response_b": '["y"]'})
