"""A model as a directory that Hugging Face loads."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from tropism.distributed.shard import part_of
from tropism.errors import OutputError
from tropism.model.adapters import files as adapter_files
from tropism.model.adapters.parameters import adapter_name, kept_parameters

SHARD_SIZE = "50GB"
"""Largest file of weights, as transformers has it."""


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
        match_permissions(path / adapter_files.CONFIG)
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
    match_permissions(config_file)


def match_permissions(file: Path) -> None:
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


def count_changed_weights(model: Any, initial: dict[str, torch.Tensor], dtype: torch.dtype) -> tuple[int, int]:
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
