"""Long chats: the work is linear in their length, and the ids are those of encoding everything at once."""

import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from family_templates import family_tokenizer
from helpers import EXACT_KINDS, chat, encoded, generation_ids, kind_of_tokenizer
from tropism.data.rows import Row
from tropism.data.tokenization.render import Renderer
from tropism.data.tokenization.tokenizer import TextTokenizer
from tropism.data.tokenization.truncate import Limits

TOKENIZERS = {kind: kind_of_tokenizer(kind) for kind in [*EXACT_KINDS, "word level"]}
TEXTS = {kind: TextTokenizer(tokenizer) for kind, tokenizer in TOKENIZERS.items()}
PIECES = st.sampled_from(["<|turn|>", "<|end|>", "<|bos|>", "the red", " ", "   ", "\n", "<|", "\u2581", "\u00e9"])


@pytest.mark.parametrize("kind", TEXTS)
@settings(max_examples=60)
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
    tokenizer, row = TOKENIZERS[kind], long_chat(30, 30, last, system="the hall")
    whole = generation_ids(tokenizer, row)
    assert encoded(Renderer(tokenizer, Limits(10**6)), row).prompt_ids.tolist() == whole
    for limit in (len(whole) - 1, len(whole) // 2, len(whole) // 20):
        found = encoded(Renderer(tokenizer, Limits(10**6, limit)), row).prompt_ids.tolist()
        shorter = [generation_ids(tokenizer, Row("r", "f:1", (row.prompt[0], *row.prompt[start:]), ()))  # type: ignore[arg-type]
                   for start in range(1, len(row.prompt), 2)]
        assert found == max((ids for ids in shorter if len(ids) <= limit), key=len)


def work(tokenizer: Any, row: Row, limits: Limits, supervise: Any) -> tuple[int, int]:
    """Characters that are encoded, and times that the template is applied."""
    renderer = Renderer(tokenizer, limits, supervise)
    done = {"characters": 0, "renderings": 0}
    encode, apply = renderer.text.encode, tokenizer.apply_chat_template

    def counted(text: str) -> list[int]:
        done["characters"] += len(text)
        return encode(text)

    def applied(*given: Any, **named: Any) -> Any:
        done["renderings"] += 1
        return apply(*given, **named)

    renderer.text.encode = counted  # type: ignore[method-assign]
    tokenizer.apply_chat_template = applied
    try:
        encoded(renderer, row)
    finally:
        del tokenizer.apply_chat_template
    return done["characters"], done["renderings"]


@pytest.mark.parametrize("kind", ["byte level", "metaspace", "prepend", "unigram"])
@pytest.mark.parametrize("limits", [Limits(10**6), Limits(512), Limits(20_000)])
@pytest.mark.parametrize("supervise", ["last", "all"])
def test_work_is_linear(kind: str, limits: Limits, supervise: str) -> None:
    """Each text is encoded a few times, however many turns there are; prompts are shortened in a few steps."""
    tokenizer = TOKENIZERS[kind]
    row = long_chat(60, 60)
    length = len(tokenizer.apply_chat_template(list(row.prompt), tokenize=False))
    characters, renderings = work(tokenizer, row, limits, supervise)
    assert characters < 8 * length
    assert renderings < (12 if supervise == "last" else 2 * 60 + 12)


@pytest.mark.parametrize(("family", "supervise"), [("llama31", "all"), ("qwen3", "last"), ("gptoss", "last")])
def test_a_chat_of_400_kilobytes(family: str, supervise: Any) -> None:
    """100 turns; a second is many times what it takes."""
    row = long_chat(100, 160)
    began = time.process_time()
    encoded(Renderer(family_tokenizer(family), Limits(2048), supervise), row)
    assert time.process_time() - began < 3


def test_one_long_word() -> None:
    """A completion without a space, such as an encoded picture."""
    tokenizer, text = TOKENIZERS["byte level"], "iVBORw0KGgo" * 20_000
    began = time.process_time()
    for row in (Row("r", "f:1", "Decode this: ", (" " + text,)), chat("Decode this:", answers=(text,)), chat(text)):
        encoded(Renderer(tokenizer, Limits(2048)), row)
    assert time.process_time() - began < 5
