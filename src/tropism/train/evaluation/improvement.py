"""How much the loss of held-out rows fell in training, with its interval: for methods without rewards."""

from collections.abc import Mapping, Sequence

import numpy as np

from tropism.data.rows import EncodedRow
from tropism.losses.scored import Scored
from tropism.methods import Method, StepInputs
from tropism.observe.verdict import Verdict, judge_improvement, judge_ranking
from tropism.train.evaluation.bootstrap import Array, interval, resamples
from tropism.train.evaluation.evaluator import units_of
from tropism.train.evaluation.row_files import HeldOutScores


def verdict_on(held_out: HeldOutScores, first: Mapping[str, float], last: Mapping[str, float]) -> Verdict:
    """The verdict on a run by its held-out rows.

    Args:
        first, last: the evaluation records before training and at the end.
    """
    rows, method = held_out.rows, held_out.method
    prompts = len({row.prompt_key for row in rows})
    found = judge_ranking(first, last, prompts)
    if found is not None:
        return found
    if method.view != "single":
        return Verdict("not shown", "the held-out rows have one label only, so rewards cannot be compared.")
    fell = improvement(method, rows, held_out.before, held_out.after)
    if fell is None:
        return Verdict("not shown", "the loss of held-out completions is not finite.")
    value, low, high = fell
    return judge_improvement("the loss of held-out completions", value, low, high, prompts)


def improvement(method: Method, rows: Sequence[EncodedRow], before: Scored,
                after: Scored) -> tuple[float, float, float] | None:
    """By how much the method's loss fell, in nats per token, and its 95% interval over resampled prompts; None if that
    is not finite.

    Args:
        method: of single completions.
        rows: `n` rows.
        before, after: their completions under both policies.
    """
    fell = np.zeros((len(method.terms), len(rows)))
    for sign, scored in ((1, before), (-1, after)):
        losses = method.losses(scored, units_of(rows, scored, method.weights(rows)), StepInputs())
        fell += sign * np.stack([own.double().numpy() for own in losses])
    counts = np.array([method.counts([row]) for row in rows], dtype=np.float64).T  # [terms, n]
    factors = np.array([term.weight for term in method.terms])

    def statistic(weights: Array) -> Array:
        totals = weights @ counts.T  # [r, terms]
        means = np.divide(weights @ fell.T, totals, out=np.zeros_like(totals), where=totals > 0)
        return np.asarray(means @ factors)

    with np.errstate(invalid="ignore"):  # of log-probs that are not finite
        value = float(statistic(np.ones((1, len(rows))))[0])
        drawn = np.concatenate([statistic(weights) for weights in resamples([row.prompt_key for row in rows])])
    ends = interval(drawn)
    return (value, *ends) if ends is not None and np.isfinite(value) else None
