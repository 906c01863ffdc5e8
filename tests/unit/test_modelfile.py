"""A Modelfile says what the chat template says, in Ollama's grammar, whatever the texts are."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from family_templates import TEMPLATES, family_tokenizer
from hostile import TEXTS
from tropism.commands.export.ollama import model_name, modelfile
from tropism.commands.export.turns import InexpressibleError, go_text, turns_of
from tropism.data.tokenization.apply_template import ChatTemplate

_COMMANDS = {"FROM", "TEMPLATE", "SYSTEM", "PARAMETER"}


def parsed(text: str) -> list[tuple[str, str]]:
    """The commands of a Modelfile and their values, read as Ollama reads them. Strict: what it would drop is an error.

    A value ends at the first line end at which it is complete: without a quotation mark at its start, or with the same
    one or three at its end. Unprintable characters are dropped.
    """
    found, place = [], 0
    while place < len(text):
        end = text.index("\n", place)
        line = text[place:end]
        place = end + 1
        if not line or line.startswith("#"):
            assert line.isprintable()
            continue
        command, _, value = line.partition(" ")
        if command == "PARAMETER":
            name, _, value = value.partition(" ")
            command += f" {name}"
        assert command.split()[0] in _COMMANDS, line
        while (complete := unquoted(value.strip())) is None:
            end = text.index("\n", place)  # an error here: the value never ends
            value += "\n" + text[place:end]
            place = end + 1
        assert all(char.isprintable() or char in "\n\t" for char in value), value
        found.append((command, complete))
    return found


def unquoted(value: str) -> str | None:
    for quotes in ('"""', '"'):
        if value.startswith(quotes):
            return value[len(quotes):-len(quotes)] if len(value) >= 2 * len(quotes) and value.endswith(quotes) else None
    return value


def executed(source: str, system: str, messages: list[dict[str, str]]) -> str:
    """A Go template of the few actions that are written, with Ollama's values."""
    parts = [("action", text[2:-2].strip()) if text.startswith("{{") else ("text", text)
             for text in re.split(r"(\{\{.*?\}\})", source, flags=re.DOTALL)]
    blocks, place = _block(parts, 0)
    assert place == len(parts)
    return "".join(_run(blocks, {"system": system, "messages": messages, "later": False, "at": None}))


def _block(parts: list[tuple[str, str]], place: int) -> tuple[list[Any], int]:
    """Nodes up to an `end` or `else` of the block that begins at a place."""
    nodes: list[Any] = []
    while place < len(parts):
        kind, text = parts[place]
        if kind == "action" and (text == "end" or text.startswith("else")):
            return nodes, place
        place += 1
        if kind == "text":
            assert "{{" not in text
            assert "}}" not in text
            nodes.append(("text", text))
        elif text.startswith(("if ", "range ")):
            branches = []
            head = text
            while True:
                inside, place = _block(parts, place)
                branches.append((head, inside))
                head = parts[place][1]
                place += 1
                if head == "end":
                    break
                head = head.removeprefix("else").strip() or "true"
            nodes.append(("branch", branches))
        else:
            nodes.append(("action", text))
    return nodes, place


def _run(nodes: list[Any], values: dict[str, Any]) -> Iterator[str]:
    for kind, content in nodes:
        if kind == "text":
            yield content
        elif kind == "action":
            if content in ("$later := false", "$later = true"):
                values["later"] = content.endswith("true")
            elif content == ".Content":
                yield values["at"]["content"]
            elif content == ".System":
                assert values["at"] is None
                yield values["system"]
            else:
                assert re.fullmatch(r'"(?:[^"\\]|\\n|\\u[0-9a-f]{4}|\\U[0-9a-f]{8})*"', content), content
                yield re.sub(r"\\(n|u.{4}|U.{8})", lambda one: "\n" if one[1] == "n" else chr(int(one[1][1:], 16)),
                             content[1:-1])
        elif content[0][0] == "range $i, $m := .Messages":
            for number, message in enumerate(values["messages"]):
                values |= {"at": message, "number": number}
                yield from _run(content[0][1], values)
            values["at"] = None
        else:
            for condition, inside in content:
                if _holds(condition, values):
                    yield from _run(inside, values)
                    break


