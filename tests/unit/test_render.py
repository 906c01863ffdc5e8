"""Text to token ids: what is supervised reads back as what was written, and nothing else opens or ends a turn."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import processors

from helpers import (
    CHATML,
    EXACT_KINDS,
    build_tokenizer,
    case_rows,
    case_yaml,
    chat,
    encoded,
    expected,
    generation_ids,
    kind_of_tokenizer,
    said,
    supervised_text,
    tokenizer_kinds,
)
from tropism.data.rows import Dropped, Reason, Row
from tropism.data.tokenization.render import Renderer
from tropism.data.tokenization.truncate import Limits
from tropism.errors import DataError, ModelError

LIMITS = Limits(100_000)


# --- plain text ------------------------------------------------------------------------------------------------------


def test_case_13_pad_is_eos() -> None:
    """M4: the terminator counts even where the padding token has the same id."""
    tokenizer = build_tokenizer(pad_token="<|eos|>")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    renderer = Renderer(tokenizer, LIMITS)
    for raw in case_rows("13-pad-is-eos.jsonl"):
        record, wanted = raw.record, expected("13")[raw.record["id"]]
        row = encoded(renderer, Row(record["id"], raw.place, record["prompt"], (record["completion"],)))
        assert row.completions[0].length == wanted["supervised"]
        assert row.completions[0].ids[-1] == wanted["last_label_id"]
        assert supervised_text(tokenizer, row) == record["completion"] + "<|eos|>"
        assert tokenizer.decode(row.prompt_ids.tolist()) == record["prompt"]


VARIANTS = {"auto_bos_on": {"auto_bos": True}, "auto_bos_off": {}, "bos_token_is_null": {"bos_token": None}}


@pytest.mark.parametrize("variant", VARIANTS)
def test_case_14_plain_row(variant: str) -> None:
    """T1: exactly one EOS, supervised; the BOS exactly where the tokenizer itself puts one."""
    tokenizer = build_tokenizer(**VARIANTS[variant])
    plain = case_yaml("14-bos-eos-once.yaml")["plain_row"]
    renderer = Renderer(tokenizer, LIMITS)
    row = encoded(renderer, Row("p", "f:1", plain["prompt"], (plain["completion"],)))
    assert row.prompt_ids.tolist() == tokenizer(plain["prompt"])["input_ids"]
    ids = [*row.prompt_ids.tolist(), *row.completions[0].ids.tolist()]
    assert ids.count(0) == (1 if variant == "auto_bos_on" else 0)
    assert ids.count(1) == 1
    assert ids[-1] == 1
    assert supervised_text(tokenizer, row) == "Seven.<|eos|>"
    assert renderer.stop_ids == {1}


def test_tokenizer_that_adds_an_eos() -> None:
    """T1: what a tokenizer would put behind a text does not stand between prompt and completion."""
    tokenizer = build_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A <|eos|>", special_tokens=[("<|bos|>", 0), ("<|eos|>", 1)])
    row = encoded(Renderer(tokenizer, LIMITS), Row("p", "f:1", "Ready? ", ("Yes",)))
    assert tokenizer.decode(row.prompt_ids.tolist()) == "<|bos|>Ready? "
    assert supervised_text(tokenizer, row) == "Yes<|eos|>"
    # An empty prompt still has the BOS to predict from, and only that.
    row = encoded(Renderer(tokenizer, LIMITS), Row("p", "f:1", "", ("Yes",)))
    assert row.prompt_ids.tolist() == [0]


def test_a_prompt_that_spells_its_bos() -> None:
    """T1: text that a template rendered earlier begins with the BOS; the tokenizer's own does not come on top."""
    tokenizer = build_tokenizer(auto_bos=True)
    for text in ("<|bos|><|turn|>user\nHi<|end|>\n", "<|turn|>user\nHi<|end|>\n"):
        row = encoded(Renderer(tokenizer, LIMITS), Row("p", "f:1", text, ("Yes",)))
        assert tokenizer.decode(row.prompt_ids.tolist()) == "<|bos|><|turn|>user\nHi<|end|>\n"
        assert supervised_text(tokenizer, row) == "Yes<|eos|>"


