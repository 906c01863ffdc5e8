"""Likelihood of single completions."""

from tropism.losses.scored import Scored
from tropism.shapes import PerCompletion


def nll(scored: Scored) -> PerCompletion:
    """Negative log-likelihood of each completion, summed over its tokens.

    Training on its sum over a step, divided by the step's tokens, is supervised fine-tuning: each token weighs the
    same. Dividing each completion by its own length first would weigh tokens of short completions more.

    Args:
        scored: `[C]` completions; the reference is not looked at.

    Returns:
        `[C]` in nats, >= 0. The caller divides by tokens.
    """
    return -scored.logps
