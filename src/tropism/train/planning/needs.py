"""Measures what packs of a run need, by counting a small and a large one of its first step."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from tropism.train.planning.blueprint import Blueprint
from tropism.train.planning.count import Count
from tropism.train.planning.fake_engine import layers_of
from tropism.train.planning.memory import HELD, Needs, Pass
from tropism.train.settings import Settings
from tropism.train.step_packs import StepPacks, StepPlanner

_SMALLER = 4


def measure(blueprint: Blueprint, planner: StepPlanner, tokens: int, base: float, settings: Settings,
            held: Mapping[str, float] | None = None) -> Needs:
    """Count two packs of the first step, of at most `tokens` and a quarter of it.

    Args:
        planner: of the run.
        base: bytes of the program.
        settings: their checkpointing, and whether forward passes come first.
        held: bytes of the components of `HELD`; by default as counted.
    """
    planner = planner.under(settings)
    large = one_pack(replace(planner, microbatch_tokens=tokens).packs_of(1))
    most = large.packs[0].batch.tokens
    small = one_pack(replace(planner, microbatch_tokens=max(1, most // _SMALLER)).packs_of(1))
    count = blueprint.count([small, large], settings.checkpointing)
    passes = [Pass(step.packs[0].batch.tokens, _phases(count, number)) for number, step in enumerate((small, large))]
    return Needs(base, held or held_in(count), *passes)


def one_pack(step: StepPacks) -> StepPacks:
    """A step cut to its largest packs."""
    largest = max(step.packs, key=lambda pack: pack.batch.tokens)
    alone = sorted(step.mismatched, key=lambda pack: pack.batch.tokens)[-1:]
    return replace(step, packs=(largest,), mismatched=tuple(alone))


def held_in(count: Count) -> dict[str, float]:
    """Bytes of what does not depend on the pack."""
    return {name: max((held.get(name, 0.0) for held in count.peaks.values()), default=0.0) for name in HELD}


def shared(held: Mapping[str, float], blueprint: Blueprint, shards: int, once: bool = False) -> dict[str, float]:
    """The same for one of several processes that share the training state.

    Each holds its part, and gathered weights: what is outside of the layers, with a buffer, and three layers, of which
    one travels. With `--parallel.reduce-once` it holds all gradients.

    Args:
        once: weights are gathered, and gradients summed, once per step, so that it holds all of both.
    """
    if shards == 1:
        return dict(held)
    module, narrow = blueprint.module, blueprint.precision == "bf16"
    layers = [sum(weight.numel() * (2 if narrow else weight.element_size()) for weight in layer.parameters())
              for layer in layers_of(module)]
    outside = {id(part.weight): part.weight.numel() * 4 for part in (module.get_input_embeddings(),
                                                                     module.get_output_embeddings())}
    found = {name: size / shards for name, size in held.items()}
    gathered = 2 * sum(outside.values()) + (sum(layers) if once else 3 * max(layers, default=0))
    found["weights"] += min(gathered, held["weights"])
    if once or blueprint.options.parallel.reduce_once:
        found["gradients"] = held["gradients"]
    return found


def _phases(count: Count, number: int) -> dict[str, dict[str, float]]:
    mark = f"{number} "
    return {phase.removeprefix(mark): held for phase, held in count.peaks.items() if phase.startswith(mark)}


def quick_bound(module: Any, tokens: int) -> float:
    """A generous estimate of the bytes that training needs, without counting: an upper bound for small models."""
    weights = sum(weight.numel() for weight in module.parameters())
    widths = sum(layer.in_features + layer.out_features for layer in module.modules()
                 if isinstance(layer, torch.nn.Linear))
    vocabulary = getattr(module.config.get_text_config(), "vocab_size", 0)
    return 20.0 * weights + 32.0 * widths * tokens + 24.0 * min(vocabulary * tokens, 2**26)


def quick_tokens(module: Any, tokens: int, most: float) -> int:
    """Tokens, doubled as long as the generous estimate stays below so many bytes."""
    while tokens < 2**40 and quick_bound(module, 2 * tokens) < most:
        tokens *= 2
    return tokens
