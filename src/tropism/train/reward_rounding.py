"""How large a reward can be through rounding alone."""

from torch import Tensor

from tropism.losses.scored import Scored
from tropism.model.language_model import Precision
from tropism.shapes import PerCompletion

_LEAST_BF16 = 1e-3  # nats per root of tokens: no start-up comparison is taken to prove less


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
