"""Losses of preference pairs: one value per pair, no mean."""

from torch.nn.functional import logsigmoid

from tropism.losses.scored import Scored
from tropism.shapes import PerUnit


def sigmoid(chosen: Scored, rejected: Scored, *, beta: float, label_smoothing: float) -> PerUnit:
    """Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290, equation 7).

    With h = chosen minus rejected log-ratio the loss is `-log sigmoid(beta h)`. `label_smoothing` e > 0 is
    conservative DPO (Mitchell 2023, "A note on DPO with noisy preferences", equation 3): the label is wrong
    with probability e, so the loss is `-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)`.

    Args:
        chosen: `[P]` the preferred completion of each pair.
        rejected: `[P]` the other one, of the same prompt.
        beta: strength of the tie to the reference, per nat; > 0.
        label_smoothing: assumed share of flipped labels, 0 <= e < 0.5.

    Returns:
        `[P]` loss of each pair, in nats.
    """
    margins = beta * (chosen.logratios - rejected.logratios)
    return -(1 - label_smoothing) * logsigmoid(margins) - label_smoothing * logsigmoid(-margins)
