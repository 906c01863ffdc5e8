"""Inputs of the kinds of cases 09 to 16 that are not among them, on the command line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest

from helpers import CHATML, fixture_parts
from integration.looking import (
    Bench,
    answer_ids,
    audit,
    bench,
    by_id,
    learned,
    left_out,
    prompt_ids,
    prompt_text,
    steps,
)

__all__ = ["bench"]
BOS, EOS, TURN, END = 0, 1, 3, 4
TEMPLATE = fixture_parts()["chat_template"]
CALLS = "{% for call in m.tool_calls or [] %}[{{ call.function.name }}]{% endfor %}"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def chats(*conversations: list[dict[str, Any]], **more: Any) -> list[dict[str, Any]]:
    """Rows of messages with the ids r1, r2, ..."""
    return [{"id": f"r{number}", "messages": messages, **more} for number, messages in enumerate(conversations, 1)]


def plain(*answers: Any, prompt: str = "p ") -> list[dict[str, Any]]:
    return [{"id": f"r{number}", "prompt": prompt, "completion": text} for number, text in enumerate(answers, 1)]


# --- 09: over a limit ------------------------------------------------------------------------------------------------

LONG = [{"role": "system", "content": "Be brief."}, user("first " * 9), answer("one"), user("second"), answer("two"),
        user("third")]


@pytest.mark.parametrize(("limit", "wanted"), [
    (74, ["Be brief.", "second", "two", "third"]),
    (73, ["Be brief.", "third"]),
    (36, None),
])
def test_09_messages_and_a_limit_of_the_prompt(bench: Bench, limit: int, wanted: list[str] | None) -> None:
    """D1: whole turns go first and the system message stays; then the cut falls inside the last turn."""
    report = bench.look(chats([*LONG, answer("four")]), "--max-prompt-length", limit)
    shown, = report["shown"]
    text = prompt_text(shown)
    assert prompt_ids(shown)[0] == BOS
    assert learned(shown) == [["four<|end|>"]]
    assert shown["notes"] == ["prompt_cut"]
    if wanted is None:
        assert len(prompt_ids(shown)) == limit
        assert "Be brief." not in text
        assert text.endswith("third<|end|>\n<|turn|>assistant\n")
    else:
        roles = ["system", *(("user", "assistant")[n % 2] for n in range(len(wanted) - 1))]
        assert text == "<|bos|>" + "".join(
            f"<|turn|>{role}\n{said}<|end|>\n" for role, said in zip(roles, wanted, strict=True)
        ) + "<|turn|>assistant\n"


def test_09_one_long_side(bench: Bench) -> None:
    """D1, D2, M2: the longer side decides for both; a side that is cut has no end, the other keeps its own."""
    report = bench.look([{"id": "a", "prompt": "0123456789" * 3, "chosen": "yes", "rejected": "n" * 40},
                         {"id": "b", "prompt": "Hi ", "chosen": "same " * 8 + "a", "rejected": "same " * 8 + "b"}],
                        "--max-length", 32)
    shown, = report["shown"]
    assert prompt_text(shown) == "4567890123456789"
    assert learned(shown) == [["yes<|eos|>"], ["n" * 16]]
    assert left_out(report) == {2: "identical_pair"}  # they differ behind the cut only


def test_09_the_answer_is_behind_the_cut(bench: Bench) -> None:
    """M5, D1: a row whose last answer is cut away is left out; if no other is left, the run stops with the sentence."""
    late = [answer("a"), user("b" * 40), answer("c")]
    rows = [{"prompt": [user("Hi")], "completion": late}, {"prompt": [user("Hi")], "completion": [answer("x")]}]
    run = bench.train("sft", rows, "--max-length", 32)
    assert left_out(audit(run)) == {1: "no_supervised_token"}
    bench.train("sft", rows[:1], "--max-length", 32, code=2)
    assert "rows.jsonl:1: no supervised token after truncation to 32 tokens (the prompt has 22)" in bench.err


# --- 10: nothing said ------------------------------------------------------------------------------------------------

BLANK = {"no-break space": "\xa0", "wide spaces": "\u2003\u3000\u2028"}
UNSEEN = {"zero width space": "\u200b\u200b", "byte order mark": "\ufeff", "NUL": "\x00", "joiners": "\u2060\u00ad",
          "filler": "\u3164\u2800"}


@pytest.mark.parametrize("form", ["plain", "messages", "parts"])
def test_10_answers_that_nobody_sees(bench: Bench, form: str) -> None:
    """D3: white space is no answer; what has no width is one, as people and models do give it, and is pointed out."""
    answers = [*BLANK.values(), *UNSEEN.values(), " \u200b.", "\xa0x"]
    if form == "plain":
        rows = plain(*answers)
    else:
        shaped: Callable[[str], Any] = (lambda text: text) if form == "messages" else (
            lambda text: [{"type": "text", "text": text}])
        rows = chats(*([user("q"), {"role": "assistant", "content": shaped(text)}] for text in answers))
    report = bench.look(rows)
    assert left_out(report) == dict.fromkeys(range(1, len(BLANK) + 1), "empty_completion")
    assert report["rows"]["kept"] == len(UNSEEN) + 2
    unseen = next(finding for finding in report["findings"] if finding["name"] == "unseen")
    assert unseen["figures"] == {"rows": len(UNSEEN)}
    assert unseen["places"] == [f"rows.jsonl:{number}" for number in range(len(BLANK) + 1, len(answers) - 1)]
    bench.look(rows[: len(BLANK)], code=2)
    assert f"no row is left to train on: {len(BLANK)} read, 0 kept: {len(BLANK)} empty_completion" in bench.err


def test_10_null_inside_messages(bench: Bench) -> None:
    """D3: a null answer is none; a null question is an empty one, and nowhere the word None."""
    report = bench.look(chats(
        [user("q"), {"role": "assistant", "content": None}], [user("q"), {"role": "assistant"}],
        [{"role": "user", "content": None, "name": None}, answer("x")], [user("q"), answer("")], []))
    assert left_out(report) == {1: "empty_completion", 2: "empty_completion", 4: "empty_completion", 5: "no_completion"}
    assert prompt_text(report["shown"][0]) == "<|bos|><|turn|>user\n<|end|>\n<|turn|>assistant\n"
    bench.look(chats([user("q"), None, answer("x")]), code=2)
    assert "rows.jsonl:1: each message of 'messages' needs a 'role' and a 'content'" in bench.err


def test_10_a_tokenizer_that_takes_the_whole_answer_away(bench: Bench) -> None:
    """D3, D1: what a normalizer removes is not there to be learned; an end alone teaches silence."""
    path = bench.with_tokenizer()
    state = json.loads((path / "tokenizer.json").read_text())
    state["normalizer"] = {"type": "Replace", "pattern": {"String": "~"}, "content": ""}
    (path / "tokenizer.json").write_text(json.dumps(state))
    report = bench.look([*plain("~~", "a~"), {"messages": [user("q"), answer("~")]}])
    assert left_out(report) == {1: "empty_completion", 3: "empty_completion"}
    assert learned(report["shown"][0]) == [["a<|eos|>"]]
    assert report["shown"][0]["notes"] == ["text_changed"]
    assert left_out(bench.look(chats([user("q"), answer("~")], [user("q"), answer("b")]))) == {1: "empty_completion"}


# --- 11: what two sides share ----------------------------------------------------------------------------------------


def test_11_plain_sides_that_share_letters(bench: Bench) -> None:
    """M2, D1: one the beginning of the other, a blank more, the same, the prompt again."""
    report = bench.look([{"id": name, "prompt": "Say: ", "chosen": chosen, "rejected": rejected}
                         for name, chosen, rejected in (("a", "one", "one two"), ("b", "one", "one "),
                                                        ("c", "one", "one"), ("d", "Say: one", "Say: two"))])
    rows = by_id(report)
    assert left_out(report) == {3: "identical_pair"}
    assert {name: learned(row) for name, row in rows.items()} == {
        "a": [["one<|eos|>"], ["one two<|eos|>"]], "b": [["one<|eos|>"], ["one <|eos|>"]],
        "d": [["Say: one<|eos|>"], ["Say: two<|eos|>"]]}
    assert {prompt_text(row) for row in rows.values()} == {"Say: "}


def test_11_conversations_that_part_elsewhere(bench: Bench) -> None:
    """M2: they must part at an answer; what differs in the question, the system message or a key only is no pair."""
    system = {"role": "system", "content": "s"}
    report = bench.look([
        {"chosen": [user("p"), answer("x")], "rejected": [user("q"), answer("x")]},
        {"chosen": [system, user("p"), answer("x")], "rejected": [user("p"), answer("y")]},
        {"chosen": [user("p"), {**answer("x"), "time": 1}], "rejected": [user("p"), {**answer("x"), "time": 2}]},
        {"chosen": [user("p"), answer("x"), user("r"), answer("z")], "rejected": [user("p"), answer("y")]}])
    assert left_out(report) == {1: "no_completion", 2: "no_completion", 3: "identical_pair"}
    shown, = report["shown"]
    assert learned(shown) == [["z<|end|>"], ["y<|end|>"]]
    assert answer_ids(shown).count(TURN) == 2
    assert prompt_ids(shown).count(TURN) == 2


def test_11_transcripts(bench: Bench) -> None:
    """M2: transcripts without a shared turn, and one that is the beginning of the other."""
    first = "\n\nHuman: p\n\nAssistant: x"
    report = bench.look([{"chosen": first, "rejected": "\n\nHuman: q\n\nAssistant: y"},
                         {"chosen": first, "rejected": first + "\n\nHuman: r\n\nAssistant: z"},
                         {"chosen": first, "rejected": "\n\nHuman: p\n\nAssistant: xy"}])
    assert left_out(report) == {1: "no_completion", 2: "no_completion"}
    assert learned(report["shown"][0]) == [["x<|end|>"], ["xy<|end|>"]]


def test_11_sides_that_a_template_makes_equal(bench: Bench) -> None:
    """D1, M1: a template that trims leaves no difference; where one is left, the trimming is noted."""
    bench.with_tokenizer(chat_template=TEMPLATE.replace("m.content }}", "m.content | trim }}"))
    report = bench.look([{"prompt": [user("p")], "chosen": " x ", "rejected": "x"},
                         {"prompt": [user("p")], "chosen": " x ", "rejected": "y"}])
    assert left_out(report) == {1: "identical_pair"}
    assert learned(report["shown"][0]) == [["x<|end|>"], ["y<|end|>"]]
    assert report["shown"][0]["notes"] == ["text_changed"]


# --- 13: ends in odd places ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
def test_13_ends_inside_the_text(bench: Bench, side: str) -> None:
    """M4, T1, T3: an EOS that plain text spells counts where it stands and is not doubled; in messages it is text."""
    bench.with_tokenizer(pad_token="<|eos|>", padding_side=side)
    rows = by_id(bench.look([*plain("a<|eos|>b", "a<|eos|>"), {**plain("a", prompt="p<|eos|> ")[0], "id": "r3"}]))
    assert {name: learned(row) for name, row in rows.items()} == {
        "r1": [["a<|eos|>b<|eos|>"]], "r2": [["a<|eos|>"]], "r3": [["a<|eos|>"]]}
    assert prompt_ids(rows["r3"]).count(EOS) == 1
    shown, = bench.look(chats([user("p<|eos|>"), answer("a<|eos|>b<|end|>")]))["shown"]
    assert learned(shown) == [["a<|eos|>b<|end|><|end|>"]]
    assert (prompt_ids(shown) + answer_ids(shown)).count(EOS) == 0
    assert answer_ids(shown).count(END) == 1


def test_13_a_padded_run_of_uneven_rows(bench: Bench) -> None:
    """M4: EOS inside rows, pad == eos: both layouts have one loss."""
    rows = plain("a<|eos|>b", "pineapple " * 6, "a")
    found = []
    for side in ("left", "right"):
        bench.with_tokenizer(pad_token="<|eos|>", padding_side=side)
        for layout in ("padded", "tree"):
            step, = steps(bench.train("sft", rows, "--layout", layout))
            found.append((step["loss"], step["grad_norm"]))
    assert all(one == pytest.approx(found[0], rel=1e-5) for one in found)


# --- 14: starts and ends of other templates --------------------------------------------------------------------------

TWO_ENDS = TEMPLATE.replace("<|end|>\n", "<|end|><|eos|>\n")
THOUGHT = TEMPLATE.replace("<|turn|>assistant\n{% endif %}", "<|turn|>assistant\n<think>{% endif %}")
BOTH = TEMPLATE.replace("<|end|>\n{% endfor %}", "<|end|>\n{% endfor %}{% if not add_generation_prompt %}"
                        "{{ eos_token }}{% endif %}")
EVERY_TURN = TEMPLATE.replace("{{ bos_token }}", "").replace("<|turn|>{{ m.role }}", "{{ bos_token }}{{ m.role }}")


@pytest.mark.parametrize(("template", "end", "bos"), [
    (TWO_ENDS, "<|end|>", 1), (THOUGHT, "<|end|>", 1), (BOTH, "<|end|>", 1), (CHATML, "<|end|>", 0),
    (TEMPLATE.replace("m.content }}", "m.content | trim }}"), "<|end|>", 1),
    (EVERY_TURN, "<|end|>", 3)], ids=["two ends", "thought", "end of all", "no bos", "trims", "bos opens turns"])
@pytest.mark.parametrize("auto_bos", [True, False])
def test_14_other_templates(bench: Bench, template: str, end: str, bos: int, auto_bos: bool) -> None:
    """T1: one end, the first; the BOS is the template's, and a tokenizer that adds one adds none to it."""
    bench.with_tokenizer(chat_template=template, auto_bos=auto_bos)
    shown, = bench.look(chats([user("q"), answer("x"), user("r"), answer("y")]))["shown"]
    assert learned(shown) == [["y" + end]]
    assert answer_ids(shown).count(EOS) == 0
    assert prompt_ids(shown).count(BOS) == bos
    assert (prompt_ids(shown)[:1] == [BOS]) == bool(bos)
    assert prompt_text(shown).endswith("<think>") == (template == THOUGHT)
    assert ("<think>" in prompt_text(shown)) == (template == THOUGHT)


