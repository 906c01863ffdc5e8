"""Checks of a model before it is built: its size, and what its weight files say of their weights."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tropism.borders import border
from tropism.errors import ModelError, count_of
from tropism.model.source import ModelSource

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_CGROUP = Path("/sys/fs/cgroup/memory.max")
_FLOATING = ("F", "BF", "C")
"""How safetensors' names of floating-point dtypes begin."""


def check_layers(config: Any, source: ModelSource) -> None:
    """Check that the weight files have every layer of the config, before a model with that many is built.

    Raises:
        ModelError: with both numbers.
    """
    numbers = [int(found[1]) for name in source.weight_files() or () if (found := _LAYER.search(name))]
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if numbers and isinstance(layers, int) and layers > max(numbers) + 1:
        raise ModelError(f"{source.name}: the config has {count_of(layers, 'layer')}, but the weight files have "
                         f"{max(numbers) + 1}. Use the config that belongs to the weights.")


def check_memory(skeleton: Any, name: str, bytes_per_weight: float, device: torch.device, processes: int = 1) -> None:
    """Refuse a model whose weights alone need more memory than there is.

    Args:
        skeleton: the model on the meta device.
        name: of the model.
        device: where the weights will be.
        processes: number of processes with a memory of their own that share the weights.

    Raises:
        ModelError: with the memory that is needed and the memory that there is.
    """
    needed = sum(weight.numel() for weight in skeleton.parameters()) * bytes_per_weight / processes
    there = (torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else machine_memory())
    if needed > there:
        where = "the GPU" if device.type == "cuda" else "this machine"
        raise ModelError(f"{name}: the weights need {needed / 2**30:,.1f} GiB of memory, but {where} has "
                         f"{there / 2**30:,.1f} GiB. Use a smaller model, or shard it over more machines or GPUs with "
                         "--parallel.shard.")


def machine_memory() -> int:
    """Memory of this machine, or of the container, in bytes."""
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = _CGROUP.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return there
    return min(there, int(limit)) if limit.isdecimal() else there


def check_stored(skeleton: Any, source: ModelSource) -> None:
    """Check in the headers of the safetensors files that no weight is stored as integers, which quantized models do.

    Raises:
        ModelError: with the name of such a weight, if the config says nothing of quantization.
    """
    if getattr(skeleton.config, "quantization_config", None) is not None:
        return
    floating = {name for name, weight in skeleton.named_parameters(remove_duplicate=False)
                if weight.is_floating_point()}
    for file, name, dtype, _ in _headers(source):
        if name in floating and not dtype.startswith(_FLOATING):
            raise ModelError(f"{file}: {name} is stored as {dtype}, but the config does not say how it is quantized")


@contextmanager
def mismatch(skeleton: Any, source: ModelSource) -> Iterator[None]:
    """Name the first weight whose shape in the files differs from the config's, if the block fails.

    Raises:
        ModelError: in place of the block's error.
    """
    try:
        yield
    except Exception as error:
        wanted = {name: tuple(weight.shape) for name, weight in skeleton.named_parameters(remove_duplicate=False)}
        for file, name, _, shape in _headers(source):
            if wanted.get(name, shape) != shape:
                raise ModelError(f"{file}: {name} is {list(shape)}, but {list(wanted[name])} in the model's config"
                                 ) from error
        raise


def _headers(source: ModelSource) -> Iterator[tuple[str, str, str, tuple[int, ...]]]:
    """File, name, dtype and shape of each weight in safetensors files."""
    for file in sorted(set((source.weight_files() or {}).values())):
        with border(f"{file}: the model could not be loaded"), safe_open(file, framework="pt") as opened:
            for name in sorted(opened.keys()):
                part = opened.get_slice(name)
                yield file, name, part.get_dtype(), tuple(part.get_shape())
