"""The figures of a report as data: what each shows, of one run or of several."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from tropism.report.read import Array, RunReport

Style = Literal["line", "dashed", "points", "steps"]
_MOST_POINTS = 2000  # of a scatter plot
_BINS = 30
_MOST_EVALUATORS = 12  # figures of their metrics; the table has all


@dataclass(frozen=True)
class Line:
    """One series of a figure.

    Args:
        label: its name in the legend.
        x, y: `[n]`; for `steps` x has the `n + 1` edges of the bins.
        color: number of its color.
        style: how it is drawn.
    """

    label: str
    x: Array
    y: Array
    color: int
    style: Style = "line"


@dataclass(frozen=True)
class Band:
    """An interval around a series: `[n]` steps, lower and upper ends."""

    label: str
    x: Array
    low: Array
    high: Array
    color: int


@dataclass(frozen=True)
class Chart:
    """A figure.

    Args:
        name: of its file.
        title: what it shows.
        about: what a reader who cannot see it should know; also below the figure.
        x_label, y_label: of the axes.
        lines, bands: what is drawn.
        levels: horizontal lines by name.
    """

    name: str
    title: str
    about: str
    x_label: str
    y_label: str
    lines: list[Line]
    bands: list[Band] = field(default_factory=list)
    levels: dict[str, float] = field(default_factory=dict)


def charts_of(runs: Sequence[RunReport]) -> list[Chart]:
    """The figures of these runs; those without data are left out."""
    found = [_loss(runs), *_rewards(runs), _ranking(runs),
             _curves(runs, "kl", "KL from the reference", "nats", _KL, "the reference point of each logged step"),
             _curves(runs, "grad_norm", "Gradient norm", "", ("grad_norm",), "before clipping"),
             _curves(runs, "learning_rate", "Learning rate", "", ("learning_rate",), "of each logged step"),
             *_evaluators(runs),
             _curves(runs, "speed", "Speed", "tokens/s", ("tokens_per_second",), "of each logged step"),
             *(chart for run in runs for chart in (_histogram(run, len(runs) > 1), _length(run, len(runs) > 1)))]
    return [chart for chart in found if chart is not None]


_KL = ("kl", "kl/raw")


def _named(run: RunReport, text: str, several: bool) -> str:
    return f"{run.name}: {text}" if several else text


def _curves(runs: Sequence[RunReport], name: str, title: str, unit: str, keys: Sequence[str], what: str,
            split: str = "train") -> Chart | None:
    """A figure of metrics over the steps. Several runs show the first of the metrics only, a color each."""
    several = len(runs) > 1
    lines: list[Line] = []
    bands: list[Band] = []
    for number, run in enumerate(runs):
        for place, key in enumerate(keys[:1] if several else keys):
            x, y = run.series(split, key)
            if x.size:
                lines.append(Line(_named(run, key, several), x, y, number if several else place))
    if not several and name == "kl" and lines:
        bands += _standard_error(runs[0])
    if not lines:
        return None
    return Chart(name, title, f"{what[0].upper()}{what[1:]}. {_ends(lines)}", "step", unit, lines, bands)


def _evaluators(runs: Sequence[RunReport]) -> list[Chart | None]:
    """A figure for each metric of the evaluators of the runs, with its interval if it has one."""
    found: list[Chart | None] = []
    for key in list(dict.fromkeys(key for run in runs for key in run.evaluator_metrics))[:_MOST_EVALUATORS]:
        chart = _curves(runs, f"evaluator-{key}", key, "", (key,), "an evaluator's figure for held-out rows", "eval")
        if chart is not None and len(runs) == 1 and runs[0].series("eval", f"{key}_low")[0].size:
            chart = replace(chart, bands=_interval(runs[0], key))
        found.append(chart)
    return found


def _interval(run: RunReport, key: str) -> list[Band]:
    names = (key, f"{key}_low", f"{key}_high")
    ends = [(record["step"], *(record[name] for name in names[1:])) for record in run.of("eval")
            if all(record.get(name) is not None for name in names)]
    x, low, high = (np.array(column, dtype=np.float64) for column in zip(*ends, strict=True)) if ends else [
        np.zeros(0)] * 3
    return [Band("interval", x, low, high, 0)] if ends else []


def _standard_error(run: RunReport) -> list[Band]:
    found = [(record["step"], record["kl/raw"], record["kl/stderr"]) for record in run.of("train")
             if record.get("kl/raw") is not None and record.get("kl/stderr") is not None]
    if not found:
        return []
    x, middle, error = (np.array(column, dtype=np.float64) for column in zip(*found, strict=True))
    return [Band("kl/raw, one standard error", x, middle - error, middle + error, 1)]


def _loss(runs: Sequence[RunReport]) -> Chart | None:
    """Loss of training steps as lines, of held-out rows as points."""
    several = len(runs) > 1
    lines = []
    for number, run in enumerate(runs):
        for split, style, color in (("train", "line", number), ("eval", "points", number if several else 1)):
            x, y = run.series(split, "loss")
            if x.size:
                text = "training" if split == "train" else "held out"
                lines.append(Line(_named(run, text, several), x, y, color, style))  # type: ignore[arg-type]
    return Chart("loss", "Loss", f"What training minimizes. {_ends(lines)}", "step", "nats", lines) if lines else None


def _rewards(runs: Sequence[RunReport]) -> list[Chart | None]:
    """Rewards of both classes in training; of several runs their margin on held-out rows."""
    if len(runs) > 1:
        return [_curves(runs, "margins", "Reward margin of held-out rows", "nats", ("rewards/margins",),
                        "mean chosen minus mean rejected reward. Runs with another beta have another scale",
                        split="eval")]
    lines = []
    for color, side in enumerate(("chosen", "rejected")):
        for split, style in (("train", "line"), ("eval", "points")):
            x, y = runs[0].series(split, f"rewards/{side}")
            if x.size:
                text = side if split == "train" else f"{side}, held out"
                lines.append(Line(text, x, y, color, style))  # type: ignore[arg-type]
    if not lines:
        return []
    return [Chart("rewards", "Rewards by class", "beta x log-ratio. In KTO chosen means desirable, and rejected "
                  f"undesirable. {_ends(lines)}", "step", "nats", lines)]


def _ranking(runs: Sequence[RunReport]) -> Chart | None:
    """AUC or accuracy of held-out rows with its interval, and the baselines of one run."""
    lines: list[Line] = []
    bands: list[Band] = []
    several = len(runs) > 1
    for number, run in enumerate(runs):
        key = run.ranking
        if key is None:
            continue
        x, y = run.series("eval", key)
        name = {"rewards/auc": "AUC", "rewards/accuracies": "accuracy"}[key]
        lines.append(Line(_named(run, name, several), x, y, number, "line"))
        (low_x, low), (high_x, high) = run.series("eval", f"{key}_low"), run.series("eval", f"{key}_high")
        if low_x.size and np.array_equal(low_x, high_x):
            bands.append(Band(_named(run, "95% interval", several), low_x, low, high, number))
    if not lines:
        return None
    levels = {"chance": 0.5} | ({f"baseline {name}": value for name, value in runs[0].baselines.items()}
                                if not several else {})
    about = "How often the reward ranks a chosen completion above a rejected one, on held-out rows. "
    if not several:
        about += "The baselines rank by the initial model's log-prob, in sum and per token, and by length. "
    return Chart("ranking", "Ranking of held-out rows", about + _ends(lines), "step", "share", lines, bands, levels)


def _histogram(run: RunReport, several: bool) -> Chart | None:
    """Rewards of held-out completions before and after; of both classes after. Log-probs per token without rewards."""
    values = {side: _floats(run, f"reward_{side}") for side in ("before", "after")}
    rewarded = bool(values["after"].size)
    if not rewarded:
        tokens = np.maximum(_floats(run, "tokens"), 1)
        values = {side: _floats(run, f"logps_{side}") for side in ("before", "after")}
        values = {side: one / tokens for side, one in values.items() if one.size == tokens.size}
    if not values.get("after", np.zeros(0)).size:
        return None
    good = run.good
    series = {"before": values["before"], "after": values["after"]}
    if rewarded and None not in good:
        is_good = np.array(good, dtype=bool)
        series = {"before": values["before"], "after, chosen": values["after"][is_good],
                  "after, rejected": values["after"][~is_good]}
    whole = np.concatenate(list(series.values()))
    if not np.isfinite(whole).all():
        return None
    edges = np.histogram_bin_edges(whole, bins=_BINS)
    order = {"before": 2, "after": 0, "after, chosen": 0, "after, rejected": 1}
    lines = [Line(name, edges, np.histogram(one, edges)[0].astype(np.float64), order[name], "steps")
             for name, one in series.items() if one.size]
    what = "rewards" if rewarded else "log-probs per token"
    return Chart(f"histogram-{run.name}" if several else "histogram",
                 _named(run, f"{what[0].upper()}{what[1:]} of held-out completions", several),
                 "Before and after training. " + " ".join(
                     f"Mean {name}: {one.mean():.4g}." for name, one in series.items() if one.size),
                 "nats" if rewarded else "nats per token", "completions", lines)


def _length(run: RunReport, several: bool) -> Chart | None:
    """Length of held-out completions against the change of their reward."""
    before, after, tokens = (_floats(run, name) for name in ("reward_before", "reward_after", "tokens"))
    if not after.size or before.size != after.size or tokens.size != after.size:
        return None
    change = after - before
    if not np.isfinite(change).all():
        return None
    kept = np.linspace(0, change.size - 1, min(change.size, _MOST_POINTS)).astype(int)
    good = np.array([bool(one) for one in run.good])
    named = {"chosen": good, "rejected": ~good} if None not in run.good else {"completions": np.ones(len(good), bool)}
    lines = [Line(name, tokens[kept][chosen[kept]], change[kept][chosen[kept]], color, "points")
             for color, (name, chosen) in enumerate(named.items()) if chosen[kept].any()]
    correlation = _rank_correlation(tokens, change)
    said = "" if correlation is None else (
        f"Their rank correlation is {correlation:+.2f}: near +1 the model learned to be long, near -1 to be short. ")
    shown = "" if kept.size == change.size else f"{kept.size:,} of {change.size:,} completions are drawn. "
    return Chart(f"length-{run.name}" if several else "length", _named(run, "Length and change of the reward", several),
                 f"Each point is a held-out completion. {said}{shown}".strip(), "tokens", "nats", lines)


def _floats(run: RunReport, name: str) -> Array:
    """A column of the scores; empty if a value is absent."""
    column = run.scores.get(name, ())
    return np.zeros(0) if any(value is None for value in column) else np.array(column, dtype=np.float64)


def _rank_correlation(one: Array, other: Array) -> float | None:
    """Spearman's correlation; None if one of them does not vary."""
    ranks = []
    for values in (one, other):
        _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts - 1) / 2)[group])
    if min(np.ptp(rank) for rank in ranks) == 0:
        return None
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _ends(lines: Sequence[Line]) -> str:
    """The first and the last value of each series, in words."""
    return " ".join(f"{line.label}: {line.y[0]:.4g} at step {line.x[0]:,.0f}, {line.y[-1]:.4g} at step "
                    f"{line.x[-1]:,.0f}." for line in lines)
