"""Tree attention: one variable-length call over gathered keys and values.

Queries of a segment (a prompt or a completion) see the keys of their tree's prompt and of their own segment, causally,
with the last query aligned to the last key. With these keys gathered, one plain variable-length call suffices. It is
exact, needs no mask and no recompilation, and handles sliding windows, since gathered keys are contiguous in position.
On CUDA it is `varlen_attn`; elsewhere one scaled-dot-product call per segment. For soft-caps of attention scores and
attention sinks see `capped_attention`. Where prompts have many completions, the keys of a prompt are not
gathered for each of them: `merged_attention` attends to prompts and to own keys apart.

Nothing here waits for the device: lengths are kept on the host.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from tropism.data.batching.collate import Segments
from tropism.errors import ModelError
from tropism.model.capped_attention import Visible, eager, flex, serves, visible
from tropism.model.merged_attention import merged_attention
from tropism.spans import timed_as

NAME = "tropism_tree"

# Keyword arguments of the attention call without effect here: the rotary embedding has applied the positions, and
# there is never a cache.
_HARMLESS = {"position_ids", "cache_position", "use_cache", "is_causal", "output_attentions",
             "output_hidden_states", "output_router_logits", "past_key_values", "past_key_value",
             "position_embeddings", "return_dict"}


@dataclass(slots=True)
class TreePass:
    """One forward pass over packed trees. Attention layers get it as the keyword argument `tree`, or with the mask.

    Args:
        segments: which queries see which keys.
        record: keep each layer's keys and values, and the last hidden states, for a later pass.
        earlier: a recorded pass whose prompts this pass continues. Its keys and states come before this pass's own.
    """

    segments: Segments
    record: bool = False
    earlier: "TreePass | None" = None
    states: Tensor | None = None
    seen: set[int] = field(default_factory=set)
    """Ids of the modules that used it."""
    windows: set[int | None] = field(default_factory=set)
    """Sliding windows that they were given."""
    _kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _masks: dict[tuple[int, int, int | None, torch.dtype], Tensor] = field(default_factory=dict)
    _visible: dict[int | None, Visible] = field(default_factory=dict)

    def again(self) -> "TreePass":
        """The same pass without a record, for layers that are computed again in the backward pass."""
        return replace(self, record=False, states=None, _kept={})

    def forget(self) -> None:
        """Let go of the record, which no later pass continues."""
        self.record, self.states = False, None
        self._kept.clear()

    def with_earlier(self, module: torch.nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, preceded by those of the earlier pass if there is one; kept if recording."""
        if self.record:
            self._kept[id(module)] = (key.detach(), value.detach())
        if self.earlier is None:
            return key, value
        earlier_key, earlier_value = self.earlier._kept[id(module)]
        return torch.cat((earlier_key, key), dim=2), torch.cat((earlier_value, value), dim=2)

    def carrier(self, device: torch.device) -> Tensor:
        """An attention mask that carries this pass, for families whose layers keep the keyword from their attention.

        transformers takes a mask of four dimensions through a model as it is. An activation checkpoint keeps it with
        the other inputs of a layer, so that a recomputation finds the pass of its forward. It is boolean, since masks
        of floating point may be cast on the way.
        """
        mask = torch.empty(1, 1, 1, 0, dtype=torch.bool, device=device)
        mask.tropism_tree = self
        return mask

    def visible(self, keys: int, window: int | None) -> Visible:
        """What queries see of this number of packed keys, for attention that does not gather them."""
        if window not in self._visible:
            self._visible[window] = visible(self.segments, keys, window)
        return self._visible[window]

    def mask(self, queries: int, keys: int, window: int | None, like: Tensor) -> Tensor:
        """Additive mask `[queries, keys]`: causal from the bottom right, at most `window` keys back."""
        key = (queries, keys, window, like.dtype)
        if key not in self._masks:
            distance = (torch.arange(queries, device=like.device)[:, None] + (keys - queries)
                        - torch.arange(keys, device=like.device)[None, :])
            seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            blank = torch.zeros(queries, keys, dtype=like.dtype, device=like.device)
            self._masks[key] = blank.masked_fill_(~seen, float("-inf"))
        return self._masks[key]