def _holds(condition: str, values: dict[str, Any]) -> bool:
    return {"if .System": bool(values["system"]), "true": True, "if $later": values["later"],
            'if eq .Role "user"': values["at"] is not None and values["at"]["role"] == "user",
            'if eq .Role "assistant"': values["at"] is not None and values["at"]["role"] == "assistant",
            "if eq (len (slice $.Messages $i)) 1": values["at"] is not None
            and values["number"] == len(values["messages"]) - 1}[condition]


def chat(*contents: str, system: str = "") -> list[dict[str, str]]:
    start = [{"role": "system", "content": system}] if system else []
    return start + [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(contents)]


CHATS = [chat("Why?"), chat("Why?", "So.", "And {{ .Role }}?"), chat("a", "b", "c\n\nd", "e", '"""', system="Be kind"),
         chat("x", system="{{ end }}")]


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("adds_bos", [False, True])
def test_families(family: str, adds_bos: bool) -> None:
    """The Go template gives what the chat template gives, read and executed by other code."""
    tokenizer = family_tokenizer(family)
    text, _ = modelfile(tokenizer, {0: tokenizer.eos_token}, "./m.gguf", {}, None, adds_bos)
    lines = parsed(text)
    assert [name for name, _ in lines] == ["FROM", "TEMPLATE", "PARAMETER stop"]
    assert lines[0][1] == "./m.gguf"
    assert lines[2][1] == tokenizer.eos_token
    for messages in CHATS:
        wanted = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        system = messages[0]["content"] if messages[0]["role"] == "system" else ""
        found = executed(lines[1][1], system, messages)
        bos = tokenizer.bos_token if adds_bos else None
        assert found == (wanted.removeprefix(bos) if bos else wanted)


LOOP = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
OTHERS = {
    "a system message before the last user message": (
        "{% for m in messages %}{% if m.role == 'user' %}[I]{% if loop.last and messages[0].role == 'system' %}"
        "{{ messages[0].content }}{% endif %}{{ m.content }}[/I]{% elif m.role == 'assistant' %}{{ m.content }}"
        "{% endif %}{% endfor %}", "changes their order"),
    "other prompts after a system message": (
        LOOP.replace("<a>", "<{{ messages[0].role }}>"), "differently if there is a system message"),
    "numbered turns": ("{% for m in messages %}{{ loop.index }}: {{ m.content }}\n{% endfor %}", "by its place"),
    "changed text": (LOOP.replace("m.content", "m.content | replace('W', 'w')"), "changes the text of messages"),
    "shouting": (LOOP.replace("m.content", "m.content | upper"), "leaves out or repeats messages"),
    "the last message only": ("{{ messages[-1].content }}", "leaves out or repeats messages"),
    "the date": ("{{ strftime_now('%Y') }}" + LOOP, "it writes the date"),
    "none": (None, "the tokenizer has none"),
    "a rejected conversation": ("{{ raise_exception('no chats') }}", "rejects these messages: no chats"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_no_go_template_expresses_is_left_out(case: str) -> None:
    source, reason = OTHERS[case]
    text, missing = modelfile(family_tokenizer("phi", chat_template=source), {1: "<|end|>"}, ".", {}, None, False)
    assert [name for name, _ in parsed(text)] == ["FROM", "PARAMETER stop"]
    assert len(missing) == 1
    assert reason in missing[0]
    assert f"# {missing[0]}\n" in text


def test_system_messages_thoughts_and_values_of_the_template() -> None:
    """What differs is said; a default system message, one inside a user message, and values are expressed."""
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}" + LOOP
    _, missing = modelfile(family_tokenizer("phi", chat_template=refusing), {}, ".", {}, None, False)
    assert missing == ["The chat template rejects system messages. TEMPLATE ignores them."]
    _, missing = modelfile(family_tokenizer("glm"), {}, ".", {}, None, False)
    assert [sentence.split(".")[0] for sentence in missing] == [
        "The chat template strips spaces and line ends around a message",
        "The chat template removes the thoughts of earlier answers"]
    text, _ = modelfile(family_tokenizer("qwen3"), {}, ".", {"enable_thinking": False}, 'Say "no"\n', False)
    lines = dict(parsed(text))
    assert executed(lines["TEMPLATE"], "", chat("a")).endswith("assistant\n<think>\n\n</think>\n\n")
    assert lines["SYSTEM"] == 'Say "no"\n'
    default = "{% if messages[0].role != 'system' %}<system>Be brief.{% endif %}" + LOOP
    tokenizer = family_tokenizer("phi", chat_template=default)
    source = dict(parsed(modelfile(tokenizer, {}, ".", {}, None, False)[0]))["TEMPLATE"]
    for messages, system in ((chat("a"), ""), (chat("a", system="b"), "b")):
        assert executed(source, system, messages) == tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True)


