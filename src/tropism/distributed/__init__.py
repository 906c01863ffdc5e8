"""Everything that involves several processes. Only this package imports `torch.distributed`."""

from tropism.distributed.world import World, connect

__all__ = ["World", "connect"]
