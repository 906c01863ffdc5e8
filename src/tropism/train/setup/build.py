"""Builds the engine from checked inputs: model, layout, reference, teacher and optimizer."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from tropism import store
from tropism.data.rows import EncodedRow
from tropism.data.schedule import Steps
from tropism.data.tree import PromptTree
from tropism.distributed.world import World
from tropism.errors import OutputError, UsageError, count_of
from tropism.files import check_writable
from tropism.methods import Method
from tropism.model.cpu_products import Products, available, choose_products, use_products
from tropism.model.language_model import LanguageModel
from tropism.model.layout_check import choose_layout
from tropism.observe.console import Voice
from tropism.train.engine import Engine
from tropism.train.evaluation.evaluator import evenly
from tropism.train.memory import keep_freed_memory
from tropism.train.optimizer import build_updater
from tropism.train.options import RunOptions
from tropism.train.out_of_memory import place_of
from tropism.train.planning.memory import resident
from tropism.train.preemption import Preemption
from tropism.train.router_loss import build_router_loss
from tropism.train.settings import AutoShard, Settings
from tropism.train.setup import models
from tropism.train.setup.agreement import check_weights
from tropism.train.setup.announce import sharding_lines, tidy_store
from tropism.train.setup.checks import probe_trees
from tropism.train.setup.cpu_load import cpu_notes
from tropism.train.setup.data import PreparedData
from tropism.train.setup.memory_and_speed import with_settings
from tropism.train.setup.planned import choose_settings, planner_of
from tropism.train.setup.policy import PolicyBuilder
from tropism.train.setup.python_objects import PythonObjects
from tropism.train.step_packs import StepPlanner, all_trees, own_trees


@dataclass(frozen=True)
class RunInputs:
    """Everything that a run needs, checked before any model is loaded.

    Args:
        options: of the run.
        world: this process among the others.
        voice: speaks to the user.
        objects: objects that a Python caller passes in place of names.
        numerics: dtype, device and pack size.
        store: directory of the scores that runs share.
        tokenizer: of the policy.
        data: rows as token ids.
        method: losses and what they need.
        schedule: which rows make up each step.
        policy: builds the model that is trained.
        reference, teacher: other models; None if there is none.
        live: the reference stays in memory.
        notes: a sentence for each setting of the model that training ignores.
        shard: what `--parallel.shard auto` stands for.
    """

    options: RunOptions
    world: World
    voice: Voice
    objects: PythonObjects
    numerics: models.Numerics
    store: Path
    tokenizer: Any
    data: PreparedData
    method: Method
    schedule: Steps
    policy: PolicyBuilder
    reference: models.ModelOrModule | None
    teacher: models.ModelOrModule | None
    live: bool
    notes: Sequence[str] = ()
    shard: AutoShard = ""

    @cached_property
    def held_out(self) -> Sequence[EncodedRow]:
        """The rows that are evaluated: all held-out rows, or `--eval-limit` of them, evenly spaced."""
        return evenly(self.data.evaluation, self.options.eval_limit)


@dataclass(frozen=True)
class BuiltEngine:
    """An engine, with its planner and facts.

    Args:
        engine: ready for step 1.
        planner: prepares its steps.
        facts: of the models, for the manifest.
        settings: how it computes.
        idle: parameters that the user's optimizer does not hold; they are frozen during the run.
    """

    engine: Engine
    planner: StepPlanner
    facts: dict[str, Any]
    settings: Settings
    idle: list[torch.nn.Parameter]


def build_engine(inputs: RunInputs, preemption: Preemption, kept: Settings | None = None) -> BuiltEngine:
    """Load and check everything that trains. All processes call this together.

    Args:
        kept: settings of the run that is resumed, which `auto` keeps.

    Raises:
        ModelError: if a model is unsupported.
        UsageError: if the processes hold different weights.
        StoppedEarly: if `preemption` requests it.
    """
    options, world, method, numerics = inputs.options, inputs.world, inputs.method, inputs.numerics
    if world.device.type == "cpu":
        keep_freed_memory(world.mesh is None)
        for note in cpu_notes(torch.get_num_threads(), int(os.environ.get("LOCAL_WORLD_SIZE", world.size))):
            inputs.voice.warn(note)
    if (method.needs_reference and not inputs.live) or getattr(options, "top_k", None):
        world.on_main(partial(_check_store, inputs.store))
    before = resident()
    with preemption.at_once():
        module, facts = inputs.policy.build(numerics, options.seed, inputs.voice,
                                            method.needs_reference and inputs.reference is None)
        probes = probe_trees(inputs.data.train, numerics.microbatch_tokens)
        model, probe = choose_layout(module, numerics.precision, world.device, probes, options.layout)
    model = replace(model, sum_once=numerics.sum_once)
    inputs.voice.say(f"layout: {probe.layout}; log-probs differ from the model's own forward pass by at most "
                     f"{probe.per_token:.1e} nats per token" + (f" ({probe.reason})" if probe.reason else ""))
    inputs.policy.round_weights(module, model.precision, sharded=False)
    check_weights(world, "model", module)
    planner = planner_of(inputs, model.layout, numerics.microbatch_tokens)
    choice = choose_settings(inputs, module, planner, before, kept)
    (inputs.voice.say if choice.fits else inputs.voice.warn)(choice.sentence)
    inputs, settings = settle_products(inputs, replace(choice.settings, shard=inputs.shard), module, kept)
    model, settings = with_settings(model, settings, probes, world, inputs.voice, options.compile == "on")
    planner = planner.under(settings)
    teacher, reference = _frozen_models(inputs, model, planner, probes, preemption)
    updater, idle = build_updater(module, options, inputs.schedule.total_steps, inputs.objects.optimizer,
                                  inputs.objects.scheduler)
    engine = Engine(model, reference, method, updater, world, options.max_grad_norm, teacher,
                    rounding=probe.per_root_token,
                    router_loss=build_router_loss(options.router_aux_weight, model, probes))
    facts |= {"settings": settings.state(), **choice.facts, "layout": probe.layout,
              "layout_error_nats_per_token": probe.per_token,
              "layout_error_nats_per_root_token": probe.per_root_token, "products": settings.products}
    if world.mesh is not None:
        for line in sharding_lines(engine.modules, world, model.gather_once, model.sum_once):
            inputs.voice.say(line)
    return BuiltEngine(engine, planner, facts, settings, idle)


def settle_products(inputs: RunInputs, settings: Settings, module: Any,
                    kept: Settings | None) -> tuple[RunInputs, Settings]:
    """Choose the library of the policy's matrix products on a CPU, which frozen models then use too.

    Raises:
        UsageError: if the run that is resumed used one that is not here.
    """
    world, numerics = inputs.world, inputs.numerics
    if settings.compiled:
        use_products(module, "mkl")
        return inputs, replace(settings, products="mkl")
    products: Products = "mkl"
    if kept is None:
        own = choose_products(module, numerics.precision, world.device) if world.is_main else products
        products = world.broadcast(own)
    elif world.device.type == "cpu":
        products = kept.products
    if not all(world.gather(products == "mkl" or available())):
        raise UsageError("the run computes its matrix products with oneDNN, which this machine's CPU or torch "
                         f"{torch.__version__} does not support. Resume it where it began, or start a new run with "
                         "--output NEW.")
    if products == "onednn":
        inputs.voice.say("matrix products: oneDNN, which is faster than MKL on this CPU; results differ by rounding")
    use_products(module, products)
    return replace(inputs, numerics=replace(numerics, products=products)), replace(settings, products=products)


def _check_store(root: Path) -> None:
    """Check that the store can be created and written. One that this user can only read serves what it holds.

    Raises:
        OutputError: if not.
    """
    what, advice = "the reference store cannot be written", "Choose another place with --store"
    try:
        store.make(root)
    except OSError as error:
        raise OutputError(f"{OutputError.because(root, error, what=what)}. {advice}.") from error
    try:
        check_writable(root, what=what, advice=advice)
    except OutputError as error:
        if not store.is_read_only(error):
            raise


def _frozen_models(inputs: RunInputs, model: LanguageModel, planner: StepPlanner, probes: Sequence[Any],
                   preemption: Preemption) -> tuple[Any, Any]:
    """The teacher and the reference, each None if the method does not use one."""
    numerics, world, held_out = inputs.numerics, inputs.world, inputs.held_out

    def place(tree: PromptTree) -> str:
        return place_of(chain(inputs.data.train, held_out), tree)

    trees, oversized = planner.survey(preemption.interruptible(lambda done, total: None))
    if oversized:
        inputs.voice.warn(f"--microbatch-tokens {numerics.microbatch_tokens} is too small for "
                          f"{count_of(oversized, 'prompt')} with completions. Each gets a pack of its own, which needs "
                          "more memory.")
    evaluated = all_trees(held_out, range(len(held_out)), inputs.method, inputs.data.max_length)
    teacher = reference = None
    if inputs.teacher is not None:
        teacher = models.build_teacher(
            model, inputs.teacher, inputs.options, inputs.tokenizer,  # type: ignore[arg-type]
            own_trees(inputs.data.train, inputs.schedule) + evaluated, probes, numerics, inputs.store, world,
            inputs.voice, preemption, place)
    if inputs.method.needs_reference and inputs.live:
        reference = inputs.policy.live(model, probes, numerics, inputs.options.seed)
    elif inputs.method.needs_reference:
        reference = models.build_reference(model, inputs.reference, trees + evaluated, probes, numerics, inputs.store,
                                           world, inputs.voice, preemption, place, inputs.policy.as_reference,
                                           getattr(inputs.options, "allow_reference_mismatch", False))
    world.on_main(partial(tidy_store, inputs.options, inputs.voice.say))  # type: ignore[arg-type]
    return teacher, reference
