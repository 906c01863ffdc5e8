"""Routers of mixture-of-experts models: their logits in a pass, and the load-balancing loss.

The loss is E * sum over experts e of f_e * P_e (Switch Transformer, Fedus et al. 2021, arXiv:2101.03961, equations 4
to 6), in the form that transformers uses for Mixtral and Qwen-MoE: f_e counts all top-k choices of a token, so the f_e
sum to k; P_e is the mean probability; both are means over tokens and layers together. Even routing gives k.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tropism.errors import ModelError, UsageError

OPTION = "--router-aux-weight"
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
"""Config entries for the weight of this loss, in the model families for which transformers implements it."""


@dataclass(slots=True)
class RouterLogits:
    """The router logits of one forward pass. The pass fills it.

    Args:
        logits: `[T, E]` of each layer with experts, padding included.
    """

    logits: tuple[Tensor, ...] = ()

    def keep(self, output: Any) -> None:
        """Keep the router logits of a backbone's output.

        Raises:
            ModelError: if it has no router logits.
        """
        found = getattr(output, "router_logits", None)
        if not found:
            raise ModelError(f"{OPTION}: the model has experts, but transformers returns no router logits for it. "
                             f"Remove {OPTION}.")
        self.logits = tuple(layer.flatten(0, -2) for layer in found)


@dataclass(frozen=True, slots=True)
class Experts:
    """The number of experts, and how many of them a token uses.

    Args:
        number: E, experts per layer.
        top_k: k, experts per token.
    """

    number: int
    top_k: int

    @classmethod
    def of(cls, config: Any) -> "Experts | None":
        """From a model's config; None for a model without experts."""
        text = config.get_text_config()
        number = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
        top_k = getattr(text, "num_experts_per_tok", None)
        return cls(int(number), int(top_k)) if number and top_k else None


def check_option(weight: float, config: Any) -> None:
    """Reject the option for a model without routers, before it is loaded.

    Raises:
        UsageError: with the option and the model.
    """
    if not weight:
        return
    missing = ""
    if Experts.of(config) is None:
        missing = "num_experts or num_local_experts with num_experts_per_tok"
    elif not any(hasattr(config.get_text_config(), name) for name in _COEFFICIENTS):
        missing = " or ".join(_COEFFICIENTS)
    if missing:
        name = (getattr(config, "architectures", None) or [config.model_type])[0]
        raise UsageError(f"{OPTION} {weight:g}: {name} is not a mixture of experts with this loss: its config has no "
                         f"{missing}. Remove {OPTION}.")


def coefficient_of(config: Any) -> float | None:
    """The weight in a model's config, which Tropism does not use; None without one, or without experts."""
    text = config.get_text_config()
    asked = next((value for name in _COEFFICIENTS if (value := getattr(text, name, None))), None)
    return float(asked) if asked and Experts.of(config) is not None else None


def expert_counts(logits: Sequence[Tensor], weights: Tensor, top_k: int) -> Tensor:
    """`[E + 1]` float64, no gradient: how often each expert is chosen, and last, the number of tokens.

    Args:
        logits: `[T, E]` of each layer.
        weights: `[T]` how often each token counts, float64.
    """
    counted = torch.zeros(logits[0].shape[-1] + 1, dtype=torch.float64, device=weights.device)
    for layer in logits:
        # As the models choose: by float32 probabilities in any precision.
        chosen = torch.softmax(layer.detach().float(), dim=-1).topk(top_k, dim=-1).indices
        counted.index_add_(0, chosen.flatten(), weights.repeat_interleave(top_k))
        counted[-1] += weights.sum()
    return counted


def probabilities(logits: Sequence[Tensor], weights: Tensor) -> Tensor:
    """`[E]` float64: each expert's probability, summed over layers and tokens and weighted by `weights`."""
    sums = []
    for layer in logits:
        at_least_fp32 = torch.promote_types(layer.dtype, torch.float32)
        sums.append(weights @ torch.softmax(layer, dim=-1, dtype=at_least_fp32).double())
    return torch.stack(sums).sum(0)


def balance_loss(load: Tensor, probabilities: Tensor) -> Tensor:
    """E * sum_e f_e P_e, or the contribution of some of the tokens.

    Args:
        load: `[E + 1]` counts of all tokens, from `expert_counts`.
        probabilities: `[E]` of all tokens, or of some.
    """
    counts, tokens = load[:-1], load[-1]
    return len(counts) * (counts / tokens * probabilities / tokens).sum()