def test_limits_stored_with_a_tokenizer_do_not_act() -> None:
    """D1: the only limits are ours; a file that says `truncate at 4` would cut in silence."""
    tokenizer = build_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=64)
    found = encoded(Renderer(tokenizer, LIMITS), chat("What is it?", answers=("A red kite",)))
    assert tokenizer.decode(found.prompt_ids.tolist()) == (
        "<|bos|><|turn|>user\nWhat is it?<|end|>\n<|turn|>assistant\n")
    assert supervised_text(tokenizer, found) == "A red kite<|end|>"
    plain = encoded(Renderer(tokenizer, LIMITS), Row("p", "f:1", "What is it? ", ("A red kite",)))
    assert tokenizer.decode(plain.prompt_ids.tolist()) == "What is it? "


def test_empty_prompt_without_bos_is_dropped(fixture_tokenizer) -> None:
    """D1: there is no token to predict the first one from; with a BOS there is."""
    dropped = Renderer(fixture_tokenizer, LIMITS).encode(Row("e5", "f:5", "", ("Ready.", "Not ready.")))
    assert isinstance(dropped, Dropped)
    assert dropped.reason == Reason.EMPTY_PROMPT
    row = encoded(Renderer(build_tokenizer(auto_bos=True), LIMITS), Row("e5", "f:5", "", ("Ready.", "Not ready.")))
    assert row.prompt_ids.tolist() == [0]


@pytest.mark.parametrize("record", [
    {"prompt": "", "chosen": "Oslo ", "rejected": "Bern"},
    {"prompt": "Is the tide in? ", "chosen": "The tide is in.", "rejected": "The tide is out."},
])
def test_plain_pairs_byte_for_byte(record: dict[str, str]) -> None:
    """M1, M2: trailing blanks stay, shared opening words stay in both answers, and the prompt ids are shared."""
    tokenizer = build_tokenizer(auto_bos=True)
    row = encoded(Renderer(tokenizer, LIMITS),
                  Row("x", "f:1", record["prompt"], (record["chosen"], record["rejected"])))
    assert tokenizer.decode(row.prompt_ids.tolist()) == "<|bos|>" + record["prompt"]
    assert supervised_text(tokenizer, row, 0) == record["chosen"] + "<|eos|>"
    assert supervised_text(tokenizer, row, 1) == record["rejected"] + "<|eos|>"


@pytest.mark.parametrize("kind", EXACT_KINDS)
@pytest.mark.parametrize(("prompt", "answer"), [
    ("Name a root vegetable.", " Parsnip."), ("Name the ", "red kite"), ("Name the", "  two blanks\n"),
    ("the", "the"), ("say: ", "\n\nred"), ("th", "e red"),
    ("say", " red , the kite .")])
def test_plain_border(kind: str, prompt: str, answer: str) -> None:
    """M1: tokens that would merge over the border never move text from one side to the other."""
    tokenizer = kind_of_tokenizer(kind)
    row = encoded(Renderer(tokenizer, LIMITS), Row("p", "f:1", prompt, (answer,)))
    assert row.prompt_ids.tolist() == tokenizer(prompt)["input_ids"]
    assert supervised_text(tokenizer, row) == answer + "<|eos|>"
    assert not row.notes


def test_unknown_characters_are_noted(fixture_tokenizer) -> None:
    """M1: where the tokenizer cannot spell a text, the row says so instead of passing silently."""
    renderer = Renderer(fixture_tokenizer, LIMITS)
    assert encoded(renderer, Row("u", "f:1", "Name: ", ("naïve",))).notes == {"text_changed"}
    assert not encoded(renderer, Row("u", "f:1", "Name: ", ("naive",))).notes


