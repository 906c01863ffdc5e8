"""Which parameters of a model belong to its adapter, and what they are called without one."""

from typing import Any

import torch

from tropism.errors import ModelError

NAME = "default"
"""peft's default name of an adapter."""

PARTS = ("lora_A", "lora_B", "lora_magnitude_vector", "modules_to_save")
"""Submodules in which peft keeps the weights of an adapter."""


def adapter_name(module: Any) -> str | None:
    """peft's name of the adapter in a module; None if there is none.

    Raises:
        ModelError: if it has several.
    """
    names = list(getattr(module, "peft_config", None) or ())
    if len(names) > 1:
        raise ModelError(f"the model holds {len(names)} adapters ({', '.join(names)}), and Tropism trains only one. "
                         "Remove the others with delete_adapter(), or merge them.")
    return str(names[0]) if names else None


def adapter_weight_names(module: Any) -> set[str] | None:
    """Names of the weights of the adapter in a module, tied weights under each of their names; None for no adapter."""
    name = adapter_name(module)
    if name is None:
        return None
    return {key for key, _ in module.named_parameters(remove_duplicate=False) if is_part(key, name)}


def is_part(key: str, name: str) -> bool:
    """Whether a tensor of this name in the model belongs to the adapter `name`."""
    parts = key.split(".")
    return any(part in PARTS and parts[place + 1 : place + 2] == [name] for place, part in enumerate(parts))


def saved_parameters(module: Any) -> list[torch.nn.Parameter]:
    """The parameters that a run saves: the adapter's, or all if there is no adapter."""
    names = adapter_weight_names(module)
    return [weight for name, weight in module.named_parameters() if names is None or name in names]


def base_name(key: str) -> str:
    """The name of a tensor in the same model without an adapter."""
    return ".".join(part for part in key.split(".") if part not in ("base_layer", "original_module"))
