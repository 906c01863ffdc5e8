"""Low-rank adapters in a causal model: their structure, and the values they begin with.

The layers are peft's, put into the module in place: it stays the causal model that it was, and its parameters keep
their names, with `base_layer` where an adapter stands around one. Making the structure needs no weights, and may be
done while they are on the meta device; filling it comes after.
"""

import hashlib
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from tropism.errors import ModelError, UsageError
from tropism.model.options import LoraOptions

NAME = "default"
"""What peft calls an adapter that nobody named."""

_PARTS = ("lora_A", "lora_B", "lora_magnitude_vector", "modules_to_save")
_KINDS = (torch.nn.Linear, Conv1D)


@dataclass(frozen=True, slots=True)
class Facts:
    """What an adapter is, in figures.

    Args:
        rank: the largest rank of its modules.
        modules: how many have an adapter.
        kinds: by how many names, the number of the layer left out.
        whole: modules that learn whole beside it.
        learning, total: weights.
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


def facts_of(module: Any) -> Facts:
    """Figures of a module with an adapter."""
    name = adapter_name(module)
    layers = {key: layer for key, layer in module.named_modules() if hasattr(layer, "lora_A") and name in layer.lora_A}
    kinds = {".".join(part for part in key.split(".") if not part.isdigit()) for key in layers}
    whole = sum(1 for _, layer in module.named_modules() if hasattr(layer, "modules_to_save"))
    learning = sum(weight.numel() for weight in kept_parameters(module))
    frozen = {id(weight): weight for key, weight in module.named_parameters()
              if key not in (learning_names(module) or ())}
    total = learning + sum(map(_size, frozen.values()))
    return Facts(max((layer.r[name] for layer in layers.values()), default=0), len(layers), len(kinds), whole,
                 learning, total)


def _size(weight: Tensor) -> int:
    """How many weights a parameter stands for: of a packed one, as many as it was made from."""
    state = getattr(weight, "quant_state", None)
    return math.prod(state.shape) if state is not None else weight.numel()


def _short(count: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


# --- which modules --------------------------------------------------------------------------------------------------


def linear_names(module: Any) -> list[str]:
    """Names of the linear layers of a model, but for its head."""
    head = module.get_output_embeddings()
    return [name for name, layer in module.named_modules() if isinstance(layer, _KINDS) and layer is not head]


def new_config(module: Any, options: LoraOptions, base: str) -> Any:
    """peft's configuration of a fresh adapter for a model, whose weights are not looked at.

    Args:
        base: what its file will say that it belongs to.

    Raises:
        UsageError: for a name that no module has, or one that cannot have what is asked for.
    """
    from peft import LoraConfig  # slow to import, and most runs have no adapter

    rank = options.rank
    assert rank is not None
    whole = _whole_modules(module, options)
    targets = _targets(module, options, whole)
    linear = [layer for name, layer in module.named_modules() if _ends(name, targets)]
    return LoraConfig(
        r=rank, lora_alpha=options.alpha if options.alpha is not None else 2 * rank, target_modules=targets,
        lora_dropout=0.0, use_dora=options.dora, use_rslora=options.rslora, modules_to_save=whole or None,
        fan_in_fan_out=all(isinstance(layer, Conv1D) for layer in linear), task_type="CAUSAL_LM",
        base_model_name_or_path=base, ensure_weight_tying=bool(whole) and _tied_names(module, whole))


def _targets(module: Any, options: LoraOptions, whole: Sequence[str]) -> list[str]:
    linear = linear_names(module)
    if options.targets is None:
        linear = [name for name in linear if not _ends(name, whole)]
        found = sorted({name.rpartition(".")[2] for name in linear})
        chosen = set(linear)
        exact = all(name in chosen for name, _ in module.named_modules() if _ends(name, found))
        return found if exact else linear
    names = _split(options.targets)
    known = set(linear)
    head = module.get_output_embeddings()
    for wanted in names:
        matched = {name: layer for name, layer in module.named_modules() if _ends(name, [wanted])}
        if not matched:
            raise UsageError(f"lora.targets {wanted}: no module of the model has this name{_near(wanted, linear)}")
        for name, layer in matched.items():
            if layer is head:
                raise UsageError(f"lora.targets {wanted}: is the head, whose weight is used as it is; "
                                 f"--lora.modules-to-save {wanted} lets it learn whole")
            if name not in known:
                raise UsageError(f"lora.targets {wanted}: {name} is a {type(layer).__name__}, and adapters stand on "
                                 f"linear layers{_near(wanted, linear)}; --lora.modules-to-save lets it learn whole")
        if both := [name for name in matched if _ends(name, whole)]:
            raise UsageError(f"lora.targets {wanted} and lora.modules_to_save both name {both[0]}; it has an adapter "
                             "or learns whole")
    return names


def _whole_modules(module: Any, options: LoraOptions) -> list[str]:
    """Names of the modules that learn whole. Of tied embeddings the one that holds the weight stands for both."""
    names = _split(options.modules_to_save)
    every = dict(module.named_modules())
    lists = (torch.nn.ModuleList, torch.nn.ModuleDict)
    for wanted in names:
        matched = [layer for name, layer in every.items() if _ends(name, [wanted])]
        if not matched or any(isinstance(layer, lists) or not any(True for _ in layer.parameters())
                              for layer in matched):
            holders = [name for name, layer in every.items()
                       if name and any(True for _ in layer.parameters(recurse=False))]
            raise UsageError(f"lora.modules_to_save {wanted}: no module of the model has this name and weights of its "
                             f"own{_near(wanted, holders)}")
    if not _tied_names(module, names):
        return names
    embedding = module.get_input_embeddings()
    own = next(name for name, layer in every.items() if layer is embedding).rpartition(".")[2]
    head = next(name for name, layer in every.items() if layer is module.get_output_embeddings())
    return [own, *(name for name in names if not _ends(head, [name]) and name != own)]


def _tied_names(module: Any, names: Sequence[str]) -> bool:
    """Whether names mean an embedding or a head that share their weight."""
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    if embedding is None or head is None or head.weight is not embedding.weight:
        return False
    return any(layer is embedding or layer is head for name, layer in module.named_modules() if _ends(name, names))


def _split(text: str | None) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in (text or "").split(",") if part.strip()))


def _ends(name: str, endings: Sequence[str]) -> bool:
    return any(name == ending or name.endswith(f".{ending}") for ending in endings)


def _near(wanted: str, names: Sequence[str]) -> str:
    kinds = sorted({name.rpartition(".")[2] for name in names})
    close = get_close_matches(wanted.rpartition(".")[2], kinds, n=3, cutoff=0.5)
    return f"; the nearest are {', '.join(close)}" if close else f"; there are {', '.join(kinds)}"


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
            # Around quantised weights peft spells them out for DoRA and puts them back, which meta memory would lose.
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
    materialise(module, dtype)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if ".lora_A." in name or ".lora_B." in name:
                weight.copy_(initial_values(seed, name, weight.shape))
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


def materialise(module: Any, dtype: torch.dtype) -> None:
    """Memory for the weights of an adapter, in a dtype, on the device of the layer that it stands on."""
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


def state_as_computed(module: Any) -> dict[str, Tensor]:
    """Every tensor that decides what a module computes now: without the adapter where it is switched off, and then by
    the names that they have without one."""
    state: dict[str, Tensor] = module.state_dict()
    name = adapter_name(module)
    off = any(getattr(layer, "_disable_adapters", False) for layer in module.modules())
    if name is None or not off:
        return state
    return {base_name(key): tensor for key, tensor in state.items() if not _is_part(key, name)}


def base_name(key: str) -> str:
    """The name that a tensor has in a model without an adapter."""
    return ".".join(part for part in key.split(".") if part not in ("base_layer", "original_module"))