# --- chat templates --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("letter", ["A", "B", "C"])
def test_case_14_templates(letter: str, variant: str) -> None:
    """T1, M1: one BOS at most, one terminator, its own where the template has one; and with a BOS-adding tokenizer."""
    case = case_yaml("14-bos-eos-once.yaml")
    name = next(name for name in case["templates"] if name.startswith(letter))
    tokenizer = build_tokenizer(chat_template=case["templates"][name], **VARIANTS[variant])
    renderer = Renderer(tokenizer, LIMITS)
    row = Row("r", "f:1", tuple(case["messages"][:1]), (tuple(case["messages"][1:]),))
    found = encoded(renderer, row)
    assert found.prompt_ids.tolist() == generation_ids(tokenizer, row)
    ids = [*found.prompt_ids.tolist(), *found.completions[0].ids.tolist()]
    assert None not in ids
    bos = 0 if letter == "B" or variant == "bos_token_is_null" else 1
    assert ids.count(0) == bos
    terminator = {"A": "<|eos|>", "B": "<|eos|>", "C": "<|end|>"}[letter]
    assert supervised_text(tokenizer, found) == "Seven." + terminator
    assert ids.count(1) == (0 if letter == "C" else 1)
    assert ids.count(4) == (2 if letter == "C" else 0)
    assert found.notes == ({"eos_added"} if letter == "B" else set())
    assert renderer.stop_ids == {tokenizer.convert_tokens_to_ids(terminator)}
    if variant != "bos_token_is_null":
        rendered = tokenizer.apply_chat_template(case["messages"], add_generation_prompt=False)["input_ids"]
        assert len(rendered) == expected("14")[name]["rendered_tokens"]
        assert bos == expected("14")[name]["bos_in_render"]


@pytest.mark.parametrize("supervise", ["last", "all"])
@pytest.mark.parametrize("number", [0, 1])
def test_case_15_multi_turn(fixture_tokenizer, supervise: str, number: int) -> None:
    """M1, T2, T3: the last turn or all turns are supervised; a spelled control token is neither a turn nor an end."""
    messages = case_rows("15-multiturn-assistant-mask.jsonl")[number].record["messages"]
    wanted = expected("15")["m1" if number == 0 else "m2"]
    renderer = Renderer(fixture_tokenizer, LIMITS, supervise)
    row = encoded(renderer, Row("m", "f:1", tuple(messages[:-1]), (tuple(messages[-1:]),)))
    completion = row.completions[0]
    spans: list[list[int]] = []
    for position, token in enumerate(completion.ids.tolist()):
        if completion.loss_mask[position]:
            if position == 0 or not completion.loss_mask[position - 1]:
                spans.append([])
            spans[-1].append(token)
    texts = [fixture_tokenizer.decode(span) for span in spans]
    if supervise == "all":
        assert texts == wanted["supervised_all_turns"]
        assert completion.length == wanted["supervised_tokens_all_turns"]
    else:
        assert texts == [wanted["supervised_last_turn_only"]]
        assert row.prompt_ids.tolist() == generation_ids(
            fixture_tokenizer, Row("m", "f:1", tuple(messages[:-1]), ())) or number == 1
    # All turns are kept, in order, and only real ones have control tokens.
    ids = [*row.prompt_ids.tolist(), *completion.ids.tolist()]
    assert ids.count(3) == wanted["real_turns"]
    rendered = fixture_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
    assert fixture_tokenizer.decode(ids) == rendered.rstrip("\n")


@pytest.mark.parametrize("kind", EXACT_KINDS)
def test_conversation_ids_are_those_of_generation(kind: str) -> None:
    """M1, M2, T2: for every kind of tokenizer, prompt ids as generation gets them, and answers that read back."""
    tokenizer = kind_of_tokenizer(kind)
    row = chat("say two  words:", "red kite", "the lamp\n is cold; ", system="the hall  lamp",
               answers=("the kite is red", " two  words:\n"))
    found = encoded(Renderer(tokenizer, LIMITS), row)
    assert found.prompt_ids.tolist() == generation_ids(tokenizer, row)
    assert supervised_text(tokenizer, found, 0) == "the kite is red<|end|>"
    assert supervised_text(tokenizer, found, 1) == " two  words:\n<|end|>"


