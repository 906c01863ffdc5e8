"""Load models, tokenizers and configs from a directory, a hub id or a GGUF file."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from tropism.borders import border
from tropism.errors import ModelError
from tropism.model import quantization as quantized
from tropism.model.adapters import files as adapter_files
from tropism.model.adapters import merge as adapter_merge
from tropism.model.config import check_architecture
from tropism.model.finite_weights import check_finite
from tropism.model.generation import corrected, read_generation
from tropism.model.language_model import Precision
from tropism.model.remote_code import check_kernels, without_code
from tropism.model.source import ModelSource
from tropism.model.tied_weights import is_tied, set_config, ties
from tropism.model.weights_check import check_layers, check_memory, check_stored, mismatch

logging.disable_progress_bar()  # transformers' own bars for every load and save would hide ours


@without_code
def load_tokenizer(source: ModelSource, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model, or of an adapter if its directory has one.

    Raises:
        ModelError: if it is not found or cannot be read.
    """
    if source.adapter and (Path(source.adapter) / "tokenizer_config.json").is_file():
        source = ModelSource(source.adapter)
    _need_gguf(source)
    source.check_files()
    with border(f"{source.name}: the tokenizer could not be loaded"), _quietly():
        tokenizer = AutoTokenizer.from_pretrained(source.name, trust_remote_code=trust_remote_code, **source.kwargs)
    check_tokenizer(tokenizer, source.name)
    return tokenizer


@without_code
def load_config(source: ModelSource, *, trust_remote_code: bool = False) -> Any:
    """The config of a model that Tropism can train.

    Raises:
        ModelError: for an unsupported architecture, or if the config is not found or cannot be read.
    """
    _need_gguf(source)
    source.check_files()
    hint = (f"It is the base of {source.adapter}. {adapter_files.base_advice(Path(source.adapter))}"
            if source.adapter else "")
    where = "" if Path(source.name).is_dir() else "directory not found, and "
    with border(f"{source.name}: {where}the model config could not be loaded", advice=hint), _quietly():
        config = AutoConfig.from_pretrained(source.name, trust_remote_code=trust_remote_code, **source.kwargs)
    check_kernels(config, trust_remote_code)
    check_architecture(config)
    return config


@without_code
def load_model(source: ModelSource, precision: Precision, device: torch.device, *,
               trust_remote_code: bool = False, quantize: quantized.Quantization | None = None,
               plain: Iterable[str] = ()) -> Any:
    """A causal model on a device, in evaluation mode, with float32 weights (float64 under `fp64`). If the source names
    an adapter, it is merged into the weights.

    Args:
        quantize: hold the weights of linear layers in 4 or 8 bits.
        plain: full names of modules that are not quantized.

    Raises:
        ModelError: if loading fails, or a weight is missing.
    """
    load_config(source, trust_remote_code=trust_remote_code)  # raises before any weight is read
    dtype = weights_dtype(precision)
    extra = dict(source.kwargs)
    if source.gguf_file:
        from transformers import GgufConfig

        extra["quantization_config"] = GgufConfig(dequantize=True)
    if quantize is not None:
        extra |= quantized.loader_arguments(quantize, device, plain)
    config = load_config(source, trust_remote_code=trust_remote_code)
    check_layers(config, source)
    empty = skeleton(config, trust_remote_code=trust_remote_code)
    if quantize is not None or getattr(config, "quantization_config", None) is None:  # else the files decide
        check_memory(empty, source.name, quantized.bytes_per_weight(quantize) or dtype.itemsize, device)
    if quantize is None:
        check_stored(empty, source)
    generation, corrections = (None, []) if source.gguf_file else read_generation(source.name, source.revision)
    if corrections:  # else transformers reads the file itself
        extra["generation_config"] = generation
    with border(f"{source.name}: the model could not be loaded"), _quietly(), mismatch(empty, source):
        model, report = AutoModelForCausalLM.from_pretrained(
            source.name, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True, **extra)
    missing = sorted(report.get("missing_keys") or [])
    if missing:
        raise ModelError(f"{source.name}: {len(missing)} weights are missing in its files: {missing[0]}, ...")
    if source.gguf_file:  # the weights are dequantized; a model marked as quantized cannot be saved
        model.hf_quantizer = None
        model.is_quantized = False
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
    check_finite((*model.named_parameters(), *quantized.scales(model)), source.name)
    if model.generation_config is not None:  # it may come from config.json
        model.generation_config = corrected(model.generation_config)[0]
    if ties(config) and not is_tied(model):  # the files hold two different tables, and transformers loads both
        set_config(model, False)
    if quantize is not None:
        return quantized.make_exact(model).eval()
    if source.adapter is not None:
        if source.inspect_base is not None:
            source.inspect_base(model)
        model = adapter_merge.merged(model, Path(source.adapter))
    return model.to(device=device, dtype=dtype).eval()


@without_code
def skeleton(config: Any, *, dtype: torch.dtype | None = None, trust_remote_code: bool = False) -> Any:
    """A model with its weights on the meta device, tied as its config says, and with real buffers.

    Args:
        dtype: of the weights; by default the config's.

    Raises:
        ModelError: if transformers cannot build it.
    """
    from accelerate import init_empty_weights  # slow to import, and not every run needs it

    chosen = {} if dtype is None else {"dtype": dtype}
    with border(f"{config.name_or_path}: cannot build a model from its config"), _quietly():
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, **chosen)
        model.tie_weights()
    return model


def check_tokenizer(tokenizer: Any, name: str) -> None:
    """Try a tokenizer, since some files load and fail only when they are used.

    Args:
        name: where it comes from, for an error.

    Raises:
        ModelError: if it cannot encode and decode, or has settings of a wrong type.
    """
    template = tokenizer.chat_template
    for text in template.values() if isinstance(template, dict) else [template]:
        if not isinstance(text, str | None):
            raise ModelError(f"{name}: the chat template of the tokenizer is not text")
    with border(f"{name}: the tokenizer fails on a simple text"), _quietly():
        tokenizer.decode(tokenizer("a b")["input_ids"])


@contextmanager
def _quietly() -> Iterator[None]:
    """Mute the notes of libraries while they load: what matters is checked here."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)


def weights_dtype(precision: Precision) -> torch.dtype:
    """Dtype of the weights: float32 also if the model computes in bfloat16."""
    return torch.float64 if precision == "fp64" else torch.float32


def _need_gguf(source: ModelSource) -> None:
    if source.gguf_file:
        try:
            import gguf  # noqa: F401
        except ImportError:
            raise ModelError("reading a GGUF file needs the package gguf. Install it with "
                             "`pip install 'tropism[gguf]'`.") from None
