"""Modules that are passed from Python with an adapter: the causal model in them, and checks of the adapter."""

from typing import Any

from tropism.errors import ModelError
from tropism.model.adapters.parameters import adapter_name
from tropism.model.adapters.targets import ON_EMBEDDING


def inner(module: Any, place: str) -> Any:
    """The causal model in a PeftModel, with the adapters in its layers; any other module unchanged.

    Args:
        place: its name in an error.

    Raises:
        ModelError: for several adapters, one on the head, or one of another type than LoRA, which may be outside the
            causal model.
    """
    for config in (getattr(module, "peft_config", None) or {}).values():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if kind != "LORA":
            raise ModelError(f"{place} holds an adapter of type {kind}, which is unsupported: Tropism trains LORA. "
                             "Merge it with merge_and_unload() if possible.")
    found = module.get_base_model() if hasattr(module, "get_base_model") else module
    if adapter_name(found) is not None:
        head = found.get_output_embeddings()
        if hasattr(head, "lora_A"):
            raise ModelError(f"{place} has an adapter on the head, which is unsupported: the head's weight is used "
                             "directly, so the adapter would have no effect. Call merge_and_unload() first.")
    return found


def check_trainable(module: Any, place: str) -> None:
    """Check that the adapter of a module is switched on, is not merged, and is not on an embedding.

    Raises:
        ModelError: with what to do about it.
    """
    for name, layer in module.named_modules():
        if len(getattr(layer, "lora_embedding_A", ())):
            raise ModelError(f"{place} has an adapter on an embedding ({name}), {ON_EMBEDDING}")
        if getattr(layer, "_disable_adapters", False):
            raise ModelError(f"the adapter of {place} is switched off. Call enable_adapter_layers() first.")
        if getattr(layer, "merged_adapters", None):
            raise ModelError(f"the adapter of {place} is merged into its weights. Call unmerge_adapter() first, or "
                             "merge_and_unload() to train without it.")
