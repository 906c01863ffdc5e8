"""How experts are computed that a layer holds in one tensor each, `[experts, ...]`, and which of them can be rounded.

Autocast does not know the grouped product of experts: transformers' own function computes it in the dtype of the
weights, so it stays float32 beside bfloat16 layers. Here the weights are cast as autocast casts those of other layers.
"""

from collections.abc import Iterator
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

NAME = "tropism"
"""Of our computation of experts, in `config._experts_implementation`."""

_MATRICES = 3
"""Dims of the weights of all experts of a layer together. Biases have one less."""

_ALIGNED = 16
"""Bytes. The grouped product needs rows and columns of a multiple of it."""


def compute_experts(module: Any, float64: bool) -> None:
    """Choose how a model's experts are computed: by our grouped product instead of transformers'. It does not support
    float64, transformers' plain loop does. Other choices of the user are kept."""
    if getattr(module.config, "_experts_implementation", None) in ("grouped_mm", NAME):
        module.set_experts_implementation("eager" if float64 else NAME)


class _InDtype:
    """A layer's experts, with their weights cast to a dtype, once."""

    def __init__(self, experts: Any, dtype: torch.dtype) -> None:
        self._experts = experts
        self._dtype = dtype

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._experts, name)
        if isinstance(found, Tensor) and found.dim() == _MATRICES and found.is_floating_point():
            found = found.to(self._dtype)
            setattr(self, name, found)
        return found


def _forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`[T, D]` output of the experts, computed in the dtype of autocast, or else in that of the hidden states `[T, D]`.
    Gradients reach the weights in the weights' own dtype. The plain loop serves sizes that the grouped product does
    not."""
    kind = hidden_states.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_states.dtype
    grouped = all(size * dtype.itemsize % _ALIGNED == 0 for weight in self.parameters() if weight.dim() == _MATRICES
                  for size in weight.shape[1:])
    compute = grouped_mm_experts_forward if grouped else type(self).forward.__wrapped__
    output: Tensor = compute(_InDtype(self, dtype), hidden_states, *args, **kwargs)
    return output


ALL_EXPERTS_FUNCTIONS.register(NAME, _forward)


def expert_matrices(module: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Name and weight of the experts that a layer holds in one tensor, without those to which an adapter adds."""
    adapted = {id(getattr(layer.get_base_layer(), layer.parameter_name)) for layer in module.modules()
               if isinstance(layer, ParamWrapper)}
    for place, layer in module.named_modules():
        for name, weight in layer.named_parameters(prefix=place, recurse=False):
            if "Experts" in type(layer).__name__ and weight.dim() == _MATRICES and id(weight) not in adapted:
                yield name, weight
