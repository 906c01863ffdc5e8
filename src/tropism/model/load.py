"""Models and tokenizers from a directory, a hub id or a GGUF file; and the result written back."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.logging import disable_progress_bar

from tropism.errors import ModelError, first_line
from tropism.model import quantization as quantized
from tropism.model.adapters import files as adapter_files
from tropism.model.adapters import merge as adapter_merge
from tropism.model.language_model import Precision
from tropism.model.source import ModelSource

disable_progress_bar()  # a bar of their own for every load and save would drown ours


def load_tokenizer(source: ModelSource, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model; the one beside an adapter where there is one.

    Raises:
        ModelError: if there is none, or it cannot be read.
    """
    if source.adapter and (Path(source.adapter) / "tokenizer_config.json").is_file():
        source = ModelSource(source.adapter)
    _need_gguf(source)
    try:
        return AutoTokenizer.from_pretrained(source.name, trust_remote_code=trust_remote_code, **source.kwargs)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ModelError(f"{source.name}: no tokenizer could be loaded: {first_line(error)}") from error


def load_config(source: ModelSource, *, trust_remote_code: bool = False) -> Any:
    """The config of a model that Tropism can train.

    Raises:
        ModelError: for encoder-decoder and vision models, by name, or if there is no readable config.
    """
    _need_gguf(source)
    try:
        config = AutoConfig.from_pretrained(source.name, trust_remote_code=trust_remote_code, **source.kwargs)
    except (OSError, ValueError, ImportError, KeyError) as error:
        hint = (f"; it is what {source.adapter} says that it belongs to: if it is elsewhere, "
                f"{adapter_files.advice(Path(source.adapter))}" if source.adapter else "")
        which = "" if Path(source.name).is_dir() else "no such directory, and as a hub id "
        raise ModelError(f"{source.name}: {which}no model config could be loaded: {first_line(error)}{hint}") from error
    check_architecture(config)
    return config


def load_model(source: ModelSource, precision: Precision, device: torch.device, *,
               trust_remote_code: bool = False, quantize: quantized.Kind | None = None,
               plain: Iterable[str] = ()) -> Any:
    """A causal model in evaluation mode, float32 weights (float64 under `fp64`), on a device; an adapter that was named
    is merged into them.

    Args:
        quantize: hold the weights of linear layers in 4 or 8 bits.
        plain: full names of modules that are not quantized.

    Raises:
        ModelError: where loading fails, or leaves a weight out.
    """
    _need_gguf(source)
    dtype = weights_dtype(precision)
    extra = dict(source.kwargs)
    if source.gguf_file:
        from transformers import GgufConfig

        extra["quantization_config"] = GgufConfig(dequantize=True)
    if quantize is not None:
        extra |= quantized.loading(quantize, device, plain)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            source.name, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True, **extra)
    except (OSError, ValueError, ImportError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{source.name}: the model could not be loaded: {first_line(error)}") from error
    missing = sorted(report.get("missing_keys") or [])
    if missing:
        raise ModelError(f"{source.name}: {len(missing)} weights are missing and would be random: {missing[0]}, ...")
    if source.gguf_file:  # the weights are plain now; a model that says it is quantized cannot be saved
        model.hf_quantizer = None
        model.is_quantized = False
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
    if quantize is not None:
        return quantized.made_exact(model).eval()
    if source.adapter is not None:
        if source.look is not None:
            source.look(model)
        model = adapter_merge.merged(model, Path(source.adapter))
    return model.to(device=device, dtype=dtype).eval()


def skeleton(config: Any, *, dtype: torch.dtype | None = None, trust_remote_code: bool = False) -> Any:
    """A model without memory for its weights, tied as its config says. Its buffers are real.

    Args:
        dtype: of the weights; by default what the config says.

    Raises:
        ModelError: if transformers cannot make it.
    """
    from accelerate import init_empty_weights  # slow to import, and not every run needs it

    chosen = {} if dtype is None else {"dtype": dtype}
    try:
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, **chosen)
        model.tie_weights()
    except (OSError, ValueError, ImportError, KeyError, AttributeError, RuntimeError) as error:
        raise ModelError(f"{config.name_or_path}: no model can be made of its config: {first_line(error)}") from error
    return model


def weights_dtype(precision: Precision) -> torch.dtype:
    """Dtype of the weights: float32 also where the computation is in bfloat16."""
    return torch.float64 if precision == "fp64" else torch.float32


def _need_gguf(source: ModelSource) -> None:
    if source.gguf_file:
        try:
            import gguf  # noqa: F401
        except ImportError:
            raise ModelError("reading a GGUF file needs the package gguf: pip install 'tropism[gguf]'") from None


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


