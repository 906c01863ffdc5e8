"""Links: the function of the log-ratio by which an f-divergence replaces it in a pairwise loss.

Wang et al. 2023, arXiv:2309.16240, replace `beta log(pi / pi_ref)` by `beta f'(pi / pi_ref)`. Each link here is f' as a
function of the log-ratio r, minus f' at r = 0. That constant cancels in a difference of two links. If both sides are
first divided by their lengths it does not cancel, and subtracting it makes an untrained policy start at margin 0.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

Link = Callable[[Tensor], Tensor]

# Above this exponent the exponential continues along its tangent. It would overflow float32 at 88, and the gradient of
# a flat loss would then be 0 times infinity.
LINEAR_FROM = 30.0


def reverse_kl(logratios: Tensor) -> Tensor:
    """r, unchanged: the divergence of DPO, KL(policy || reference)."""
    return logratios


def forward_kl(logratios: Tensor) -> Tensor:
    """`1 - exp(-r)`: KL(reference || policy). The cost is exponential for ratios near 0 and saturates above 1."""
    return -_expm1(-logratios)


def js(logratios: Tensor) -> Tensor:
    """`log 2 + log sigmoid(r)`: the Jensen-Shannon divergence. At most log 2; linear far below 0."""
    return math.log(2.0) + logsigmoid(logratios)


def alpha(coefficient: float) -> Link:
    """`(exp((a - 1) r) - 1) / (a - 1)`: the alpha-divergence of coefficient a; r for a = 1.

    a = 0 is `forward_kl`. TRL clamps the exponent at 80, where the gradient ends. Here a tangent continues it from 30.
    """
    power = coefficient - 1.0
    if power == 0:
        return reverse_kl
    return lambda logratios: _expm1(power * logratios) / power


def link_of(name: str, alpha_coefficient: float) -> Link:
    """The link of a divergence by name; only `alpha` uses `alpha_coefficient`.

    Raises:
        KeyError: for an unknown divergence.
    """
    if name == "alpha":
        return alpha(alpha_coefficient)
    return {"reverse_kl": reverse_kl, "forward_kl": forward_kl, "js": js}[name]


def _expm1(exponent: Tensor) -> Tensor:
    """`exp(x) - 1` up to LINEAR_FROM and its tangent above: finite, convex, with a gradient everywhere."""
    beyond = torch.relu(exponent - LINEAR_FROM)
    return torch.expm1(exponent.clamp(max=LINEAR_FROM)) + math.exp(LINEAR_FROM) * beyond
