"""Modules from Python that hold adapters: the causal model in them, and what of them is not served."""

from typing import Any

from tropism.errors import ModelError
from tropism.model.adapters.parameters import adapter_name
from tropism.model.adapters.targets import ON_EMBEDDING


def inner(module: Any, place: str) -> Any:
    """The causal model in a PeftModel, with the adapters in its layers; any other module itself.

    Args:
        place: what it is called in an error.

    Raises:
        ModelError: for adapters of another kind than LoRA, which may stand outside the causal model, several, or one on
            the head.
    """
    for config in (getattr(module, "peft_config", None) or {}).values():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if kind != "LORA":
            raise ModelError(f"{place} holds an adapter of kind {kind}; Tropism takes LORA: give the model that "
                             "merge_and_unload() makes of it, if it can")
    found = module.get_base_model() if hasattr(module, "get_base_model") else module
    if adapter_name(found) is not None:
        head = found.get_output_embeddings()
        if hasattr(head, "lora_A"):
            raise ModelError(f"{place} has its adapter on the head too, whose weight is used as it is: it would count "
                             "for nothing; merge_and_unload() the model first")
    return found


def check_trainable(module: Any, place: str) -> None:
    """The adapter of a module is one that computes, is not in the weights already, and stands on no embedding.

    Raises:
        ModelError: saying how to make it so.
    """
    for name, layer in module.named_modules():
        if len(getattr(layer, "lora_embedding_A", ())):
            raise ModelError(f"{place} has its adapter on an embedding ({name}), {ON_EMBEDDING}")
        if getattr(layer, "_disable_adapters", False):
            raise ModelError(f"the adapter of {place} is switched off; enable_adapter_layers() first")
        if getattr(layer, "merged_adapters", None):
            raise ModelError(f"the adapter of {place} is merged into its weights; unmerge_adapter() first, or "
                             "merge_and_unload() to train without it")
