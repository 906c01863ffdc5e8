"""Losses of single completions, each desirable or undesirable: one value per unit, no mean."""

import torch

from tropism.losses.scored import Scored
from tropism.shapes import Labels, PerUnit, Scalar


def kto(
    scored: Scored,
    desirable: Labels,
    reference_point: Scalar,
    *,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> PerUnit:
    """Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv:2402.01306, equations 7 and 8).

    With r = log-ratio and z0 = reference point, a desirable unit costs
    `desirable_weight * (1 - sigmoid(beta (r - z0)))` and an undesirable one
    `undesirable_weight * (1 - sigmoid(beta (z0 - r)))`. The constant lambda_y of the paper is left out of
    the value but not of the gradient: the loss is 0 where the utility is at its upper bound.

    Args:
        scored: `[U]` one completion per unit.
        desirable: `[U]` True for desirable units.
        reference_point: scalar z0 >= 0 in nats, pooled over the whole step; no gradient flows into it.
        beta: how fast the utility saturates, per nat; > 0.
        desirable_weight: lambda_D, dimensionless.
        undesirable_weight: lambda_U, dimensionless.

    Returns:
        `[U]` loss of each unit, between 0 and its weight.
    """
    gains = beta * (scored.logratios - reference_point.detach())
    gains = torch.where(desirable, gains, -gains)
    weights = torch.full_like(gains, undesirable_weight).masked_fill(desirable, desirable_weight)
    return weights * torch.sigmoid(-gains)
