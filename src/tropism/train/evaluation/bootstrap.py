"""AUC and accuracy with bootstrap intervals over prompts."""

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

RESAMPLES = 1000
_CHUNK = 20  # resamples at once: memory stays a few numbers per row
_SEED = 20260101  # fixed: an interval is a function of the scores alone


def auc(scores: Array, desirable: npt.NDArray[np.bool_], weights: Array | None = None) -> Array:
    """Probability that a desirable score exceeds an undesirable one, ties one half.

    Args:
        scores: `[n]`.
        desirable: `[n]`.
        weights: `[r, n]` how often each entry counts in each of r resamples; by default once in one.

    Returns:
        `[r]`; NaN where a class is absent.
    """
    weights = np.ones((1, len(scores))) if weights is None else weights
    _, group = np.unique(scores, return_inverse=True)
    groups = int(group.max()) + 1
    positive = np.zeros((len(weights), groups))
    negative = np.zeros((len(weights), groups))
    for target, chosen in ((positive, desirable), (negative, ~desirable)):
        np.add.at(target.T, group[chosen], weights[:, chosen].T)
    below = np.cumsum(negative, axis=1) - negative
    wins = (positive * (below + 0.5 * negative)).sum(axis=1)
    pairs = positive.sum(axis=1) * negative.sum(axis=1)
    return np.divide(wins, pairs, out=np.full(len(weights), np.nan), where=pairs > 0)


def accuracy(margins: Array, weights: Array | None = None) -> Array:
    """Share of margins above 0, a margin of 0 counted one half; `weights` and the result as in `auc`."""
    weights = np.ones((1, len(margins))) if weights is None else weights
    right = (margins > 0) + 0.5 * (margins == 0)
    return np.asarray((weights * right).sum(axis=1) / weights.sum(axis=1))


def resamples(prompts: Sequence[Hashable]) -> Iterator[Array]:
    """How often each entry counts when its prompts are drawn with replacement: `[chunk, n]`, 1000 rows in all."""
    numbers: dict[Hashable, int] = {}
    of_entry = np.array([numbers.setdefault(prompt, len(numbers)) for prompt in prompts])
    generator = np.random.Generator(np.random.Philox(_SEED))
    for _ in range(RESAMPLES // _CHUNK):
        drawn = generator.integers(0, len(numbers), size=(_CHUNK, len(numbers)))
        counts = np.zeros((_CHUNK, len(numbers)))
        np.add.at(counts, (np.arange(_CHUNK)[:, None], drawn), 1.0)
        yield counts[:, of_entry]


def interval(values: Array) -> tuple[float, float] | None:
    """The middle 95% of resampled values, or None if none of them exists."""
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def with_interval(key: str, value: Any, resampled: Array) -> dict[str, float]:
    """`key`, `key_low` and `key_high`; nothing if the value does not exist."""
    if not np.isfinite(value):
        return {}
    ends = interval(resampled)
    found = {key: float(value)}
    if ends is not None:
        found |= {f"{key}_low": ends[0], f"{key}_high": ends[1]}
    return found
