"""A model with its adapter switched off, and the tensors that decide what a model computes now."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from tropism.model.adapters.parameters import adapter_name, base_name, is_part


@contextmanager
def adapter_off(module: Any) -> Iterator[None]:
    """Let the model compute without its adapter, bitwise equal to the base. Fully trained modules are the base's too.

    peft's own switch also changes which weights require gradients, which an existing autograd graph would notice.
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
def without_input_cast(module: Any) -> Iterator[None]:
    """Keep the dtype of activations that enter adapters. peft casts them to the dtype of the adapter's weights, which
    rounds them if the weights are communicated in bfloat16 and computed in float32."""
    layers = [layer for layer in module.modules() if getattr(layer, "cast_input_dtype_enabled", False)]
    for layer in layers:
        layer.cast_input_dtype_enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.cast_input_dtype_enabled = True


def active_state(module: Any) -> dict[str, Tensor]:
    """Every tensor that decides what a module computes now. If the adapter is switched off, without its tensors and
    under the names of a model without an adapter."""
    state: dict[str, Tensor] = module.state_dict()
    name = adapter_name(module)
    off = any(getattr(layer, "_disable_adapters", False) for layer in module.modules())
    if name is None or not off:
        return state
    return {base_name(key): tensor for key, tensor in state.items() if not is_part(key, name)}


def active_scales(module: Any) -> list[str]:
    """What else decides what adapters compute now: name, scale and kind of each adapter that is switched on."""
    return [f"{name} {adapter} {layer.scaling[adapter]!r} {bool(getattr(layer, 'use_dora', {}).get(adapter))}"
            for name, layer in module.named_modules()
            if isinstance(getattr(layer, "scaling", None), dict) and not getattr(layer, "_disable_adapters", False)
            for adapter in sorted(layer.scaling)]
