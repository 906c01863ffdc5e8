"""An adapter in figures: its rank, its modules, and how many weights are trainable."""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tropism.model.adapters.parameters import adapter_name, adapter_weight_names, saved_parameters


@dataclass(frozen=True, slots=True)
class AdapterSummary:
    """An adapter in figures.

    Args:
        rank: the largest rank of its modules.
        modules: number of modules with an adapter.
        kinds: number of their distinct names, ignoring the index of the layer.
        whole: modules that are trained in full in addition (`modules_to_save`).
        learning, total: trainable weights and all weights, those of the adapter included.
        experts: weights of experts that stay frozen. Families that hold all experts of a layer in one tensor have no
            linear layer for each, which an adapter could be put on.
    """

    rank: int
    modules: int
    kinds: int
    whole: int
    learning: int
    total: int
    experts: int = 0

    def __str__(self) -> str:
        full = f" and {self.whole} fully trained modules" if self.whole else ""
        return (f"rank {self.rank} on {self.modules} modules ({self.kinds} kinds){full}: {_short(self.learning)} of "
                f"{_short(self.total)} weights are trainable"
                + (f"; {_short(self.experts)} weights of experts stay frozen" if self.experts else ""))


def summarize(module: Any) -> AdapterSummary:
    """Figures of the adapter in a module."""
    name = adapter_name(module)
    layers = {key: layer for key, layer in module.named_modules() if hasattr(layer, "lora_A") and name in layer.lora_A}
    kinds = {".".join(part for part in key.split(".") if not part.isdigit()) for key in layers}
    full = len({id(next(layer.modules_to_save[name].parameters())) for layer in module.modules()
                if hasattr(layer, "modules_to_save")})  # tied modules count once
    learning = sum(weight.numel() for weight in saved_parameters(module))
    frozen = {id(weight): weight for key, weight in module.named_parameters()
              if key not in (adapter_weight_names(module) or ()) and ".original_module." not in key}
    total = learning + sum(map(_size, frozen.values()))
    experts = sum(_size(weight) for key, weight in module.named_parameters() if id(weight) in frozen
                  and weight.ndim >= 3 and "experts" in key)
    return AdapterSummary(max((layer.r[name] for layer in layers.values()), default=0), len(layers), len(kinds), full,
                          learning, total, experts)


def rank_warning(module: Any) -> str | None:
    """A warning if a rank exceeds the smaller side of its weight, where more rank has no effect; None otherwise."""
    name = adapter_name(module)
    beyond = [(key, layer) for key, layer in module.named_modules()
              if hasattr(layer, "lora_A") and name in layer.lora_A
              and layer.r[name] > min(layer.in_features, layer.out_features)]
    if not beyond:
        return None
    key, layer = beyond[0]
    return (f"rank {layer.r[name]} exceeds the smaller side of the weights of {len(beyond)} modules ({key} is "
            f"{layer.out_features} x {layer.in_features}). A rank above that side only costs memory and time.")


def _size(weight: Tensor) -> int:
    """Number of weights in a parameter; of a quantized one, before it was packed."""
    state = getattr(weight, "quant_state", None)
    return math.prod(state.shape) if state is not None else weight.numel()


def _short(count: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)
