"""Checks and limits from a model's config: supported architectures, rotary lengths, dropout, longest sequence."""

from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tropism.errors import ModelError


def check_architecture(config: Any) -> None:
    """Accept only decoder-only text models.

    Raises:
        ModelError: for any other architecture.
    """
    name = (getattr(config, "architectures", None) or [config.model_type])[0]
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{name} is an encoder-decoder model: unsupported, Tropism trains decoder-only text models")
    if getattr(config, "vision_config", None) is not None or getattr(config, "audio_config", None) is not None:
        raise ModelError(f"{name} is a vision or audio model: unsupported, Tropism trains decoder-only text models")
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not getattr(config, "auto_map", None):
        raise ModelError(f"{name} (model_type {config.model_type}) is unsupported: transformers has no causal language "
                         "model for it")


def check_rope(config: Any, max_length: int) -> None:
    """Reject lengths at which rotary frequencies would depend on the other sequences of a pack.

    Raises:
        ModelError: with the longest safe length.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = rope.values() if rope and all(isinstance(entry, dict) for entry in rope.values()) else [rope]
    for kind in kinds:
        if kind.get("rope_type") in ("dynamic", "longrope"):
            safe = kind.get("original_max_position_embeddings") or text.max_position_embeddings
            if max_length > safe:
                raise ModelError(f"rope type '{kind['rope_type']}' changes its frequencies beyond {safe} tokens, so "
                                 f"results would depend on packing. Use --max-length {safe} or less.")


def dropout_of(config: Any) -> dict[str, float]:
    """Dropout rates of a config that are above 0. Training turns them all off."""
    values = config.get_text_config().to_dict()
    return {name: value for name, value in values.items()
            if ("dropout" in name or name.endswith("_pdrop")) and isinstance(value, float) and value > 0}


def max_positions(config: Any) -> int | None:
    """Longest sequence that the model supports, in tokens; None if the config does not say."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)
