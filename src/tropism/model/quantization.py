"""Frozen weights in 4 or 8 bits (QLoRA, arXiv:2305.14314), by bitsandbytes.

Only the weights are quantized. They are dequantized for each product, which is computed in the precision of the run:
bitsandbytes' own 8-bit product also rounds the inputs, so results would depend on the other sequences of a pack.
"""

import importlib.util
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from tropism.errors import ModelError

Quantization = Literal["nf4", "int8"]

_KEPT = "tropism_quantization"


def check_installed() -> None:
    """Check before loading that bitsandbytes is installed.

    Raises:
        ModelError: with the command that installs it.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ModelError("--lora.quantize needs the package bitsandbytes. Install it with "
                         "`pip install 'tropism[quant]'`.")


def bytes_per_weight(kind: Quantization | None) -> float:
    """Memory of a quantized weight; 0 if it is not quantized."""
    return {"nf4": 0.5, "int8": 1.0}[kind] if kind else 0.0


def scales(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Name and scales of each quantized weight. They are not finite if one of its values was not."""
    for name, weight in model.named_parameters():
        state = getattr(weight, "quant_state", None)
        for found in (getattr(state, "offset", None), getattr(state, "absmax", None), getattr(weight, "SCB", None)):
            if isinstance(found, Tensor):
                yield name, found


def loader_arguments(kind: Quantization, device: torch.device, plain: Iterable[str]) -> dict[str, Any]:
    """Arguments for transformers' loader.

    Args:
        plain: full names of modules that are not quantized.
    """
    check_installed()
    from transformers import BitsAndBytesConfig  # needs an optional package

    skip = [re.escape(name) for name in plain]  # transformers treats them as regular expressions
    config = (BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                                 bnb_4bit_compute_dtype=torch.float32, llm_int8_skip_modules=skip)
              if kind == "nf4" else BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=skip))
    return {"quantization_config": config, "device_map": {"": device}}


def make_exact(model: Any) -> Any:
    """Make each product depend on its own rows alone, in place; returns the model.

    Raises:
        ModelError: if nothing was quantized.
    """
    import bitsandbytes  # an optional package

    kinds = (bitsandbytes.nn.Linear4bit, bitsandbytes.nn.Linear8bitLt)
    layers = [layer for layer in model.modules() if isinstance(layer, kinds)]
    if not layers:
        raise ModelError(f"{type(model).__name__} has no linear layers that bitsandbytes can quantize. Remove "
                         "--lora.quantize.")
    made: dict[type, type] = {}
    for layer in layers:
        own = type(layer)
        # Keeps the class name, by which peft recognizes it.
        layer.__class__ = made.setdefault(own, type(own.__name__, (_DequantizedLinear, own), {}))
    return model


class _DequantizedLinear:
    """The forward pass of a linear layer whose weight is dequantized temporarily, for each product."""

    def forward(self: Any, hidden: Tensor) -> Tensor:
        result: Tensor = _Product.apply(hidden, self)
        return result if self.bias is None else result + self.bias.to(result.dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, layer: Any) -> Tensor:
        kind = hidden.device.type
        compute = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        ctx.layer, ctx.compute, ctx.dtype = layer, compute, hidden.dtype
        return functional.linear(hidden.to(compute), dequantized(layer).to(compute))

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, None]:
        return (upstream.to(ctx.compute) @ dequantized(ctx.layer).to(ctx.compute)).to(ctx.dtype), None


@torch.no_grad()
def dequantized(layer: Any) -> Tensor:
    """`[out, in]` dequantized weight of a layer."""
    from bitsandbytes import functional as kernels  # an optional package

    weight, kept = layer.weight, getattr(layer, _KEPT, None)
    if kept is None:
        kept = _state_of(layer)
    elif weight.dtype not in (torch.uint8, torch.int8):
        raise ModelError(f"torch {torch.__version__} converts quantized weights when it gathers them. Install a newer "
                         "torch, or pass --parallel.shard off.")
    if isinstance(kept, Tensor):
        return kernels.int8_vectorwise_dequant(weight.data, kept)
    return kernels.dequantize_4bit(weight.data, kept)


def _state_of(layer: Any) -> Any:
    """What a quantized weight needs to be dequantized: its state of bitsandbytes in 4 bits, its scales in 8 bits."""
    weight = layer.weight
    if hasattr(weight, "quant_state"):
        return weight.quant_state
    return weight.SCB if weight.SCB is not None else layer.state.SCB


@contextmanager
def made_shardable(model: Any) -> Iterator[None]:
    """Context in which a model is sharded whose quantized weights every process holds in full: its layers keep what
    dequantizes their weights, of which FSDP only divides the codes.

    Raises:
        ModelError: for DoRA, which needs complete weights.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, _DequantizedLinear)]
    if any(len(getattr(layer, "lora_magnitude_vector", None) or ()) for layer in model.modules()):
        raise ModelError("DoRA on quantized weights cannot be sharded. Pass --parallel.shard off.")
    for layer in layers:
        setattr(layer, _KEPT, _state_of(layer))
        codes = layer.weight.data.as_subclass(Tensor)  # type: ignore[attr-defined]
        layer.weight = torch.nn.Parameter(codes, requires_grad=False)  # type: ignore[attr-defined]
    yield
    for layer in layers:  # for those who count or save the weights
        kept = getattr(layer, _KEPT)
        setattr(layer.weight, "SCB" if isinstance(kept, Tensor) else "quant_state", kept)  # type: ignore[attr-defined]
