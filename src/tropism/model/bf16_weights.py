"""Hold frozen weights in bfloat16: autocast would round them for every product; rounding once halves their memory."""

from itertools import chain
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from tropism.distributed.shard import convert, each_whole, is_sharded
from tropism.model.adapters.parameters import base_name
from tropism.model.fingerprint import tensor_hash
from tropism.model.moe_experts import expert_matrices


def round_to_bf16(module: Any) -> None:
    """Convert the frozen weights of linear layers and experts to bfloat16, in place.

    Autocast rounds them in the same way whenever it uses them, so no result changes. Excluded are weights of adapters,
    of layers with DoRA (which computes norms of the weights themselves), and of a head that is tied to the embedding.
    The module keeps the hashes of the float32 weights, so its fingerprint does not change. A sharded model must not
    have computed yet. All processes must call this together.
    """
    weights = roundable(module)
    hashes = each_whole(weights, lambda name, weight: tensor_hash(weight))
    known: dict[str, str] = getattr(module, "hashes_before_rounding", {})
    module.hashes_before_rounding = known | dict(zip(map(base_name, weights), hashes, strict=True))
    if is_sharded(module):
        convert(module, weights, torch.bfloat16)
        return
    for weight in weights.values():
        weight.data = weight.data.to(torch.bfloat16)


def roundable(module: Any) -> dict[str, torch.nn.Parameter]:
    """Frozen float32 weights of linear layers and experts that can be rounded, by name."""
    shared = {id(layer.weight) for layer in module.modules() if isinstance(layer, torch.nn.Embedding)}
    apart = {id(weight) for layer in module.modules() if getattr(layer, "lora_magnitude_vector", None)
             for weight in layer.get_base_layer().parameters()}
    apart |= {id(weight) for layer in module.modules() for name in ("lora_A", "lora_B")
              for weight in getattr(layer, name, torch.nn.Module()).parameters()}
    linear = ((f"{name}.weight", layer.weight) for name, layer in module.named_modules()
              if isinstance(layer, torch.nn.Linear | Conv1D))
    return {name: weight for name, weight in chain(linear, expert_matrices(module)) if weight.dtype == torch.float32
            and not weight.requires_grad and id(weight) not in shared | apart}
