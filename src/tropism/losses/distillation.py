"""Divergence from a teacher, as the loss of a unit. `divergence` computes it from the distributions."""

from tropism.losses.scored import Scored
from tropism.shapes import Labels, PerUnit


def of_completion(scored: Scored, desirable: Labels | None = None) -> PerUnit:
    """Divergence of each completion, summed over its tokens. Labels change nothing."""
    assert scored.divergence is not None
    return scored.divergence


def of_pair(chosen: Scored, rejected: Scored) -> PerUnit:
    """Sum of the divergences of both sides."""
    return of_completion(chosen) + of_completion(rejected)
