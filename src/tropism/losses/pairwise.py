"""Losses of preference pairs: one value per pair, no mean.

Throughout, c and r are the log-ratios of a pair's chosen and rejected completion (policy minus reference log-prob, in
nats) and h is their difference. A `link` replaces each log-ratio according to an f-divergence
(`tropism.losses.f_divergence_links`); the default leaves it unchanged. Losses without a link are not functions of h.
"""

import math

import torch
from torch.nn.functional import logsigmoid

from tropism.losses.f_divergence_links import Link, reverse_kl
from tropism.losses.scalar_functions import logistic
from tropism.losses.scored import Scored
from tropism.shapes import PerUnit


def sigmoid(
    chosen: Scored, rejected: Scored, *, beta: float, label_smoothing: float, link: Link = reverse_kl
) -> PerUnit:
    """Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290, equation 7).

    The loss is `-log sigmoid(beta h)`. `label_smoothing` e > 0 is conservative DPO (Mitchell 2023, "A note on DPO
    with noisy preferences", equation 3): the label is wrong with probability e, so the loss is
    `-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)`.

    Args:
        chosen: `[P]` the preferred completion of each pair.
        rejected: `[P]` the other one, of the same prompt.
        beta: strength of the constraint to the reference, per nat; > 0.
        label_smoothing: assumed share of flipped labels, 0 <= e < 0.5.
        link: f-divergence of the tie.

    Returns:
        `[P]` loss of each pair, in nats.
    """
    return logistic(beta * _h(chosen, rejected, link), label_smoothing)


def robust(
    chosen: Scored, rejected: Scored, *, beta: float, label_smoothing: float, link: Link = reverse_kl
) -> PerUnit:
    """Provably robust DPO (Chowdhury, Kini and Natarajan 2024, arXiv:2403.00409).

    `((1 - e) l(beta h) - e l(-beta h)) / (1 - 2 e)` with l = -log sigmoid: its mean over labels flipped with
    probability e is the loss on true labels. It is not bounded below. Equal to `l(beta h) - e beta h / (1 - 2 e)`.

    Args:
        chosen: `[P]` the preferred completion of each pair.
        rejected: `[P]` the other one.
        beta: strength of the constraint to the reference, per nat; > 0.
        label_smoothing: true share e of flipped labels, 0 <= e < 0.5.
        link: f-divergence of the tie.

    Returns:
        `[P]` loss of each pair; may be negative.
    """
    margins = beta * _h(chosen, rejected, link)
    clean, flipped = -logsigmoid(margins), -logsigmoid(-margins)
    return ((1 - label_smoothing) * clean - label_smoothing * flipped) / (1 - 2 * label_smoothing)


def hinge(chosen: Scored, rejected: Scored, *, beta: float, link: Link = reverse_kl) -> PerUnit:
    """Hinge loss `max(0, 1 - beta h)` (SLiC, Zhao et al. 2023, arXiv:2305.10425, with the normalized log-probs of
    RSO, Liu et al. 2023, arXiv:2309.06657).

    Args:
        chosen: `[P]` the preferred completion of each pair.
        rejected: `[P]` the other one.
        beta: 1 / required margin, per nat; > 0.
        link: f-divergence of the tie.

    Returns:
        `[P]` loss of each pair, >= 0.
    """
    return torch.relu(1 - beta * _h(chosen, rejected, link))


def ipo(chosen: Scored, rejected: Scored, *, beta: float, link: Link = reverse_kl) -> PerUnit:
    """Identity preference optimization, on summed log-probs (Azar et al. 2023, arXiv:2310.12036, equation 17).

    `(h - 1 / (2 beta))^2`, as the paper prints it: the target is a margin in nats per completion.

    Args:
        chosen: `[P]` the preferred completion of each pair.
        rejected: `[P]` the other one.
        beta: the paper's tau, per nat; > 0.
        link: f-divergence of the tie.

    Returns:
        `[P]` loss of each pair, in squared nats.
    """
    return (_h(chosen, rejected, link) - 1 / (2 * beta)).square()


