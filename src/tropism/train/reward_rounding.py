"""How large a reward, or a log-prob above 0, can be through rounding alone."""

import torch
from torch import Tensor

from tropism.losses.scored import Scored
from tropism.model.language_model import Precision
from tropism.shapes import PerCompletion

_LEAST_BF16 = 1e-3  # nats per root of tokens: no start-up comparison is taken to prove less


MOST_STORED = 0.1
"""No rounding raises a log-prob to this value, in nats: at 3e-5 nats per token it would take 3000 tokens."""


def most_logp(tokens: int, precision: Precision) -> float:
    """The largest log-prob of a completion that rounding explains. Exactly 0 is valid: a model may be certain.

    A token's log-prob is a difference of two logits, in float32 or more. Of logits up to 256 it is off by no more than
    256 units of the last place.
    """
    return 256 * tokens * torch.finfo(torch.float64 if precision == "fp64" else torch.float32).eps


def reward_noise(scored: Scored, beta: float, precision: Precision, per_root_token: float = 0.0) -> PerCompletion:
    """`[C]` the largest reward that rounding explains. A reward no larger than this is no difference.

    Args:
        beta: factor between a log-ratio and a reward.
        precision: dtype of both models' computation.
        per_root_token: bfloat16's measured error of a completion's log-prob, in nats per root of its tokens.
    """
    if precision == "bf16":
        return beta * max(2 * per_root_token, _LEAST_BF16) * scored.lengths.double().sqrt()
    noise: Tensor = {"fp32": 1e-6, "fp64": 1e-12}[precision] * (1 + beta * scored.logps.detach().abs())
    return noise
