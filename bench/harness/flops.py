"""Necessary FLOPs: what no exact implementation can do without. docs/performance.md derives them."""

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from tropism.data.tree import PromptTree


@dataclass(frozen=True)
class Size:
    """What the FLOPs of a token depend on.

    Args:
        blocks: weights of the decoder's matrices, without embedding and head.
        head: weights of the head.
        attention: layers x heads x size of a head.
    """

    blocks: int
    head: int
    attention: int

    @classmethod
    def of(cls, module: nn.Module) -> "Size":
        """Of a model of transformers."""
        config = module.config.get_text_config()
        inside = sum(weight.numel() for weight in module.get_decoder().layers.parameters() if weight.dim() > 1)
        wide = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(inside, config.hidden_size * config.vocab_size,
                   config.num_hidden_layers * config.num_attention_heads * wide)

    def forward(self, tokens: int, keys: float, scored: int) -> float:
        """FLOPs of a forward pass.

        Args:
            tokens: computed in the blocks.
            keys: that all of them see together.
            scored: tokens whose log-prob is computed.
        """
        return 2.0 * self.blocks * tokens + 4.0 * self.attention * keys + 2.0 * self.head * scored


def tree_cost(tree: PromptTree, with_prompt: bool = True) -> tuple[int, float, int]:
    """Tokens, keys that they see, and scored tokens of a tree; `with_prompt` False for leaves of a known prompt."""
    prompt = len(tree.prompt_ids)
    lengths = [len(tree.completions[i].ids) - 1 for i, carrier in enumerate(tree.carriers) if carrier == i]
    keys = sum(length * (prompt + (length + 1) / 2) for length in lengths)
    if with_prompt:
        keys += prompt * (prompt + 1) / 2
    return sum(lengths) + prompt * with_prompt, keys, sum(completion.length for completion in tree.completions)


def necessary(size: Size, trees: Iterable[PromptTree], mismatched: Iterable[PromptTree] = (),
              teacher: Size | None = None) -> float:
    """FLOPs of a step: forward and backward (twice the forward) of each tree, forward alone of mismatched completions
    and the teacher. Rows that share a prompt share its tokens; stored scores cost nothing."""
    total = 0.0
    for tree in trees:
        cost = tree_cost(tree)
        total += 3 * size.forward(*cost) + (teacher.forward(*cost) if teacher else 0.0)
    return total + sum(size.forward(*tree_cost(tree, with_prompt=False)) for tree in mismatched)


def measured_peak(device: torch.device, dtype: torch.dtype, side: int | None = None) -> float:
    """FLOP/s of a square matrix product on this device: the best of several, after a warm-up."""
    side = side or (8192 if device.type == "cuda" else 2048)
    one, other = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(6):
        synchronize(device)
        began = time.perf_counter()
        one @ other
        synchronize(device)
        best = min(best, time.perf_counter() - began)
    return 2.0 * side**3 / best


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
