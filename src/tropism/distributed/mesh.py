"""The arrangement of processes: replicate x shard x tensor. Neighboring ranks share a tensor group."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

AXES = ("replicate", "shard", "tensor")


@dataclass(frozen=True)
class Mesh:
    """The axes of a run over several processes.

    Args:
        device: where tensors live and gradients travel, with the axes of `AXES`.
        host: the same processes for tensors in CPU memory; the same object if the device is the CPU.
        data: process group of the data-parallel peers, which compute other rows; None for all processes.
    """

    device: DeviceMesh
    host: DeviceMesh
    data: Any = None

    @classmethod
    def of(cls, kind: str, replicate: int, shard: int, tensor: int) -> "Mesh":
        """Arrange all processes in a mesh. A collective call.

        Args:
            kind: `cpu` or `cuda`.
            replicate, shard, tensor: sizes whose product is the number of processes.
        """
        device = init_device_mesh(kind, (replicate, shard, tensor), mesh_dim_names=AXES)
        host = device if kind == "cpu" else init_device_mesh("cpu", (replicate, shard, tensor), mesh_dim_names=AXES)
        data = None
        if tensor > 1:
            groups = [dist.new_group(list(range(first, dist.get_world_size(), tensor))) for first in range(tensor)]
            data = groups[dist.get_rank() % tensor]
        return cls(device, host, data)

    def size(self, axis: str) -> int:
        """Processes along an axis."""
        return int(self.device.size(AXES.index(axis)))

    def group(self, axis: str) -> Any:
        """The process group of this process along an axis."""
        return self.device.get_group(axis)

    @property
    def fsdp(self) -> DeviceMesh:
        """The axes that FSDP uses: `shard`, and `replicate` if there are replicas."""
        return self.device["replicate", "shard"] if self.size("replicate") > 1 else self.device["shard"]

    def on_host(self, mesh: DeviceMesh) -> DeviceMesh:
        """The same axes for tensors in CPU memory."""
        names = mesh.mesh_dim_names
        assert names is not None
        return self.host if names == AXES else self.host[names if len(names) > 1 else names[0]]
