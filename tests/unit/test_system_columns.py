"""Columns beside the prompt that belong to it: `system`, `system_prompt`, `history`."""

from typing import Any

import numpy as np
import pytest
from test_formats_known import (
    CHAT,
    FROM_VALUE,
    HH,
    MARKED,
    REQUEST,
    SCORED,
    TREE,
    ULTRA,
    answer,
    read,
    refused,
    short,
    user,
)

from helpers import build_tokenizer, generation_ids
from tropism.data.read_rows import read_rows
from tropism.data.rows import Row
from tropism.data.tokenization.render import Renderer
from tropism.data.tokenization.truncate import Limits

SYSTEM = {"role": "system", "content": "s"}
TEXT: dict[str, Any] = {"prompt": "p", "completion": "a", "label": True}


@pytest.mark.parametrize(("view", "record"), [
    ("unpaired", TEXT), ("unpaired", {"messages": CHAT, "label": True}), ("single", {"messages": CHAT}),
    ("single", {"prompt": [user("p")], "completion": "a"}), ("paired", {"prompt": "p", "chosen": "a", "rejected": "b"}),
    ("paired", {"chosen": CHAT, "rejected": [user("p"), answer("b")]}), ("paired", REQUEST),
    ("single", {"conversations": FROM_VALUE}), ("unpaired", {"conversations": FROM_VALUE, "kto_tag": False}),
    ("paired", {"conversations": FROM_VALUE[:1], "chosen": FROM_VALUE[1], "rejected": {"from": "gpt", "value": "b"}}),
    ("single", {"instruction": "p", "output": "a"}), ("paired", {"instruction": "p", "chosen": "a", "rejected": "b"}),
    ("single", {"input": "p", "output": "a"}), ("unpaired", {"prompt": "p", "response": "a", "preference": "chosen"}),
    ("paired", {"context": [user("p")], "chosen": [answer("a")], "rejected": [answer("b")]}), ("paired", HH),
    ("paired", {"question": "p", "chosen": "a", "rejected": "b"}), ("paired", ULTRA), ("unpaired", SCORED),
    ("paired", TREE), ("unpaired", MARKED), ("single", {"query": "p", "response": "a"}),
    ("paired", {"history": "p", "human_ref_A": "a", "human_ref_B": "b", "labels": 1}),
    ("paired", {"context": [user("p")], "response1": "a", "response2": "b", "overall_preference": -1}),
    ("paired", {"messages": CHAT, "rejected_response": "b"}),
])
@pytest.mark.parametrize(("name", "value"), [
    ("system", "s"), ("system_prompt", "s"), ("system", [SYSTEM]), ("system", SYSTEM), ("system_prompt", ["s"]),
    ("system", [{"type": "text", "text": "s"}]), ("system", '[{"role": "system", "content": "s"}]')])
def test_every_format_gets_its_system_message(view: Any, record: dict[str, Any], name: str, value: Any) -> None:
    """H3: the system message is the first message of every row, and the other messages stay."""
    plain = [row for row in read(view, record)[1] if isinstance(row, Row)]
    found = [row for row in read(view, {**record, name: value})[1] if isinstance(row, Row)]
    assert len(plain) == len(found) > 0
    for one, other in zip(plain, found, strict=True):
        prompt = (user(one.prompt),) if isinstance(one.prompt, str) else one.prompt
        assert other.prompt == (SYSTEM, *prompt)
        assert other.completions == tuple((answer(side),) if isinstance(side, str) else side
                                          for side in one.completions)


@pytest.mark.parametrize("nothing", [None, "", " \n", [], {}, float("nan"), np.float64("nan"), "[]"])
def test_no_system_message(nothing: Any) -> None:
    """Null and empty values add nothing, so plain text stays plain text."""
    for name in ("system", "system_prompt") if nothing != "[]" else ("tools",):
        assert [short(row) for row in read("unpaired", {**TEXT, name: nothing})[1]] == [("p", "a", True)]
    if nothing != {}:
        assert [short(row) for row in read("unpaired", {**TEXT, "tools": nothing})[1]] == [("p", "a", True)]


