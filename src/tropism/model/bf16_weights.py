"""Frozen weights in half the memory: where autocast would round them for every product, they are rounded once."""

from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from tropism.distributed.shard import convert, each_whole, is_sharded
from tropism.model.adapters.parameters import base_name
from tropism.model.fingerprint import tensor_hash


def round_to_bf16(module: Any) -> None:
    """Hold the frozen weights of linear layers in bfloat16, in place; all else stays as it is.

    Autocast rounds them in the same way whenever it uses them, so that no result changes. Not those of adapters, nor of
    layers with DoRA, whose norms are taken of the weights themselves, nor a head that is an embedding too. The module
    keeps the hashes of what it held, so that its fingerprint stays what it was. A sharded model must not have computed
    yet; all processes call this together.
    """
    weights = roundable(module)
    hashes = each_whole(weights, lambda name, weight: tensor_hash(weight))
    known: dict[str, str] = getattr(module, "hashes_before_narrowing", {})
    module.hashes_before_narrowing = known | dict(zip(map(base_name, weights), hashes, strict=True))
    if is_sharded(module):
        convert(module, weights, torch.bfloat16)
        return
    for weight in weights.values():
        weight.data = weight.data.to(torch.bfloat16)


def roundable(module: Any) -> dict[str, torch.nn.Parameter]:
    """Frozen float32 weights of linear layers by name."""
    shared = {id(layer.weight) for layer in module.modules() if isinstance(layer, torch.nn.Embedding)}
    apart = {id(weight) for layer in module.modules() if getattr(layer, "lora_magnitude_vector", None)
             for weight in layer.get_base_layer().parameters()}
    apart |= {id(weight) for layer in module.modules() for name in ("lora_A", "lora_B")
              for weight in getattr(layer, name, torch.nn.Module()).parameters()}
    return {f"{name}.weight": layer.weight for name, layer in module.named_modules()
            if isinstance(layer, torch.nn.Linear | Conv1D) and layer.weight.dtype == torch.float32
            and not layer.weight.requires_grad and id(layer.weight) not in shared | apart}