def test_answers_that_a_template_trims(fixture_tokenizer) -> None:
    """M1: supervised is what the template renders, which may trim."""
    tokenizer = build_tokenizer(chat_template=CHATML.replace("m.content }}", "m.content | trim }}"))
    found = encoded(Renderer(tokenizer, LIMITS), chat("Hi", answers=("  Oslo \n", "Bern")))
    assert supervised_text(tokenizer, found, 0) == "Oslo<|end|>"
    assert supervised_text(tokenizer, found, 1) == "Bern<|end|>"
    assert found.notes == {"text_changed"}
    assert not encoded(Renderer(tokenizer, LIMITS), chat(" Hi ", answers=("Oslo", "Bern"))).notes


def test_a_template_that_trims_and_ends_nothing() -> None:
    """M1, T1: the trimmed answer and one EOS; the line end between turns is not part of it."""
    template = "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}" + (
        "{% if add_generation_prompt %}assistant: {% endif %}")
    tokenizer = build_tokenizer(chat_template=template)
    found = encoded(Renderer(tokenizer, LIMITS), chat("Hi", answers=(" Oslo \n",)))
    assert supervised_text(tokenizer, found) == "Oslo<|eos|>"
    assert found.notes == {"eos_added", "text_changed"}


def test_tool_calls_belong_to_the_answer() -> None:
    """M1, T4: added tokens that are not special stand inside an answer; its end is the first special one behind it."""
    tokenizer = kind_of_tokenizer("byte level", CHATML.replace(
        "<|end|>", "{% for call in m.tool_calls %}<call>{{ call.name }}</call>{% endfor %}<|end|>"))
    tokenizer.add_tokens(["<call>", "</call>"])
    answer = {"role": "assistant", "content": "on it", "tool_calls": [{"name": "lamp"}]}
    row = Row("r", "f:1", (said("user", "Dim it"),), ((answer,),))
    found = encoded(Renderer(tokenizer, LIMITS), row)
    assert supervised_text(tokenizer, found) == "on it<call>lamp</call><|end|>"
    assert tokenizer.convert_tokens_to_ids("<call>") in found.completions[0].ids


def test_generation_prompt_with_text_of_its_own() -> None:
    """M1: a generation prompt that opens a thought is given, not learned; a finished answer that lacks it is found."""
    template = CHATML.replace("<|turn|>assistant\n{% endif %}", "<|turn|>assistant\n<think>\n\n</think>\n\n{% endif %}")
    tokenizer = build_tokenizer(chat_template=template)
    row = chat("assistant?", answers=("assistant", "user"))
    found = encoded(Renderer(tokenizer, LIMITS), row)
    assert found.prompt_ids.tolist() == generation_ids(tokenizer, row)
    assert tokenizer.decode(found.prompt_ids.tolist()).endswith("<think>\n\n</think>\n\n")
    assert supervised_text(tokenizer, found, 0) == "assistant<|end|>"
    assert supervised_text(tokenizer, found, 1) == "user<|end|>"


def test_a_template_may_refuse(fixture_tokenizer) -> None:
    """M5: its own sentence reaches the user with the place; no template at all is named as the fault."""
    refusing = build_tokenizer(chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match=r"f:1: the chat template rejects these messages: roles must alternate"):
        Renderer(refusing, LIMITS).encode(chat("Hi"))
    with pytest.raises(ModelError, match="no chat template"):
        Renderer(build_tokenizer(chat_template=None), LIMITS).encode(chat("Hi"))
    with pytest.raises(ModelError, match="no EOS token"):
        Renderer(build_tokenizer(eos_token=None), LIMITS)


def test_a_conversation_without_prompt_is_dropped_even_by_a_strict_template() -> None:
    """D1: nothing to predict from; templates that want a first message are not asked."""
    tokenizer = build_tokenizer(chat_template="{{ messages[0].content.upper() }}" + CHATML)
    dropped = Renderer(tokenizer, LIMITS).encode(Row("r", "f:1", (), ((said("assistant", "Hi"),),)))
    assert isinstance(dropped, Dropped)
    assert dropped.reason == Reason.EMPTY_PROMPT


