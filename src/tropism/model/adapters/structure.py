"""Low-rank adapters in a causal model: their structure, and the values they begin with.

The layers are peft's, put into the module in place: it stays the causal model that it was, and its parameters keep
their names, with `base_layer` where an adapter stands around one. Making the structure needs no weights, and may be
done while they are on the meta device; filling it comes after.
"""

import hashlib
import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tropism.distributed.shard import give, is_sharded
from tropism.errors import ModelError, UsageError

# peft imports bitsandbytes where it is there, which then misses a kernel that nothing here uses.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

NAME = "default"
"""What peft calls an adapter that nobody named."""

_PARTS = ("lora_A", "lora_B", "lora_magnitude_vector", "modules_to_save")


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """What an adapter is, in figures.

    Args:
        rank: the largest rank of its modules.
        modules: how many have an adapter.
        kinds: by how many names, the number of the layer left out.
        whole: modules that learn whole beside it, and in place of the model's own.
        learning, total: weights, those of the adapter included.
    """

    rank: int
    modules: int
    kinds: int
    whole: int
    learning: int
    total: int

    def __str__(self) -> str:
        beside = f" and {self.whole} whole modules" if self.whole else ""
        return (f"rank {self.rank} on {self.modules} modules ({self.kinds} kinds){beside}: {_short(self.learning)} of "
                f"{_short(self.total)} weights learn")


def adapter_name(module: Any) -> str | None:
    """What peft calls the adapter of a module; None if it has none.

    Raises:
        ModelError: if it has several.
    """
    names = list(getattr(module, "peft_config", None) or ())
    if len(names) > 1:
        raise ModelError(f"the model holds {len(names)} adapters ({', '.join(names)}); Tropism trains one: "
                         "delete_adapter the others, or merge them")
    return str(names[0]) if names else None


def learning_names(module: Any) -> set[str] | None:
    """Names of the weights that belong to the adapter of a module, tied ones under each name; None for no adapter."""
    name = adapter_name(module)
    if name is None:
        return None
    return {key for key, _ in module.named_parameters(remove_duplicate=False) if _is_part(key, name)}


def _is_part(key: str, name: str) -> bool:
    parts = key.split(".")
    return any(part in _PARTS and parts[place + 1 : place + 2] == [name] for place, part in enumerate(parts))


def kept_parameters(module: Any) -> list[torch.nn.Parameter]:
    """The parameters that a result consists of: the adapter's, or all where there is none."""
    names = learning_names(module)
    return [weight for name, weight in module.named_parameters() if names is None or name in names]


def facts_of(module: Any) -> AdapterFacts:
    """Figures of a module with an adapter."""
    name = adapter_name(module)
    layers = {key: layer for key, layer in module.named_modules() if hasattr(layer, "lora_A") and name in layer.lora_A}
    kinds = {".".join(part for part in key.split(".") if not part.isdigit()) for key in layers}
    whole = len({id(next(layer.modules_to_save[name].parameters())) for layer in module.modules()
                 if hasattr(layer, "modules_to_save")})  # tied ones are one
    learning = sum(weight.numel() for weight in kept_parameters(module))
    frozen = {id(weight): weight for key, weight in module.named_parameters()
              if key not in (learning_names(module) or ()) and ".original_module." not in key}
    total = learning + sum(map(_size, frozen.values()))
    return AdapterFacts(max((layer.r[name] for layer in layers.values()), default=0), len(layers), len(kinds), whole,
                 learning, total)


def too_large(module: Any) -> str | None:
    """What is to be said of ranks beyond the smaller side of a weight, where more changes nothing; None if none is."""
    name = adapter_name(module)
    beyond = [(key, layer) for key, layer in module.named_modules()
              if hasattr(layer, "lora_A") and name in layer.lora_A
              and layer.r[name] > min(layer.in_features, layer.out_features)]
    if not beyond:
        return None
    key, layer = beyond[0]
    return (f"rank {layer.r[name]} is above the smaller side of the weights of {len(beyond)} modules ({key} is "
            f"{layer.out_features} x {layer.in_features}); beyond that side a rank changes nothing but memory and time")


def _size(weight: Tensor) -> int:
    """How many weights a parameter stands for: of a packed one, as many as it was made from."""
    state = getattr(weight, "quant_state", None)
    return math.prod(state.shape) if state is not None else weight.numel()