def test_14_one_token_for_both_borders(bench: Bench) -> None:
    """T1: where BOS and EOS are one token it stands once in front and once behind."""
    bench.with_tokenizer(bos_token="<|eos|>")
    shown, = bench.look(chats([user("q"), answer("x")]))["shown"]
    assert prompt_ids(shown).count(EOS) == 1
    assert learned(shown) == [["x<|end|>"]]
    bench.with_tokenizer(bos_token="<|eos|>", chat_template="{{ bos_token }}{% for m in messages %}{{ m.content }}\n"
                                                            "{% endfor %}{% if add_generation_prompt %}A:{% endif %}")
    shown, = bench.look(chats([user("q"), answer("A:x")]))["shown"]
    assert (prompt_ids(shown).count(EOS), answer_ids(shown).count(EOS)) == (1, 1)


def test_14_two_ends_and_all_turns(bench: Bench) -> None:
    """T1, T2: the first end of each answer is learned, the second is context."""
    bench.with_tokenizer(chat_template=TWO_ENDS)
    shown, = bench.look(chats([user("q"), answer("x"), user("r"), answer("y")]), "--supervise", "all")["shown"]
    assert learned(shown) == [["x<|end|>", "y<|end|>"]]
    assert answer_ids(shown).count(EOS) == 2
    assert EOS not in answer_ids(shown, learned=True)


