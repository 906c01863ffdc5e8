"""Activation checkpointing: what a forward pass keeps for the backward pass, and what is computed again.

Each decoder layer is one checkpoint, without reentrant autograd. Training repeats the same kernels on the same inputs,
so the result is that of a run without checkpointing. Selective checkpointing keeps what is expensive to compute and
cheap to keep: matrix products and attention. What it computes again is element-wise.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tropism.model.attention import TreePass

Checkpointing = Literal["none", "selective", "full"]
"""`none` keeps everything, `selective` the matrix products of each layer, `full` only the input of each layer."""

Context = Callable[[], AbstractContextManager[None]]
"""Makes the context in which a layer computes, for the forward pass and again for the backward pass."""

_KEPT = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "mkldnn::_linear_pointwise",
         "torch_attn::_varlen_attn")
_OF_EXPERTS = ("aten::_grouped_mm", "aten::_scaled_grouped_mm")
_KEPT_BEGIN = "aten::_scaled_dot_product_"
"""Operations whose results selective checkpointing keeps, by name. Every attention kernel of torch begins so. Those of
experts are computed again if transformers adds biases to them in place (gpt-oss): what is kept must not change."""


@contextmanager
def layers_forward(layers: Sequence[Any], change: Callable[[Any, Callable[..., Any]], Callable[..., Any]]
                   ) -> Iterator[None]:
    """Replace the forward methods of some layers temporarily. Hooks of a layer, as sharding sets them, stay outside.

    Args:
        change: takes a layer and its forward method, and returns another one.
    """
    with ExitStack() as undo:
        for layer in layers:
            if "forward" in vars(layer):
                undo.callback(setattr, layer, "forward", layer.forward)
            else:
                undo.callback(delattr, layer, "forward")
            layer.forward = change(layer, layer.forward)
        yield


def checkpointed(layer: Any, forward: Callable[..., Any], mode: Checkpointing, context: Context, offload: bool
                 ) -> Callable[..., Any]:
    """A layer's forward method that keeps for the backward pass only what `mode` says.

    Args:
        forward: of the layer.
        context: what else must be active when the layer is computed again. Autocast is restored without it.
        offload: keep the layer's inputs in host memory.
    """
    biased = any(getattr(part, "has_bias", False) is True for part in layer.modules())
    kept = frozenset((*_KEPT, *(() if biased else _OF_EXPERTS)))

    def run(*args: Any, tree: TreePass | None = None, **kwargs: Any) -> Any:
        # A pass that records does so once, and what is kept for the second computation does not hold the record.
        passes = [] if tree is None else [tree.again(), tree]

        def compute(*args: Any, **kwargs: Any) -> Any:
            if passes:
                kwargs["tree"] = passes.pop() if len(passes) > 1 else passes[0]
            return forward(*args, **kwargs)

        with in_host_memory() if offload else nullcontext():
            return checkpoint(compute, *args, use_reentrant=False, preserve_rng_state=False,
                              context_fn=partial(_contexts, mode, kept, context), **kwargs)

    return run


def _contexts(mode: Checkpointing, kept: frozenset[str], context: Context
              ) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of the first and of the second computation of a layer."""
    if mode == "full":
        return nullcontext(), context()
    keep, reuse = create_selective_checkpoint_contexts(partial(_policy, kept))
    return keep, _both(context(), reuse)


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def _policy(products: frozenset[str], context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = operation.name().partition(".")[0] if hasattr(operation, "name") else ""
    kept = name in products or (name.startswith(_KEPT_BEGIN) and not name.endswith("_backward"))
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def in_host_memory() -> Any:
    """Context in which autograd keeps tensors of a GPU in pinned host memory. The host does not wait for the copies,
    which are ordered with the computation on the current stream."""
    def pack(tensor: Tensor) -> tuple[torch.device, Tensor]:
        if tensor.device.type != "cuda":
            return tensor.device, tensor
        kept = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return tensor.device, kept.copy_(tensor, non_blocking=True)

    def unpack(kept: tuple[torch.device, Tensor]) -> Tensor:
        device, tensor = kept
        return tensor.to(device, non_blocking=True)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
