"""Thoughts, tool calls and added tokens in text: the ids of the chat template, or a sentence that says what is lost."""

from typing import Any

import pytest

from family_templates import TEMPLATES, added_tokens, family_tokenizer
from helpers import encoded, said, supervised_text
from tropism.data.audit.audit import Audit
from tropism.data.audit.findings import find_in_rows
from tropism.data.rows import EncodedRow, Message, Row
from tropism.data.tokenization.render import Renderer
from tropism.data.tokenization.truncate import Limits
from tropism.errors import DataError

LIMITS = Limits(100_000)
FAMILIES = list(TEMPLATES)
THOUGHT = "<think>\nSix sevens.\n</think>\n\n42"
TOOLS = ({"type": "function", "function": {"name": "lamp", "parameters": {"type": "object", "properties": {}}}},)
WITH_TOOLS = [family for family in FAMILIES if family not in ("gemma", "phi", "r1", "llama31")]


def answer(content: str | None, **keys: Any) -> Message:
    return {"role": "assistant", "content": content, **keys}


def call(**keys: Any) -> Message:
    function = {"name": "lamp", "arguments": {"level": 3, "mode": "<think>"}}
    return answer("", tool_calls=[{"type": "function", "function": function}], **keys)


def row_of(*messages: Message, tools: Any = None) -> Row:
    return Row("r", "f:1", messages[:-1], ((messages[-1],),), tools=tools)


ASK, MORE = said("user", "What is 6 times 7?"), said("user", "again")
TALKS: dict[str, tuple[Message, ...]] = {
    "no thought": (ASK, answer("42")),
    "system": (said("system", "Be brief."), ASK, answer("42")),
    "turns": (ASK, answer("42"), MORE, answer("43")),
    "thought": (ASK, answer(THOUGHT)),
    "thoughts in turns": (ASK, answer(THOUGHT), MORE, answer(THOUGHT)),
    "thought before": (ASK, answer(THOUGHT), MORE, answer("43")),
    "line ends before": (ASK, answer("\n\n<think>\n\nSix.\n\n</think>\n42")),
    "no white space": (ASK, answer("<think>Six.</think>42")),
    "empty thought": (ASK, answer("<think>\n\n</think>\n\n42")),
    "closed only": (ASK, answer("Six.\n</think>\n\n42")),
    "opened only": (ASK, answer("<think>Six")),
    "key": (ASK, answer("42", reasoning_content="Six sevens.")),
    "key with line ends": (ASK, answer("42", reasoning_content="\nSix.\n")),
    "other key": (ASK, answer("42", reasoning="Six sevens.")),
    "third key": (ASK, answer("42", thinking="Six sevens.")),
    "keys in turns": (ASK, answer("42", reasoning_content="Six."), MORE, answer("43", reasoning_content="So.")),
    "tags of a user": (said("user", "is <think>x</think> or <tool_call> a tag?"), answer("It is a </think> tag")),
    "tags of the system": (said("system", "Think in <think></think>."), ASK, answer("42")),
    "call as text": (ASK, answer('<tool_call>\n{"name": "lamp"}\n</tool_call>')),
    "result as text": (said("user", "<tool_response>\nok\n</tool_response>"), answer("ok")),
}
WITH_CALLS: dict[str, tuple[Message, ...]] = {
    "schemas": (ASK, answer("42")),
    "call": (ASK, call()),
    "call with a thought": (ASK, call(reasoning_content="I must.")),
    "result": (ASK, call(), {"role": "tool", "content": "<think>done</think>"}, answer("It is on.")),
    "two calls": (ASK, call(), {"role": "tool", "content": "done"}, call()),
}


def check(family: str, messages: tuple[Message, ...], tools: Any = None) -> None:
    """The prompt is that of generation; with the completion it is the plain conversation up to white space."""
    tokenizer = family_tokenizer(family)
    found = encoded(Renderer(tokenizer, LIMITS), row_of(*messages, tools=tools))

    def plain(given: tuple[Message, ...], generate: bool) -> list[int]:
        return tokenizer.apply_chat_template(list(given), tools=tools and list(tools),
                                             add_generation_prompt=generate)["input_ids"]

    prompt, completion = found.prompt_ids.tolist(), found.completions[0].ids.tolist()
    whole = plain(messages, False)
    assert prompt == plain(messages[:-1], True)
    assert not found.notes & {"control_spelled", "turn_spelled", "thought_restored"}
    if "eos_added" in found.notes:
        assert completion.pop() == tokenizer.eos_token_id
    ids = prompt + completion
    assert ids == whole[: len(ids)]
    assert not tokenizer.decode(whole[len(ids) :]).strip()


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "r1"])
def test_ids_are_those_of_the_template(family: str, talk: str) -> None:
    """T2, T5: reasoning in content, under its key or nowhere, in one turn and several."""
    check(family, TALKS[talk])