# --- 15: conversations of other shapes -------------------------------------------------------------------------------

TOOL = {"role": "tool", "content": "42"}


@pytest.mark.parametrize(("messages", "all_turns"), [
    ([user("q"), answer("one moment"), TOOL, answer("done")], ["one moment", "done"]),
    ([user("q"), answer("x"), answer("y")], ["x", "y"]),
    ([answer("Hello!"), user("q"), answer("x")], ["x"]),
    ([{"role": "system", "content": "s"}, answer("Hello!"), user("q"), answer("x")], ["Hello!", "x"]),
    ([user("q"), {"role": "system", "content": "s"}, answer("x")], ["x"]),
    ([user("q"), user("r"), answer("x")], ["x"]),
], ids=["a tool speaks", "twice", "opens", "opens behind the system", "late system", "two questions"])
def test_15_who_speaks(bench: Bench, messages: list[dict[str, Any]], all_turns: list[str]) -> None:
    """M1, T2: each turn stands in the row once and in order; answers are learned, what others say is not."""
    rendered = "".join(f"<|turn|>{m['role']}\n{m['content']}<|end|>\n" for m in messages)
    for supervise, wanted in (("last", all_turns[-1:]), ("all", all_turns)):
        shown, = bench.look(chats(messages), "--supervise", supervise)["shown"]
        assert learned(shown) == [[text + "<|end|>" for text in wanted]]
        text = prompt_text(shown) + "".join(token["text"] for token in shown["completions"][0]["tokens"])
        assert text == "<|bos|>" + rendered.rstrip("\n")


