"""Scalar functions shared by several losses."""

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tropism.shapes import PerUnit

# A completion of probability 1 has infinite odds, so log-probs are clamped to this from above. The gradient is 0 there,
# as it is in the logits of a softmax with a probability of exactly 1.
NEAREST_TO_CERTAIN = -1e-12


def logistic(margins: PerUnit, label_smoothing: float) -> PerUnit:
    """`-(1 - e) log sigmoid(m) - e log sigmoid(-m)`: the logistic loss when a share e of the labels is flipped."""
    return -(1 - label_smoothing) * logsigmoid(margins) - label_smoothing * logsigmoid(-margins)


def log1mexp(log_probs: Tensor) -> Tensor:
    """`log(1 - exp(x))` for x <= 0, exact to rounding at both ends, with a finite gradient.

    Near 0, 1 - exp(x) loses digits and expm1 computes it; far below 0, log1p does (Maechler 2012, "Accurately computing
    log(1 - exp(-|a|))"). Each branch gets valid arguments only, so that the branch that is not selected cannot put a
    NaN into the gradient.
    """
    capped = log_probs.clamp(max=NEAREST_TO_CERTAIN)
    near = capped > -math.log(2.0)
    by_expm1 = torch.log(-torch.expm1(torch.where(near, capped, -1.0)))
    by_log1p = torch.log1p(-torch.exp(torch.where(near, -1.0, capped)))
    return torch.where(near, by_expm1, by_log1p)
