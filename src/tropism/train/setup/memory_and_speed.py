"""How the policy computes its layers: checkpointed, compiled, or plain."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tropism.borders import is_out_of_memory
from tropism.data.batching.collate import Batch, collate
from tropism.data.batching.pack import tokens_in_layout
from tropism.data.tree import PromptTree
from tropism.distributed.shard import is_sharded, part_of
from tropism.distributed.world import World
from tropism.errors import ModelError, UsageError, first_line
from tropism.model.compiled import CompiledLayers
from tropism.model.language_model import LanguageModel, Precision
from tropism.observe.console import Voice
from tropism.train.options import ComputeOptions
from tropism.train.settings import Settings

# Largest differences that rounding explains: of log-probs in nats per token, and of the gradient relative to its norm.
_TOLERANCE: dict[Precision, tuple[float, float]] = {"fp64": (1e-5, 1e-5), "fp32": (1e-4, 1e-3), "bf16": (5e-2, 0.1)}


def check_compute(options: ComputeOptions, device: torch.device) -> None:
    """Check options of memory and speed before anything is loaded.

    Raises:
        UsageError: for options that exclude each other or have no effect here.
    """
    if options.offload_checkpoints and options.checkpointing not in ("auto", "full"):
        raise UsageError(f"--offload-checkpoints requires --checkpointing full, but it is {options.checkpointing}. "
                         "Remove one of them.")
    if options.offload_checkpoints and device.type == "cpu":
        raise UsageError("--offload-checkpoints has no effect without a GPU: checkpoints are already in host memory")
    if options.compile == "on" and options.layout == "padded":
        raise UsageError("--compile on requires the tree layout. Remove --layout padded or --compile on.")


def with_settings(model: LanguageModel, settings: Settings, trees: Sequence[PromptTree], world: World, voice: Voice,
                  wanted: bool) -> tuple[LanguageModel, Settings]:
    """The policy with the settings of a run, and the settings that are in use. All processes call this together.

    Args:
        trees: the start-up batch.
        wanted: layers must be compiled. Otherwise, the run continues without if they cannot be.

    Raises:
        ModelError: if layers must be compiled but cannot be, or if no layers are found for checkpoints.
    """
    if settings.checkpointing != "none" and not model.layers:
        raise ModelError(f"--checkpointing {settings.checkpointing}: {type(model.module).__name__} has no list of "
                         "decoder layers. Use --checkpointing none.")
    model = replace(model, checkpointing=settings.checkpointing, offload=settings.offload,
                    gather_once=bool(settings.gather_once), sum_once=model.sum_once or bool(settings.gather_once))
    if settings.checkpointing == "selective" and world.max([int(_changes_what_is_kept(model, trees))])[0]:
        voice.say("full checkpointing: selective checkpointing does not work for layers of "
                  f"{type(model.module).__name__}")
        settings = replace(settings, checkpointing="full")
        model = replace(model, checkpointing="full")
    if not settings.compiled:
        return model, settings
    voice.say("compiling the layers of the model")
    compiled, refusal = compile_layers(model, trees, world)
    if compiled is None:
        if wanted:
            raise ModelError(f"--compile on: {refusal}. Use --compile off.")
        voice.say(f"layers are not compiled: {refusal}")
        return model, replace(settings, compiled=False)
    voice.say(f"compiled {len(model.layers)} layers as {compiled.graphs} graphs")
    return replace(model, compiled=compiled), settings


def _changes_what_is_kept(model: LanguageModel, trees: Sequence[PromptTree]) -> bool:
    """Whether layers change results that selective checkpointing keeps: their gradients are then wrong, or the backward
    pass fails."""
    smallest = min(trees, key=partial(tokens_in_layout, layout=model.layout))  # memory is scarce
    try:
        gap, distance = _differences(replace(model, checkpointing="none"), model,
                                     collate([smallest], model.layout).to(model.device))
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        return True
    finally:
        model.module.zero_grad(set_to_none=True)
    limits = _TOLERANCE[model.precision]
    return not (gap <= limits[0] and distance <= limits[1])


def compile_layers(model: LanguageModel, trees: Sequence[PromptTree],
                   world: World) -> tuple[CompiledLayers | None, str]:
    """Compiled layers of a model, compared with the plain ones on a batch; None and the reason if they are not usable.

    Args:
        trees: the batch.
    """
    if model.layout == "padded":
        return None, "the model trains in the padded layout"
    if world.mesh is not None and world.mesh.size("tensor") > 1:  # torch fails in the backward pass of such layers
        return None, "--parallel.tensor divides them over processes"
    try:
        compiled = CompiledLayers()
        gap, distance = _differences(model, replace(model, compiled=compiled), collate(trees, "tree").to(model.device))
    except Exception as error:  # the compiler may fail anywhere
        if isinstance(error, torch.OutOfMemoryError) or is_sharded(model.module):
            raise
        return None, f"{type(error).__name__}: {first_line(error)}"
    finally:
        model.module.zero_grad(set_to_none=True)
    limits = _TOLERANCE[model.precision]
    if world.max([int(not (gap <= limits[0] and distance <= limits[1]))])[0]:
        return None, (f"compiled layers differ from plain ones by {gap:.2g} nats per token (limit {limits[0]:g}) and "
                      f"{distance:.2g} of the gradient (limit {limits[1]:g})")
    compiled.expect_no_more()
    return compiled, ""


def _differences(plain: LanguageModel, other: LanguageModel, batch: Batch) -> tuple[float, float]:
    """Largest difference of log-probs in nats per token, and the difference of gradients relative to their norm.

    One gradient is added and the other subtracted, which takes no more memory than a step.
    """
    plain.module.zero_grad(set_to_none=True)
    expected = plain.logps(batch)
    plain.backward(expected.sum(), last=True)
    norm = _gradient_norm(plain.module)
    found = other.logps(batch)
    other.backward(-found.sum(), last=True)
    gap = ((found - expected).detach().abs() / batch.lengths).max()
    return float(gap), _gradient_norm(plain.module) / max(norm, 1e-30)


def _gradient_norm(module: Any) -> float:
    """Norm of the gradient that this process holds."""
    squares = [part_of(weight.grad).double().pow(2).sum() for weight in module.parameters() if weight.grad is not None]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0
