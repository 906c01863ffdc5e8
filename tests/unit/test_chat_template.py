"""Options of chat templates: each has its effect or is refused, and the rules for tokens hold under every template."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from helpers import CHATML, build_tokenizer, case_rows, case_yaml, chat, encoded, expected, said, supervised_text
from tropism.data.audit.template_findings import find_in_template
from tropism.data.read_rows import read_rows
from tropism.data.rows import Row
from tropism.data.tokenization.chat_template import (
    NAMES,
    TemplateOptions,
    check_effect,
    make_renderer,
    parse_kwargs,
    template_text,
)
from tropism.data.tokenization.render import Renderer
from tropism.data.tokenization.truncate import Limits
from tropism.errors import DataError, ModelError, UsageError

LIMITS = Limits(1000)
TOKENS = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>",
          "<end_of_turn>", "<|user|>", "<|assistant|>", "<|system|>"]
THINKING = CHATML.replace("<|turn|>assistant\n{% endif %}",
                          "<|turn|>assistant\n{% if not enable_thinking %}<think></think>{% endif %}{% endif %}")


def tokenizer_with(tokens: list[str] = TOKENS, **changes: Any) -> Any:
    tokenizer = build_tokenizer(**changes)
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    return tokenizer


def options(**values: Any) -> TemplateOptions:
    return TemplateOptions(**values)


WANTED = {
    "chatml": ("<|im_start|>system\nBrief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
               "Yes<|im_end|>"),
    "llama3": ("<|bos|><|start_header_id|>system<|end_header_id|>\n\nBrief.<|eot_id|>"
               "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
               "<|start_header_id|>assistant<|end_header_id|>\n\n", "Yes<|eot_id|>"),
    "phi3": ("<|system|>\nBrief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\n", "Yes<|end|>"),
    "gemma": ("<|bos|><start_of_turn>user\nBrief.\n\nHi<end_of_turn>\n<start_of_turn>model\n", "Yes<end_of_turn>"),
    "plain": ("<|bos|>System: Brief.\nUser: Hi\nAssistant:", " Yes<|eos|>"),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("auto_bos", [True, False])
def test_templates_of_ours(name: str, auto_bos: bool) -> None:
    """T1, M1: text, one BOS at most, one terminator, and nothing odd about them."""
    tokenizer = tokenizer_with(auto_bos=auto_bos)
    renderer = make_renderer(tokenizer, LIMITS, options(chat_template=name))
    found = encoded(renderer, chat("Hi", system="Brief.", answers=("Yes",)))
    prompt, answer = WANTED[name]
    assert tokenizer.decode(found.prompt_ids.tolist()) == prompt
    assert supervised_text(tokenizer, found) == answer
    assert not found.notes
    assert found.prompt_ids.tolist().count(0) <= 1
    assert [finding.name for finding in find_in_template(renderer)] == (
        ["no_bos"] if auto_bos and not prompt.startswith("<|bos|>") else [])
    assert tokenizer.chat_template == template_text(name)  # what the exported model must use
    with pytest.raises(DataError, match=rf"f:1: the chat template {name} rejects.*has no place for tools"):
        renderer.encode(chat("Hi", tools=({"name": "f"},)))


@pytest.mark.parametrize("name", NAMES)
def test_all_turns_under_templates_of_ours(name: str) -> None:
    """T2: every answer with its terminator; turns between them are context."""
    tokenizer = tokenizer_with()
    renderer = make_renderer(tokenizer, LIMITS, options(chat_template=name, supervise="all"))
    completion = encoded(renderer, chat("a", "b", "c", answers=("d",))).completions[0]
    lead, end = WANTED[name][1].split("Yes")
    assert tokenizer.decode(completion.ids[completion.loss_mask].tolist()) == f"{lead}b{end}{lead}d{end}"
    assert not completion.loss_mask.all()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "plain"])
def test_a_template_of_ours_needs_its_tokens(name: str) -> None:
    """T1: spelled as plain characters its end would be no end."""
    with pytest.raises(ModelError, match=rf"--chat-template {name}: the tokenizer has no token <.*plain"):
        make_renderer(build_tokenizer(), LIMITS, options(chat_template=name))
    make_renderer(build_tokenizer(), LIMITS, options(chat_template="plain"))


def test_template_from_a_file(tmp_path: Path) -> None:
    """The file wins over the tokenizer's own; a file that is no template is named with its line."""
    path = tmp_path / "t.jinja"
    path.write_text("{% generation %}" + CHATML.replace("<|turn|>", "<|turn|>!") + "{% endgeneration %}")
    tokenizer = build_tokenizer()
    found = encoded(make_renderer(tokenizer, LIMITS, options(chat_template=str(path))), chat("Hi", answers=("Yes",)))
    assert tokenizer.decode(found.prompt_ids.tolist()) == "<|turn|>!user\nHi<|end|>\n<|turn|>!assistant\n"
    path.write_text("a\n{% for m in %}")
    with pytest.raises(UsageError, match=r"t.jinja:2: not a valid template: "):
        make_renderer(tokenizer, LIMITS, options(chat_template=str(path)))
    with pytest.raises(ValidationError, match="'chatlm' is neither a file nor one of chatml, gemma, llama3"):
        options(chat_template="chatlm")


