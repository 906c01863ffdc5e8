"""Modules that other code has sharded, recognized by what it leaves in them."""

from typing import Any

from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor


def sharded_by(module: Any) -> str:
    """What has sharded a module or one below it; empty if none is sharded."""
    for part in module.modules():
        if isinstance(part, FullyShardedDataParallel | FSDPModule):
            return "FSDP"
        for parameter in part.parameters(recurse=False):
            if isinstance(parameter, DTensor):
                return "tensor parallelism"
            if hasattr(parameter, "ds_id"):  # set by DeepSpeed's partitioning of parameters
                return "DeepSpeed ZeRO-3"
    return ""
