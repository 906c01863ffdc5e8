"""What a model gives for some trees in one layout, in float64."""

from typing import Any

import torch

from tropism.data.batching.collate import collate
from tropism.data.tree import PromptTree
from tropism.model.language_model import LanguageModel


def logps_and_gradient(model: Any, layout: Any, trees: list[PromptTree]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs, and the gradient of a weighted sum of them."""
    ours = LanguageModel(model, layout, "fp64", torch.device("cpu"))
    if layout == "padded":
        model.set_attn_implementation("eager")
    logps = ours.logps(collate(trees, layout))
    model.zero_grad()
    (logps * torch.linspace(-1.0, 1.0, len(logps), dtype=logps.dtype)).sum().backward()
    return logps.detach(), torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