def test_15_nobody_asked(bench: Bench) -> None:
    """D1: an answer without anything before it has no prompt, whichever turns are learned."""
    for supervise in ("last", "all"):
        report = bench.look(chats([answer("y")], [user("q"), answer("x")]), "--supervise", supervise)
        assert left_out(report) == {1: "empty_prompt"}


def test_15_calls(bench: Bench) -> None:
    """M1, M5: a call is learned as the template shows it; one that shows nothing of it is refused, by name."""
    call = {"role": "assistant", "content": None, "tool_calls": [
        {"type": "function", "function": {"name": "lamp", "arguments": {"to": 20}}}]}
    rows = chats([user("q"), call], [user("q"), call, TOOL, answer("done")])
    bench.look(rows, code=2)
    assert "rows.jsonl:1: the chat template does not render the call of 'lamp'" in bench.err
    bench.with_tokenizer(chat_template=TEMPLATE.replace("{{ m.content }}", "{{ m.content }}" + CALLS))
    report = bench.look(rows)
    assert [learned(shown) for shown in report["shown"]] == [[["[lamp]<|end|>"]], [["done<|end|>"]]]
    assert "None" not in "".join(map(prompt_text, report["shown"]))


# --- 16: schemas from other places -----------------------------------------------------------------------------------

