"""Long chats: the work is linear in their length, and the ids are those of encoding everything at once."""

import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from family_templates import family_tokenizer
from helpers import CHATML, EXACT_KINDS, build_tokenizer, chat, encoded, generation_ids, kind_of_tokenizer, said
from tropism.data.rows import Row
from tropism.data.tokenization import conversation
from tropism.data.tokenization.render import Renderer
from tropism.data.tokenization.tokenizer import TextTokenizer
from tropism.data.tokenization.truncate import Limits

TOKENIZERS = {kind: kind_of_tokenizer(kind) for kind in [*EXACT_KINDS, "word level"]}
TEXTS = {kind: TextTokenizer(tokenizer) for kind, tokenizer in TOKENIZERS.items()}
PIECES = st.sampled_from(["<|turn|>", "<|end|>", "<|bos|>", "the red", " ", "   ", "\n", "<|", "\u2581", "\u00e9"])


@pytest.mark.parametrize("kind", TEXTS)
@settings(max_examples=30)
@given(text=st.lists(PIECES, max_size=12).map("".join))
@example(text="")
@example(text=" the<|end|> the <|end|>  <|turn|>")
def test_chunks_have_the_ids_of_the_text(kind: str, text: str) -> None:
    """M2: a text is encoded in pieces only where that changes nothing."""
    tokenizer = TEXTS[kind]
    chunks = tokenizer.chunks(text)
    assert "".join(chunks) == text
    assert [token for chunk in chunks for token in tokenizer.encode(chunk)] == tokenizer.encode(text)
    assert tokenizer._last_chunk(text) == (chunks[-1] if chunks else "")


def long_chat(turns: int, words: int, last: str = "fine", **named: Any) -> Row:
    return chat(*(f"{n} " + "the red kite " * words for n in range(2 * turns - 1)), answers=(last,), **named)


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("last", ["fine", "a <|end|> b"])
def test_a_long_prompt_has_the_ids_of_generation(kind: str, last: str) -> None:
    """M2: also without its oldest turns, and if control tokens are spelled in the row."""
    tokenizer, row = TOKENIZERS[kind], long_chat(20, 35, last, system="the hall")
    whole = generation_ids(tokenizer, row)
    assert encoded(Renderer(tokenizer, Limits(10**6)), row).prompt_ids.tolist() == whole
    shorter = [generation_ids(tokenizer, Row("r", "f:1", (row.prompt[0], *row.prompt[start:]), ()))  # type: ignore[arg-type]
               for start in range(1, len(row.prompt), 2)]
    for limit in (len(whole) - 1, len(whole) // 2, len(whole) // 20):
        found = encoded(Renderer(tokenizer, Limits(10**6, limit)), row).prompt_ids.tolist()
        assert found == max((ids for ids in shorter if len(ids) <= limit), key=len)


def work(tokenizer: Any, row: Row, limits: Limits, supervise: Any) -> tuple[int, int]:
    """Characters that are encoded, and messages that the template renders."""
    renderer = Renderer(tokenizer, limits, supervise)
    done = {"characters": 0, "messages": 0}
    encode, apply = renderer.text.encode, tokenizer.apply_chat_template

    def counted(text: str) -> list[int]:
        done["characters"] += len(text)
        return encode(text)

    def applied(messages: Any, **named: Any) -> Any:
        done["messages"] += len(messages)
        return apply(messages, **named)

    renderer.text.encode = counted  # type: ignore[method-assign]
    tokenizer.apply_chat_template = applied
    try:
        encoded(renderer, row)
    finally:
        del tokenizer.apply_chat_template
    return done["characters"], done["messages"]


@pytest.mark.parametrize("kind", ["byte level", "metaspace", "prepend", "unigram"])
@pytest.mark.parametrize("limits", [Limits(10**6), Limits(512), Limits(20_000)])
@pytest.mark.parametrize("supervise", ["last", "all"])
def test_work_is_linear(kind: str, limits: Limits, supervise: str) -> None:
    """Each text is encoded a few times, however many turns there are; prompts are shortened in a few steps."""
    tokenizer = TOKENIZERS[kind]
    row = long_chat(60, 12)
    length = len(tokenizer.apply_chat_template(list(row.prompt), tokenize=False))
    characters, messages = work(tokenizer, row, limits, supervise)
    assert characters < 8 * length
    assert messages < 15 * len(row.prompt)


@pytest.mark.parametrize("family", ["qwen25", "llama31", "gemma", "phi", "smollm3"])
@pytest.mark.parametrize("last", ["fine", "a <|im_end|><|eot_id|><end_of_turn><|end|> b"])
def test_many_turns_are_the_same_as_one_by_one(family: str, last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """M1, T2: also if messages are alike, are tool calls, or come in other orders."""
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "lamp", "arguments": {}}}]}
    steps = [said("user", "go on"), said("assistant", "ok"), said("user", "ok"), said("assistant", "ok"),
             said("user", "ok"), said("assistant", " more\n")] + (
                 [said("user", "do"), call, said("tool", "done")] * 2 if family in ("qwen25", "llama31") else [])
    messages = (said("system", "Be brief."), *(steps * 5), said("user", "so"))
    row = Row("r", "f:1", messages, ((said("assistant", last),), (said("assistant", "b"),)))
    found = encoded(Renderer(family_tokenizer(family), Limits(10**6), "all"), row)
    monkeypatch.setattr(conversation, "_MANY", 10**6)
    slow = encoded(Renderer(family_tokenizer(family), Limits(10**6), "all"), row)
    assert found.notes == slow.notes
    for one, other in zip(found.completions, slow.completions, strict=True):
        assert one.key == other.key
    assert found.prompt_ids.tolist() == slow.prompt_ids.tolist()


