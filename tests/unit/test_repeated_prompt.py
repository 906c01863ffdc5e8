"""A prompt beside whole conversations that contain it."""

from typing import Any

import pytest
from test_formats_known import answer, read, refused, short, user

from tropism.data.rows import Dropped, Reason


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


S, X, Y, P, A, B = system("s"), user("x"), answer("y"), user("p"), answer("a"), answer("b")


@pytest.mark.parametrize(("prompt", "start", "wanted"), [
    ("p", [S, P], ["s: s", "u: p"]), ("p", [P], ["u: p"]), ("p", [X, Y, P], ["u: x", "a: y", "u: p"]),
    ("p", [S, X, Y, P], ["s: s", "u: x", "a: y", "u: p"]), ("p \n", [S, P], ["s: s", "u: p \n"]),
    ([P], [S, P], ["s: s", "u: p"]), ([S, P], [P], ["s: s", "u: p"]), ([S, P], [S, P], ["s: s", "u: p"]),
    ([S, P], [S, X, Y, P], ["s: s", "u: x", "a: y", "u: p"]), ([X, Y, P], [P], ["u: x", "a: y", "u: p"]),
    ([S, X, Y, P], [X, Y, P], ["s: s", "u: x", "a: y", "u: p"]), ("", [S, P], ["s: s", "u: p"]),
    (None, [P], ["u: p"]), ([], [X, Y, P], ["u: x", "a: y", "u: p"]), ("p", [P, user("q")], ["u: p", "u: q"]),
    ("p", [S], ["s: s", "u: p"]), ([X, Y], [P], None)])
def test_the_prompt_is_found(prompt: Any, start: list[Any], wanted: list[str] | None) -> None:
    """H3, M2: for pairs and single completions alike; each message comes once, in its order."""
    (pair,) = read("paired", {"prompt": prompt, "chosen": [*start, A], "rejected": [*start, B]})[1]
    if wanted is None:  # the completion continues the conversation
        assert short(pair) == (["u: x", "a: y"], ["u: p", "a: a"], ["u: p", "a: b"])
        return
    assert short(pair) == (wanted, ["a: a"], ["a: b"])
    (one,) = read("single", {"prompt": prompt, "completion": [*start, A]})[1]
    assert short(one) == (wanted, ["a: a"])
    rows = read("unpaired", {"prompt": prompt, "chosen": [*start, A], "rejected": [*start, B]})[1]
    assert [short(row) for row in rows] == [(wanted, ["a: a"], True), (wanted, ["a: b"], False)]


def test_one_side_alone_is_a_conversation() -> None:
    for rejected in ("b", [B], B):
        (row,) = read("paired", {"prompt": "p", "chosen": [S, P, A], "rejected": rejected})[1]
        assert short(row) == (["s: s", "u: p"], ["a: a"], ["a: b"])


def test_an_answer_that_repeats_the_question() -> None:
    """Later turns that equal the prompt are context, as they were."""
    (row,) = read("single", {"prompt": "p", "completion": [P, Y, P, A]})[1]
    assert short(row) == (["u: p"], ["a: y", "u: p", "a: a"])
    (row,) = read("single", {"prompt": "p", "completion": [Y, P, A]})[1]
    assert short(row) == (["u: p"], ["a: y", "u: p", "a: a"])
    assert short(read("single", {"prompt": "p", "completion": "p a"})[1][0]) == ("p", "p a")


@pytest.mark.parametrize(("prompt", "chosen", "rejected", "why"), [
    ("q", [S, P, A], [S, P, B], "'chosen' begins with role 'system' but does not contain the prompt"),
    ("q", [P, A], [P, B], "'chosen' begins with role 'user' but does not contain the prompt"),
    ("p", [S, P, A], [P, B], "so they do not share a prompt"),
    ("p", [S, P, A], [system("t"), P, B], "so they do not share a prompt"),
    ("p", [P, X, A], [P, B], "so they do not share a prompt"), ("p", [P, X, A], [B], "so they do not share a prompt"),
    ([S, P], [system("t"), P, A], [system("t"), P, B], "the prompt has the system message 's', but 'chosen' has 't'")])
def test_a_conversation_of_another_prompt(prompt: Any, chosen: Any, rejected: Any, why: str) -> None:
    """The row is dropped for the true reason."""
    (row,) = read("paired", {"prompt": prompt, "chosen": chosen, "rejected": rejected})[1]
    assert isinstance(row, Dropped)
    assert row.reason == Reason.NO_COMPLETION
    assert why in row.detail


def test_the_prompt_can_be_ignored() -> None:
    """What the reason advises."""
    record = {"prompt": "q", "chosen": [S, P, A], "rejected": [S, P, B]}
    (row,) = read("paired", record, columns="unused=prompt")[1]
    assert short(row) == (["s: s", "u: p"], ["a: a"], ["a: b"])


def test_messages_beside_a_prompt() -> None:
    """Whole conversations stand for themselves; an answer alone follows the prompt."""
    for prompt in ("p", "another"):
        assert short(read("single", {"prompt": prompt, "messages": [S, P, A]})[1][0]) == (["s: s", "u: p"], ["a: a"])
    assert short(read("single", {"prompt": "p", "messages": [A]})[1][0]) == (["u: p"], ["a: a"])
    assert short(read("unpaired", {"prompt": "p", "messages": [S, A], "label": True})[1][0]) == (
        ["s: s", "u: p"], ["a: a"], True)


def test_a_system_column_beside_conversations() -> None:
    record = {"prompt": "p", "chosen": [S, P, A], "rejected": [S, P, B]}
    assert short(read("paired", {**record, "system": "s"})[1][0]) == (["s: s", "u: p"], ["a: a"], ["a: b"])
    assert "'system' is 't', but the messages begin with the system message 's'" in refused(
        "paired", {**record, "system": "t"})
