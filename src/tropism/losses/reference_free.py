"""Losses of preference pairs that need no reference model: one value per pair, no mean."""

from torch import Tensor
from torch.nn.functional import logsigmoid

from tropism.losses.scalar_functions import log1mexp, logistic
from tropism.losses.scored import Scored
from tropism.shapes import PerUnit


def cpo(chosen: Scored, rejected: Scored, *, beta: float, label_smoothing: float) -> PerUnit:
    """Contrastive preference optimization (Xu et al. 2024, arXiv:2401.08417, equation 3, the preference term).

    DPO with a uniform reference: with h = chosen minus rejected summed log-prob of the policy, `-log sigmoid(beta h)`.
    The paper's likelihood term is `sft.nll` of the chosen side, which the caller adds with its own weight.

    Args:
        chosen: `[P]` the preferred completion of each pair.
        rejected: `[P]` the other one.
        beta: steepness, per nat; > 0.
        label_smoothing: assumed share of flipped labels, 0 <= e < 0.5; not in the paper.

    Returns:
        `[P]` loss of each pair.
    """
    return logistic(beta * (chosen.logps - rejected.logps), label_smoothing)


def simpo(chosen: Scored, rejected: Scored, *, beta: float, simpo_gamma: float, label_smoothing: float) -> PerUnit:
    """Simple preference optimization (Meng et al. 2024, arXiv:2405.14734, equation 6).

    With m = mean log-prob per token, `-log sigmoid(beta (m_chosen - m_rejected) - gamma)`.

    Args:
        chosen: `[P]` the preferred completion of each pair.
        rejected: `[P]` the other one.
        beta: steepness, per nat per token; the paper uses 2 to 10.
        simpo_gamma: gamma, the required margin of the rewards; dimensionless, >= 0. The paper tunes gamma / beta.
        label_smoothing: assumed share of flipped labels, 0 <= e < 0.5; not in the paper.

    Returns:
        `[P]` loss of each pair.
    """
    return logistic(beta * (_mean_logps(chosen) - _mean_logps(rejected)) - simpo_gamma, label_smoothing)


def odds_ratio(chosen: Scored, rejected: Scored, *, beta: float) -> PerUnit:
    """The odds-ratio term of ORPO (Hong et al. 2024, arXiv:2403.07691, equation 7).

    With p = exp(mean log-prob per token) and odds = p / (1 - p), `-lambda log sigmoid(log(odds_chosen /
    odds_rejected))`. ORPO adds the likelihood of the chosen side, `sft.nll`; the caller does that.

    Args:
        chosen: `[P]` the preferred completion of each pair.
        rejected: `[P]` the other one.
        beta: the paper's lambda, the weight of this term relative to the likelihood; dimensionless, > 0.

    Returns:
        `[P]` loss of each pair, lambda included.
    """
    return -beta * logsigmoid(log_odds_difference(_mean_logps(chosen), _mean_logps(rejected)))


def log_odds_difference(chosen_logps: PerUnit, rejected_logps: PerUnit) -> PerUnit:
    """`log(odds_chosen / odds_rejected)` from log-probs <= 0; finite up to a probability of 1."""
    return (chosen_logps - rejected_logps) - (log1mexp(chosen_logps) - log1mexp(rejected_logps))


def _mean_logps(side: Scored) -> Tensor:
    """`[P]` mean log-prob of each completion's tokens."""
    return side.logps / side.lengths
