"""Held-out prompts: never on both sides, and the same whatever the order of the rows."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import row
from tropism.data.rows import EncodedRow, Row
from tropism.data.split import split_by_prompt
from tropism.data.tokenization.render import Renderer
from tropism.data.tokenization.truncate import Limits
from tropism.errors import UsageError

ROWS = st.lists(st.integers(0, 30), min_size=2, max_size=60).filter(lambda prompts: len(set(prompts)) > 1).map(
    lambda prompts: [row([prompt], [1], desirable=True, id=str(n)) for n, prompt in enumerate(prompts)])
FRACTIONS = st.floats(0, 0.99)


@given(ROWS, FRACTIONS)
def test_sides_are_disjoint_and_complete(rows: list[EncodedRow], fraction: float) -> None:
    """DESIGN, Evaluation: ceil(fraction x prompts) are held out, at least one on each side; order is kept."""
    train, held_out = split_by_prompt(rows, fraction)
    assert sorted((r.id for r in (*train, *held_out)), key=int) == [r.id for r in rows]
    for side in (train, held_out):
        assert [r.id for r in side] == sorted((r.id for r in side), key=int)
    keys = [{r.split_key for r in side} for side in (train, held_out)]
    assert not keys[0] & keys[1]
    total = len(keys[0] | keys[1])
    assert len(keys[1]) == min(max(math.ceil(fraction * total), 1), total - 1)


@given(ROWS, FRACTIONS, st.randoms(use_true_random=False))
def test_order_does_not_matter(rows: list[EncodedRow], fraction: float, random) -> None:
    """DESIGN, Evaluation: independent of seed and order; how often a prompt occurs does not matter either."""
    shuffled = [*rows, rows[0]]
    random.shuffle(shuffled)
    assert {r.id for r in split_by_prompt(rows, fraction)[1]} == {r.id for r in split_by_prompt(shuffled, fraction)[1]}


@given(ROWS, st.floats(0.05, 0.5), st.floats(0, 0.4))
def test_a_larger_share_holds_the_smaller(rows: list[EncodedRow], fraction: float, more: float) -> None:
    """DESIGN, Evaluation: the smallest hashes are held out, so a larger share only adds prompts."""
    small, large = (split_by_prompt(rows, share)[1] for share in (fraction, fraction + more))
    assert {r.id for r in small} <= {r.id for r in large}


def test_one_prompt_cannot_be_split() -> None:
    """DESIGN, Evaluation: at least one prompt on each side."""
    with pytest.raises(UsageError, match="--eval-fraction: all rows have the same prompt"):
        split_by_prompt([row([1], [2]), row([1], [3])], 0.5)


def test_conversations_go_by_their_first_user_message(fixture_tokenizer) -> None:
    """DESIGN, Evaluation: a later turn of a conversation holds the answers to its first turn."""
    def key(*contents: str, system: str | None = None, limit: int = 500) -> bytes:
        prompt = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(contents)]
        if system:
            prompt.insert(0, {"role": "system", "content": system})
        encoded = Renderer(fixture_tokenizer, Limits(limit)).encode(
            Row("r", "f:1", tuple(prompt), (({"role": "assistant", "content": "a"},),)))
        assert isinstance(encoded, EncodedRow)
        return encoded.split_key

    assert key("Hi") == key("Hi", "Hello", "more") == key("Hi", system="Be brief.")
    assert key("Hi") != key("Ho", "Hello", "Hi")
    # Truncation comes later and changes nothing: the cut prompts of these two are equal.
    assert key("x" + "y" * 99, limit=40) != key("z" + "y" * 99, limit=40)
