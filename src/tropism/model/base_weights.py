"""Check whether an adapter's base still has the weights that the adapter was trained on."""

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tropism.borders import read_object
from tropism.distributed.shard import each_whole
from tropism.errors import ModelError
from tropism.model.adapters.switch import active_state, adapter_off
from tropism.model.fingerprint import tensor_hash
from tropism.model.source import ModelSource


def base_hash(module: Any) -> str | None:
    """Hash of a model's weights and stored buffers without its adapter.

    They are hashed as float32, so the hash does not depend on the precision of a run, its device, or sharding. All
    processes that share the model must call this together.

    Returns:
        None if the weights are quantized, since they then differ from the base's.
    """
    if getattr(module, "is_quantized", False):
        return None

    def one(name: str, weight: Tensor) -> str:
        value = weight.detach().float() if weight.is_floating_point() else weight
        return f"{name} {tuple(weight.shape)} {tensor_hash(value)}"

    with adapter_off(module):
        lines = each_whole(active_state(module), one)
    return hashlib.blake2b("\n".join(sorted(lines)).encode(), digest_size=16).hexdigest()


def recorded_hash(directory: Path) -> str | None:
    """Hash of the weights that a run's adapter was trained on, from the run's manifest; None if unknown.

    Args:
        directory: of the adapter: RUN/model, or the model of a checkpoint.
    """
    above = directory.resolve().parents
    for run in (above[0], *(above[2:3] if len(above) > 1 and above[1].name == "checkpoints" else ())):
        with suppress(ModelError):
            if found := read_object(run / "manifest.json").get("base_weights"):
                return str(found)
    return None


def first_difference(module: Any, directory: Path) -> str | None:
    """Name of the first weight, without the adapter, that differs from the safetensors files of a directory, compared
    as float32; None if all are equal or the directory has no such files."""
    with adapter_off(module):
        own = active_state(module)
    try:
        for file in sorted(set((ModelSource(str(directory)).weight_files() or {}).values())):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  (it is not a dict)
                    weight, stored = own.get(name), opened.get_tensor(name)
                    if weight is not None and (weight.shape != stored.shape
                                               or not torch.equal(weight.detach().cpu().float(), stored.float())):
                        return name
    except (OSError, ModelError, SafetensorError):
        return None  # whoever needs these files reports the error
    return None
