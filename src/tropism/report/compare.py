"""Several runs side by side: options that differ, and how often each ranks the same held-out pairs rightly."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tropism.report.read import Array, RunReport, plain
from tropism.train.evaluation.bootstrap import accuracy, interval, resamples

_MOST_PAIRS = 100  # of the completions of a prompt
_NOT_COMPARED = ("output", "resume", "report", "store", "log_dir")


@dataclass(frozen=True)
class PairAccuracy:
    """The share of common held-out pairs whose chosen side has the larger reward after training.

    Args:
        value, low, high: with the 95% interval over resampled prompts.
        difference: from the first run, with its paired interval; None for the first run.
    """

    value: float
    low: float
    high: float
    difference: tuple[float, float, float] | None


def differing_options(runs: Sequence[RunReport]) -> list[tuple[str, list[str]]]:
    """Options whose values differ, each with its value in every run; `-` where a run has no such option."""
    names = list(dict.fromkeys(name for run in runs for name in run.options))
    found = []
    for name in names:
        values = [plain(run.options[name]) if name in run.options else "-" for run in runs]
        if name not in _NOT_COMPARED and len(set(values)) > 1:
            found.append((name, values))
    return found


def pair_accuracies(runs: Sequence[RunReport]) -> tuple[int, list[PairAccuracy]]:
    """Number of the held-out pairs that all runs have, and the accuracy of each run; none without such pairs.

    A pair is two completions of one prompt, one of them chosen or desirable, the other rejected or undesirable. A tie
    counts one half.
    """
    margins = [_margins(run) for run in runs]
    common = sorted(set.intersection(*(set(own) for own in margins)))
    if not common:
        return 0, []
    values = [np.array([own[pair] for pair in common]) for own in margins]
    weights = list(resamples([pair[0] for pair in common]))
    drawn = [np.concatenate([accuracy(own, weight) for weight in weights]) for own in values]
    exact = [float(accuracy(own)[0]) for own in values]
    found = []
    for number, value in enumerate(exact):
        difference = None if number == 0 else (value - exact[0], *_ends(drawn[number] - drawn[0]))
        found.append(PairAccuracy(value, *_ends(drawn[number]), difference))
    return len(common), found


def _ends(values: Array) -> tuple[float, float]:
    found = interval(values)
    assert found is not None  # accuracies are finite
    return found


def _margins(run: RunReport) -> dict[tuple[int, int, int], float]:
    """Reward of the chosen minus that of the rejected side, by prompt and both completions."""
    scores, good = run.scores, run.good
    rewards: list[Any] = scores.get("reward_after", [])
    if not rewards or None in good or None in rewards:
        return {}
    sides: dict[int, tuple[dict[int, float], dict[int, float]]] = defaultdict(lambda: ({}, {}))
    for prompt, completion, reward, chosen in zip(scores["prompt_key"], scores["completion_key"], rewards, good,
                                                  strict=True):
        sides[prompt][not chosen][completion] = reward
    pairs = {}
    if any(scores["side"]):  # pairs as they are
        keys = list(zip(scores["prompt_key"], scores["completion_key"], rewards, strict=True))
        for (prompt, one, reward), (_, other, lower) in zip(keys[::2], keys[1::2], strict=True):
            pairs[prompt, one, other] = reward - lower
        return pairs
    for prompt, (liked, disliked) in sides.items():
        every = [(one, other) for one in liked for other in disliked if one != other][:_MOST_PAIRS]
        pairs |= {(prompt, one, other): liked[one] - disliked[other] for one, other in every}
    return pairs