def test_kwargs() -> None:
    """L3: as JSON, with commas, from a mapping; unknown names and ours are refused."""
    wanted = {"a": False, "b": 3, "c": "x y", "d": None}
    assert parse_kwargs('{"a": false, "b": 3, "c": "x y", "d": null}') == wanted
    assert parse_kwargs("a=false,b=3,c=x y,d=null") == wanted
    assert options(chat_template_kwargs=wanted).template_kwargs == wanted
    assert options(**options(chat_template_kwargs=wanted).dump()).template_kwargs == wanted
    assert options().template_kwargs == {}
    for bad in ("a", "=1", "{'a': 1}", "a=1,"):
        with pytest.raises(ValidationError, match=r"(NAME=VALUE|not valid JSON)"):
            options(chat_template_kwargs=bad)
    with pytest.raises(ValidationError, match="'tools' is set by Tropism"):
        options(chat_template_kwargs={"tools": []})
    with pytest.raises(UsageError, match=r"does not use 'enable_thinkin'\. Did you mean enable_thinking"):
        make_renderer(build_tokenizer(chat_template=THINKING), LIMITS, options(chat_template_kwargs="enable_thinkin=1"))


@pytest.mark.parametrize(("value", "opened"), [("true", ""), ("false", "<think></think>")])
def test_kwargs_reach_the_template(value: str, opened: str) -> None:
    """T1, T2: a generation prompt that opens a thought is given, not learned; the option takes it away."""
    tokenizer = build_tokenizer(chat_template=THINKING)
    renderer = make_renderer(tokenizer, LIMITS, options(chat_template_kwargs=f"enable_thinking={value}"))
    found = encoded(renderer, chat("Hi", answers=("Yes",)))
    assert tokenizer.decode(found.prompt_ids.tolist()).endswith("<|turn|>assistant\n" + opened)
    assert found.prompt_ids.tolist() == tokenizer.apply_chat_template(
        [said("user", "Hi")], add_generation_prompt=True, enable_thinking=value == "true")["input_ids"]
    assert supervised_text(tokenizer, found) == "Yes<|end|>"
    assert [finding.name for finding in find_in_template(renderer)] == (["generation_prompt_adds"] if opened else [])


def test_all_turns_need_a_template_that_does_not_change_them() -> None:
    """M5: thoughts that only the last turn has; the error says so, and what to do."""
    renderer = Renderer(build_tokenizer(chat_template=THINKING), LIMITS, "all")
    with pytest.raises(DataError, match=r"f:1: the chat template renders earlier turns differently.*--supervise last"):
        renderer.encode(chat("a", "b", "c"))


@pytest.mark.parametrize(("template", "sentence"), [
    ("{% for m in messages if m.role == 'user' %}{{ m.content }}\n{% endfor %}", "does not render the completion"),
    ("{% for m in messages if m.role == 'user' %}{{ m.content }}\n{% endfor %}"
     "{% if add_generation_prompt %}A:{% endif %}", "changes the text of the completion"),
    ("{% for m in messages %}{{ m.content[:2] }}|{% endfor %}{% if add_generation_prompt %}A:{% endif %}",
     "changes the text of the completion")])
