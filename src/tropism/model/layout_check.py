"""Choose the layout before training, after checking its log-probs against the model's own forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from tropism.borders import is_out_of_memory
from tropism.data.batching.collate import Layout, collate
from tropism.data.tree import PromptTree
from tropism.distributed.passes import rest
from tropism.distributed.shard import is_sharded
from tropism.errors import ModelError, first_line
from tropism.model.attention import TreePass, attention, plain_implementation
from tropism.model.language_model import LanguageModel, Precision, computing
from tropism.model.token_state import carries_state, depends_on_line, has_window, without_attention

# Largest mean difference per token that rounding explains, in nats. In float64, transformers' norms and rotary
# tables still round through float32.
_TOLERANCE: dict[Precision, float] = {"fp64": 1e-5, "fp32": 1e-4, "bf16": 5e-2}


@dataclass(frozen=True, slots=True)
class LayoutCheck:
    """Result of the comparison at startup.

    Args:
        layout: the layout to train in.
        per_token: largest difference of a completion's log-prob from the plain forward pass, in nats per token.
        per_root_token: the same per square root of tokens, since rounding adds up like a random walk.
        reason: why the tree layout is not used; empty if it is.
    """

    layout: Layout
    per_token: float
    per_root_token: float
    reason: str = ""


@torch.no_grad()
def plain_logps(model: LanguageModel, trees: Sequence[PromptTree]) -> Tensor:
    """`[C]` log-probs by the model's own forward pass: full logits, padded lines, transformers' attention."""
    batch = collate(trees, "padded").to(model.device)
    with (attention(model.module, plain_implementation(model.module)),
          computing(model.module, model.precision, model.device)):
        logits = model.module(input_ids=batch.input_ids, attention_mask=batch.attention_mask,
                              position_ids=batch.position_ids, use_cache=False).logits
    rest(model.module)
    picked = logits.flatten(0, 1)[batch.predict_index]
    picked = picked.to(torch.promote_types(picked.dtype, torch.float32))
    logps = torch.log_softmax(picked, dim=-1).gather(1, batch.target_ids[:, None]).squeeze(1).double()
    return torch.zeros(len(batch.lengths), dtype=torch.float64, device=model.device).index_add(
        0, batch.completion_index, logps)


@torch.no_grad()
def _differences(model: LanguageModel, trees: Sequence[PromptTree]) -> tuple[float, float, TreePass | None]:
    """Largest difference from the plain forward pass, per token and per square root of tokens; and the pass itself.

    The second measures rounding. In bfloat16 rounding depends on the shapes of products, so the completions are also
    scored in other shapes: in the padded layout the plain forward pass would use the same ones.
    """
    plain = plain_logps(model, trees)
    batch = collate(trees, model.layout).to(model.device)
    tree_pass = model.tree_pass(batch)
    together = model.logps(batch, tree_pass)
    gaps = (together - plain).abs()
    per_token = float((gaps / batch.lengths).max())
    if model.precision == "bf16":
        single = [PromptTree(tree.prompt_ids, (completion,)) for tree in trees for completion in tree.completions]
        for part in (single[::2], single[1::2], *([one] for one in single)):
            if part:
                alone = model.logps(collate(part, model.layout).to(model.device))
                places = [next(i for i, one in enumerate(single) if one is tree) for tree in part]
                gaps[places] = torch.maximum(gaps[places], (alone - together[places]).abs())
    return per_token, float((gaps / batch.lengths.sqrt()).max()), tree_pass


def _unserved(model: LanguageModel, tree: TreePass) -> str | None:
    """What a pass did not serve: a layer without tree attention, or a window in a mask only; None if nothing."""
    if layer := without_attention(model.module, tree.seen):
        return f"a {layer} does not use the attention of the tree layout"
    if has_window(model.module) and tree.windows == {None}:
        return "the sliding window is applied in a mask only, of which the tree layout has none"
    return None


def choose_layout(module: object, precision: Precision, device: torch.device, trees: Sequence[PromptTree],
                  wanted: Layout | Literal["auto"]) -> tuple[LanguageModel, LayoutCheck]:
    """The model in the requested layout. `auto` is the tree layout if it is exact for this model, else padded.

    A model that carries a state from token to token, or depends on places in a line, is padded, whatever the
    comparison shows.

    For bfloat16 the comparison runs in float32 first, since rounding could hide that completions see each other.

    Args:
        trees: a small batch with at least two trees, or one with two completions, so that leaks are visible.

    Raises:
        ModelError: if the requested layout, or both layouts, differ from the model's own forward pass.
    """
    reason = ""
    candidates: tuple[Layout, ...] = ("tree", "padded") if wanted == "auto" else (wanted,)
    stages: tuple[Precision, ...] = ("fp32", "bf16") if precision == "bf16" else (precision,)
    for layout in candidates:
        try:
            if layout == "tree" and (part := carries_state(module)):
                raise ModelError(f"{part} passes a state from token to token, which the tree layout would carry from "
                                 "one completion into the next")
            if layout == "tree" and (part := depends_on_line(module)):
                raise ModelError(f"{part} depends on the place of a token in its line, which the tree layout changes")
            for stage in stages:
                model = LanguageModel(module, layout, stage, device)
                per_token, per_root_token, tree_pass = _differences(model, trees)
                if not per_token <= _TOLERANCE[stage]:
                    raise ModelError(f"log-probs in the {layout} layout differ from the model's own forward pass by "
                                     f"{per_token:.2g} nats per token (limit {_TOLERANCE[stage]:g} in {stage})")
            if tree_pass is not None and (part := _unserved(model, tree_pass)):
                raise ModelError(part)
        except Exception as refusal:
            # A layer without support for trees may fail anywhere. A sharded model cannot recover from that.
            unforeseen = not isinstance(refusal, ModelError)
            if unforeseen and (is_out_of_memory(refusal) or is_sharded(module)):
                raise
            reason = f"{type(refusal).__name__}: {first_line(refusal)}" if unforeseen else str(refusal)
        else:
            return replace(model, rounding=per_root_token), LayoutCheck(layout, per_token, per_root_token, reason)
    raise ModelError(f"this model is unsupported: {reason}")
