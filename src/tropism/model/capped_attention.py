"""Attention with soft-capped scores (Gemma 2) and with sinks (gpt-oss).

In plain operations segment by segment, and on CUDA for a full pack in one call of FlexAttention (Dong et al. 2024,
arXiv:2412.05496). There keys are not gathered: a query sees two runs of the packed keys, one of its tree's prompt and
one of its own segment, whose bounds follow from lengths that are on the device. With a sink of score s, the softmax
over the keys is multiplied by exp(l) / (exp(l) + exp(s)), where l is the log-sum-exp of their scores.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from tropism.data.batching.collate import Segments

_BLOCK = 128
_FEWEST = 2 * _BLOCK
"""Queries and keys are padded to full blocks, and to two of them: a single one would be compiled again."""
_LIMIT = 64
"""Versions of the compiled code: with and without gradients, for each cap, dtype and shape of heads."""
_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest difference of the trial, relative to the largest value. Products of float32 may be rounded to TF32."""


@dataclass(frozen=True)
class Visible:
    """The keys that each query sees, as two runs of the packed keys, and which blocks of them a kernel needs.

    Args:
        blocks: of the padded queries and keys.
        queries, keys: numbers with padding.
    """

    blocks: BlockMask
    queries: int
    keys: int


def visible(segments: Segments, keys: int, window: int | None) -> Visible:
    """What queries of a pack see. Reads nothing from the device.

    Args:
        segments: of the pack.
        keys: number of packed keys. Those of the pack's own queries come last, in their order.
        window: number of keys that a query sees at most, itself included; None for all.
    """
    device, queries = segments.cu_queries.device, sum(segments.query_lengths)
    at = torch.arange(queries, dtype=torch.int32, device=device)
    segment = torch.bucketize(at, segments.cu_queries[1:], right=True)
    first, before = segments.cu_queries[segment], keys - queries
    shared = (segments.cu_keys.diff() - segments.cu_queries.diff())[segment]
    low = segments.key_index[segments.cu_keys[:-1]].to(torch.int32)[segment]
    hidden = torch.zeros_like(at) if window is None else (shared + at - first - (window - 1)).clamp(min=0)
    bounds = torch.stack((low + torch.minimum(hidden, shared), low + shared,
                          before + first + (hidden - shared).clamp(min=0), before + at + 1))
    padded, width = _padded(queries), _padded(keys)
    rest = bounds.new_zeros(4, padded - queries)
    rest[1] = 1  # padding sees the first key
    bounds = torch.cat((bounds, rest), dim=1)
    return Visible(_blocks(bounds, width), padded, width)


