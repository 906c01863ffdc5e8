"""The processes that share the vocabulary of a head, with the verbs that `model.columns` asks of them."""

from dataclasses import dataclass
from functools import cached_property

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Peers:
    """A process group of torch.distributed, for small tensors on any device.

    Args:
        group: of which this process is a member; None for all processes.
    """

    group: dist.ProcessGroup | None = None

    @cached_property
    def rank(self) -> int:
        """Which one this is."""
        return dist.get_rank(self.group)

    @cached_property
    def size(self) -> int:
        """How many there are."""
        return dist.get_world_size(self.group)

    def sum(self, values: Tensor) -> Tensor:
        """Elementwise sum, equal to the bit on all processes. `values` may be overwritten."""
        sent = self._sendable(values)
        dist.all_reduce(sent, group=self.group)
        return sent.to(values.device)

    def gather(self, values: Tensor) -> Tensor:
        """`[size, ...]` what each process gave, in the order of ranks; all give equal shapes and dtypes."""
        sent = self._sendable(values)
        found = sent.new_empty((self.size, *sent.shape))
        dist.all_gather(list(found), sent, group=self.group)
        return found.to(values.device)

    def _sendable(self, values: Tensor) -> Tensor:
        """Dense, and where a backend of the group takes it."""
        served = self._served
        return values.contiguous().to(values.device if values.device.type in served else served[0])

    @cached_property
    def _served(self) -> list[str]:
        """Kinds of devices that the group has a backend for, such as `cpu` and `cuda`."""
        pairs = dist.get_backend_config(self.group).split(",")
        return [pair.partition(":")[0] for pair in pairs]