def test_a_template_that_hides_answers(template: str, sentence: str, tmp_path: Path) -> None:
    """M5: refused by its name, never a mask of nothing or of an end alone."""
    path = tmp_path / "hides.jinja"
    path.write_text(template)
    renderer = make_renderer(build_tokenizer(), LIMITS, options(chat_template=str(path)))
    with pytest.raises(DataError, match=rf"^f:1: the chat template .*hides.jinja {sentence}.*--chat-template"):
        renderer.encode(chat("Hi", answers=("Surely",)))


def test_a_template_without_markers_gets_derived_spans() -> None:
    """M5: neither an end nor a generation prompt: what the answer adds to the text is learned, and said so."""
    tokenizer = build_tokenizer(chat_template="{% for m in messages %}{{ m.role }}> {{ m.content }}\n{% endfor %}")
    renderer = Renderer(tokenizer, LIMITS)
    found = encoded(renderer, chat("Hi", answers=("Yes",)))
    assert tokenizer.decode(found.prompt_ids.tolist()) == "user> Hi\n"
    assert supervised_text(tokenizer, found) == "assistant> Yes<|eos|>"
    assert found.notes == {"eos_added"}
    assert [finding.name for finding in find_in_template(renderer)] == ["no_generation_prompt"]


def test_odd_templates_are_noticed() -> None:
    """T1: two BOS; tokens that the tokenizer does not know."""
    twice = Renderer(build_tokenizer(chat_template="{{ bos_token }}{{ bos_token }}" + CHATML), LIMITS)
    assert [(finding.name, finding.severity) for finding in find_in_template(twice)] == [("two_bos", "warning")]
    every_turn = Renderer(build_tokenizer(bos_token="<|user|>", chat_template=(
        "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|user|>{% endif %}")), LIMITS)
    assert "two_bos" not in [finding.name for finding in find_in_template(every_turn)]
    foreign = Renderer(build_tokenizer(chat_template=template_text("chatml")), LIMITS)
    finding, = find_in_template(foreign)
    assert finding.name == "template_tokens"
    assert "<|im_end|>, <|im_start|>" in finding.text
    assert find_in_template(Renderer(build_tokenizer(chat_template=None), LIMITS)) == []


@pytest.mark.parametrize("prompt", ["Be brief.", "", "say <|end|>"])
def test_system_prompt(fixture_tokenizer, prompt: str) -> None:
    """T2, T3: it opens conversations that have none, as if the row had it; others keep theirs."""
    renderer = make_renderer(fixture_tokenizer, LIMITS, options(system_prompt=prompt))
    with_one = encoded(Renderer(fixture_tokenizer, LIMITS), chat("Hi", system=prompt))
    found = encoded(renderer, chat("Hi"))
    assert found.prompt_ids.tolist() == with_one.prompt_ids.tolist()
    assert found.split_key == with_one.split_key
    own = encoded(renderer, chat("Hi", system="Mine."))
    assert fixture_tokenizer.decode(own.prompt_ids.tolist()) == (
        "<|bos|><|turn|>system\nMine.<|end|>\n<|turn|>user\nHi<|end|>\n<|turn|>assistant\n")
    developer = Row("r", "f:1", (said("developer", "Mine."), said("user", "Hi")), ((said("assistant", "Yes"),),))
    assert "system" not in fixture_tokenizer.decode(encoded(renderer, developer).prompt_ids.tolist())


def test_options_without_effect(fixture_tokenizer) -> None:
    """L3: plain text is rendered by no template, so options of templates are refused."""
    for values in ({"chat_template": "plain"}, {"system_prompt": "x"}, {"supervise": "all"}):
        tokenizer = build_tokenizer()
        renderer = make_renderer(tokenizer, LIMITS, options(**values))
        encoded(renderer, Row("r", "f:1", "Hi ", ("Yes",)))
        with pytest.raises(UsageError, match=rf"{next(iter(values)).replace('_', '-')}.* has no effect"):
            check_effect(options(**values), renderer)
        encoded(renderer, chat("Hi"))
        check_effect(options(**values), renderer)
    renderer = make_renderer(fixture_tokenizer, LIMITS, options())
    encoded(renderer, Row("r", "f:1", "Hi ", ("Yes",)))
    check_effect(options(), renderer)


