"""Checks and limits from a model's config: supported architectures, rotary lengths, dropout, longest sequence."""

import json
from collections.abc import Mapping
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from tropism.errors import ModelError

MOST_LAYERS = 2000
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_SIZES = (*_LAYERS, "hidden_size", "n_embd", "d_model", "num_attention_heads", "n_head", "n_heads", "vocab_size",
          "head_dim", "max_position_embeddings", "n_positions")
_MAY_BE_ZERO = ("num_key_value_heads", "intermediate_size")
_LARGEST = 2**31 - 1


def check_values(values: Mapping[str, Any], place: str) -> None:
    """Reject sizes that are no integers or that no model has, before transformers computes with them.

    Args:
        values: content of a config file.
        place: the file.

    Raises:
        ModelError: with the name and the value.
    """
    for name in (*_SIZES, *_MAY_BE_ZERO):
        value, least = values.get(name), int(name in _SIZES)
        for size in value if isinstance(value, list) and name not in _LAYERS else [value]:
            if size is not None and (type(size) is not int or not least <= size <= _LARGEST):
                raise ModelError(f"{place}: {name} is {_shown(size)}, but must be an integer from {least} to "
                                 f"{_LARGEST}")
    for name in _LAYERS:
        if (values.get(name) or 0) > MOST_LAYERS:
            raise ModelError(f"{place}: {name} is {values[name]:,}, but at most {MOST_LAYERS:,} layers are supported")
    if not isinstance(values.get("model_type", ""), str):
        raise ModelError(f"{place}: model_type is {_shown(values['model_type'])}, but must be text")
    names = values.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ModelError(f"{place}: architectures is {_shown(names)}, but must be a list of names")
    quantized = values.get("quantization_config")
    method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
    if isinstance(quantized, dict) and (quantized.get("load_in_4bit") or quantized.get("load_in_8bit")):
        method = "bitsandbytes_4bit"  # as transformers does: these files say "bitsandbytes", and old ones nothing
    if quantized is not None and (not isinstance(method, str) or method not in AUTO_QUANTIZATION_CONFIG_MAPPING):
        raise ModelError(f"{place}: quantization_config has the method {_shown(method)}, which transformers does "
                         "not know")
    for name in ("text_config", "llm_config", "language_config"):
        if isinstance(values.get(name), dict):
            check_values(values[name], f"{place}: {name}")


def check_generation(values: Mapping[str, Any], place: str) -> None:
    """Reject settings of generation that would fail after training, when the model is sampled and saved.

    Args:
        values: content of a generation config.
        place: the file.

    Raises:
        ModelError: with the name and the value.
    """
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = values.get(name)
        if value is not None and not all(type(one) is int for one in (value if isinstance(value, list) else [value])):
            raise ModelError(f"{place}: {name} is {_shown(value)}, but must be an integer or a list of integers")
    for name in ("num_beams", "num_return_sequences"):
        value = values.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise ModelError(f"{place}: {name} is {_shown(value)}, but must be an integer above 0")


def _shown(value: Any) -> str:
    """A value as it is written in the file, shortened."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]} ..."


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
    """Reject lengths at which rotary frequencies would depend on the other sequences of a pack, or at which attention
    is divided into chunks, which tree attention does not know.

    Raises:
        ModelError: with the longest safe length.
    """
    text = config.get_text_config()
    chunk = getattr(text, "attention_chunk_size", None)
    if isinstance(chunk, int) and max_length > chunk and "chunked_attention" in (
            getattr(text, "layer_types", None) or ()):
        raise ModelError(f"the model attends in chunks of {chunk} tokens, which longer sequences do not support. Use "
                         f"--max-length {chunk} or less.")
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
