"""From products of hidden states and weight to logits: bias, scale and soft-cap."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shape:
    """Logits are `scale * (raw + bias)`, then soft-capped.

    Args:
        bias: `[c]` of the same columns, or None.
        scale: factor.
        softcap: c of c tanh(logits / c), or None.
    """

    bias: Tensor | None
    scale: float
    softcap: float | None

    def logits_(self, raw: Tensor) -> Tensor:
        """`[n, c]` logits, in place."""
        if self.bias is not None:
            raw += self.bias.to(raw.dtype)
        if self.scale != 1.0:
            raw *= self.scale
        if self.softcap is not None:
            torch.tanh_(raw.div_(self.softcap)).mul_(self.softcap)
        return raw

    def bend(self, logits: Tensor) -> Tensor | None:
        """`[n, c]` derivative of the soft-cap, from the logits that it has made; None without one."""
        if self.softcap is None:
            return None
        bent = logits / self.softcap
        return bent.mul_(bent).neg_().add_(1)

    def to_raw(self, change: Tensor, bend: Tensor | None) -> Tensor:
        """Turn a derivative by the logits into one by `raw`, in place."""
        if bend is not None:
            change *= bend
        if self.scale != 1.0:
            change *= self.scale
        return change