def test_tools_of_another_shape() -> None:
    """T4: a template that looks for the name elsewhere would show an empty list; with the right shape it works."""
    template = "{% for tool in tools %}[{{ tool.function }}]{% endfor %}" + CHATML
    renderer = Renderer(build_tokenizer(chat_template=template), LIMITS)
    with pytest.raises(DataError, match=r"^f:1: tool 'lamp' is missing in the rendered prompt: .*another form"):
        renderer.encode(chat("Hi", tools=({"name": "lamp"},)))
    assert encoded(renderer, chat("Hi", tools=({"type": "function", "function": {"name": "lamp"}},)))
    assert encoded(renderer, chat("Hi", tools=({"type": "function", "function": {"name": "lamp<|end|>"}},)))
    assert encoded(renderer, chat("Hi", tools=({"nameless": 1},)))


TOOLS = "{% for call in m.tool_calls %}<|user|>{{ call.name }}{% endfor %}"


@pytest.mark.parametrize("content", ["", "on it"])
@pytest.mark.parametrize("template", [
    CHATML.replace("<|end|>", TOOLS + "<|end|>"),
    CHATML.replace("<|end|>", TOOLS + "<|end|>") + "{% if not add_generation_prompt %}<|eos|>{% endif %}",
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}" + TOOLS + "<|end|>\n{% endfor %}"])
def test_a_call_may_open_with_a_special_token(template: str, content: str) -> None:
    """M1, T1: which is not the end of the answer; nor is the token that some templates put behind it all."""
    tokenizer = tokenizer_with(chat_template=template)
    answer = {"role": "assistant", "content": content, "tool_calls": [{"name": "lamp"}]}
    found = encoded(Renderer(tokenizer, LIMITS), Row("r", "f:1", (said("user", "Hi"),), ((answer,),)))
    lead = "" if "add_generation_prompt %}<|turn|>" in template else "<|turn|>assistant\n"
    assert supervised_text(tokenizer, found) == f"{lead}{content}<|user|>lamp<|end|>"


def test_case_14_notices() -> None:
    """T1: of the three templates only the one without an end gets a message."""
    case = case_yaml("14-bos-eos-once.yaml")
    for name, template in case["templates"].items():
        audit = read_rows([{"messages": case["messages"]}], Renderer(build_tokenizer(chat_template=template), LIMITS),
                          "single")
        said_so = [notice for notice in audit.notices() if "One EOS was added" in notice]
        assert len(said_so) == (1 if name.startswith("B") else 0)


def test_case_16_tools(fixture_tokenizer) -> None:
    """T4: the schemas with the user's keys only; a template without a place for them is refused, not left alone."""
    rows = case_rows("16-tools-null-keys.jsonl")
    audit = read_rows([raw.record for raw in rows], Renderer(fixture_tokenizer, LIMITS), "unpaired")
    for found, raw in zip(audit.rows, rows, strict=True):
        text = fixture_tokenizer.decode(found.prompt_ids.tolist())
        wanted = expected("16")[raw.record["id"]]
        assert all(word in text for word in wanted["must_contain"])
        assert not [word for word in wanted["must_not_contain"] if word in text]
        assert json.loads(text.split("\n")[1]) == raw.record["tools"][0]
    with pytest.raises(DataError, match=r"^row 1: the row has tools, but the chat template does not use them"):
        read_rows([raw.record for raw in rows], Renderer(build_tokenizer(chat_template=CHATML), LIMITS), "unpaired")


def test_the_option_for_control_tokens_reaches_the_renderer() -> None:
    """T3: plain characters unless the user says otherwise; other words are no option."""
    for wanted in ("plain", "keep", "refuse"):
        assert make_renderer(build_tokenizer(), LIMITS, options(control_tokens=wanted)).control_tokens == wanted
    assert make_renderer(build_tokenizer(), LIMITS, options()).control_tokens == "plain"
    with pytest.raises(ValidationError):
        options(control_tokens="drop")