def ipo_mean(chosen: Scored, rejected: Scored, *, beta: float, link: Link = reverse_kl) -> PerUnit:
    """Identity preference optimization, on means per token (Azar et al. 2023, arXiv:2310.12036).

    `ipo` with each side divided by its length, as in the experiments of its authors and in TRL. The target is a margin
    in nats per token, so the same beta requires a far larger margin than in `ipo`.

    Args:
        chosen: `[P]` the preferred completion of each pair.
        rejected: `[P]` the other one.
        beta: the paper's tau, tokens per nat; > 0.
        link: f-divergence of the tie, applied to the sum before the division.

    Returns:
        `[P]` loss of each pair, in squared nats per token.
    """
    return (_h_per_token(chosen, rejected, link) - 1 / (2 * beta)).square()


def sigmoid_norm(chosen: Scored, rejected: Scored, *, beta: float, link: Link = reverse_kl) -> PerUnit:
    """Length-normalized DPO (Lambert et al. 2024, Tülu 3, arXiv:2411.15124, section 5).

    `-log sigmoid(beta (c / length_c - r / length_r))`: DPO on the log-ratios per token.

    Args:
        chosen: `[P]` the preferred completion of each pair.
        rejected: `[P]` the other one.
        beta: strength of the constraint to the reference, tokens per nat; the paper uses 5.
        link: f-divergence of the tie, applied to the sum before the division.

    Returns:
        `[P]` loss of each pair.
    """
    return -logsigmoid(beta * _h_per_token(chosen, rejected, link))


def exo_pair(
    chosen: Scored, rejected: Scored, *, beta: float, label_smoothing: float, link: Link = reverse_kl
) -> PerUnit:
    """Efficient exact optimization on pairs (Ji et al. 2024, arXiv:2402.00856, equation 16).

    The reverse KL from the policy's preference q = sigmoid(beta h) to the smoothed label (1 - e, e):
    `q log(q / (1 - e)) + (1 - q) log((1 - q) / e)`.

    Args:
        chosen: `[P]` the preferred completion of each pair.
        rejected: `[P]` the other one.
        beta: strength of the constraint to the reference, per nat; > 0.
        label_smoothing: e, 0 < e < 0.5; at 0 the loss would be infinite.
        link: f-divergence of the tie.

    Returns:
        `[P]` loss of each pair, >= 0 up to rounding.
    """
    margins = beta * _h(chosen, rejected, link)
    preferred = torch.sigmoid(margins) * (logsigmoid(margins) - math.log1p(-label_smoothing))
    other = torch.sigmoid(-margins) * (logsigmoid(-margins) - math.log(label_smoothing))
    return preferred + other


def discopop(
    chosen: Scored, rejected: Scored, *, beta: float, discopop_tau: float, link: Link = reverse_kl
) -> PerUnit:
    """DiscoPOP, the log-ratio modulated loss (Lu et al. 2024, arXiv:2406.08414, equation 5).

    With m = beta h and w = sigmoid(m / tau), `(1 - w) (-log sigmoid(m)) + w exp(-m)`: logistic for pairs in the wrong
    order, exponential for pairs in the right order.

    Args:
        chosen: `[P]` the preferred completion of each pair.
        rejected: `[P]` the other one.
        beta: strength of the constraint to the reference, per nat; > 0.
        discopop_tau: temperature of the blend, > 0; the paper uses 0.05.
        link: f-divergence of the tie.

    Returns:
        `[P]` loss of each pair, > 0. Not convex: it has a local minimum left of m = 0.
    """
    margins = beta * _h(chosen, rejected, link)
    # w exp(-m) with one exponent: for m far below 0, w vanishes faster than exp(-m) grows, and a product of the two
    # would be 0 times infinity.
    exponential = torch.exp(logsigmoid(margins / discopop_tau) - margins)
    return torch.sigmoid(-margins / discopop_tau) * -logsigmoid(margins) + exponential