def test_plain_text_of_one_file_is_read_in_one_way() -> None:
    """Rows without a system message are chats too, if others have one. A row that is messages changes no other row."""
    _, rows = read("unpaired", {**TEXT, "system": "s"}, {**TEXT, "system": None}, TEXT)
    assert [short(row)[0] for row in rows] == [["s: s", "u: p"], ["u: p"], ["u: p"]]
    _, rows = read("unpaired", {"prompt": [user("p")], "completion": "a", "label": True, "system": "s"}, TEXT)
    assert [short(row)[0] for row in rows] == [["s: s", "u: p"], "p"]
    _, rows = read("unpaired", {**TEXT, "tools": [{"name": "f"}]})
    assert short(rows[0])[0] == ["u: p"]


def test_the_reading_names_the_columns() -> None:
    renderer = Renderer(build_tokenizer(), Limits(1000))
    audit = read_rows([{**TEXT, "system": "s", "history": [["x", "y"]]}], renderer, "unpaired")
    assert "read as trl (prompt, completion, label), with system and history; override with" in audit.format


@pytest.mark.parametrize("first", [
    SYSTEM, {"role": "system", "content": " s\n"}, {"role": "developer", "content": "s"}])
def test_an_equal_system_message_is_used_once(first: dict[str, Any]) -> None:
    (row,) = read("single", {"messages": [first, *CHAT], "system": "s", "system_prompt": "s"})[1]
    assert row.prompt == (first, user("p"))


def test_different_system_messages_stop_with_both() -> None:
    """The user must say which one is meant."""
    assert refused("single", {"messages": [{"role": "system", "content": "t"}, *CHAT], "system": "s"}) == (
        "f:1: 'system' is 's', but the messages begin with the system message 't'. Remove one of them. --columns "
        "unused=system ignores the column.")
    assert refused("single", {"messages": CHAT, "system": "s", "system_prompt": "t"}).startswith(
        "f:1: 'system' is 's', but 'system_prompt' is 't'.")
    (row,) = read("single", {"messages": [{"role": "system", "content": "t"}, *CHAT], "system": "s"},
                  columns="unused=system")[1]
    assert row.prompt[0]["content"] == "t"


@pytest.mark.parametrize(("value", "problem"), [
    (5, "'system' must be text or a list of messages, not int"),
    ([user("x")], "'system' must be text or a system message, but it has a message of role 'user'"),
    (["s", "t"], "each message of 'system' needs a 'role' and a 'content'"), ("\ud83d", "lone surrogate")])
def test_what_is_no_system_message(value: Any, problem: str) -> None:
    assert problem in refused("unpaired", {**TEXT, "system": value})


def test_the_column_precedes_the_option(tmp_path: Any) -> None:
    """Ids are those of the messages; `--system-prompt` is for rows without a system message."""
    renderer = Renderer(build_tokenizer(), Limits(1000), system_prompt="option")
    rows = read_rows([{"messages": CHAT, "system": "s"}, {"messages": CHAT, "system": None}], renderer, "single").rows
    for row, system in zip(rows, ("s", "option"), strict=True):
        given = Row("r", "f:1", ({"role": "system", "content": system}, user("p")), ((answer("a"),),))
        assert row.prompt_ids.tolist() == generation_ids(renderer.text.tokenizer, given)


@pytest.mark.parametrize("history", [[["x", "y"]], [user("x"), answer("y")], [{"from": "human", "value": "x"},
                                                                             {"from": "gpt", "value": "y"}]])
def test_a_history_beside_any_format(history: Any) -> None:
    for view, record in (("unpaired", TEXT), ("single", {"messages": CHAT}), ("single", {"input": "p", "output": "a"})):
        (row,) = read(view, {**record, "history": history, "system": "s"})[1]  # type: ignore[arg-type]
        assert short(row)[0] == ["s: s", "u: x", "a: y", "u: p"]
    (row,) = read("single", {"messages": [user("x"), answer("y"), *CHAT], "history": history})[1]
    assert short(row)[0] == ["u: x", "a: y", "u: p"]
    assert short(read("unpaired", {**TEXT, "history": "3 edits"})[1][0])[0] == "p"
    assert "'history' must be a list" in refused("single", {"instruction": "p", "output": "a", "history": "x"})
