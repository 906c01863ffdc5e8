"""The processes that share a vocabulary-parallel head, and the collectives that the head uses."""

from dataclasses import dataclass
from functools import cached_property

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Peers:
    """A process group of torch.distributed, for small tensors on any device.

    Args:
        group: process group that includes this process; None for all processes.
    """

    group: dist.ProcessGroup | None = None

    @cached_property
    def rank(self) -> int:
        """Rank of this process in the group."""
        return dist.get_rank(self.group)

    @cached_property
    def size(self) -> int:
        """Number of processes in the group."""
        return dist.get_world_size(self.group)

    def sum(self, values: Tensor) -> Tensor:
        """Elementwise sum, bitwise equal on all processes. `values` may be overwritten."""
        sent = self._sendable(values)
        dist.all_reduce(sent, group=self.group)
        return sent.to(values.device)

    def gather(self, values: Tensor) -> Tensor:
        """`[size, ...]` the values of each process in rank order. Shapes and dtypes must be equal."""
        sent = self._sendable(values)
        found = sent.new_empty((self.size, *sent.shape))
        dist.all_gather(list(found), sent, group=self.group)
        return found.to(values.device)

    def _sendable(self, values: Tensor) -> Tensor:
        """Contiguous, and on a device that a backend of the group supports."""
        served = self._served
        return values.contiguous().to(values.device if values.device.type in served else served[0])

    @cached_property
    def _served(self) -> list[str]:
        """Device types that the group has a backend for, such as `cpu` and `cuda`."""
        pairs = dist.get_backend_config(self.group).split(",")
        return [pair.partition(":")[0] for pair in pairs]
