"""Lends a model to a function of the user, and takes it back as it was."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tropism.distributed.passes import rest
from tropism.distributed.shard import part_of
from tropism.model.attention import attention, plain_implementation
from tropism.model.generation import generating
from tropism.model.language_model import LanguageModel, computing

_HOOKS = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
          "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks")
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 2**22  # values


@contextmanager
def lent(model: LanguageModel, stop_ids: Sequence[int], seed: int) -> Iterator[Any]:
    """Yield the transformers module of a model, ready to compute and to generate: in evaluation mode, without
    gradients, in the precision of the run, with attention that takes padded lines. By default it generates greedily, up
    to the run's stop ids. Random generators start from a seed.

    Afterwards modes, gradients, hooks, config and random generators are what they were. Weights are not, if they were
    changed: see `fingerprints`.
    """
    module = model.module
    settings = {"eos_token_id": list(stop_ids), "pad_token_id": stop_ids[0]} if stop_ids else {}
    with (_random_apart(model.device, seed), _settings_kept(), _module_kept(module), torch.no_grad(),
          attention(module, plain_implementation(module)), generating(module, **settings),
          computing(module, model.precision, model.device)):
        try:
            yield module
        finally:
            rest(module)


def fingerprints(module: Any) -> dict[str, tuple[int, str, int]]:
    """For each weight its identity, its dtype, and a sum that depends on every bit and its place. Of a sharded weight,
    this process's part."""
    return {name: (id(weight), str(weight.dtype), _checksum(part_of(weight)))
            for name, weight in module.named_parameters(remove_duplicate=False)}


def _checksum(weight: Tensor) -> int:
    """Sum modulo 2^64 of the values as integers, each times an odd number of its own: no single change keeps it."""
    flat = weight.detach().contiguous().view(-1)
    if flat.dtype not in _INTEGERS.values():
        flat = flat.view(_INTEGERS[flat.element_size()])
    total = 0
    for start in range(0, len(flat), _CHUNK):
        part = flat[start : start + _CHUNK].to(torch.int64)
        odd = torch.arange(start, start + len(part), device=part.device) * 2 + 1
        total += int((part * odd).sum())
    return total % 2**64


@contextmanager
def _random_apart(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the random generators inside the block, and restore them after it."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextmanager
def _settings_kept() -> Iterator[None]:
    """Restore settings of torch on which results depend."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


@contextmanager
def _module_kept(module: Any) -> Iterator[None]:
    """Restore modes, hooks, patched methods, gradients and the config of a module."""
    parts = list(module.modules())
    modes = [part.training for part in parts]
    hooks = [{name: dict(getattr(part, name)) for name in _HOOKS} for part in parts]
    forwards = [vars(part).get("forward") for part in parts]
    weights = [(weight, weight.requires_grad, weight.grad) for weight in module.parameters()]
    config, attended = dict(vars(module.config)), module.config._attn_implementation
    try:
        yield
    finally:
        for part, mode, hooked, forward in zip(parts, modes, hooks, forwards, strict=True):
            part.training = mode
            for name, kept in hooked.items():
                found = getattr(part, name)
                if dict(found) != kept:
                    found.clear()
                    found.update(kept)
            if vars(part).get("forward") is not forward:
                vars(part).pop("forward", None)
                vars(part).update({} if forward is None else {"forward": forward})
        for weight, learns, gradient in weights:
            if weight.requires_grad != learns:
                weight.requires_grad_(learns)
            if weight.grad is not gradient:
                weight.grad = gradient
        if module.config._attn_implementation != attended:
            module.set_attn_implementation(attended)
        vars(module.config).clear()
        vars(module.config).update(config)
