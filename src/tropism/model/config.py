"""Checks and limits from a model's config: supported architectures, rotary lengths, dropout, longest sequence."""

from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tropism.errors import ModelError


def check_architecture(config: Any) -> None:
    """Refuse what is not a decoder-only text model.

    Raises:
        ModelError: naming the architecture.
    """
    name = (getattr(config, "architectures", None) or [config.model_type])[0]
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{name} is an encoder-decoder model; Tropism trains decoder-only text models")
    if getattr(config, "vision_config", None) is not None or getattr(config, "audio_config", None) is not None:
        raise ModelError(f"{name} is a vision or audio model; Tropism trains decoder-only text models")
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not getattr(config, "auto_map", None):
        raise ModelError(f"{name} (model_type {config.model_type}) is not a causal language model of transformers")


def check_rope(config: Any, max_length: int) -> None:
    """Refuse lengths at which rotary frequencies would depend on what else is in a pack.

    Raises:
        ModelError: naming the longest length that is safe.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = rope.values() if rope and all(isinstance(entry, dict) for entry in rope.values()) else [rope]
    for kind in kinds:
        if kind.get("rope_type") in ("dynamic", "longrope"):
            safe = kind.get("original_max_position_embeddings") or text.max_position_embeddings
            if max_length > safe:
                raise ModelError(f"rope type '{kind['rope_type']}' changes its frequencies beyond {safe} tokens, so "
                                 f"results would depend on packing; set --max-length {safe} or less")


def dropout_of(config: Any) -> dict[str, float]:
    """Dropout rates that the config asks for; all are off in training, and the report says so."""
    values = config.get_text_config().to_dict()
    return {name: value for name, value in values.items()
            if ("dropout" in name or name.endswith("_pdrop")) and isinstance(value, float) and value > 0}


def max_positions(config: Any) -> int | None:
    """The longest sequence that the model was made for, in tokens."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)