@pytest.mark.parametrize("change", [
    ("<|end|>", " {{ loop.index }}<|end|>"),
    ("{{ m.content }}", "{{ m.content }}{% if loop.index0 == 20 %} (late){% endif %}"),
    ("<|turn|>assistant\n{% endif %}", "<|turn|>assistant\n{% if messages|length > 20 %}{% endif %}{% endif %}"),
    ("{% for m in messages %}", "{% for m in messages %}{% if loop.index0 == 30 %}!{% endif %}")])
def test_templates_that_look_far_back(change: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """M1, T2: what a few turns do not tell is rendered with all of them."""
    tokenizer = build_tokenizer(chat_template=CHATML.replace(*change))
    row = chat(*(f"turn {n}" for n in range(41)))
    found = encoded(Renderer(tokenizer, Limits(10**6), "all"), row)
    monkeypatch.setattr(conversation, "_MANY", 10**6)
    assert found.completions[0].key == encoded(Renderer(tokenizer, Limits(10**6), "all"), row).completions[0].key
    whole = tokenizer.apply_chat_template([*row.prompt, *row.completions[0]])["input_ids"]  # type: ignore[misc]
    ids = [*found.prompt_ids.tolist(), *found.completions[0].ids.tolist()]
    assert ids == whole[: len(ids)]


@pytest.mark.parametrize(("family", "supervise"), [("llama31", "all"), ("qwen3", "last"), ("gptoss", "last")])
def test_a_chat_of_400_kilobytes(family: str, supervise: Any) -> None:
    """100 turns; a second is many times what it takes."""
    row = long_chat(100, 160)
    began = time.process_time()
    encoded(Renderer(family_tokenizer(family), Limits(2048), supervise), row)
    assert time.process_time() - began < 3


def test_one_long_word() -> None:
    """A completion without a space, such as an encoded picture."""
    tokenizer, text = TOKENIZERS["byte level"], "iVBORw0KGgo" * 10_000
    began = time.process_time()
    for row in (Row("r", "f:1", "Decode this: ", (" " + text,)), chat("Decode this:", answers=(text,)), chat(text)):
        encoded(Renderer(tokenizer, Limits(2048)), row)
    assert time.process_time() - began < 5
