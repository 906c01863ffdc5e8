"""Several models on the same rows: one table, and the differences to the first model with paired intervals."""

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tropism.commands.scoring.figures import figures
from tropism.commands.scoring.own_run import read_run
from tropism.commands.scoring.scores import Scores, score_in
from tropism.config import ScoringOptions
from tropism.data.formats import View
from tropism.data.row_blocks import RowTable
from tropism.data.rows import EncodedRow
from tropism.distributed import connect
from tropism.errors import UsageError, count_of
from tropism.observe.console import Voice
from tropism.train.evaluation.bootstrap import Array, accuracy, auc, resamples, with_interval
from tropism.train.evaluation.row_files import row_keys

Statistic = Callable[[Array | None], Array]
"""The value of a metric, `[r]` for weights `[r, n]` of the rows, or `[1]` without weights."""


@dataclass(frozen=True)
class Difference:
    """By how much a model exceeds the first one in a metric.

    Args:
        model: its name.
        metric: key of the metric.
        values: the difference under `difference`, and `difference_low` and `difference_high`, its 95% interval over
            prompts that are drawn together for both models.
    """

    model: str
    metric: str
    values: dict[str, float]

    def __str__(self) -> str:
        low, high = (self.values.get(f"difference_{end}") for end in ("low", "high"))
        ends = "" if low is None or high is None else f" (95%: {low:+.4f} to {high:+.4f})"
        return f"{self.metric} {self.values['difference'] + 0.0:+.4f}{ends}"

    def to_json(self) -> dict[str, Any]:
        """The entry of the list `differences` in the file of `--json`."""
        return {"model": self.model, "metric": self.metric,
                **{name.replace("difference_", ""): value for name, value in self.values.items()}}


@dataclass(frozen=True)
class Comparison:
    """Several models on the same rows.

    Args:
        models: as they were given.
        scores: of each, for the same rows in the same order.
        figures: metrics of each.
        differences: of all others to the first, metric by metric.
        left_out: rows that a model dropped, and that are left out for all.
    """

    models: Sequence[str]
    scores: Sequence[Scores]
    figures: Sequence[dict[str, float]]
    differences: Sequence[Difference]
    left_out: int

    @property
    def names(self) -> list[str]:
        """A short name of each model, distinct from the others."""
        paths = [Path(model.rstrip("/")).parts or (model,) for model in self.models]
        for count in range(1, max(map(len, paths)) + 1):
            short = ["/".join(path[-count:]) for path in paths]
            if len(set(short)) == len(short):
                return short
        return [f"{number}: {model}" for number, model in enumerate(self.models, start=1)]

    def to_json(self) -> dict[str, Any]:
        """The content of the file of `--json`."""
        return {"rows": len(self.scores[0].rows), "left_out": self.left_out, "data": self.scores[0].source,
                "models": [{"model": model, **scores.options.dump(), "metrics": found}
                           for model, scores, found in zip(self.models, self.scores, self.figures, strict=True)],
                "differences": [one.to_json() for one in self.differences]}


def compare(models: Sequence[str], options: ScoringOptions, voice: Voice | None = None) -> Comparison | None:
    """Score the same rows with several models, one after another. None on other processes than the main one.

    Args:
        models: as for `score`.
        options: for all of them. Those that are not set are each run's own.

    Raises:
        UsageError: if the models are evaluated on different rows, or as different kinds of rows, or one is named twice.
        TropismError: as of `score`.
    """
    if twice := next((model for number, model in enumerate(models) if model in models[:number]), None):
        raise UsageError(f"{twice}: named twice. Remove one.")
    with connect() as world:
        spoken = voice if voice and world.is_main else Voice(loud=world.is_main)
        if options.data is None:
            world.together(lambda: _check_kinds(models, options))
        found: list[Scores] = []
        heard: set[str] = set()
        for model in models:
            found.append(score_in(world, model, options, spoken, heard))
            gc.collect()  # a module has reference cycles: only one is in memory at a time
            world.together(lambda: _check_same_rows(models, found, options))
        if not world.is_main:
            return None
    common, left_out = _common(found)
    differences = [difference for number in range(1, len(common))
                   for difference in _differences(models[number], common[0], common[number])]
    return Comparison(models, common, [figures(scores) for scores in common], differences, left_out)


def show(comparison: Comparison, voice: Voice) -> None:
    """Print the table and the differences."""
    rows = count_of(len(comparison.scores[0].rows), "row")
    if comparison.left_out:
        voice.warn(f"{count_of(comparison.left_out, 'row')} left out, which not all models keep. The losses of runs, "
                   "which depend on all rows, are omitted.")
    names = comparison.names
    voice.side_by_side(f"{rows}, the same for all models", names, comparison.figures)
    for model, name in zip(comparison.models[1:], names[1:], strict=True):
        own = [str(one) for one in comparison.differences if one.model == model]
        if own:
            voice.say(f"{name} minus {names[0]}: {'; '.join(own)}")


Key = tuple[str, str | int]


