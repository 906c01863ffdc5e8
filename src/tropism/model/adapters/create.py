"""Put a low-rank adapter into a causal model, and give it its initial values.

The layers are peft's and are inserted in place: the module stays a causal model, and its parameters keep their names,
except that `base_layer` is added to the names inside an adapted layer. `make_structure` needs no weights and works on
the meta device. `set_initial_values` follows.
"""

import hashlib
import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tropism.borders import border
from tropism.distributed.shard import give, is_sharded, whole_of
from tropism.errors import ModelError, UsageError
from tropism.model.adapters.parameters import NAME, PARTS, adapter_name, adapter_weight_names
from tropism.model.adapters.targets import check_rank
from tropism.model.tied_weights import is_tied

# peft imports bitsandbytes if it is installed, which then warns about a missing kernel that nothing here uses.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def make_structure(module: Any, config: Any) -> None:
    """Insert the layers of an adapter into a model, in place, on the meta device: without values yet.

    Modules that are trained in full are copies of the model's own, with their weights if they have any.

    Raises:
        UsageError: if the model already has an adapter.
        ModelError: if peft rejects the adapter.
    """
    from peft import inject_adapter_in_model

    if adapter_name(module) is not None:
        raise UsageError("the model already has an adapter, and training continues that one. Remove --lora.rank and "
                         "--lora.adapter, or merge the adapter first.")
    wanted, start = list(config.modules_to_save or ()), config.init_lora_weights
    config.init_lora_weights = False  # `set_initial_values` sets them
    config.inference_mode = False
    check_rank(module, config)
    one_table = config.ensure_weight_tying and is_tied(module)
    with border("the adapter does not match the model"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about kinds of layers, which peft detects correctly
        # For DoRA peft dequantizes weights and restores them, which would lose them on the meta device.
        inject_adapter_in_model(config, module, adapter_name=NAME,
                                low_cpu_mem_usage=not getattr(module, "is_quantized", False))
    config.init_lora_weights = start
    config.modules_to_save = wanted or None  # without the tied ones, which peft adds again on loading
    if one_table:
        _tie_saved(module)
    names = adapter_weight_names(module) or set()
    for name, weight in module.named_parameters(remove_duplicate=False):
        weight.requires_grad_(name in names)
    module.eval()


def _tie_saved(module: Any) -> None:
    """Let tied ends that are trained in full share one weight. peft does this only for some names of modules.

    Raises:
        ModelError: if only one of them is trained.
    """
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    if not _has(embedding, "modules_to_save") or not _has(head, "modules_to_save"):
        raise ModelError(f"{type(module).__name__}: the embedding and the output head share one table, but the adapter "
                         "trains only one of them. Name both in --lora.modules-to-save.")
    head.modules_to_save[NAME].weight = embedding.modules_to_save[NAME].weight


def initial_values(seed: int, name: str, shape: Sequence[int]) -> Tensor:
    """The initial values of a weight of an adapter: a function of seed and name alone, not of order, device or number
    of processes.

    `lora_A` is uniform in +-1 / sqrt(fan in), like peft's Kaiming initialization with a = sqrt 5; `lora_B` is 0.

    Args:
        seed: the run's seed.
        name: of the parameter in the model.
        shape: of the full weight, also if it is sharded.

    Returns:
        float64.

    Raises:
        ValueError: for a weight whose initial values depend on other weights.
    """
    if ".lora_B." in name:
        return torch.zeros(*shape, dtype=torch.float64)
    if ".lora_A." not in name:
        raise ValueError(f"the initial values of {name} depend on other weights")
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=16).digest()
    bits = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    bound = 1 / math.sqrt(math.prod(shape[1:]))
    return torch.from_numpy(bits.uniform(-bound, bound, tuple(shape)))


def set_initial_values(module: Any, seed: int, dtype: torch.dtype) -> None:
    """Give a new adapter its initial values, on the device of the layer it adapts.

    Args:
        dtype: of the adapter and of the modules that are trained in full.
    """
    allocate(module, dtype)
    for name, weight in module.named_parameters():
        if ".lora_A." in name or ".lora_B." in name:
            give(weight, initial_values(seed, name, weight.shape))
    copy_saved_modules(module)
    set_dora_magnitudes(module)


@torch.no_grad()
def copy_saved_modules(module: Any) -> None:
    """Initialize modules that are trained in full with the weights of the modules they replace."""
    for wrapper in _wrappers(module):
        for name, weight in wrapper.modules_to_save[NAME].named_parameters():
            weight.copy_(wrapper.original_module.get_parameter(name))


@torch.no_grad()
def set_dora_magnitudes(module: Any) -> None:
    """Initialize DoRA's magnitudes with the norms of the weights' rows (arXiv:2402.09353, equation 5). Needs the base
    weights, `lora_A` and `lora_B`."""
    from peft.utils.integrations import dequantize_module_weight

    for layer in module.modules():
        magnitude = layer.lora_magnitude_vector[NAME] if _has(layer, "lora_magnitude_vector") else None
        if magnitude is not None:
            change = layer.lora_B[NAME].weight @ layer.lora_A[NAME].weight
            weight = dequantize_module_weight(layer.get_base_layer())
            norm = magnitude.get_weight_norm(weight, change.to(weight.dtype), layer.scaling[NAME])
            give(magnitude.weight, whole_of(norm))


def allocate(module: Any, dtype: torch.dtype) -> None:
    """Allocate the weights of an adapter in a dtype, on the device of the layer it adapts. In a sharded model they are
    allocated already."""
    if is_sharded(module):
        return
    made: dict[int, torch.nn.Parameter] = {}  # tied weights stay one parameter
    for layer in module.modules():
        if not _has(layer, "lora_A") and not _has(layer, "modules_to_save"):
            continue
        base = layer.original_module if _has(layer, "modules_to_save") else layer.get_base_layer()
        device = next(base.parameters()).device
        for part in PARTS:
            for inner in layer._modules[part].modules() if _has(layer, part) else ():
                for name, weight in list(inner.named_parameters(recurse=False)):
                    if id(weight) not in made:
                        value = (torch.empty(weight.shape, dtype=dtype, device=device) if weight.is_meta
                                 else weight.detach().to(device, dtype))
                        made[id(weight)] = torch.nn.Parameter(value)
                    inner.register_parameter(name, made[id(weight)])


def _has(layer: Any, part: str) -> bool:
    return part in layer._modules and NAME in layer._modules[part]


def _wrappers(module: Any) -> Iterator[Any]:
    return (layer for layer in module.modules() if _has(layer, "modules_to_save"))
