"""The sample of stored scores that is computed again: how it is drawn, and what counts as a difference."""

from typing import Any

import numpy as np
import pytest

from helpers import tree
from tropism.train.frozen import sample
from tropism.train.frozen.sample import draw, total_variation

TREES = [tree([3, *range(10, 10 + n)], [20 + n, 1], [40 + n, 41, 1]) for n in range(30)]
ALL = {key for one in TREES for key in one.score_keys}


def test_a_sample_is_small_distinct_and_stored() -> None:
    """At most 2,048 tokens; nothing that was computed just now; each completion has its own prompt."""
    stored = {key for one in TREES[5:] for key in one.score_keys}
    chosen = draw(TREES, stored)
    keys = [one.score_keys[0] for one in chosen]
    assert len(set(keys)) == len(keys) == 50
    assert set(keys) <= stored
    assert all(len(one.completions) == 1 for one in chosen)
    assert sum(one.tokens for one in draw(TREES * 99, ALL)) <= 2048


def test_a_sample_has_an_upper_size() -> None:
    many = [tree([3, n], [4, 1]) for n in range(300)]
    assert len(draw(many, {key for one in many for key in one.score_keys})) == 64


def test_a_sample_stays_within_its_tokens() -> None:
    """Short completions fill what long ones leave; where none fits, one is taken all the same."""
    long = [tree([3] * 1500, [n, 1]) for n in range(9)]
    short = [tree([3, 4], [n, 1]) for n in range(9)]
    chosen = draw(long + short, {key for one in long + short for key in one.score_keys})
    assert sum(one.tokens for one in chosen) <= 2048
    assert len(chosen) == 10
    longer = [tree([3] * 3000, [n, 1], [n + 20, 1]) for n in range(9)]
    assert len(draw(longer, {key for one in longer for key in one.score_keys})) == 1


def test_nobody_can_know_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not repeat, and leaves the generators alone that training uses."""
    import random

    import torch

    monkeypatch.setattr(sample, "_MOST", 8)
    before = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].tolist()
    drawn = {tuple(one.score_keys[0] for one in draw(TREES, ALL)) for _ in range(5)}
    assert len(drawn) == 5
    assert (random.getstate(), np.random.get_state()[1].tolist()) == (before[0], before[2])
    assert torch.equal(torch.get_rng_state(), before[1])


def test_there_may_be_nothing_to_sample() -> None:
    assert draw([], ALL) == []
    assert draw(TREES, set()) == []


# --- most likely tokens -----------------------------------------------------------------------------------------------


def entry(*tokens: dict[int, float], dtype: Any = np.float32) -> Any:
    """Ids by falling probability, and the rest, for each token."""
    ids = np.array([sorted(one, key=lambda name: -one[name]) for one in tokens])
    logps = np.log(np.array([[one[name] for name in row] for one, row in zip(tokens, ids, strict=True)]))
    return ids, logps.astype(dtype), np.log([1 - sum(one.values()) for one in tokens]).astype(dtype)


TOKEN = {7: 0.5, 8: 0.25, 9: 0.125}


@pytest.mark.parametrize(("other", "gap"), [
    (TOKEN, 0.0), ({7: 0.25, 8: 0.5, 9: 0.125}, 0.25), ({7: 0.4, 8: 0.25, 9: 0.125}, 0.1),
    ({7: 0.5, 8: 0.25, 10: 0.125}, 0.0), ({7: 0.5, 8: 0.25, 10: 0.125 + 1e-6}, 0.0)])
def test_how_far_two_teachers_are_apart(other: dict[int, float], gap: float) -> None:
    """The exchange of equally likely tokens at the end of the list is rounding."""
    for one, another in ((TOKEN, other), (other, TOKEN)):
        assert total_variation(entry(one), entry(another)) == pytest.approx(gap, abs=1e-5)


def test_other_tokens_are_far() -> None:
    """Also with flat or repeated ones, and however long the list is."""
    truth = entry(TOKEN, TOKEN)
    for other in ({1: 0.5, 2: 0.25, 3: 0.125}, {1: 0.3, 2: 0.29, 3: 0.28}, {1: 1e-3, 2: 1e-3, 3: 1e-3}):
        assert total_variation(entry(other, other), truth) > 0.3
        assert total_variation(entry(TOKEN, other), truth) > 0.15
    ids, logps, tail = truth
    assert total_variation((np.full_like(ids, 7), logps, tail), truth) == 1.0
    assert total_variation(tuple(part[:1] for part in truth), truth) == 1.0  # type: ignore[arg-type]