@timed_as("attention")
def tree_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, *, tree: TreePass | None = None,
    sliding_window: int | None = None, softcap: float | None = None, s_aux: Tensor | None = None, **rest: Any,
) -> tuple[Tensor, None]:
    """The attention function registered with transformers.

    Args:
        query: `[1, Hq, T, head]`; key: `[1, Hkv, T, head]`; value: `[1, Hkv, T, out]`; Hkv a divisor of Hq.
        attention_mask: None, or the carrier of the pass.
        tree: the pass. Callers without one, such as generation, must use another implementation.

    Returns:
        `[1, T, Hq, out]` and None.

    Raises:
        ModelError: for an unsupported argument that would change the result.
    """
    unknown = sorted(name for name, given in rest.items() if given is not None and name not in _HARMLESS)
    if unknown or dropout:
        raise ModelError(f"tree attention does not support {', '.join(unknown) or 'dropout'}. Use --layout padded.")
    tree = getattr(attention_mask, "tropism_tree", None) if tree is None else tree
    if tree is None:
        raise ModelError("tree attention was called without a tree. Wrap the call in `attention(...)`.")
    segments = tree.segments
    tree.seen.add(id(module))
    tree.windows.add(sliding_window)
    # Under autocast, rotary embeddings and norms make queries and keys float32, while values are bfloat16.
    query, key = query.to(value.dtype), key.to(value.dtype)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    size = value.shape[-1]
    query, key, value = _equal_heads(query, key, value)
    key, value = tree.with_earlier(module, key, value)
    if sliding_window is not None and sliding_window >= max(segments.key_lengths):
        sliding_window = None
    plain = softcap is None and s_aux is None
    kernel = query.device.type == "cuda" and query.dtype in _VARLEN_TYPES
    if segments.shared is not None and plain and sliding_window is None and (kernel or query.device.type == "cpu"):
        merged = merged_attention(query, key, value, segments, segments.shared, scaling)
        return merged.transpose(1, 2)[..., :size].contiguous(), None
    if not plain and serves(query, key, softcap, s_aux is not None):
        out = flex(query, key, value, tree.visible(key.shape[2], sliding_window), scaling, softcap, s_aux)
        return out.transpose(1, 2)[..., :size].contiguous(), None
    key, value = key.index_select(2, segments.key_index), value.index_select(2, segments.key_index)
    if kernel and plain:
        return _varlen(query, key, value, segments, scaling, sliding_window)[None, ..., :size], None
    outputs = []
    queries = query.split(segments.query_lengths, dim=2)
    keys = key.split(segments.key_lengths, dim=2)
    values = value.split(segments.key_lengths, dim=2)
    for q, k, v in zip(queries, keys, values, strict=True):
        if plain:
            outputs.append(_segment(tree, q, k, v, scaling, sliding_window))
        else:
            mask = tree.mask(q.shape[2], k.shape[2], sliding_window, q)
            outputs.append(eager(q, k, v, mask, scaling, softcap, s_aux))
    return torch.cat(outputs, dim=2).transpose(1, 2)[..., :size].contiguous(), None  # some models take a view of it


def _equal_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Heads of one size, as fast kernels need: the smaller ones get zeros, which change no score and no sum."""
    more = query.shape[-1] - value.shape[-1]
    if more < 0:
        return functional.pad(query, (0, -more)), functional.pad(key, (0, -more)), value
    return query, key, functional.pad(value, (0, more)) if more else value


_VARLEN_TYPES = (torch.bfloat16, torch.float16)
# From torch 2.12 on, grouped heads need this flag; 2.11 has no such flag.
_GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def _varlen(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None,
            window: int | None) -> Tensor:
    """On CUDA: the full pack in one call. Returns `[T, Hq, head]`."""
    out = varlen_attn(
        query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1),
        segments.cu_queries, segments.cu_keys, max(segments.query_lengths), max(segments.key_lengths),
        scale=scaling, window_size=(-1 if window is None else window - 1, 0), **_GROUPED)
    return out[0] if isinstance(out, tuple) else out


def _segment(tree: TreePass, query: Tensor, key: Tensor, value: Tensor, scaling: float | None,
             window: int | None) -> Tensor:
    """One segment by torch's scaled-dot-product attention.

    On CPUs half precision is computed in float32: its backward is up to three times faster there, and more exact.
    """
    dtype = query.dtype
    if query.device.type == "cpu" and dtype in _VARLEN_TYPES:
        query, key, value = query.float(), key.float(), value.float()
    length, total = query.shape[2], key.shape[2]
    window = None if window is None or window >= total else window
    mask = None if length == total and window is None else tree.mask(length, total, window, query)
    with torch.autocast(query.device.type, enabled=False):
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None and length > 1, scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1]).to(dtype)


# There is no mask function: with one, transformers would wait for the device in each forward to choose a mask.
AttentionInterface.register(NAME, tree_attention)

_KEYWORD_DROPPED = {"nemotron", "stablelm"}


def tree_arguments(model: Any, tree: TreePass, device: torch.device) -> dict[str, Any]:
    """Keyword arguments that take a pass to the attention layers of a model."""
    if model.config.get_text_config().model_type in _KEYWORD_DROPPED:
        return {"tree": tree, "attention_mask": tree.carrier(device)}
    return {"tree": tree}


def plain_implementation(model: Any) -> str:
    """The fastest exact implementation for padded lines and generation in the model's family.

    Some releases of transformers offer one that ignores the soft-cap of attention scores.
    """
    capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
    return "sdpa" if getattr(model, "_supports_sdpa", False) and not capped else "eager"


@contextmanager
def attention(model: Any, implementation: str) -> Iterator[None]:
    """Use another attention implementation temporarily, to generate or to score padded lines."""
    before = model.config._attn_implementation
    if before == implementation:
        yield
        return
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