@pytest.mark.parametrize(("family", "talk"), [
    (family, talk) for family in WITH_TOOLS for talk in WITH_CALLS
    if (family, talk) != ("gptoss", "call with a thought")])  # that template reads another key
def test_ids_of_tools_are_those_of_the_template(family: str, talk: str) -> None:
    """T2, T4, T5: schemas, calls and results; an added token in an argument is that token."""
    check(family, WITH_CALLS[talk], TOOLS)


def test_a_thought_in_content_is_two_tokens() -> None:
    """T3, T5: not letters, and not an empty thought before them."""
    for family in ("qwen3", "qwen35", "r1", "glm", "smollm3", "qwen25"):
        tokenizer = family_tokenizer(family)
        found = encoded(Renderer(tokenizer, LIMITS), row_of(*TALKS["thought"]))
        ids = [*found.prompt_ids.tolist(), *found.completions[0].ids.tolist()]
        assert [ids.count(tokenizer.convert_tokens_to_ids(name)) for name in ("<think>", "</think>")] == [1, 1]
        text = tokenizer.decode(ids)
        assert text.index("<think>") < text.index("Six sevens.") < text.index("</think>") < text.index("42")


@pytest.mark.parametrize(("content", "wanted", "notes"), [
    (THOUGHT, "Six sevens.\n</think>\n\n42", {"thought_restored"}),
    ("Six sevens.\n</think>\n\n42", "Six sevens.\n</think>\n\n42", {"thought_restored"}),
    ("\n<think>Six.</think>42", "Six.</think>42", {"thought_restored"}),
    ("<think>\n\n</think>\n\n42", "</think>\n\n42", {"thought_restored"}),
    ("<think>\na <think> b</think>c</think>42", "a <think> b</think>c</think>42", {"thought_restored"}),
    ("42", "42", {"thought_open"}),
    ("<think>Six", "Six", {"thought_restored", "thought_open"})])
def test_a_template_that_drops_the_thought_it_opens(content: str, wanted: str, notes: set[str]) -> None:
    """T2, T5: the generation prompt opens the thought, so the completion is the thought, its end and the answer."""
    tokenizer = family_tokenizer("r1")
    for before in ((), (ASK, answer(THOUGHT))):
        found = encoded(Renderer(tokenizer, LIMITS), row_of(*before, MORE, answer(content)))
        prompt = tokenizer.decode(found.prompt_ids.tolist())
        assert prompt.endswith("<｜User｜>again<｜Assistant｜><think>\n")
        assert prompt.count("<think>") == 1  # earlier thoughts are dropped, as in generation
        assert supervised_text(tokenizer, found) == wanted + "<｜end▁of▁sentence｜>"
        assert found.notes == notes


def test_a_template_that_closes_the_thought_it_opens() -> None:
    """T5: finished messages without a thought have an empty one, which the completion closes."""
    template = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and '</think>' not in "
                "m.content %}<think></think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
                "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}")
    tokenizer = family_tokenizer("qwen3", chat_template=template)
    for content, wanted in (("42", "</think>42"), (THOUGHT, "Six sevens.\n</think>\n\n42")):
        found = encoded(Renderer(tokenizer, LIMITS), row_of(ASK, answer(content)))
        assert supervised_text(tokenizer, found) == wanted + "<|im_end|>"
        assert not found.notes


@pytest.mark.parametrize("family", ["qwen3", "qwen35"])
@pytest.mark.parametrize("message", [answer(THOUGHT), answer("42", reasoning_content="Six sevens.")])
def test_thinking_switched_off(family: str, message: Message) -> None:
    """T5: behind a closed thought comes the answer; a thought is reported."""
    tokenizer = family_tokenizer(family)
    renderer = Renderer(tokenizer, LIMITS, template_kwargs={"enable_thinking": False})
    found = encoded(renderer, row_of(ASK, message))
    assert tokenizer.decode(found.prompt_ids.tolist()).endswith("assistant\n<think>\n\n</think>\n\n")
    assert supervised_text(tokenizer, found) == "42<|im_end|>"
    assert "thought_hidden" in found.notes


def test_thoughts_that_the_template_keeps_only_before_the_answer() -> None:
    """T2: a prompt as generation sees it, though finished conversations lack its thought."""
    tokenizer = family_tokenizer("gptoss")
    before = (ASK, call(thinking="I must."), {"role": "tool", "content": "done"})
    found = encoded(Renderer(tokenizer, LIMITS), row_of(*before, answer("It is on.", thinking="Good.")))
    assert "I must." in tokenizer.decode(found.prompt_ids.tolist())
    assert supervised_text(tokenizer, found) == (
        "<|channel|>analysis<|message|>Good.<|end|><|start|>assistant<|channel|>final<|message|>It is on.<|return|>")
    assert not found.notes


