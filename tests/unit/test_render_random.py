"""Random conversations through tokenizers of every kind: the laws of M1, M2, T1 and T3, whatever people write."""

from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from helpers import EXACT_KINDS, chat, encoded, generation_ids, kind_of_tokenizer, supervised_text
from tropism.data.render import Renderer
from tropism.data.rows import Row
from tropism.data.truncate import Limits

LIMITS = Limits(100_000)
CONTROL = ["<|bos|>", "<|eos|>", "<|pad|>", "<|turn|>", "<|end|>", "<|unk|>"]
SPELLS_ALL = {"byte level", "space runs"}  # kinds whose alphabet has every character and nothing else
KNOWN = ["the", "red kite", " ", "   ", "        ", "\n", "20", ":", "<", "lamp", ", ", "say two"]

UNICODE = st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=8)
PIECES = st.one_of(st.sampled_from(KNOWN), st.sampled_from(CONTROL), UNICODE)
TEXTS = st.lists(PIECES, max_size=6).map("".join)
ANSWERS = TEXTS.filter(str.strip)


@st.composite
def conversations(draw: Any, texts: st.SearchStrategy[str] = TEXTS) -> Row:
    """Two to four messages, then an answer; with a system message, an empty one, or none."""
    turns = draw(st.lists(texts, min_size=1, max_size=3).filter(lambda drawn: len(drawn) % 2 == 1))
    return chat(*turns, system=draw(st.none() | st.just("") | texts), answers=(draw(texts.filter(str.strip)),))


def texts_of(row: Row) -> str:
    return "".join(message["content"] for part in (row.prompt, *row.completions) for message in part)  # type: ignore[index]


TOKENIZERS = {kind: kind_of_tokenizer(kind) for kind in EXACT_KINDS}
RENDERERS = {kind: Renderer(tokenizer, LIMITS) for kind, tokenizer in TOKENIZERS.items()}


@pytest.mark.parametrize("kind", EXACT_KINDS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.filter_too_much])
@given(row=conversations())
@example(row=chat("        ", answers=("  \t x",), system=""))
@example(row=chat("\u2581the", "\u2581", "<|end", answers=("|><|end|>\u2581",)))
@example(row=chat("e\u0301", answers=("\u0301e \U0001f469\u200d\U0001f33e",)))
def test_random_conversations(kind: str, row: Row) -> None:
    """M1, M2, T1, T3: generation's ids before, one terminator behind, and what reads differently is noted."""
    tokenizer = TOKENIZERS[kind]
    found = encoded(RENDERERS[kind], row)
    prompt, answer = found.prompt_ids.tolist(), row.completions[0][0]["content"]  # type: ignore[index]
    special = {tokenizer.convert_tokens_to_ids(name) for name in CONTROL} - {tokenizer.unk_token_id}
    spelt = any(name in texts_of(row) for name in CONTROL)
    assert (found.notes & {"control_spelt"} != set()) == spelt
    if not spelt:
        assert prompt == generation_ids(tokenizer, row)
    turn, end = (tokenizer.convert_tokens_to_ids(name) for name in ("<|turn|>", "<|end|>"))
    assert [i for i in prompt if i in special] == [turn, end] * len(row.prompt) + [turn]
    assert [i for i in found.completions[0].ids.tolist() if i in special] == [end]
    assert found.completions[0].ids[-1] == end
    if "text_changed" not in found.notes:
        assert supervised_text(tokenizer, found) == answer + "<|end|>"
    else:
        assert kind not in SPELLS_ALL


@pytest.mark.parametrize("kind", EXACT_KINDS)
@settings(max_examples=40, suppress_health_check=[HealthCheck.filter_too_much])
@given(row=conversations(st.lists(st.sampled_from(KNOWN + CONTROL), max_size=6).map("".join)))
def test_random_conversations_of_known_characters(kind: str, row: Row) -> None:
    """M1: where the tokenizer can spell all characters, every answer is learned exactly as it is written."""
    found = encoded(RENDERERS[kind], row)
    assert "text_changed" not in found.notes
    answer = row.completions[0][0]["content"]  # type: ignore[index]
    completion = found.completions[0]
    assert supervised_text(TOKENIZERS[kind], found) == answer + "<|end|>"
    assert RENDERERS[kind].text.supervised_text(
        found.prompt_ids.tolist(), completion.ids.tolist(), completion.loss_mask.tolist()) == [answer + "<|end|>"]


@pytest.mark.parametrize("kind", EXACT_KINDS)
@settings(max_examples=40, suppress_health_check=[HealthCheck.filter_too_much])
@given(row=conversations())
@example(row=chat("", "\n", "", answers=("the",)))
def test_random_conversations_with_all_turns(kind: str, row: Row) -> None:
    """M1, T2: with all turns learned, the ids are one for one those of the prompt and its last answer."""
    tokenizer = TOKENIZERS[kind]
    found = encoded(Renderer(tokenizer, LIMITS, "all"), row)
    last = encoded(RENDERERS[kind], row)
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    completion = found.completions[0]
    answers = 1 + sum(message["role"] == "assistant" for message in row.prompt)  # type: ignore[index]
    learned = completion.ids[completion.loss_mask]
    assert learned.tolist().count(end) == answers
    whole = [*found.prompt_ids.tolist(), *completion.ids.tolist()]
    if not found.notes & {"text_changed"} and not last.notes & {"text_changed"}:
        straight = [*last.prompt_ids.tolist(), *last.completions[0].ids.tolist()]
        assert tokenizer.decode(whole) == tokenizer.decode(straight)


@pytest.mark.parametrize("kind", EXACT_KINDS)
@settings(max_examples=40)
@given(text=ANSWERS, before=TEXTS)
def test_pieces_are_the_tokens(kind: str, text: str, before: str) -> None:
    """M1: what is shown token by token has every id once, and adds up to the text where no character is split."""
    reader = RENDERERS[kind].text
    ids, lead = reader.encode(text), reader.encode(before)
    pieces = reader.pieces(ids, lead, [True] * len(ids))
    assert [piece.id for piece in pieces] == ids
    assert all(piece.supervised for piece in pieces)
    assert all(piece.visible.isprintable() for piece in pieces)
    if text.isascii() and before.isascii() and before and kind in SPELLS_ALL:
        assert "".join(piece.text for piece in pieces) == text
