"""Attention to a shared prompt and to a completion's own keys apart, merged by their log-sum-exp.

With many completions per prompt, gathered keys repeat the prompt once per completion. Here the queries of all
completions of a prompt attend to it together, without a mask, and each segment attends to itself causally. With
partial outputs o_i and log-sum-exps l_i of the scores, l = log sum exp(l_i) and o = sum exp(l_i - l) o_i are those of
one softmax over all keys (Dao et al. 2022, FlashAttention, section 3.1). The gradient of each part is the usual one of
flash attention (appendix B.2), with the merged output and log-sum-exp in the place of its own: they give the
probabilities and row sums of the softmax over all keys. Sums over the parts are in float32 or better.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tropism.data.batching.collate import Segments, SharedPrompts


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs of queries and the run of keys of each: lengths on the host, and cumulative int32 ones on the device."""

    query_lengths: Sequence[int]
    key_lengths: Sequence[int]
    cu_queries: Tensor
    cu_keys: Tensor
    causal: bool
    scale: float

    def slices(self) -> Iterator[tuple[slice, slice]]:
        query = key = 0
        for queries, keys in zip(self.query_lengths, self.key_lengths, strict=True):
            yield slice(query, query + queries), slice(key, key + keys)
            query, key = query + queries, key + keys

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """`[1, H, T, head]` output and `[1, H, T]` log-sum-exp of the scores."""
        if not _fused_on_cpu(query):
            out, log_sum, *_ = torch.ops.aten._flash_attention_forward(
                _packed(query), _packed(key), _packed(value), self.cu_queries, self.cu_keys, max(self.query_lengths),
                max(self.key_lengths), 0.0, self.causal, False, scale=self.scale)
            return out.transpose(0, 1)[None], log_sum[None]
        parts = [torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query[:, :, at], key[:, :, seen], value[:, :, seen], 0.0, self.causal, scale=self.scale)
            for at, seen in self.slices()]
        return torch.cat([out for out, _ in parts], dim=2), torch.cat([log_sum for _, log_sum in parts], dim=2)

    def backward(self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor,
                 log_sum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value, given the output and log-sum-exp over all keys."""
        if not _fused_on_cpu(query):
            state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of dropout, of which there is none
            grads = torch.ops.aten._flash_attention_backward(
                _packed(grad), _packed(query), _packed(key), _packed(value), _packed(out), log_sum[0].contiguous(),
                self.cu_queries, self.cu_keys, max(self.query_lengths), max(self.key_lengths), 0.0, self.causal,
                state, torch.empty(0, device=query.device), scale=self.scale)
            dq, dk, dv = (one.transpose(0, 1)[None] for one in grads)
            return dq, dk, dv
        parts = [torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad[:, :, at], query[:, :, at], key[:, :, seen], value[:, :, seen], out[:, :, at], log_sum[:, :, at],
            0.0, self.causal, scale=self.scale) for at, seen in self.slices()]
        dq, dk, dv = (torch.cat(one, dim=2) for one in zip(*parts, strict=True))
        return dq, dk, dv


def _fused_on_cpu(query: Tensor) -> bool:
    """Whether the kernels of CPUs take the runs, one by one."""
    return query.device.type == "cpu"


def _packed(states: Tensor) -> Tensor:
    """`[T, H, head]` of `[1, H, T, head]`."""
    return states[0].transpose(0, 1).contiguous()


def _runs(segments: Segments, shared: SharedPrompts, scale: float) -> tuple[_Runs, _Runs]:
    """Segments among themselves, and completions with their prompts."""
    own = _Runs(segments.query_lengths, segments.query_lengths, segments.cu_queries, segments.cu_queries, True, scale)
    return own, _Runs(shared.query_lengths, shared.key_lengths, shared.cu_queries, shared.cu_keys, False, scale)


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: Segments, shared: SharedPrompts,
                scale: float) -> Tensor:
        own, prompts = _runs(segments, shared, scale)
        at, seen = shared.query_index, shared.key_index
        out, log_sum = own.forward(query, key[:, :, shared.before:], value[:, :, shared.before:])
        prompt_out, prompt_sum = prompts.forward(query.index_select(2, at), key.index_select(2, seen),
                                                 value.index_select(2, seen))
        own_sum = log_sum.index_select(2, at)
        both = torch.logaddexp(own_sum, prompt_sum)
        mixed = (out.index_select(2, at) * (own_sum - both).exp()[..., None]
                 + prompt_out * (prompt_sum - both).exp()[..., None])
        out = out.index_copy(2, at, mixed.to(out.dtype))
        ctx.save_for_backward(query, key, value, out, log_sum.index_copy(2, at, both))
        ctx.given = segments, shared, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, log_sum = ctx.saved_tensors
        segments, shared, scale = ctx.given
        own, prompts = _runs(segments, shared, scale)
        at, seen = shared.query_index, shared.key_index
        dq, dk, dv = own.backward(grad, query, key[:, :, shared.before:], value[:, :, shared.before:], out, log_sum)
        prompt_dq, prompt_dk, prompt_dv = prompts.backward(
            grad.index_select(2, at), query.index_select(2, at), key.index_select(2, seen),
            value.index_select(2, seen), out.index_select(2, at), log_sum.index_select(2, at))
        wide = torch.promote_types(query.dtype, torch.float32)
        totals = [dq.to(wide).index_add_(2, at, prompt_dq.to(wide))]
        for part, whole in ((dk, prompt_dk), (dv, prompt_dv)):
            total = torch.nn.functional.pad(part.to(wide), (0, 0, shared.before, 0))
            totals.append(total.index_add_(2, seen, whole.to(wide)))
        return *(total.to(query.dtype) for total in totals), None, None, None


def merged_attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, shared: SharedPrompts,
                     scale: float) -> Tensor:
    """Attention of a pack, without gathering keys for each completion.

    Args:
        query: `[1, Hq, T, head]`; key, value: `[1, Hkv, K, head]`, Hkv a divisor of Hq.
        segments, shared: which queries see which keys.
        scale: of the scores.

    Returns:
        `[1, Hq, T, head]`.
    """
    dtype = query.dtype
    if dtype in (torch.bfloat16, torch.float16) and query.device.type == "cpu":
        query, key, value = query.float(), key.float(), value.float()
    out: Tensor = _Merged.apply(query, key, value, segments, shared, scale)
    return out.to(dtype)