@pytest.mark.parametrize(("family", "messages"), [
    ("r1", (ASK, answer("42", reasoning_content="Six."))),
    ("llama31", (ASK, answer("42", reasoning_content="Six."))),
    ("llama31", (ASK, answer("42", reasoning="Six."))),
    ("gemma", (ASK, answer("42", thinking="Six."))),
    ("llama31", (ASK, answer("42", reasoning_content="Six."), MORE, answer("43")))])
def test_a_thought_that_is_not_shown_is_a_warning(family: str, messages: tuple[Message, ...]) -> None:
    """T5: of the run, with the count, the place and what to do."""
    found = encoded(Renderer(family_tokenizer(family), LIMITS), row_of(*messages))
    (text,) = [text for text in Audit("f", rows=[found]).notices() if "thought of 1 row is not trained" in text]
    assert "first f:1" in text
    assert "<think>...</think>" in text
    assert [one.severity for one in find_in_rows([found]) if one.name == "thought_hidden"] == ["warning"]


@pytest.mark.parametrize(("family", "messages"), [
    ("qwen3", (ASK, answer("42", reasoning_content="Six.", reasoning="Six."))),
    ("qwen3", (ASK, answer("42", reasoning_content="Old."), MORE, answer("43"))),  # dropped in generation too
    ("qwen3", (ASK, answer("42", reasoning="Old."), MORE, answer("43"))),
    ("gptoss", (ASK, answer("42", thinking="Six."))),
    ("llama31", (ASK, answer("42", reasoning_content=""))),
    ("llama31", (ASK, answer(THOUGHT)))])
def test_a_thought_that_is_shown_is_none(family: str, messages: tuple[Message, ...]) -> None:
    """T5: nothing is lost, so nothing is said."""
    assert not encoded(Renderer(family_tokenizer(family), LIMITS), row_of(*messages)).notes


def test_an_answer_inside_a_thought_is_a_warning() -> None:
    """T5: in the run, with the remedy."""
    found = encoded(Renderer(family_tokenizer("r1"), LIMITS), row_of(*TALKS["no thought"]))
    (text,) = Audit("f", rows=[found]).notices()
    assert text.startswith("a completion of 1 row is inside a thought that it never closes (first f:1)")
    assert "</think>" in text
    assert Audit("f", rows=[found]).to_json()["rows"]["thought_open"] == 1
    assert "thought_open" not in encoded(Renderer(family_tokenizer("qwen35"), LIMITS), row_of(ASK, answer("42"))).notes


def test_a_system_message_that_is_not_shown_is_a_warning() -> None:
    """T5: gpt-oss and others show the first one only; some templates have none."""
    template = TEMPLATES["phi"].replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
    for shown in (False, True):
        tokenizer = family_tokenizer("phi", **({} if shown else {"chat_template": template}))
        found = encoded(Renderer(tokenizer, LIMITS), row_of(*TALKS["system"]))
        assert found.notes == (set() if shown else {"system_hidden"})


@pytest.mark.parametrize("family", ["qwen3", "qwen35", "r1", "gptoss"])
def test_all_turns_of_templates_that_drop_thoughts(family: str) -> None:
    """T2: no sequence holds every turn as generation writes it, so the error names what does."""
    with pytest.raises(DataError, match=r"f:1: .*`tropism convert DATA --to messages --turns all.*--supervise last"):
        Renderer(family_tokenizer(family), LIMITS, "all").encode(row_of(*TALKS["thoughts in turns"]))


@pytest.mark.parametrize("family", ["qwen25", "smollm3", "llama31", "gemma", "phi"])
def test_all_turns_of_templates_that_keep_them(family: str) -> None:
    """T2: one after the other, they are the plain conversation."""
    tokenizer = family_tokenizer(family)
    found: EncodedRow = encoded(Renderer(tokenizer, LIMITS, "all"), row_of(*TALKS["thoughts in turns"]))
    ids = [*found.prompt_ids.tolist(), *found.completions[0].ids.tolist()]
    whole = tokenizer.apply_chat_template(list(TALKS["thoughts in turns"]))["input_ids"]
    assert ids == whole[: len(ids)]
    learned = tokenizer.decode(found.completions[0].ids[found.completions[0].loss_mask].tolist())
    assert learned.count(THOUGHT) == 2
    assert "again" not in learned


@pytest.mark.parametrize("family", [family for family in FAMILIES if added_tokens(family)[1] and family != "r1"])
@pytest.mark.parametrize("where", ["system", "user", "assistant"])
def test_every_token_that_is_not_special_is_itself(family: str, where: str) -> None:
    """T3: in the content of every role, wherever it is."""
    for name in added_tokens(family)[1]:
        for text in (name, f"a {name} b", f"{name}{name}", f"{name}\n\nx"):
            put = {role: text if role == where else "so" for role in ("system", "user", "assistant")}
            check(family, (said("system", put["system"]), said("user", put["user"]), answer(put["assistant"]),
                           MORE, answer("fine")))
            if where != "assistant" or "</think>" not in text:
                check(family, (said("user", put["user"]), answer(put["assistant"])))