def nca_pair(chosen: Scored, rejected: Scored, *, beta: float) -> PerUnit:
    """Noise contrastive alignment on pairs (Chen et al. 2024, arXiv:2402.05369, NCA with hard labels).

    `-log s(beta c) - 0.5 log s(-beta c) - 0.5 log s(-beta r)` with s = sigmoid: the chosen log-ratio itself is held
    above 0, not only its difference from the rejected one.

    Args:
        chosen: `[P]` the preferred completion of each pair.
        rejected: `[P]` the other one.
        beta: reward per nat; > 0.

    Returns:
        `[P]` loss of each pair, >= 0.
    """
    up, down = beta * chosen.logratios, beta * rejected.logratios
    return -logsigmoid(up) - 0.5 * logsigmoid(-up) - 0.5 * logsigmoid(-down)


def bco_pair(chosen: Scored, rejected: Scored, *, beta: float) -> PerUnit:
    """Binary classifier optimization on pairs (Jung et al. 2024, arXiv:2404.04656), without the reward shift.

    `-log sigmoid(beta c) - log sigmoid(-beta r)`. `unpaired.bco` is the paper's loss with the shift.

    Args:
        chosen: `[P]` the preferred completion of each pair.
        rejected: `[P]` the other one.
        beta: reward per nat; > 0.

    Returns:
        `[P]` loss of each pair, >= 0.
    """
    return -logsigmoid(beta * chosen.logratios) - logsigmoid(-beta * rejected.logratios)


def sppo_hard(chosen: Scored, rejected: Scored, *, beta: float) -> PerUnit:
    """Self-play preference optimization with hard labels (Wu et al. 2024, arXiv:2405.00675, equation 4.7).

    `(c - 1 / (2 beta))^2 + (r + 1 / (2 beta))^2`: the paper's win probability is taken to be 1 for the chosen side and
    0 for the rejected one, instead of a preference model's estimate.

    Args:
        chosen: `[P]` the preferred completion of each pair.
        rejected: `[P]` the other one.
        beta: the paper's 1 / eta, per nat; > 0.

    Returns:
        `[P]` loss of each pair, in squared nats.
    """
    target = 1 / (2 * beta)
    return (chosen.logratios - target).square() + (rejected.logratios + target).square()


def apo_zero(chosen: Scored, rejected: Scored, *, beta: float) -> PerUnit:
    """Anchored preference optimization, zero (D'Oosterlinck et al. 2024, arXiv:2408.06266, equation 7).

    `1 - sigmoid(beta c) + sigmoid(beta r)`: chosen up, rejected down. For data whose chosen completions are better than
    what the model writes.

    Args:
        chosen: `[P]` the preferred completion of each pair.
        rejected: `[P]` the other one.
        beta: how fast a side saturates, per nat; > 0.

    Returns:
        `[P]` loss of each pair, between 0 and 2.
    """
    return torch.sigmoid(-beta * chosen.logratios) + torch.sigmoid(beta * rejected.logratios)


def apo_down(chosen: Scored, rejected: Scored, *, beta: float) -> PerUnit:
    """Anchored preference optimization, down (D'Oosterlinck et al. 2024, arXiv:2408.06266, equation 8).

    `sigmoid(beta c) + 1 - sigmoid(beta (c - r))`: both down, rejected further. For data whose chosen completions are
    worse than what the model writes.

    Args:
        chosen: `[P]` the preferred completion of each pair.
        rejected: `[P]` the other one.
        beta: how fast a side saturates, per nat; > 0.

    Returns:
        `[P]` loss of each pair, between 0 and 2.
    """
    return torch.sigmoid(beta * chosen.logratios) + torch.sigmoid(-beta * (chosen.logratios - rejected.logratios))


def _h(chosen: Scored, rejected: Scored, link: Link) -> PerUnit:
    """`[P]` difference of the linked log-ratios."""
    return link(chosen.logratios) - link(rejected.logratios)


def _h_per_token(chosen: Scored, rejected: Scored, link: Link) -> PerUnit:
    """`[P]` the same, each side divided by its number of tokens."""
    return link(chosen.logratios) / chosen.lengths - link(rejected.logratios) / rejected.lengths
