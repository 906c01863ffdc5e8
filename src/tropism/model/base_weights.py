"""Whether the weights that an adapter stands on are those that it was trained on."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tropism.distributed.shard import each_whole
from tropism.model.adapters.switch import active_state, adapter_off
from tropism.model.fingerprint import tensor_hash


def base_hash(module: Any) -> str | None:
    """Hash of the weights and stored buffers without the adapter, by their names there. They count as float32, so that
    the precision of a run, its device, and how the model is spread have no part in it. All processes that share the
    model call this together.

    Returns:
        None where the weights are held in fewer bits, and are no longer those of the base.
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
    """Hash of the weights that the adapter of a run was trained on, as the run's manifest has it.

    Args:
        directory: of the adapter: RUN/model, or that of a checkpoint.
    """
    above = directory.resolve().parents
    for run in (above[0], *(above[2:3] if len(above) > 1 and above[1].name == "checkpoints" else ())):
        with suppress(OSError, ValueError, AttributeError):
            if found := json.loads((run / "manifest.json").read_text(encoding="utf-8")).get("base_weights"):
                return str(found)
    return None


def first_difference(module: Any, directory: Path) -> str | None:
    """The first weight without the adapter that is not what the safetensors files of a directory have by this name, as
    float32; None where all are, or the directory cannot tell."""
    with adapter_off(module):
        own = active_state(module)
    try:
        for name, kept in _stored(directory):
            weight = own.get(name)
            if weight is not None and (weight.shape != kept.shape
                                       or not torch.equal(weight.detach().cpu().float(), kept.float())):
                return name
    except (OSError, ValueError, KeyError, SafetensorError):
        return None  # no file of weights: whoever needs it says so
    return None


def _stored(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model directory, one at a time."""
    index = directory / "model.safetensors.index.json"
    files = {"model.safetensors"}
    if index.is_file():
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    for file in sorted(files):
        with safe_open(directory / file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (it is no dict)
                yield name, opened.get_tensor(name)
