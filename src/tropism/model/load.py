"""Models and tokenizers from a directory, a hub id or a GGUF file; and the result written back."""

import json
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.logging import disable_progress_bar

from tropism.distributed.shard import part_of
from tropism.errors import ModelError, OutputError
from tropism.model import quantization as quantized
from tropism.model.adapters import files as adapter_files
from tropism.model.adapters import merge as adapter_merge
from tropism.model.adapters.files import first_line
from tropism.model.adapters.structure import adapter_name, kept_parameters
from tropism.model.language_model import Precision
from tropism.model.options import is_adapter
from tropism.observe.console import Voice

SHARD_SIZE = "50GB"
"""Largest file of weights, as transformers has it."""

disable_progress_bar()  # a bar of their own for every load and save would drown ours


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model comes from: a directory or hub id, a GGUF file in it where that is what was named, and an adapter
    where that is what was named: the others are then its base. `look` is called with the base when it is loaded, before
    the adapter is merged into it."""

    name: str
    gguf_file: str | None = None
    adapter: str | None = None
    look: Callable[[Any], None] | None = None

    @classmethod
    def of(cls, name: str) -> "Source":
        """Understand what a user named.

        Raises:
            ModelError: if it looks like a local path and is not there.
        """
        path = Path(name).expanduser()
        if path.suffix.lower() == ".gguf":
            if not path.is_file():
                raise ModelError(f"{name}: no such GGUF file")
            return cls(str(path.resolve().parent), path.name)
        if path.is_dir():
            if is_adapter(path):
                return cls._of_adapter(path.resolve())
            if not (path / "config.json").is_file():
                if (path / "manifest.json").is_file():
                    raise ModelError(f"{name}: is a run; " + (f"name its result: {path / 'model'}" if (
                        path / "model").is_dir() else "it has no result yet"))
                ggufs = sorted(file.name for file in path.glob("*.gguf"))
                hint = f"; name the file: {path / ggufs[0]}" if ggufs else ""
                raise ModelError(f"{name}: no config.json in this directory{hint}")
            return cls(str(path.resolve()))
        if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1 or " " in name:
            raise ModelError(f"{name}: no such directory, and not a hub id (owner/name)")
        if path.parent.is_dir():
            _say_missing(name)
        return cls(name)

    @classmethod
    def _of_adapter(cls, path: Path) -> "Source":
        base = adapter_files.base_of(path)
        try:
            return replace(cls.of(base), adapter=str(path))
        except ModelError as error:
            raise ModelError(f"{path}: an adapter of {base}, which is not to be found ({error}); "
                             f"{adapter_files.advice(path)}") from None

    @property
    def base(self) -> "Source":
        """The same without the adapter."""
        return replace(self, adapter=None)

    @property
    def kwargs(self) -> dict[str, Any]:
        """Arguments for transformers' loaders."""
        return {"gguf_file": self.gguf_file} if self.gguf_file else {}

    @property
    def absolute(self) -> str:
        """The name under which another process finds it."""
        return self.adapter or (str(Path(self.name) / self.gguf_file) if self.gguf_file else self.name)


@cache
def _say_missing(name: str) -> None:
    """Say of what may be a mistyped path, or a hub id, that it is no directory before the hub is asked for it."""
    with suppress(ValueError):  # no hub id either, which loading says
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return
    voice = Voice(loud=os.environ.get("RANK", "0") == "0")
    voice.warn(f"{name}: no such directory, though {Path(name).parent} is one; looked for as a hub id (owner/name)")


