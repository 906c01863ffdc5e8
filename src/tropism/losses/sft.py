"""Likelihood of completions."""

import torch

from tropism.losses.scored import Scored
from tropism.shapes import Labels, PerCompletion, PerUnit


def nll(scored: Scored) -> PerCompletion:
    """Negative log-likelihood of each completion, summed over its tokens.

    Supervised fine-tuning minimizes its sum over a step divided by the tokens of the step, so that all tokens have
    equal weight. Dividing each completion by its own length first would give tokens of short completions more weight.

    Args:
        scored: `[C]` completions; the reference is not used.

    Returns:
        `[C]` in nats, >= 0. The caller divides by tokens.
    """
    return -scored.logps


def nll_chosen(chosen: Scored, rejected: Scored) -> PerUnit:
    """`nll` of the chosen completions, one per pair."""
    return nll(chosen)


def nll_desirable(scored: Scored, desirable: Labels) -> PerUnit:
    """`nll` of desirable completions; 0 for the others."""
    return torch.where(desirable, nll(scored), torch.zeros_like(scored.logps))
