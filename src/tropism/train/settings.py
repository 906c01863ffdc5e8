"""How a run computes: pack size, checkpointing and compilation. No result depends on it beyond rounding."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from tropism.model.checkpointing import Checkpointing
from tropism.model.cpu_products import Products

AutoShard = Literal["", "on", "off"]
"""What `--parallel.shard auto` stands for; empty if the run has another value, or one process."""


@dataclass(frozen=True)
class Settings:
    """The settings in use, with each `auto` decided.

    Args:
        microbatch_tokens: tokens of a pack.
        checkpointing: what a forward pass keeps for the backward pass.
        offload: keep checkpoints in host memory.
        compiled: run compiled layers.
        asked_tokens, asked_checkpointing: what a step ran out of memory with, before it was repeated with the above; 0
            and empty if none has.
        products: library of the matrix products of linear layers on a CPU.
        gather_once: a sharded model gathers its weights, and sums its gradients, once per step; None without one.
        shard: whether the processes share one copy of the training state, if `auto` decided that.
        forwards_first_tokens: of a step whose forward passes may all come before its backward passes, if that saves
            passes; 0 if the backward pass of a pack follows its forward pass.
    """

    microbatch_tokens: int = 2048
    checkpointing: Checkpointing = "none"
    offload: bool = False
    compiled: bool = False
    asked_tokens: int = 0
    asked_checkpointing: str = ""
    products: Products = "mkl"
    gather_once: bool | None = None
    shard: AutoShard = ""
    forwards_first_tokens: int = 0

    def lowered(self, tokens: int, checkpointing: Checkpointing, before: int) -> "Settings":
        """The settings after a step has run out of memory with packs of `before` tokens."""
        asked = self.asked_checkpointing or ("" if checkpointing == self.checkpointing else self.checkpointing)
        return replace(self, microbatch_tokens=tokens, checkpointing=checkpointing,
                       asked_tokens=self.asked_tokens or (0 if tokens == before else before),
                       asked_checkpointing=asked)

    def state(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return asdict(self)

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> "Settings":
        """The settings of `state()`."""
        return cls(**state)

    @classmethod
    def kept_in(cls, trainer: Mapping[str, Any] | None) -> "Settings | None":
        """The settings that a checkpoint's `trainer.json` keeps; None without a checkpoint, or in an early one."""
        return cls.restored(trainer["settings"]) if trainer and "settings" in trainer else None
