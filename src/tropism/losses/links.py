"""What an f-divergence makes of a log-ratio before a pairwise loss sees it: its derivative at the ratio.

Wang et al. 2023, arXiv:2309.16240, put `beta f'(pi / pi_ref)` in the place of `beta log(pi / pi_ref)`. Each link here
is f' as a function of the log-ratio r, less f' at r = 0. That constant cancels in a difference of two links; where the
two sides are divided by their lengths first it does not, and 0 is what makes an untrained policy start at margin 0.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

Link = Callable[[Tensor], Tensor]

# From here on the exponential goes on along its tangent. Its values would overflow float32 at 88, and a loss that is
# already flat would then multiply 0 with infinity.
LINEAR_FROM = 30.0


def reverse_kl(logratios: Tensor) -> Tensor:
    """r itself: the divergence of DPO, KL(policy || reference)."""
    return logratios


def forward_kl(logratios: Tensor) -> Tensor:
    """`1 - exp(-r)`: KL(reference || policy). A ratio near 0 costs exponentially; above 1 it saturates."""
    return -_expm1(-logratios)


def js(logratios: Tensor) -> Tensor:
    """`log 2 + log sigmoid(r)`: the Jensen-Shannon divergence. At most log 2; linear far below 0."""
    return math.log(2.0) + logsigmoid(logratios)


def alpha(coefficient: float) -> Link:
    """`(exp((a - 1) r) - 1) / (a - 1)`: the alpha-divergence of coefficient a; r itself as a goes to 1.

    a = 0 is `forward_kl`. TRL clamps the exponent at 80, where the gradient ends; we go on along the tangent at 30.
    """
    power = coefficient - 1.0
    if power == 0:
        return reverse_kl
    return lambda logratios: _expm1(power * logratios) / power


def link_of(name: str, alpha_coefficient: float) -> Link:
    """The link of a divergence by its name; `alpha_coefficient` is only looked at by `alpha`.

    Raises:
        KeyError: no such divergence.
    """
    if name == "alpha":
        return alpha(alpha_coefficient)
    return {"reverse_kl": reverse_kl, "forward_kl": forward_kl, "js": js}[name]


def _expm1(exponent: Tensor) -> Tensor:
    """`exp(x) - 1` up to LINEAR_FROM, and the tangent from there: finite, convex, with a gradient everywhere."""
    beyond = torch.relu(exponent - LINEAR_FROM)
    return torch.expm1(exponent.clamp(max=LINEAR_FROM)) + math.exp(LINEAR_FROM) * beyond
