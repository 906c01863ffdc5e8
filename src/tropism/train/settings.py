"""How a run computes: pack size, checkpointing and compilation. No result depends on it beyond rounding."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tropism.model.checkpointing import Checkpointing


@dataclass(frozen=True)
class Settings:
    """The settings in use, with each `auto` decided.

    Args:
        microbatch_tokens: tokens of a pack.
        checkpointing: what a forward pass keeps for the backward pass.
        offload: keep checkpoints in host memory.
        compiled: run compiled layers.
    """

    microbatch_tokens: int = 2048
    checkpointing: Checkpointing = "none"
    offload: bool = False
    compiled: bool = False

    def state(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return asdict(self)

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> "Settings":
        """The settings of `state()`."""
        return cls(**state)
