"""What log-probs need of a tile of logits: one pass forward, and one in place backward.

On NVIDIA GPUs with Triton, `triton_kernels` does each in one kernel. It is tested against the plain torch here.
"""

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from tropism.model.head.shape import Shape
from tropism.model.head.tiles import at, by_blocks, planned_kernels, put


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def fused(raw: Tensor) -> bool:
    """Whether Triton works on this tile. Tensors without memory (fake ones) take plain torch."""
    return raw.is_contiguous() and on_triton(raw)


def on_triton(logits: Tensor) -> bool:
    """Whether Triton works on logits with contiguous rows."""
    return (logits.is_cuda and type(logits) is Tensor and logits.dtype == torch.float32 and logits.shape[1] > 0
            and _has_triton())


def kernels(raw: Tensor) -> Any:
    """The module of fused kernels for a tile of products; None for plain torch."""
    if (planned := planned_kernels()) is not None:
        return planned
    if not fused(raw):
        return None
    from tropism.model.head import triton_kernels

    return triton_kernels


def fold(raw: Tensor, shape: Shape, targets: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """`[n]` log-sum-exp over a tile, and `[n]` logit of each target, 0 if it is not in the tile.

    Args:
        raw: `[n, c]` products of hidden states and weight. May be overwritten with the logits.
        shape: what makes logits of them.
        targets: `[n]` token ids.
        first: id of the first column.
    """
    if (quick := kernels(raw)) is not None:
        log_sums, here = quick.fold(raw, shape, targets, first)
        return log_sums, here

    def of(block: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = shape.logits_(block)
        return torch.logsumexp(logits, dim=-1), at(logits, ids, first).squeeze(1)

    found = by_blocks(of, raw, targets[:, None])
    return found[0], found[1]


def unfold(raw: Tensor, shape: Shape, targets: Tensor, first: int, log_z: Tensor, upstream: Tensor,
           out: Tensor | None = None, finished: bool = False) -> Tensor:
    """`[n, c]` derivative of `sum(upstream * log-prob)` by `raw`, in place or written to `out`.

    Args:
        raw, shape, targets, first: as in `fold`. May be overwritten.
        log_z: `[n]` log-sum-exp over all columns.
        upstream: `[n]`.
        out: `[n, c]`, of any dtype.
        finished: `raw` is as `fold` has left it.
    """
    if (quick := kernels(raw)) is not None:
        change: Tensor = quick.unfold(raw, shape, targets, first, log_z, upstream, out)
        return change

    def of(block: Tensor, to: Tensor, ids: Tensor, log_z: Tensor, upstream: Tensor) -> tuple[()]:
        logits = block if finished else shape.logits_(block)
        bend = shape.bend(logits)
        change = shape.to_raw(score(logits, ids, first, log_z, upstream), bend)
        if out is not None:
            to.copy_(change)
        return ()

    by_blocks(of, raw, raw if out is None else out, targets[:, None], log_z[:, None], upstream[:, None])
    return raw if out is None else out


def score(logits: Tensor, ids: Tensor, first: int, log_z: Tensor, upstream: Tensor) -> Tensor:
    """`[n, c]` derivative of `sum(upstream * log-prob)` by the logits, which it overwrites. The others are `[n, 1]`."""
    change = logits.sub_(log_z).exp_()
    of_target = (1 - at(change, ids, first)) * upstream
    return put(change.mul_(-upstream), ids, of_target, first)

