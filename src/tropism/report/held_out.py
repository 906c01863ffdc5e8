"""A metric of several runs on the held-out rows that all of them have, with intervals over the same prompts."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tropism.report.read import Array, RunReport
from tropism.train.evaluation.bootstrap import accuracy, auc, interval, resamples

Key = tuple[Any, ...]
Statistic = Callable[[Array | None], Array]


@dataclass(frozen=True)
class HeldOut:
    """A metric of several runs on common rows.

    Args:
        key: `rewards/auc` or `rewards/accuracies`, which should be high, or `nll/token`, the negative log-likelihood of
            a token, which should be low.
        rows: that all runs have.
        all_rows: no run has others.
        values: of each run.
        drawn: of each run `[1000]`, its values over resampled prompts, the same for all runs.
    """

    key: str
    rows: int
    all_rows: bool
    values: list[float]
    drawn: list[Array]

    @property
    def best(self) -> int:
        """Number of the best run, the first of equal ones."""
        return int(np.argmin(self.values) if self.key == "nll/token" else np.argmax(self.values))

    def interval(self, number: int) -> tuple[float, float]:
        """The 95% interval of a run's value."""
        return _ends(self.drawn[number])

    def difference(self, number: int, other: int) -> tuple[float, float, float]:
        """By how much a run exceeds another one, with its paired interval."""
        return (self.values[number] - self.values[other], *_ends(self.drawn[number] - self.drawn[other]))


def held_out(runs: Sequence[RunReport]) -> HeldOut | None:
    """The metric of runs on their common rows; None if they have no such rows or metric."""
    kinds = {_kind(run) for run in runs}
    if len(kinds) != 1 or (key := kinds.pop()) is None:
        return None
    entries = [_entries(run, key) for run in runs]
    common = [entry for entry in entries[0] if all(entry in own for own in entries)]
    if not common:
        return None
    statistics = [_statistic(key, common, np.array([own[entry] for entry in common])) for own in entries]
    values = [float(statistic(None)[0]) for statistic in statistics]
    if not np.isfinite(values).all():
        return None
    drawn: list[list[Array]] = [[] for _ in runs]
    for weights in resamples([entry[0] for entry in common]):
        for own, statistic in zip(drawn, statistics, strict=True):
            own.append(statistic(weights))
    return HeldOut(key, len(common), all(len(own) == len(common) for own in entries), values,
                   [np.concatenate(own) for own in drawn])


def _kind(run: RunReport) -> str | None:
    scores = run.scores
    if not scores or None in scores["logps_after"]:
        return None
    if None in run.good or None in scores["reward_after"]:
        return "nll/token"
    return "rewards/accuracies" if any(scores["side"]) else "rewards/auc"


def _entries(run: RunReport, kind: str) -> dict[Key, Any]:
    """By prompt, completions and label, with a number for equal rows: the reward, margin, or log-prob and length."""
    scores, after = run.scores, run.scores["reward_after"]
    if kind != "nll/token" and _all_within_rounding(run, kind):
        after = [0.0] * len(after)
    columns = zip(scores["prompt_key"], scores["completion_key"], run.good, strict=True)
    if kind == "rewards/accuracies":
        keys = list(columns)
        rows: list[tuple[Key, Any]] = [((*one[:2], other[1]), reward - lower) for one, other, reward, lower in zip(
            keys[::2], keys[1::2], after[::2], after[1::2], strict=True)]
    else:
        values = after if kind == "rewards/auc" else zip(scores["logps_after"], scores["tokens"], strict=True)
        rows = list(zip(columns, values, strict=True))
    seen: Counter[Key] = Counter()
    found: dict[Key, Any] = {}
    for key, value in rows:
        found[*key, seen[key]] = value
        seen[key] += 1
    return found


def _all_within_rounding(run: RunReport, kind: str) -> bool:
    """Whether the last evaluation counted every reward as 0, as after training with learning rate 0."""
    last = (run.of("eval") or [{}])[-1]
    return all(last.get(f"{kind}{end}") == 0.5 for end in ("", "_low", "_high"))


def _statistic(kind: str, entries: Sequence[Key], values: Array) -> Statistic:
    if kind == "rewards/auc":
        return partial(auc, values, np.array([bool(entry[2]) for entry in entries]))
    return partial(accuracy, values) if kind == "rewards/accuracies" else partial(_nll, values)


def _nll(values: Array, weights: Array | None = None) -> Array:
    """Negative log-prob of a token, `[r]`, from log-probs and lengths `[n, 2]`."""
    totals = (np.ones((1, len(values))) if weights is None else weights) @ values
    return np.asarray(-totals[:, 0] / np.maximum(totals[:, 1], 1.0))


def _ends(values: Array) -> tuple[float, float]:
    return interval(values) or (float("nan"), float("nan"))
