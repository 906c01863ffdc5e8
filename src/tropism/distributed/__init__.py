"""The verbs of a distributed step. `torch.distributed` is imported here and nowhere else."""

from tropism.distributed.world import World, connect

__all__ = ["World", "connect"]