def load_tokenizer(source: Source, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model; the one beside an adapter where there is one.

    Raises:
        ModelError: if there is none, or it cannot be read.
    """
    if source.adapter and (Path(source.adapter) / "tokenizer_config.json").is_file():
        source = Source(source.adapter)
    _need_gguf(source)
    try:
        return AutoTokenizer.from_pretrained(source.name, trust_remote_code=trust_remote_code, **source.kwargs)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ModelError(f"{source.name}: no tokenizer could be loaded: {first_line(error)}") from error


def load_config(source: Source, *, trust_remote_code: bool = False) -> Any:
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


def load_model(source: Source, precision: Precision, device: torch.device, *,
               trust_remote_code: bool = False, quantize: quantized.Kind | None = None,
               plain: Iterable[str] = ()) -> Any:
    """A causal model in evaluation mode, float32 weights (float64 under `fp64`), on a device; an adapter that was named
    is merged into them.

    Args:
        quantize: hold the weights of linear layers in 4 or 8 bits.
        plain: full names of modules that are not quantised.

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
    if source.gguf_file:  # the weights are plain now; a model that says it is quantised cannot be saved
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


def _need_gguf(source: Source) -> None:
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


def export(model: Any, tokenizer: Any, path: Path, dtype: torch.dtype, stop_ids: Iterable[int],
           weights: dict[str, torch.Tensor] | None = None) -> None:
    """Write safetensors, config, tokenizer, chat template and generation config that load as they are; of a model with
    an adapter, the adapter in place of weights and config.

    Args:
        stop_ids: the terminators that were trained; generation stops at them, and at those it had before.
        weights: a state dict in place of the model's own.

    Raises:
        OutputError: if the disk refuses; `path` is then as it was.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write_model(model, tokenizer, partial, dtype, stop_ids, weights)
        shutil.rmtree(path, ignore_errors=True)  # of a run that was killed at its end, and went on
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        needed = sum(weight.numel() for weight in kept_parameters(model)) * dtype.itemsize
        failure = OutputError.because(path, error, needed, "the model could not be written")
        shutil.rmtree(partial, ignore_errors=True)  # half a model is of no use, and may be what fills the disk
        raise failure from error


def check_space(model: Any, path: Path, dtype: torch.dtype, copies: int = 1, beside: int = 0) -> None:
    """Find out before training whether the result fits on the disk, with what is kept on the way.

    Args:
        copies: models that are written.
        beside: bytes of whatever else is.

    Raises:
        OutputError: saying how much is needed and how much is free.
    """
    needed = sum(weight.numel() for weight in kept_parameters(model)) * dtype.itemsize * copies + beside
    free = shutil.disk_usage(path).free
    if free < needed * 1.05:
        what = ("the model" if copies == 1 else f"{copies} models") + (" and the checkpoints" if beside else "")
        raise OutputError(f"{path}: {what} will take {needed / 2**30:.2f} GiB, and {free / 2**30:.2f} GiB are free")


def write_model(model: Any, tokenizer: Any, path: Path, dtype: torch.dtype, stop_ids: Iterable[int],
                weights: dict[str, torch.Tensor] | None = None,
                shard_size: str | int = SHARD_SIZE) -> None:
    """Write a model's files into a directory that is there. `export` does it whole or not at all.

    Args:
        stop_ids, weights: as `export` takes them.
        shard_size: of a file at most; beyond it there are several, with an index.
    """
    add_stop_ids(model.generation_config, stop_ids)
    if adapter_name(model) is not None:
        adapter_files.save(model, path, dtype, weights)
        model.generation_config.save_pretrained(path)
        tokenizer.save_pretrained(path)
        as_readable_as(path / adapter_files.CONFIG)
        return
    converted: dict[tuple[int, torch.Size], torch.Tensor] = {}  # tied weights stay one tensor, and are written once
    state = {}
    for name, tensor in (model.state_dict() if weights is None else weights).items():
        here = (tensor.data_ptr(), tensor.shape)
        if here not in converted:
            converted[here] = tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None)
        state[name] = converted[here]
    model.save_pretrained(path, state_dict=state, max_shard_size=shard_size)
    tokenizer.save_pretrained(path)
    config_file = path / "config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config["dtype"] = str(dtype).removeprefix("torch.")
    config.pop("torch_dtype", None)
    config_file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    as_readable_as(config_file)


def as_readable_as(file: Path) -> None:
    """Let whoever may read a file read the weights beside it: safetensors writes them for their owner alone."""
    for weights in file.parent.glob("*.safetensors"):
        weights.chmod(file.stat().st_mode & 0o777)


def add_stop_ids(generation: Any, stop_ids: Iterable[int]) -> None:
    """Let generation stop at these too, and at those it had before."""
    before = generation.eos_token_id
    known = before if isinstance(before, list) else [] if before is None else [before]
    stops = [*known, *sorted(set(stop_ids) - set(known))]
    if stops:
        generation.eos_token_id = stops[0] if len(stops) == 1 else stops


def survived_rounding(model: Any, initial: dict[str, torch.Tensor], dtype: torch.dtype) -> tuple[int, int]:
    """How many of the weights that this process holds were changed by training, and the change of how many is still
    there in `dtype`.

    Args:
        initial: weights before; those that are not there did not learn.
    """
    changed = kept = 0
    for name, parameter in model.named_parameters():
        if name not in initial:
            continue
        before, after = initial[name], part_of(parameter.detach()).cpu()
        moved = before != after
        changed += int(moved.sum())
        kept += int((moved & (before.to(dtype) != after.to(dtype))).sum())
    return changed, kept