def _padded(size: int) -> int:
    return max(_FEWEST, -(-size // _BLOCK) * _BLOCK)


def _blocks(bounds: Tensor, keys: int) -> BlockMask:
    """Blocks that are seen in full and in part, from the bounds `[4, queries]` of both runs."""
    low, high, start, end = bounds.unbind(0)

    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return ((key >= low[query]) & (key < high[query])) | ((key >= start[query]) & (key < end[query]))

    left = torch.arange(0, keys, _BLOCK, dtype=torch.int32, device=bounds.device)
    right, runs = left + _BLOCK, [(low[:, None], high[:, None]), (start[:, None], end[:, None])]
    some, every = (torch.stack([test(begin, stop) for begin, stop in runs]).any(0).view(-1, _BLOCK, len(left))
                   for test in (lambda begin, stop: (begin < stop) & (begin < right) & (stop > left),
                                lambda begin, stop: (begin <= left) & (stop >= right)))
    full = every.all(1)
    part = some.any(1) & ~full

    def listed(needed: Tensor) -> tuple[Tensor, Tensor]:
        order = needed.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        return needed.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]

    return BlockMask.from_kv_blocks(*listed(part), *listed(full), BLOCK_SIZE=_BLOCK, mask_mod=mask)


def flex(query: Tensor, key: Tensor, value: Tensor, seen: Visible, scaling: float, softcap: float | None,
         sinks: Tensor | None, call: Callable[..., Any] | None = None) -> Tensor:
    """Attention of a full pack.

    Args:
        query: `[1, Hq, T, head]`; key, value: `[1, Hkv, K, head]`, not gathered; Hkv a divisor of Hq.
        seen: of `visible`.
        scaling: of the scores.
        softcap: cap c of c tanh(score / c); None without one.
        sinks: `[Hq]` scores of the sinks; None without them.
        call: in place of the compiled `flex_attention`.

    Returns:
        `[1, Hq, T, head]`.
    """
    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    length = query.shape[2]
    query = functional.pad(query, (0, 0, 0, seen.queries - length))
    key, value = (functional.pad(one, (0, 0, 0, seen.keys - one.shape[2])) for one in (key, value))
    with torch.autocast(query.device.type, enabled=False):
        out, extra = (call or _compiled())(
            query, key, value, score_mod=None if softcap is None else capped, block_mask=seen.blocks, scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1], return_aux=AuxRequest(lse=True))
        if sinks is not None:
            out = (out * torch.sigmoid(extra.lse - sinks[:, None].to(extra.lse.dtype))[..., None]).to(out.dtype)
    kept: Tensor = out[:, :, :length]
    return kept


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True, fullgraph=True, recompile_limit=_LIMIT)


def serves(query: Tensor, key: Tensor, softcap: float | None, sinks: bool) -> bool:
    """Whether FlexAttention computes such attention on the device of the query: NVIDIA GPUs, after a trial."""
    return (query.device.type == "cuda" and query.dtype in _TOLERANCE
            and _agrees(query.device, query.dtype, query.shape[1], key.shape[1], query.shape[3], softcap, sinks))


@cache
def _agrees(device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, size: int, softcap: float | None,
            sinks: bool) -> bool:
    """Whether it compiles, and gives what plain operations give, on one segment. Compiled code is used again."""
    draw = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(device, dtype).requires_grad_()

    length = 2 * _FEWEST
    q, k, v = inputs = [drawn(1, count, length, size) for count in (heads, key_heads, key_heads)]
    sink, upstream = drawn(heads) if sinks else None, drawn(1, heads, length, size).detach()
    ends = torch.tensor([0, length], dtype=torch.int32, device=device)
    seen = visible(Segments((length,), (length,), torch.arange(length, device=device), ends, ends), length, None)
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    mask = torch.zeros(length, length, dtype=dtype, device=device).masked_fill_(~causal, -torch.inf)
    try:
        with torch.enable_grad():
            both = [flex(q, k, v, seen, size**-0.5, softcap, sink), eager(q, k, v, mask, size**-0.5, softcap, sink)]
            found, right = ([out, *torch.autograd.grad(out, inputs, upstream)] for out in both)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # a compiler may fail in any way; plain operations remain
        return False
    return all(float((a - b).detach().abs().max()) <= _TOLERANCE[dtype] * float(b.detach().abs().max())
               for a, b in zip(found, right, strict=True))


def eager(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, softcap: float | None,
          sinks: Tensor | None) -> Tensor:
    """Attention of one segment in plain operations.

    Args:
        query: `[1, Hq, T, head]`; key, value: `[1, Hkv, K, head]`, gathered.
        mask: `[T, K]`, added to the scores.
        scaling, softcap, sinks: as in `flex`.
    """
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + mask
    at_least_fp32 = torch.promote_types(scores.dtype, torch.float32)
    if sinks is None:
        weights = torch.softmax(scores, dim=-1, dtype=at_least_fp32)
    else:
        sink = sinks.reshape(1, -1, 1, 1).expand(1, -1, query.shape[2], 1).to(scores.dtype)
        weights = torch.softmax(torch.cat((scores, sink), dim=-1), dim=-1, dtype=at_least_fp32)[..., :-1]
    return weights.to(value.dtype) @ value
