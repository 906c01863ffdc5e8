"""Scalar functions that several losses are written with."""

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tropism.shapes import PerUnit

# A completion of probability 1 has infinite odds; its mean log-prob counts as this. The gradient ends here with it,
# as it does in the logits, where a softmax that gives exactly 1 has none.
NEAREST_TO_CERTAIN = -1e-12


def logistic(margins: PerUnit, label_smoothing: float) -> PerUnit:
    """`-(1 - e) log sigmoid(m) - e log sigmoid(-m)`: the logistic loss when a share e of the labels is flipped."""
    return -(1 - label_smoothing) * logsigmoid(margins) - label_smoothing * logsigmoid(-margins)


def log1mexp(log_probs: Tensor) -> Tensor:
    """`log(1 - exp(x))` for x <= 0, exact to rounding at both ends, with a finite gradient.

    Near 0 the difference 1 - exp(x) loses its digits and is taken by expm1; far below it is next to 1 and is taken by
    log1p (Maechler 2012, "Accurately computing log(1 - exp(-|a|))"). Each branch sees only arguments that it is made
    for, so that the branch not taken cannot put a NaN into the gradient.
    """
    capped = log_probs.clamp(max=NEAREST_TO_CERTAIN)
    near = capped > -math.log(2.0)
    by_expm1 = torch.log(-torch.expm1(torch.where(near, capped, -1.0)))
    by_log1p = torch.log1p(-torch.exp(torch.where(near, -1.0, capped)))
    return torch.where(near, by_expm1, by_log1p)