def test_tools_reach_the_prompt_as_given(fixture_tokenizer) -> None:
    """T4: the schemas with the keys that the user gave, for each side the same."""
    tools = ({"name": "pond_depth", "parameters": {"unit": {"type": "string", "enum": ["m", "ft"]}}},)
    row = chat("How deep?", answers=("2 m", "3 m"), tools=tools)
    found = encoded(Renderer(fixture_tokenizer, LIMITS), row)
    assert found.prompt_ids.tolist() == generation_ids(fixture_tokenizer, row)
    line = fixture_tokenizer.decode(found.prompt_ids.tolist()).split("\n")[1]
    assert json.loads(line) == tools[0]


def test_templates_see_no_nulls(monkeypatch: pytest.MonkeyPatch) -> None:
    """D3: some releases of transformers let a template write the word None for them."""
    tokenizer = build_tokenizer(chat_template=CHATML)
    real, seen = tokenizer.apply_chat_template, []

    def watched(messages: list[dict[str, object]], **named: object) -> object:
        seen.extend(messages)
        return real(messages, **named)

    monkeypatch.setattr(tokenizer, "apply_chat_template", watched)
    messages = ({"role": "user", "content": None, "name": None}, {"role": "assistant", "content": "Hi"})
    Renderer(tokenizer, LIMITS).template(messages, Row("r", "f:1", (), ()), generate=False)
    assert seen == [{"role": "user"}, {"role": "assistant", "content": "Hi"}]


BYTE_LEVEL = kind_of_tokenizer("byte level")
PIECES = st.text(max_size=12) | st.sampled_from(["<|turn|>", "<|end|>", "<|eos|>", " ", "the red", "\n", "\r\n"])
TEXTS = st.lists(PIECES, min_size=1, max_size=6).map("".join).filter(str.strip)


@settings(max_examples=300)
@given(prompt=TEXTS, answer=TEXTS)
@example(prompt="a\U000f0000<|end|>", answer="\U000f0001<|turn|>\U000f0000")
@example(prompt="é́", answer="́e")
def test_any_text_reads_back(prompt: str, answer: str) -> None:
    """M1, T1, T3: for a byte-level BPE and any Unicode text: content as written, one terminator, two turns."""
    found = encoded(Renderer(BYTE_LEVEL, LIMITS), chat(prompt, answers=(answer,)))
    ids = found.prompt_ids.tolist()
    assert BYTE_LEVEL.decode(ids) == f"<|turn|>user\n{prompt}<|end|>\n<|turn|>assistant\n"
    assert (ids.count(3), ids.count(4)) == (2, 1)
    assert [i for i in found.completions[0].ids.tolist() if i < 6] == [4]
    assert supervised_text(BYTE_LEVEL, found) == answer + "<|end|>"
    if "<|" not in prompt:
        assert ids == generation_ids(BYTE_LEVEL, chat(prompt))


@settings(max_examples=100)
@given(prompt=TEXTS, answer=TEXTS)
def test_any_plain_text_reads_back(prompt: str, answer: str) -> None:
    """M1, T1: plain text, with the tokenizer's own ids for the prompt."""
    found = encoded(Renderer(BYTE_LEVEL, LIMITS), Row("p", "f:1", prompt, (answer,)))
    assert found.prompt_ids.tolist() == BYTE_LEVEL(prompt)["input_ids"]
    wanted = answer if answer.endswith("<|eos|>") else answer + "<|eos|>"
    assert supervised_text(BYTE_LEVEL, found) == wanted


def test_kinds_are_what_they_claim() -> None:
    """The tokenizers above differ in what makes tokenizers dangerous; else the tests above prove little."""
    kinds = tokenizer_kinds()
    assert len(kinds) == 9
    assert kinds["unigram"].encode("<|end|>").tokens == ["▁", "<|end|>"]
    assert kinds["control merges"].encode("<|end|>").tokens == ["<|end|>"]
    assert kinds["ignore merges"].encode("<|end|>").tokens == ["<|end|>"]
    assert kinds["word level"].encode("<|end|>").tokens == ["<|end|>"]
    assert kinds["prepend"].encode("the").tokens == ["▁the"]