def test_stops_that_are_text_are_left_out() -> None:
    text, missing = modelfile(family_tokenizer("phi"), {0: "<|end|>", 1: "\u0120a", 2: "<|end|>"}, ".", {}, None, False)
    assert [value for name, value in parsed(text) if name == "PARAMETER stop"] == ["<|end|>", "<|end|>"]
    assert "is ordinary text" in missing[0]


@settings(max_examples=25)
@given(text=TEXTS | st.text('"\n{}\\ \t#a', max_size=12))
def test_hostile_texts_stay_texts(text: str) -> None:
    """In the template, in the system prompt and in comments: every command is ours, and every text as it was."""
    source = "{% for m in messages %}" + "{{ odd }}<{{ m.role }}>{{ m.content }}{{ odd }}{% endfor %}{{ odd }}<a>"
    tokenizer = family_tokenizer("phi", chat_template=source)
    content, missing = modelfile(tokenizer, {0: "<|end|>"}, "./m.gguf", {"odd": text}, text, False)
    lines = parsed(content)
    names = [name for name, _ in lines]
    assert names == [name for name in ("FROM", "TEMPLATE", "SYSTEM", "PARAMETER stop") if name in names]
    found = dict(lines)
    assert found.get("SYSTEM", text) == text
    assert ("SYSTEM" in found) == (not any("system prompt" in sentence for sentence in missing))
    if "TEMPLATE" in found:
        assert executed(found["TEMPLATE"], "s", chat("a", "b", "c", system="s")) == tokenizer.apply_chat_template(
            chat("a", "b", "c", system="s"), tokenize=False, add_generation_prompt=True, odd=text)
    else:
        assert any("TEMPLATE is left out" in sentence for sentence in missing)


@settings(max_examples=25)
@given(text=st.text(max_size=20))
def test_a_text_in_a_go_template_is_that_text(text: str) -> None:
    assert executed(go_text(text), "", []) == text
    assert '"""' not in go_text(text)


def test_a_template_that_rejects_what_it_differs_on_is_not_trusted() -> None:
    template = ChatTemplate(family_tokenizer("phi", chat_template=LOOP), {}, "t")
    turns, remarks = turns_of(lambda messages: template.render(messages, None, "p", generate=True))
    assert (turns.first, turns.system, turns.answer, turns.later, turns.generate, remarks) == (
        "<user>", ("<system>", "<user>"), "<assistant>", "<user>", "<a>", [])
    with pytest.raises(InexpressibleError, match="by its place"):
        turns_of(lambda messages: f"{len(messages)}" + template.render(messages, None, "p", generate=True))


@pytest.mark.parametrize(("name", "wanted"), [("My Model", "my-model"), ("--x", "x"), ("\u65e5", "model"),
                                              ("a/b c.D_1", "a-b-c.d_1"), ("", "model")])
def test_names_for_ollama(name: str, wanted: str) -> None:
    assert model_name(name) == wanted
