"""Save a model or adapter as a directory that transformers or peft loads."""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError

from tropism.distributed.shard import part_of
from tropism.errors import ModelError, OutputError, clause, first_line
from tropism.files import bytes_on_disk, system_errors
from tropism.model.adapters import files as adapter_files
from tropism.model.adapters.parameters import adapter_name, saved_parameters
from tropism.model.generation import corrected

SHARD_SIZE = "50GB"
"""Largest file of weights: the default of transformers."""

_BYTES_PER_TOKEN = 150  # of tokenizer.json with its merges: 75 to 135 in models of today
_BYTES_PER_TENSOR = 128  # of a safetensors header, beside the name
_CONFIG_BYTES = 16 * 1024  # of the configs and the chat template, each


def export(model: Any, tokenizer: Any, path: Path, dtype: torch.dtype, stop_ids: Iterable[int],
           weights: dict[str, torch.Tensor] | None = None) -> None:
    """Write safetensors, config, tokenizer, chat template and generation config; of a model with an adapter, the
    adapter instead of weights and config. The directory appears only when all files are written.

    Args:
        stop_ids: terminators that were trained. Generation stops at them and at the stop tokens it already had.
        weights: a state dict to write instead of the model's own.

    Raises:
        OutputError: if writing fails; `path` is then unchanged. If only the tokenizer fails, the rest is written.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        with system_errors():
            failed = write_model(model, tokenizer, partial, dtype, stop_ids, weights)
        shutil.rmtree(path, ignore_errors=True)  # left by a run that was killed while finishing, and then resumed
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        needed = model_bytes(model, path, dtype)
        shutil.rmtree(partial, ignore_errors=True)  # useless, and perhaps what fills the disk: not free otherwise
        raise OutputError.because(path, error, needed, "the model could not be written") from error
    if failed is not None:
        raise failed


def model_bytes(model: Any, path: Path, dtype: torch.dtype) -> int:
    """Space that `export` takes: weights, and an estimate of tokenizer and configs."""
    weights = sum(weight.numel() for weight in saved_parameters(model)) * dtype.itemsize
    tokens = int(getattr(model.config.get_text_config(), "vocab_size", None) or 0)
    names = sum(len(name) + _BYTES_PER_TENSOR for name in model.state_dict())
    return bytes_on_disk([weights + names, tokens * _BYTES_PER_TOKEN, *[_CONFIG_BYTES] * 5], path)


def export_bytes(weights: Mapping[str, torch.Tensor], tokenizer: Any, path: Path, dtype: torch.dtype) -> int:
    """Space that a directory with these weights and this tokenizer takes.

    Args:
        weights: by their names, on any device; of tied ones each name.
        tokenizer: measured by saving it. Estimated by the size of its vocabulary if there is no room for that.
    """
    values = {id(weight): weight.numel() for weight in weights.values()}
    names = sum(len(name) + _BYTES_PER_TENSOR for name in weights)
    try:
        with TemporaryDirectory() as place, system_errors():
            save_tokenizer(tokenizer, Path(place))
            sizes = [file.stat().st_size for file in Path(place).rglob("*") if file.is_file()]
    except OSError:
        sizes = [len(tokenizer) * _BYTES_PER_TOKEN]
    return bytes_on_disk([sum(values.values()) * dtype.itemsize + names, *sizes, *[_CONFIG_BYTES] * 5], path)


def write_model(model: Any, tokenizer: Any, path: Path, dtype: torch.dtype, stop_ids: Iterable[int],
                weights: dict[str, torch.Tensor] | None = None,
                shard_size: str | int = SHARD_SIZE) -> OutputError | None:
    """Write a model's files into an existing directory. Unlike `export`, may leave some of them after an error.

    Args:
        stop_ids, weights: as for `export`.
        shard_size: largest size of a file; a larger model is split into several files with an index.

    Returns:
        the error of the tokenizer, which is written last, if it cannot be saved.
    """
    add_stop_ids(model.generation_config, stop_ids)
    model.generation_config, _ = corrected(model.generation_config)
    if adapter_name(model) is not None:
        adapter_files.save(model, path, dtype, weights)
        model.generation_config.save_pretrained(path)
        match_permissions(path / adapter_files.CONFIG)
        return _tokenizer_error(tokenizer, path)
    converted: dict[tuple[int, torch.Size], torch.Tensor] = {}  # tied weights stay one tensor and are written once
    state = {}
    for name, tensor in (model.state_dict() if weights is None else weights).items():
        here = (tensor.data_ptr(), tensor.shape)
        if here not in converted:
            converted[here] = tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None)
        state[name] = converted[here]
    model.save_pretrained(path, state_dict=state, max_shard_size=shard_size)
    config_file = path / "config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    if model._auto_class is None:  # the code that came with the model was not run, and is not passed on
        config.pop("auto_map", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    config.pop("torch_dtype", None)
    if not _ends_equal(model, state):
        _set_untied(config)
    config_file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    match_permissions(config_file)
    return _tokenizer_error(tokenizer, path)


def check_saved_files(model: Any, tokenizer: Any) -> None:
    """Check before training that config, generation config and tokenizer can be saved after it.

    Raises:
        ModelError: naming what cannot be saved.
    """
    with TemporaryDirectory() as place:
        for name, write in (("config", model.config.save_pretrained),
                            ("generation config", model.generation_config.save_pretrained),
                            ("tokenizer", tokenizer.save_pretrained)):
            try:
                write(place)
            except OSError:  # the disk of temporary files: not what is checked here
                return
            except Exception as error:  # code of libraries and of others, which may raise anything
                raise ModelError(f"the {name} of the model cannot be saved, so the result would be incomplete: "
                                 f"{first_line(error)}") from error


def _tokenizer_error(tokenizer: Any, path: Path) -> OutputError | None:
    try:
        save_tokenizer(tokenizer, path)
    except (OSError, SafetensorError):
        raise
    except Exception as error:  # as above
        return OutputError(f"the model is written, but its tokenizer cannot be saved: {clause(first_line(error))}. "
                           "Copy the tokenizer's files from the base model into the directory 'model'.")
    return None


def _ends_equal(model: Any, state: Mapping[str, torch.Tensor]) -> bool:
    """Whether embedding and head have equal weights in a state dict, or only one of them is in it."""
    ends = {name for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None
            for module_name, module in model.named_modules() if module is end for name in [f"{module_name}.weight"]}
    weights = [state[name] for name in ends if name in state]
    return len(weights) < 2 or weights[0] is weights[1] or torch.equal(*weights)


def _set_untied(config: dict[str, Any]) -> None:
    """Record in the content of a config file that head and embedding are two tables."""
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            part["tie_word_embeddings"] = False


def save_tokenizer(tokenizer: Any, path: Path) -> None:
    """Write a tokenizer's files into an existing directory, without references to code that was not run."""
    tokenizer.save_pretrained(path)
    file = path / "tokenizer_config.json"
    if getattr(tokenizer, "_auto_class", None) is None and file.is_file():
        config = json.loads(file.read_text(encoding="utf-8"))
        if config.pop("auto_map", None) is not None:
            file.write_text(json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def match_permissions(file: Path) -> None:
    """Give the safetensors files next to a file its permissions: safetensors makes them readable for the owner only."""
    for weights in file.parent.glob("*.safetensors"):
        weights.chmod(file.stat().st_mode & 0o777)


def add_stop_ids(generation: Any, stop_ids: Iterable[int]) -> None:
    """Add stop tokens to a generation config."""
    before = generation.eos_token_id
    known = before if isinstance(before, list) else [] if before is None else [before]
    stops = [*known, *sorted(set(stop_ids) - set(known))]
    if stops:
        generation.eos_token_id = stops[0] if len(stops) == 1 else stops


def count_changed_weights(model: Any, initial: dict[str, torch.Tensor], dtype: torch.dtype) -> tuple[int, int]:
    """Count the weights on this process that training changed, and those of them that still differ in `dtype`.

    Args:
        initial: trainable weights before training.
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
