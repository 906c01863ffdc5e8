"""Losses of single completions, each desirable or undesirable: one value per unit, no mean."""

import torch
from torch.nn.functional import logsigmoid

from tropism.losses.scored import Scored
from tropism.shapes import Labels, PerUnit, Scalar


def kto(
    scored: Scored,
    desirable: Labels,
    reference_point: Scalar | PerUnit,
    *,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> PerUnit:
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024, arXiv:2402.01306, equations 7 and 8).

    With r = log-ratio and z0 = reference point, a desirable unit costs
    `desirable_weight * (1 - sigmoid(beta (r - z0)))` and an undesirable one
    `undesirable_weight * (1 - sigmoid(beta (z0 - r)))`. The constant lambda_y of the paper is omitted, which
    does not change the gradient: the loss is 0 at the upper bound of the utility.

    Args:
        scored: `[U]` one completion per unit.
        desirable: `[U]` True for desirable units.
        reference_point: z0 >= 0 in nats, a scalar pooled over the whole step, or `[U]` that of each unit's micro-batch;
            no gradient flows into it.
        beta: how fast the utility saturates, per nat; > 0.
        desirable_weight: lambda_D, dimensionless.
        undesirable_weight: lambda_U, dimensionless.

    Returns:
        `[U]` loss of each unit, between 0 and its weight.
    """
    gains = _gains(beta * (scored.logratios - reference_point.detach()), desirable)
    return _weights(gains, desirable, desirable_weight, undesirable_weight) * torch.sigmoid(-gains)


def apo_zero_unpaired(
    scored: Scored, desirable: Labels, *, beta: float, desirable_weight: float, undesirable_weight: float
) -> PerUnit:
    """Anchored preference optimization on single completions (D'Oosterlinck et al. 2024, arXiv:2408.06266, equation 7).

    The two terms of `apo_zero`, each for units of its own class: with r = log-ratio, `1 - sigmoid(beta r)` for a
    desirable unit and `sigmoid(beta r)` for an undesirable one. This is KTO anchored at a reference point of 0. The
    weights are not in the paper.

    Args:
        scored: `[U]` one completion per unit.
        desirable: `[U]` True for desirable units.
        beta: how fast a unit saturates, per nat; > 0.
        desirable_weight: weight of a desirable unit, dimensionless.
        undesirable_weight: weight of an undesirable unit, dimensionless.

    Returns:
        `[U]` loss of each unit, between 0 and its weight.
    """
    return kto(scored, desirable, scored.logps.new_zeros(()), beta=beta, desirable_weight=desirable_weight,
               undesirable_weight=undesirable_weight)


def kto_no_reference_point(
    scored: Scored, desirable: Labels, *, beta: float, desirable_weight: float, undesirable_weight: float
) -> PerUnit:
    """KTO with z0 = 0 (Ethayarajh et al. 2024, arXiv:2402.01306, the ablation without a reference point).

    No mismatched completions are scored, so a step costs less; the utility is no longer relative to how far the
    policy has moved on average. The arithmetic is that of `apo_zero_unpaired`, which comes from another paper.

    Args:
        scored: `[U]` one completion per unit.
        desirable: `[U]` True for desirable units.
        beta: how fast the utility saturates, per nat; > 0.
        desirable_weight: lambda_D, dimensionless.
        undesirable_weight: lambda_U, dimensionless.

    Returns:
        `[U]` loss of each unit, between 0 and its weight.
    """
    return kto(scored, desirable, scored.logps.new_zeros(()), beta=beta, desirable_weight=desirable_weight,
               undesirable_weight=undesirable_weight)


def bco(
    scored: Scored,
    desirable: Labels,
    shift: Scalar,
    *,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> PerUnit:
    """Binary classifier optimization (Jung et al. 2024, arXiv:2404.04656, with the reward shift).

    The reward beta r is the logit of a classifier of desirable against undesirable units: with s = shift,
    `-log sigmoid(beta r - s)` for a desirable unit and `-log sigmoid(s - beta r)` for an undesirable one. The weights
    are our addition, named as KTO's; the paper has none. Its correction for prompts that differ between the classes
    is not implemented.

    Args:
        scored: `[U]` one completion per unit.
        desirable: `[U]` True for desirable units.
        shift: scalar, running mean of the rewards beta r seen so far, both classes; no gradient flows into it.
        beta: reward per nat; > 0.
        desirable_weight: weight of a desirable unit, dimensionless.
        undesirable_weight: weight of an undesirable unit, dimensionless.

    Returns:
        `[U]` loss of each unit.
    """
    gains = _gains(beta * scored.logratios - shift.detach(), desirable)
    return -_weights(gains, desirable, desirable_weight, undesirable_weight) * logsigmoid(gains)


def _gains(rewards: PerUnit, desirable: Labels) -> PerUnit:
    """Rewards with the sign of undesirable units inverted."""
    return torch.where(desirable, rewards, -rewards)


def _weights(like: PerUnit, desirable: Labels, desirable_weight: float, undesirable_weight: float) -> PerUnit:
    """The class weight of each unit, in the dtype of `like`."""
    return torch.full_like(like, undesirable_weight).masked_fill(desirable, desirable_weight)