LAMP = {"name": "set_lamp", "parameters": {"room": {"type": "string"}, "level": {"enum": [1, None, 3]}}}
POND = {"name": "pond_depth", "description": "Depth", "parameters": {"unit": {"type": "string"}}}


def schemas(shown: dict[str, Any]) -> list[Any]:
    return [json.loads(line) for line in prompt_text(shown).split("<|end|>")[0].splitlines()[1:]]


def as_file(bench: Bench, kind: str, rows: list[dict[str, Any]]) -> Path:
    path = bench.path / f"tools.{kind}"
    table = pyarrow.Table.from_pylist(rows)
    if kind == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        pyarrow.feather.write_feather(table, str(path))
    return path


@pytest.mark.parametrize("kind", ["parquet", "feather"])
def test_16_columns_that_are_united(bench: Bench, kind: str) -> None:
    """T4: keys of neighbors are taken out at every depth, in tools and messages; a null in a list is the user's."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "set_lamp"}}]}
    template = TEMPLATE.replace("{{ m.content }}", "{{ m.content }}{{ m.keys() | sort | join(',') }}" + CALLS)
    bench.with_tokenizer(chat_template=template)
    rows = [{"id": "a", "messages": [user("q"), call, {**TOOL, "name": "set_lamp"}, answer("x")], "tools": [LAMP]},
            {"id": "b", "messages": [user("q"), answer("y")], "tools": [POND, LAMP]},
            {"id": "c", "messages": [user("q"), answer("z")], "tools": None},
            {"id": "d", "messages": [user("q"), answer("z")], "tools": []}]
    shown = by_id(bench.look(as_file(bench, kind, rows)))
    assert schemas(shown["a"]) == [LAMP]
    assert schemas(shown["b"]) == [POND, LAMP]
    assert "tools" not in prompt_text(shown["c"]) + prompt_text(shown["d"])
    assert "qcontent,role<|end|>" in prompt_text(shown["b"])
    assert "assistant\nrole,tool_calls[set_lamp]<|end|>" in prompt_text(shown["a"])
    assert "42content,name,role<|end|>" in prompt_text(shown["a"])
    of_lines = by_id(bench.look(rows))
    for name in "acd":  # of b the columns remember the keys, but not their order
        assert of_lines[name]["prompt"] == shown[name]["prompt"]


@pytest.mark.parametrize("form", ["list", "text", "list of texts", "text of texts"])
def test_16_schemas_as_text(bench: Bench, form: str) -> None:
    """T4: JSON of a list, or a list of JSON, is the list; what is no schema stops the run with its place."""
    texts = [json.dumps(LAMP), json.dumps(POND)]
    tools = {"list": [LAMP, POND], "text": json.dumps([LAMP, POND]), "list of texts": texts,
             "text of texts": json.dumps(texts)}[form]
    shown, = bench.look(chats([user("q"), answer("x")], tools=tools))["shown"]
    assert schemas(shown) == [LAMP, POND]
    for bad in (["lamp"], [None], [5], "lamp", 5, {"name": "lamp"}, "[" * 100_000):
        bench.look(chats([user("q"), answer("x")], tools=bad), code=2)
        assert bench.err.startswith("tropism: rows.jsonl:1: ")
        assert "'tools'" in bench.err


def test_16_nulls_that_the_user_wrote(bench: Bench) -> None:
    """T4: JSONL is taken as it is written, null keys of schemas included; null keys of messages are none."""
    tools = [{"name": "f", "description": None}]
    rows = chats([{**user("q"), "tool_calls": None, "name": None}, answer("x")], tools=tools)
    bench.with_tokenizer(chat_template=TEMPLATE.replace("{{ m.content }}", "{{ m.content }}{{ m.keys() | list }}"))
    shown, = bench.look(rows)["shown"]
    assert schemas(shown) == tools
    assert "q['role', 'content']" in prompt_text(shown)
