"""`fold` and `unfold` in one Triton kernel each: a tile of logits is read once forward, read and written once backward.

Sums are taken in float32, online as in Milakov and Gimelshein 2018, arXiv:1805.02867, algorithm 3. Imported only if it
is used, since Triton is not installed everywhere.
"""

from typing import Any

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor

from tropism.model.head.shape import Shape

_BLOCK = 4096


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _logits(raw, bias, at, inside, scale, cap, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr):  # noqa: ANN001, ANN202
    """Logits of a block of products, before the mask, and the derivative of the soft-cap."""
    logits = raw
    if HAS_BIAS:
        logits += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    logits *= scale
    bend = tl.full(logits.shape, 1.0, tl.float32)
    if HAS_CAP:
        bent = 2.0 / (1.0 + tl.exp(-2.0 * logits / cap)) - 1.0
        logits = cap * bent
        bend = 1.0 - bent * bent
    return logits, bend


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _fold(raw, bias, targets, log_sums, here, first, columns, scale, cap,  # noqa: ANN001, ANN202
          HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row) - first
    peak, total, found = -float("inf"), 0.0, 0.0
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < columns
        products = tl.load(raw + row * columns + at, mask=inside, other=0.0)
        logits, _ = _logits(products, bias, at, inside, scale, cap, HAS_BIAS, HAS_CAP)
        found += tl.sum(tl.where(inside & (at == target), logits, 0.0), axis=0)
        logits = tl.where(inside, logits, -float("inf"))
        higher = tl.maximum(peak, tl.max(logits, axis=0))
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(peak - shift) + tl.sum(tl.exp(logits - shift), axis=0)
        peak = higher
    tl.store(log_sums + row, peak + tl.log(total))
    tl.store(here + row, found)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _unfold(raw, bias, targets, log_z, upstream, out, first, columns, scale, cap,  # noqa: ANN001, ANN202
            HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    products = tl.load(raw + row * columns + at, mask=inside, other=0.0)
    logits, bend = _logits(products, bias, at, inside, scale, cap, HAS_BIAS, HAS_CAP)
    probability = tl.exp(logits - tl.load(log_z + row))
    change = tl.where(at == tl.load(targets + row) - first, 1.0 - probability, -probability)
    change = change * tl.load(upstream + row) * bend * scale
    tl.store(out + row * columns + at, change.to(out.dtype.element_ty), mask=inside)


def _shaped(raw: Tensor, shape: Shape) -> dict[str, Any]:
    bias = raw if shape.bias is None else shape.bias.contiguous()
    return {"bias": bias, "columns": raw.shape[1], "scale": float(shape.scale), "cap": float(shape.softcap or 1),
            "HAS_BIAS": shape.bias is not None, "HAS_CAP": shape.softcap is not None, "BLOCK": _BLOCK}


def fold(raw: Tensor, shape: Shape, targets: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """As `folds.fold`. Leaves `raw` as it is, contiguous and in float32."""
    log_sums, here = torch.empty_like(raw[:, 0]), torch.empty_like(raw[:, 0])
    if len(raw):
        _fold[(len(raw),)](raw, targets=targets.contiguous(), log_sums=log_sums, here=here, first=first,
                           **_shaped(raw, shape))
    return log_sums, here


def unfold(raw: Tensor, shape: Shape, targets: Tensor, first: int, log_z: Tensor, upstream: Tensor,
           out: Tensor | None = None) -> Tensor:
    """As `folds.unfold`, from the products themselves."""
    out = raw if out is None else out
    if len(raw):
        _unfold[(len(raw), triton.cdiv(raw.shape[1], _BLOCK))](
            raw, targets=targets.contiguous(), log_z=log_z.contiguous(), upstream=upstream.contiguous(), out=out,
            first=first, **_shaped(raw, shape))
    return out
