"""Messages and tool calls that are stored as JSON text: objects in every file type and from Python."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from test_formats_known import answer, read, refused, short, user

from format_examples import KINDS, write
from helpers import kind_of_tokenizer
from tropism.data.read_rows import read_rows
from tropism.data.rows import EncodedRow, Row
from tropism.data.tokenization.render import Renderer
from tropism.data.tokenization.truncate import Limits

LABELS = (True, False)
FROM = [{"from": "human", "value": "p"}, {"from": "gpt", "value": "a"}]


@pytest.mark.parametrize("kind", [*KINDS, "python"])
def test_messages_in_every_kind_of_file(kind: str, fixture_tokenizer: Any, tmp_path: Path) -> None:
    """H3, T4: the ids are those of the objects, whatever the file."""
    objects = [{"prompt": [user("p")], "completion": [answer(f"a{label}")], "label": label} for label in LABELS]
    texts = [{**row, "prompt": json.dumps(row["prompt"]), "completion": json.dumps(row["completion"])}
             for row in objects]
    renderer = Renderer(fixture_tokenizer, Limits(1000))
    source = texts if kind == "python" else write(tmp_path, "d", kind, texts)
    found, wanted = (read_rows(given, renderer, "unpaired").rows for given in (source, objects))
    assert [(row.prompt_ids.tolist(), row.completions[0].ids.tolist(), row.desirable) for row in found] == [
        (row.prompt_ids.tolist(), row.completions[0].ids.tolist(), row.desirable) for row in wanted]


@pytest.mark.parametrize(("view", "record", "row"), [
    ("single", {"messages": json.dumps([user("p"), answer("a")])}, (["u: p"], ["a: a"])),
    ("single", {"conversations": json.dumps(FROM)}, (["u: p"], ["a: a"])),
    ("single", {"messages": [json.dumps(user("p")), json.dumps(answer("a"))]}, (["u: p"], ["a: a"])),
    ("single", {"messages": json.dumps([user("p"), answer("a")]), "prompt": "another "}, (["u: p"], ["a: a"])),
    ("paired", {"prompt": "p", "chosen": json.dumps(answer("a")), "rejected": json.dumps(answer("b"))},
     (["u: p"], ["a: a"], ["a: b"])),
    ("paired", {"prompt": "p", "chosen": json.dumps([user("p"), answer("a")]),
                "rejected": json.dumps([user("p"), answer("b")])}, (["u: p"], ["a: a"], ["a: b"])),
    ("paired", {"chosen": json.dumps([user("p"), answer("a")]), "rejected": json.dumps([user("p"), answer("b")])},
     (["u: p"], ["a: a"], ["a: b"])),
    ("single", {"prompt": json.dumps(user("p")), "completion": "a", "system": json.dumps({"role": "system",
                                                                                         "content": "s"})},
     (["s: s", "u: p"], ["a: a"])),
    ("paired", {"input": json.dumps({"messages": [user("p")]}), "preferred_output": json.dumps([answer("a")]),
                "non_preferred_output": json.dumps([answer("b")])}, (["u: p"], ["a: a"], ["a: b"])),
    ("paired", {"prompt": "p", "responses": '["b", "a"]', "scores": "[1, 5]"}, ("p", "a", "b")),
    ("paired", {"instruction": "p", "completions": json.dumps([
        {"response": "b", "overall_score": 1}, {"response": "a", "overall_score": 2}])},
     (["u: p"], ["a: a"], ["a: b"])),
    ("single", {"instruction": "p", "output": "a", "history": '[["x", "y"]]'}, (["u: x", "a: y", "u: p"], ["a: a"])),
])
def test_columns_of_each_format(view: Any, record: dict[str, Any], row: tuple[Any, ...]) -> None:
    assert [short(found) for found in read(view, record)[1]] == [row]


@pytest.mark.parametrize("text", [
    '[{"a": 1}]', '{"role": "x"}', '[{"role": "user", "content": "q"}]', '["a"]', "[1, 2]", '{"name": "f"}', "[]", "{}",
    '[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]', '[{"role": "x", "content": "y"}]',
    '[{"from": "Rome", "to": "Oslo"}]', '[{"role": "assistant", "content": 5}]', "[{not json}]", "[" * 5000])
def test_a_completion_that_is_other_json_stays_text(text: str) -> None:
    """Data that teaches to write JSON."""
    assert [short(row) for row in read("unpaired", {"prompt": "p", "completion": text, "label": True})[1]] == [
        ("p", text, True)]


def test_other_json_beside_messages() -> None:
    asked = '[{"role": "user", "content": "q"}]'
    for prompt in ([user("p")], json.dumps([user("p")])):
        (row,) = read("unpaired", {"prompt": prompt, "completion": asked, "label": True})[1]
        assert short(row) == (["u: p"], [f"a: {asked}"], True)


def test_a_column_is_messages_only_if_most_of_it_is() -> None:
    odd = json.dumps([answer("a")])
    rows = [{"prompt": "p", "completion": text, "label": True} for text in ("x", "y", odd)]
    assert [short(row)[1] for row in read("unpaired", *rows)[1]] == ["x", "y", odd]
    rows = [{"prompt": "p", "completion": text, "label": True} for text in (odd, "y", odd)]
    assert [short(row)[1] for row in read("unpaired", *rows)[1]] == [["a: a"], "y", ["a: a"]]


@pytest.mark.parametrize(("cell", "problem"), [
    ("[{'role': 'user', 'content': 'Hi'}]", "in Python notation, not JSON"),
    ("[{'content': 'a', 'role': 'user'}\n {'content': 'b'}]", "in Python notation, not JSON"),
    ('[{"role": None}]', "in Python notation, not JSON"), ("{'role': 'user', 'content': 'Hi'}", "in Python notation"),
    ('[{"role": "user", "content": "Hi', "in JSON that is cut off")])
def test_messages_as_programs_print_them(cell: str, problem: str) -> None:
    """M1: what pandas makes of messages in a CSV is no JSON, and must not be learned as text."""
    said = refused("single", {"prompt": "p", "completion": "a"}, {"prompt": cell, "completion": "b"})
    assert said.startswith(f"f:2: 'prompt' has messages {problem}")


def test_calls_and_tools_as_json_text() -> None:
    """T4: `tool_calls`, a schema, and the parameters of one."""
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked = {"role": "assistant", "content": None, "tool_calls": json.dumps([call])}
    schema = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    in_text = {"type": "function", "function": {"name": "f", "parameters": '{"type": "object"}'}}
    for tools in (json.dumps([schema]), [json.dumps(schema)], [in_text], [{**schema, "function": json.dumps(
            schema["function"])}]):
        (row,) = read("single", {"messages": [user("p"), asked], "tools": tools})[1]
        assert row.completions[0][0]["tool_calls"] == [call]
        assert row.tools == (schema,)
    (row,) = read("single", {"messages": [user("p"), {**asked, "tool_calls": [json.dumps(call)]}]})[1]
    assert row.completions[0][0]["tool_calls"] == [call]
    assert "'tool_calls' of a message of 'messages' must be a list of calls or its JSON, not 'f()'" in refused(
        "single", {"messages": [user("p"), {**asked, "tool_calls": "f()"}]})


# --- arguments of calls ----------------------------------------------------------------------------------------------

CALL = "{% if message.tool_calls %}{% for call in message.tool_calls %}<call>{{ call.function.name }} "
SHAPES = {
    "tojson": "{{ call.function.arguments | tojson }}",
    "test": "{% if call.function.arguments is string %}{{ call.function.arguments }}{% else %}"
            "{{ call.function.arguments | tojson }}{% endif %}",
    "mapping": "{% for key, value in call.function.arguments.items() %}<p={{ key }}>{{ value }}{% endfor %}",
    "text": "{{ call.function.arguments }}",
    "sum": "{{ 'args ' + call.function.arguments + '.' }}",
    "joined": "{{ 'args ' ~ call.function.arguments }}"}


@cache
def _tokenizer(shape: str) -> Any:
    return kind_of_tokenizer("byte level", "{% for message in messages %}<|turn|>{{ message.role }}\n" + CALL + (
        SHAPES[shape]) + "{% endfor %}{% else %}{{ message.content }}{% endif %}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}")


def _ids(shape: str, arguments: Any) -> list[int]:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    row = Row("r", "f:1", (user("p"),), (({"role": "assistant", "content": None, "tool_calls": [call]},),))
    encoded = Renderer(_tokenizer(shape), Limits(1000)).encode(row)
    assert isinstance(encoded, EncodedRow)
    return list(encoded.completions[0].ids.tolist())


def _rendered(shape: str, arguments: Any) -> str:
    return str(_tokenizer(shape).decode(_ids(shape, arguments)))


@pytest.mark.parametrize("shape", ["tojson", "test", "mapping"])
@pytest.mark.parametrize("text", ['{"room":"hall","level":3}', '{"a": {"b": [1.5, null]}}', "{}", ""])
def test_arguments_as_text_render_as_the_object(shape: str, text: str) -> None:
    """T4: as OpenAI's format has them."""
    assert _rendered(shape, text) == _rendered(shape, json.loads(text or "{}"))


@pytest.mark.parametrize(("shape", "around"), [("text", "{}"), ("sum", "args {}."), ("joined", "args {}")])
def test_a_template_that_writes_text_gets_the_text(shape: str, around: str) -> None:
    """Byte for byte, as it was given."""
    text = '{"room":  "hall"}'
    assert f"<call>f {around.format(text)}" in _rendered(shape, text)


@pytest.mark.parametrize("text", ["room=hall", '["a"]', "3", '{"a": '])
def test_arguments_that_are_no_object_are_unchanged(text: str) -> None:
    assert text in _rendered("test", text)


@pytest.mark.parametrize("text", [
    '{"a": "<|end|>"}', '{"a": "\\u003c|end|\\u003e"}', '{"a": "<|end|>", "a": "b"}', '{"<|end|>": 1}'])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_control_tokens_in_arguments_are_plain_characters(shape: str, text: str) -> None:
    """T3: also behind an escape, or in a key that JSON drops."""
    end = _tokenizer(shape).convert_tokens_to_ids("<|end|>")
    assert _ids(shape, text).count(end) == 1
