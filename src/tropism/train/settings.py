"""How a run computes: pack size, checkpointing and compilation. No result depends on it beyond rounding."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tropism.model.checkpointing import Checkpointing
from tropism.model.cpu_products import Products


@dataclass(frozen=True)
class Settings:
    """The settings in use, with each `auto` decided.

    Args:
        microbatch_tokens: tokens of a pack.
        checkpointing: what a forward pass keeps for the backward pass.
        offload: keep checkpoints in host memory.
        compiled: run compiled layers.
        products: library of the matrix products of linear layers on a CPU.
    """

    microbatch_tokens: int = 2048
    checkpointing: Checkpointing = "none"
    offload: bool = False
    compiled: bool = False
    products: Products = "mkl"

    def state(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return asdict(self)

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> "Settings":
        """The settings of `state()`."""
        return cls(**state)
