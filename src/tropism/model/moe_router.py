"""Routers of mixture-of-experts models: what they said in a pass, and the loss that keeps their load even.

The loss is E * sum over experts e of f_e * P_e (Switch Transformer, Fedus et al. 2021, arXiv:2101.03961, equations 4
to 6), in the form that transformers gives it for Mixtral and Qwen-MoE: f_e counts all of a token's top-k choices, so
that the f_e sum to k, P_e is the mean probability, and both are means over tokens and layers together. Even routing
gives k.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tropism.errors import ModelError, UsageError

OPTION = "router_aux_weight"
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
"""Where configs of families name the weight for which transformers has this loss."""


@dataclass(slots=True)
class RouterLogits:
    """What the routers say in one forward pass; the pass fills it.

    Args:
        logits: `[T, E]` of each layer that has experts, padding included.
    """

    logits: tuple[Tensor, ...] = ()

    def keep(self, output: Any) -> None:
        """Keep the router logits of a backbone's output.

        Raises:
            ModelError: if it has none.
        """
        found = getattr(output, "router_logits", None)
        if not found:
            raise ModelError(f"{OPTION}: the model has experts, but transformers gives no router logits for it; leave "
                             f"{OPTION} out")
        self.logits = tuple(layer.flatten(0, -2) for layer in found)


@dataclass(frozen=True, slots=True)
class Experts:
    """How a model chooses among its experts.

    Args:
        number: E, experts of a layer.
        top_k: k, experts that a token goes to.
    """

    number: int
    top_k: int

    @classmethod
    def of(cls, config: Any) -> "Experts | None":
        """What a config says; None for a model without experts."""
        text = config.get_text_config()
        number = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
        top_k = getattr(text, "num_experts_per_tok", None)
        return cls(int(number), int(top_k)) if number and top_k else None


def compute_experts(module: Any, float64: bool) -> None:
    """Choose how experts are multiplied: transformers' grouped product has no float64, its plain loop has."""
    if float64 and getattr(module.config, "_experts_implementation", None) == "grouped_mm":
        module.set_experts_implementation("eager")


def check_option(weight: float, config: Any) -> None:
    """Refuse the option for a model without routers, before it is loaded.

    Raises:
        UsageError: naming the option and the model.
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
        raise UsageError(f"{OPTION} {weight:g}: {name} is not a mixture of experts with such a loss (its config has no "
                         f"{missing}); leave {OPTION} out")


def coefficient_of(config: Any) -> float | None:
    """The weight that a model's own config names; it has no effect here. None without one, or without experts."""
    text = config.get_text_config()
    asked = next((value for name in _COEFFICIENTS if (value := getattr(text, name, None))), None)
    return float(asked) if asked and Experts.of(config) is not None else None


def expert_counts(logits: Sequence[Tensor], weights: Tensor, top_k: int) -> Tensor:
    """`[E + 1]` float64, no gradient: how often each expert is chosen, and at the end how many tokens choose.

    Args:
        logits: `[T, E]` of each layer.
        weights: `[T]` how often each token counts, float64.
    """
    counted = torch.zeros(logits[0].shape[-1] + 1, dtype=torch.float64, device=weights.device)
    for layer in logits:
        # Chosen as the models choose: by float32 probabilities, whatever the precision is.
        chosen = torch.softmax(layer.detach().float(), dim=-1).topk(top_k, dim=-1).indices
        counted.index_add_(0, chosen.flatten(), weights.repeat_interleave(top_k))
        counted[-1] += weights.sum()
    return counted


def probabilities(logits: Sequence[Tensor], weights: Tensor) -> Tensor:
    """`[E]` float64: each expert's probability, summed over layers and tokens, each `weights` times."""
    sums = []
    for layer in logits:
        at_least_fp32 = torch.promote_types(layer.dtype, torch.float32)
        sums.append(weights @ torch.softmax(layer, dim=-1, dtype=at_least_fp32).double())
    return torch.stack(sums).sum(0)


def balance_loss(load: Tensor, probabilities: Tensor) -> Tensor:
    """E * sum_e f_e P_e, or the part of it that some of the tokens contribute.

    Args:
        load: `[E + 1]` of all tokens.
        probabilities: `[E]` of all tokens, or of some.
    """
    counts, tokens = load[:-1], load[-1]
    return len(counts) * (counts / tokens * probabilities / tokens).sum()