def _keys(found: Sequence[Scores]) -> list[list[Key]]:
    """What identifies each row of several models: its place and id, or its content if they come from several files."""
    if len({scores.source for scores in found}) == 1:
        return [[(row.place, row.id) for row in scores.rows] for scores in found]
    keys: list[list[Key]] = []
    for scores in found:
        seen: Counter[str] = Counter()
        keys.append([])
        for key in row_keys(scores.rows):
            keys[-1].append((key, seen[key]))  # of equal rows the first, the second, and so on
            seen[key] += 1
    return keys


def _check_kinds(models: Sequence[str], options: ScoringOptions) -> None:
    """Compare the kinds of rows that the runs held out, before any model is loaded."""
    kinds = [(model, run.options.view) for model in models for run in [read_run(model, options)[0]] if run is not None]
    for name, view in kinds[1:]:
        _check_same_kind(kinds[0], (name, view))


def _check_same_kind(first: tuple[str, View], other: tuple[str, View]) -> None:
    if first[1] != other[1]:
        raise UsageError(f"{first[0]} is evaluated on {_KINDS[first[1]]}, but {other[0]} on {_KINDS[other[1]]}. Pass "
                         "--data DATA to evaluate both on the same rows.")


def _check_same_rows(models: Sequence[str], found: Sequence[Scores], options: ScoringOptions) -> None:
    first, last = found[0], found[-1]
    name = models[len(found) - 1]
    _check_same_kind((models[0], first.view), (name, last.view))
    ours, theirs = map(set, _keys([first, last]))
    if (ours != theirs) if options.data is None else ours.isdisjoint(theirs):
        raise UsageError(f"{models[0]} and {name} held out different rows. Pass --data DATA to evaluate both on the "
                         "same ones.")


_KINDS = {"unpaired": "labeled completions", "paired": "pairs", "single": "completions without labels"}


def _common(found: Sequence[Scores]) -> tuple[list[Scores], int]:
    """The scores of the rows that all models have, in the order of the first one, and the number of other rows."""
    places = [{key: number for number, key in enumerate(keys)} for keys in _keys(found)]
    shared = [key for key in places[0] if all(key in other for other in places)]
    left_out = len(set().union(*places)) - len(shared)
    return [_taken(scores, [numbers[key] for key in shared])
            for scores, numbers in zip(found, places, strict=True)], left_out


def _taken(scores: Scores, numbers: list[int]) -> Scores:
    """The scores of some rows. Their losses are omitted, which depend on all rows."""
    if numbers == list(range(len(scores.rows))):
        return scores
    rows: Sequence[EncodedRow] = (scores.rows.take(np.array(numbers, dtype=np.int64))
                                  if isinstance(scores.rows, RowTable) else [scores.rows[number] for number in numbers])
    return replace(scores, rows=rows, completions=[scores.completions[number] for number in numbers], is_own=False,
                   record={})


def _differences(model: str, first: Scores, other: Scores) -> list[Difference]:
    pairs = [(key, statistic, theirs[key]) for theirs in [_statistics(other)]
             for key, statistic in _statistics(first).items() if key in theirs]
    weights = list(resamples([row.prompt_key for row in first.rows]))
    found = []
    for key, mine, its in pairs:
        def difference(drawn: Array | None, mine: Statistic = mine, its: Statistic = its) -> Array:
            return its(drawn) - mine(drawn)

        values = with_interval("difference", difference(None)[0], np.concatenate(list(map(difference, weights))))
        if values:
            found.append(Difference(model, key, values))
    return found


def _statistics(scores: Scores) -> dict[str, Statistic]:
    """The metrics that are compared, by key: how rewards rank and differ, and the mean log-prob of a token."""
    found: dict[str, Statistic] = {}
    members = scores.units.members[:, :2].numpy()
    if scores.view != "single" and scores.has_rewards:
        method = scores.method
        rewards = method.clear_rewards(scores.scored, scores.units, scores.noise(method)).numpy()
        if scores.view == "paired":
            margins = rewards[:, 0] - rewards[:, 1]
            found["rewards/accuracies"] = lambda drawn: accuracy(margins, drawn)
            found["rewards/margins"] = lambda drawn: _mean(margins, np.ones(len(margins)), drawn)
        else:
            desirable = np.array([bool(row.desirable) for row in scores.rows])
            found["rewards/auc"] = lambda drawn: auc(rewards[:, 0], desirable, drawn)
            found["rewards/margins"] = lambda drawn: (_mean(rewards[:, 0] * desirable, desirable, drawn)
                                                      - _mean(rewards[:, 0] * ~desirable, ~desirable, drawn))
    logps, tokens = (value.numpy()[members].sum(axis=1)
                     for value in (scores.scored.logps, scores.scored.lengths.double()))
    found["logps/token"] = lambda drawn: _mean(logps, tokens, drawn)
    return found


def _mean(values: Array, counts: Any, drawn: Array | None) -> Array:
    """Sum of values by sum of counts, `[r]`; NaN where there are none."""
    drawn = np.ones((1, len(values))) if drawn is None else drawn
    total = drawn @ np.asarray(counts, dtype=np.float64)
    return np.divide(drawn @ values, total, out=np.full(len(drawn), np.nan), where=total > 0)
