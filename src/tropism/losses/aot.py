"""Losses that compare distributions of rewards, by pairing values of equal rank across the step.

The partner of a unit depends on all units of the step, so it is an argument. The caller gathers the values of the step
first, and then each micro-batch is independent of the others. `partners` computes the pairing.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from tropism.losses.scalar_functions import logistic
from tropism.losses.scored import Scored
from tropism.shapes import PerUnit


@torch.no_grad()
def partners(values: Float[Tensor, " N"], others: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """The entry of `others` whose rank in `others` is the rank of each value in `values`.

    This is the optimal transport between two sets of points on a line, for any convex cost (Melnyk et al. 2024,
    arXiv:2406.05882). Equal values take their ranks in order of position.

    Args:
        values: `[N]` points that get a partner.
        others: `[N]` points that are partners.

    Returns:
        `[N]` a permutation of `others`, in the order of `values`; no gradient.
    """
    ranked = values.argsort(stable=True)
    return torch.empty_like(others).scatter_(0, ranked, others.sort(stable=True).values)


def aot(chosen: Scored, rejected: Scored, *, beta: float, label_smoothing: float, partner: PerUnit) -> PerUnit:
    """Alignment by optimal transport, paired data (Melnyk et al. 2024, arXiv:2406.05882, AOT paired).

    The distribution of the policy's margins (chosen minus rejected log-prob) is trained to dominate the reference's.
    With m a margin of the policy and n the reference margin of the same rank in the step, the loss of a pair is
    `-log sigmoid(beta (m - n))`.

    Args:
        chosen: `[P]` the preferred completion of each pair.
        rejected: `[P]` the other one, of the same prompt.
        beta: steepness, per nat; > 0.
        label_smoothing: assumed share of flipped labels, 0 <= e < 0.5.
        partner: `[P]` reference margin of equal rank, `partners(policy margins, reference margins)` of the whole
            step, in nats; no gradient flows into it.

    Returns:
        `[P]` loss of each pair.
    """
    return logistic(beta * (chosen.logps - rejected.logps - partner.detach()), label_smoothing)


def aot_unpaired(
    chosen: Scored,
    rejected: Scored,
    *,
    beta: float,
    label_smoothing: float,
    chosen_partner: PerUnit,
    rejected_partner: PerUnit,
) -> PerUnit:
    """Alignment by optimal transport, unpaired data (Melnyk et al. 2024, arXiv:2406.05882, AOT unpaired).

    The distribution of the chosen log-ratios a is trained to dominate that of the rejected log-ratios b. With both
    sorted over the step and l the logistic loss, the step costs `sum_i l(beta (a_(i) - b_(i)))`.

    Both ends of a term depend on the policy, but belong to different pairs, possibly on different ranks. So each end
    has its own copy of the term, in which the other end is a constant. The gradients of the copies add up to that of
    the step. Their values would count each term twice, so each copy counts half. The value and gradient of one pair
    therefore do not match: only the sum over all pairs of the step is the loss.

    Args:
        chosen: `[P]` preferred completions.
        rejected: `[P]` the others; the pairing is not used.
        beta: steepness, per nat; > 0.
        label_smoothing: assumed share of flipped labels, 0 <= e < 0.5.
        chosen_partner: `[P]` rejected log-ratio of the same rank as each chosen one, in nats; a constant.
        rejected_partner: `[P]` chosen log-ratio of the same rank as each rejected one, in nats; a constant.

    Returns:
        `[P]` shares of the step's loss.
    """
    upper = logistic(beta * (chosen.logratios - chosen_partner.detach()), label_smoothing)
    lower = logistic(beta * (rejected_partner.detach() - rejected.logratios), label_smoothing)
    both = upper + lower
    return both - 0.5 * both.detach()