def _short(count: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


# --- structure ------------------------------------------------------------------------------------------------------


def make_structure(module: Any, config: Any) -> None:
    """Put the layers of an adapter into a model, in place, on the meta device, where their values do not exist yet.

    Modules that learn whole are copies of the module's own, with its weights where it has any.

    Raises:
        UsageError: if the model has an adapter already.
        ModelError: if peft cannot.
    """
    from peft import inject_adapter_in_model

    if adapter_name(module) is not None:
        raise UsageError("the model has an adapter already, which is trained as it is; leave lora.rank and "
                         "lora.adapter out, or merge it first")
    wanted, start = list(config.modules_to_save or ()), config.init_lora_weights
    config.init_lora_weights = False  # the values come from `fill`
    config.inference_mode = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of kinds of layers that peft tells apart by itself
            # Around quantized weights peft spells them out for DoRA and puts them back, which meta memory would lose.
            inject_adapter_in_model(config, module, adapter_name=NAME,
                                    low_cpu_mem_usage=not getattr(module, "is_quantized", False))
    except (ValueError, TypeError) as error:
        raise ModelError(f"the adapter does not fit the model: {' '.join(str(error).split())}") from error
    config.init_lora_weights = start
    config.modules_to_save = wanted or None  # peft adds tied ones, and finds them again by itself
    names = learning_names(module) or set()
    for name, weight in module.named_parameters(remove_duplicate=False):
        weight.requires_grad_(name in names)
    module.eval()


# --- values ---------------------------------------------------------------------------------------------------------


def initial_values(seed: int, name: str, shape: Sequence[int]) -> Tensor:
    """The values with which a weight of an adapter begins: a function of seed and name, whatever the order, device or
    number of processes.

    `lora_A` is uniform in +-1 / sqrt(fan in), as peft's Kaiming start with a = sqrt 5; `lora_B` is 0.

    Args:
        seed: of the run.
        name: of the parameter in the model.
        shape: of the whole weight.

    Returns:
        float64.

    Raises:
        ValueError: for a weight that begins as a function of others.
    """
    if ".lora_B." in name:
        return torch.zeros(*shape, dtype=torch.float64)
    if ".lora_A." not in name:
        raise ValueError(f"{name} begins as a function of other weights")
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=16).digest()
    bits = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    bound = 1 / math.sqrt(math.prod(shape[1:]))
    return torch.from_numpy(bits.uniform(-bound, bound, tuple(shape)))


def fill(module: Any, seed: int, dtype: torch.dtype) -> None:
    """Give a fresh adapter its values, on the device of the layer that it stands on.

    Args:
        dtype: of the adapter and of the modules that learn whole.
    """
    materialize(module, dtype)
    for name, weight in module.named_parameters():
        if ".lora_A." in name or ".lora_B." in name:
            give(weight, initial_values(seed, name, weight.shape))
    copy_whole_modules(module)
    fill_magnitudes(module)


@torch.no_grad()
def copy_whole_modules(module: Any) -> None:
    """Let modules that learn whole begin as those that they take the place of."""
    for wrapper in _wrappers(module):
        for name, weight in wrapper.modules_to_save[NAME].named_parameters():
            weight.copy_(wrapper.original_module.get_parameter(name))


@torch.no_grad()
def fill_magnitudes(module: Any) -> None:
    """Let the magnitudes of DoRA begin as the norms of the weights' rows (arXiv:2402.09353, equation 5). It needs the
    base weights and `lora_A` and `lora_B`."""
    from peft.utils.integrations import dequantize_module_weight

    for layer in module.modules():
        magnitude = layer.lora_magnitude_vector[NAME] if _has(layer, "lora_magnitude_vector") else None
        if magnitude is not None:
            change = layer.lora_B[NAME].weight @ layer.lora_A[NAME].weight
            weight = dequantize_module_weight(layer.get_base_layer())
            magnitude.weight.copy_(magnitude.get_weight_norm(weight, change.to(weight.dtype), layer.scaling[NAME]))


def materialize(module: Any, dtype: torch.dtype) -> None:
    """Memory for the weights of an adapter, in a dtype, on the device of the layer that it stands on. Where a model is
    spread over processes they have it already."""
    if is_sharded(module):
        return
    made: dict[int, torch.nn.Parameter] = {}  # tied ones stay one
    for layer in module.modules():
        if not _has(layer, "lora_A") and not _has(layer, "modules_to_save"):
            continue
        base = layer.original_module if _has(layer, "modules_to_save") else layer.get_base_layer()
        device = next(base.parameters()).device
        for part in _PARTS:
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


# --- with and without -----------------------------------------------------------------------------------------------


@contextmanager
def switched_off(module: Any) -> Iterator[None]:
    """The model as it is without its adapter, to the bit; modules that learn whole are those of the base.

    peft's own switch also changes which weights ask for gradients, and would be seen by a graph that exists.
    """
    layers = [layer for layer in module.modules() if hasattr(layer, "_disable_adapters")]
    before = [layer._disable_adapters for layer in layers]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, value in zip(layers, before, strict=True):
            layer._disable_adapters = value


@contextmanager
def uncast(module: Any) -> Iterator[None]:
    """Let adapters take activations as they come. peft gives them the dtype of the adapter's weights, which rounds
    where those have traveled in fewer bits and are widened for the product."""
    layers = [layer for layer in module.modules() if getattr(layer, "cast_input_dtype_enabled", False)]
    for layer in layers:
        layer.cast_input_dtype_enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.cast_input_dtype_enabled = True


def state_as_computed(module: Any) -> dict[str, Tensor]:
    """Every tensor that decides what a module computes now: without the adapter where it is switched off, and then by
    the names that they have without one."""
    state: dict[str, Tensor] = module.state_dict()
    name = adapter_name(module)
    off = any(getattr(layer, "_disable_adapters", False) for layer in module.modules())
    if name is None or not off:
        return state
    return {base_name(key): tensor for key, tensor in state.items() if not _is_part(key, name)}


def scales_as_computed(module: Any) -> list[str]:
    """What decides beside the weights what adapters compute now: name, scale and kind of each that is switched on."""
    return [f"{name} {adapter} {layer.scaling[adapter]!r} {bool(getattr(layer, 'use_dora', {}).get(adapter))}"
            for name, layer in module.named_modules()
            if isinstance(getattr(layer, "scaling", None), dict) and not getattr(layer, "_disable_adapters", False)
            for adapter in sorted(layer.scaling)]


def base_name(key: str) -> str:
    """The name that a tensor has in a model without an adapter."""
    return ".".join(part for part in key.split(".") if part not in ("base_layer", "original_module"))
