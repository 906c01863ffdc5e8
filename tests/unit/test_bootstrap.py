"""AUC, accuracy and their intervals."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tropism.train.evaluation.bootstrap import RESAMPLES, accuracy, auc, interval, resamples, with_interval

ENTRIES = st.lists(st.tuples(st.integers(-3, 3), st.booleans(), st.integers(0, 3)), min_size=1, max_size=25)


def brute_auc(entries: list[tuple[float, bool, int]]) -> float:
    """Over all pairs of a desirable and an undesirable entry, each as often as it counts."""
    wins = pairs = 0.0
    for score, desirable, count in entries:
        for other, other_desirable, other_count in entries:
            if desirable and not other_desirable:
                pairs += count * other_count
                wins += count * other_count * (1.0 if score > other else 0.5 if score == other else 0.0)
    return wins / pairs if pairs else np.nan


@given(ENTRIES)
def test_auc_is_the_share_of_won_pairs(entries: list[tuple[float, bool, int]]) -> None:
    """DESIGN, Evaluation: ties one half; with and without weights; NaN where a class is absent."""
    scores, desirable, counts = (np.array(column) for column in zip(*entries, strict=True))
    scores = scores.astype(np.float64)
    plain = auc(scores, desirable)
    assert plain.shape == (1,)
    np.testing.assert_allclose(plain[0], brute_auc([(s, d, 1) for s, d, _ in entries]), rtol=0, atol=1e-12)
    weighted = auc(scores, desirable, np.stack([counts, np.ones_like(counts)]).astype(np.float64))
    np.testing.assert_allclose(weighted, [brute_auc(entries), plain[0]], rtol=0, atol=1e-12)


def test_auc_in_numbers() -> None:
    """DESIGN, Evaluation: perfect, reversed, all tied, one class."""
    labels = np.array([True, True, False, False])
    assert auc(np.array([3.0, 2.0, 1.0, 0.0]), labels)[0] == 1.0
    assert auc(np.array([0.0, 1.0, 2.0, 3.0]), labels)[0] == 0.0
    assert auc(np.zeros(4), labels)[0] == 0.5
    assert auc(np.array([1.0, 0.0, 0.0, -1.0]), labels)[0] == 0.875
    assert np.isnan(auc(np.zeros(4), labels | True)[0])
    assert np.isnan(auc(np.zeros(4), labels & False)[0])


@given(ENTRIES)
def test_accuracy_counts_ties_half(entries: list[tuple[float, bool, int]]) -> None:
    """DESIGN, Evaluation: DPO accuracies likewise."""
    margins = np.array([entry[0] for entry in entries], dtype=np.float64)
    wanted = np.mean([1.0 if m > 0 else 0.5 if m == 0 else 0.0 for m in margins])
    np.testing.assert_allclose(accuracy(margins), [wanted], rtol=0, atol=1e-12)


def test_resamples_draw_prompts() -> None:
    """DESIGN, Evaluation: 1000 resamples of prompts: rows of a prompt come and go together; a fixed seed."""
    prompts = ["a", "b", "a", "c", "b"]
    counts = np.concatenate(list(resamples(prompts)))
    assert counts.shape == (RESAMPLES, 5) == (1000, 5)
    np.testing.assert_array_equal(counts[:, 0], counts[:, 2])
    np.testing.assert_array_equal(counts[:, 1], counts[:, 4])
    np.testing.assert_array_equal(counts[:, [0, 1, 3]].sum(axis=1), 3)
    np.testing.assert_array_equal(counts, np.concatenate(list(resamples(prompts))))
    assert len({tuple(line) for line in counts[:, [0, 1, 3]].tolist()}) == 10  # all ways to draw 3 from 3
    np.testing.assert_allclose(counts.mean(axis=0), 1, atol=0.1)


def test_interval_is_the_middle_95_percent() -> None:
    """DESIGN, Evaluation: resamples in which the value does not exist are left out; none at all gives none."""
    assert interval(np.arange(1001.0)) == (25.0, 975.0)
    assert interval(np.array([np.nan, *range(1001)])) == (25.0, 975.0)
    assert interval(np.full(3, np.nan)) is None


def test_keys_of_a_value_with_interval() -> None:
    """K4: `_low` and `_high` beside it; a value that does not exist leaves no key at all."""
    assert with_interval("rewards/auc", np.float64(0.75), np.array([0.5, 0.5])) == {
        "rewards/auc": 0.75, "rewards/auc_low": 0.5, "rewards/auc_high": 0.5}
    assert with_interval("rewards/auc", np.nan, np.array([0.5])) == {}
    assert with_interval("rewards/auc", 0.75, np.array([np.nan])) == {"rewards/auc": 0.75}


@pytest.mark.parametrize("better", [True, False])
def test_the_interval_covers_the_value(better: bool) -> None:
    """DESIGN, Evaluation: on scores that separate well, and on scores that do not."""
    generator = np.random.default_rng(0)
    labels = np.arange(200) % 2 == 0
    scores = generator.normal(size=200) + 2.0 * labels * better
    drawn = np.concatenate([auc(scores, labels, weights) for weights in resamples(range(200))])
    found = with_interval("auc", auc(scores, labels)[0], drawn)
    assert found["auc_low"] < found["auc"] < found["auc_high"]
    assert (found["auc_low"] > 0.5) is better
    assert found["auc_high"] - found["auc_low"] < 0.2
