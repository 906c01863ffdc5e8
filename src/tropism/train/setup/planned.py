"""The settings of a run, from what its packs need: counted on a copy of its models without values."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from tropism.data.batching.collate import Layout
from tropism.data.row_facts import facts_of
from tropism.distributed.shard import is_sharded
from tropism.distributed.world import World
from tropism.model import load
from tropism.model.checkpointing import Checkpointing
from tropism.model.compiled import worth_compiling
from tropism.model.source import ModelSource
from tropism.model.token_state import carries_state, depends_on_line
from tropism.train.frozen import teacher as teachers
from tropism.train.planning.blueprint import Blueprint
from tropism.train.planning.choose import Choice, candidates, choose, limit_of, slowness, unpredicted
from tropism.train.planning.count import GAPS
from tropism.train.planning.memory import Needs, available, base_bytes, resident
from tropism.train.planning.needs import measure, quick_bound, quick_tokens, shared
from tropism.train.settings import Settings
from tropism.train.setup import models
from tropism.train.step_packs import StepPlanner

_FIRST = 8
"""Steps that are looked at."""
PLENTY = 8
"""Nothing is counted for a model whose generous bound is this many times below what there is."""
_ROOM = 4
"""Models without gradients may take this share of the memory, beside packs and what is gathered."""


def choose_settings(inputs: Any, module: Any, planner: StepPlanner, before: int, kept: Settings | None) -> Choice:
    """The settings of a run: those that the options name, and for `auto` those that are kept or chosen. They are the
    same on all processes, which call this together.

    Args:
        inputs: `RunInputs` of the run.
        module: the policy, loaded.
        planner: of the run; its packs are replaced.
        before: resident bytes before the policy was loaded.
        kept: settings of the run that is resumed, which `auto` keeps.
    """
    options, world = inputs.options, inputs.world
    kind = world.device.type
    tried = candidates(options, kind, kept, worth_compiling(inputs.schedule.total_steps, world.device))
    limit = limit_of(options, available(world.device, _neighbors(world)))
    shards = 1 if world.mesh is None else world.mesh.size("shard") * world.mesh.size("tensor")
    own = inputs.policy.skeleton(inputs.numerics) if is_sharded(module) else module
    first = planner.saves and kept is None
    if options.memory_limit is None and PLENTY * quick_bound(own, tried[0].microbatch_tokens) < limit:
        enough = quick_tokens(own, tried[0].microbatch_tokens, limit / 2) if first else 0
        found, once = unpredicted(tried, None, enough), True
    else:
        try:
            needs = needs_of(blueprint_of(inputs, own, planner.layout), planner, tried[0].microbatch_tokens,
                             base_bytes(world.device, before))
            found = predicted(needs, planner, tried, limit, options, shards, kind, first)
            once = bool(found.settings.gather_once)
        except Exception as error:  # models may do anything with their tensors; a run does not fail by its prediction
            found, once = unpredicted(tried, error), False
    own_number = tried.index(replace(found.settings, gather_once=tried[0].gather_once))
    number, apart, tokens = world.max([own_number, int(not once), -found.forwards_first_tokens])
    found, once = found if number == own_number else found.at(tried, number), not apart
    found = found.with_forwards_first(-tokens)
    if kept and kept.gather_once is not None and kept.microbatch_tokens == found.settings.microbatch_tokens:
        once = kept.gather_once
    return replace(found, settings=replace(found.settings, gather_once=once if is_sharded(module) else None))


def needs_of(blueprint: Blueprint, planner: StepPlanner, tokens: int, base: float) -> Callable[..., Needs]:
    """What one process needs: of settings, the processes that share the training state, and whether it holds all
    weights and gradients for a step. Each level of checkpointing is counted once, as in `measure`, and once more if
    forward passes come first."""
    @cache
    def whole(level: Checkpointing, forwards_first_tokens: int) -> Needs:
        settings = Settings(tokens, level, forwards_first_tokens=forwards_first_tokens)
        return measure(blueprint, planner, tokens, base, settings)

    def needs(settings: Settings, shards: int, once: bool = False) -> Needs:
        found = whole(settings.checkpointing, settings.forwards_first_tokens)
        found = found if shards == 1 else found.without(GAPS)  # `keep_freed_memory` is off
        return replace(found, held=shared(found.held, blueprint, shards, once))

    return needs


def predicted(needs: Callable[..., Needs], planner: StepPlanner, tried: list[Settings], limit: int, options: Any,
              shards: int, kind: str, saves: bool = False) -> Choice:
    """The choice by prediction. Processes that share the training state gather weights once per step if all of them and
    all gradients fit beside the packs that are chosen without.

    Args:
        needs: of `needs_of`.
        tried, limit, kind, saves: as in `choose`.
        options: of the run.
        shards: processes that share the training state.
    """
    def chosen(among: list[Settings], once: bool) -> Choice:
        return choose(among, limit, options.memory_limit is not None, partial(needs, shards=shards, once=once),
                      *tree_and_step(planner), kind, saves)

    found = chosen(tried, False)
    if shards == 1 or not found.fits:
        return found
    once = chosen([replace(found.settings, gather_once=True)], True)
    return once if once.fits else found


def arranged(inputs: Any, kept: Settings | None) -> Any:
    """The inputs with what `--parallel.shard auto` stands for. All processes call this together.

    Full copies are kept if they fit on all of them with settings that are as fast as those of shared weights.

    Args:
        inputs: `RunInputs` of the run; returned as they are if nothing is left to decide.
        kept: settings of the run that is resumed.
    """
    world, options = inputs.world, inputs.options
    by_name = all(one is None or isinstance(one, ModelSource)
                  for one in (inputs.policy.named, inputs.reference, inputs.teacher))
    whole = options.lora.quantize and options.lora.dora
    if inputs.shard or world.size == 1 or not (options.parallel.may_copy and by_name) or whole:
        return inputs
    shard = kept.shard if kept else ""
    if not shard:
        shard = "on" if world.max([int(not _copies_fit(inputs))])[0] else "off"
    if shard == "off":
        return replace(inputs, shard=shard)
    world = world.spread(*options.parallel.sizes(world.size))
    return replace(inputs, world=world, numerics=models.numerics_of(options, world), shard=shard)


def _copies_fit(inputs: Any) -> bool:
    """Whether a full copy of the training state fits on this process, with packs as fast as without."""
    options, world, numerics = inputs.options, inputs.world, inputs.numerics
    kind = world.device.type
    limit = limit_of(options, available(world.device, _neighbors(world)))
    tried = candidates(options, kind, None, worth_compiling(inputs.schedule.total_steps, world.device))
    try:
        module = inputs.policy.skeleton(numerics)
        frozen = [] if inputs.teacher is None else [skeleton_of(inputs.teacher, numerics)]
        bound = quick_bound(module, tried[0].microbatch_tokens) + sum(map(_weight_bytes, frozen))
        if options.memory_limit is None and PLENTY * bound < limit:
            return True
        layout = options.layout if options.layout != "auto" else likely_layout(module)
        planner = planner_of(inputs, layout, tried[0].microbatch_tokens)
        needs = needs_of(blueprint_of(inputs, module, layout), planner, tried[0].microbatch_tokens,
                         base_bytes(world.device, resident()))
        copy, share = (predicted(needs, planner, tried, limit, options, shards, kind) for shards in (1, world.size))
    except Exception:  # as in `choose_settings`; shared weights need the least
        return False
    return copy.fits and slowness(copy.settings, kind) <= slowness(share.settings, kind)


def weights_fit(world: World, configs: Sequence[Any], trust_remote_code: bool) -> bool:
    """Whether each process has room for models that do not learn, several times over. All processes call this together.

    Args:
        configs: of the models.
    """
    sizes = [_weight_bytes(load.skeleton(config, dtype=torch.float32, trust_remote_code=trust_remote_code))
             for config in configs]
    return not world.max([int(_ROOM * sum(sizes) > available(world.device, _neighbors(world)))])[0]


def _weight_bytes(module: Any) -> int:
    return sum(weight.numel() * weight.element_size() for weight in module.parameters())


def likely_layout(module: Any) -> Layout:
    """The layout that a model will have, before it can be tried."""
    return "padded" if carries_state(module) or depends_on_line(module) else "tree"


def planner_of(inputs: Any, layout: Layout, microbatch_tokens: int, world: World | None = None) -> StepPlanner:
    """Prepares the steps of a run.

    Args:
        inputs: `RunInputs` of the run.
        world: instead of its own.
    """
    return StepPlanner(inputs.data.train, inputs.schedule, inputs.method, layout, microbatch_tokens,
                       inputs.data.max_length, world or inputs.world, reuse_prompts=not inputs.live,
                       balanced=inputs.options.router_aux_weight > 0)


def tree_and_step(planner: StepPlanner) -> tuple[int, int]:
    """Tokens of the largest row, and of the largest of the first steps, of one process."""
    facts = facts_of(planner.rows)
    largest = int((facts.prompt_tokens + facts.tokens.sum(axis=1)).max())
    first = range(1, min(_FIRST, planner.schedule.total_steps) + 1)
    return largest, max(sum(pack.batch.tokens for pack in planner.packs_of(number).packs) for number in first)


def _neighbors(world: World) -> int:
    """Processes on this machine."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", world.size)))


def blueprint_of(inputs: Any, module: Any, layout: Any, gpu: bool | None = None) -> Blueprint:
    """What the count of a run's steps needs to know.

    Args:
        inputs: `RunInputs` of the run.
        module: the policy with its adapter, real or on the meta device.
        gpu: count as on a GPU; None for the run's own device.
    """
    options, method, policy, numerics = inputs.options, inputs.method, inputs.policy, inputs.numerics
    named = isinstance(policy.named, ModelSource)
    reference = None
    if method.needs_reference:
        reference = "stored" if not inputs.live else "off" if policy.fresh else "live"
    teacher, comparison = None, None
    if inputs.teacher is not None:
        rows = [entry.get_text_config().vocab_size
                for entry in (module.config, models.config_of(inputs.teacher, options.trust_remote_code))]
        comparison = teachers.compare_as(options, teachers.shared_vocabulary(inputs.tokenizer, *rows))
        if options.top_k is None:
            teacher = skeleton_of(inputs.teacher, numerics)
    quantized = options.lora.quantize
    return Blueprint(options, module, layout, numerics.precision, method, reference, teacher, comparison,
                     numerics.device.type == "cuda" if gpu is None else gpu,
                     policy.adapts and named and numerics.precision == "bf16",
                     {"nf4": 4, "int8": 8}.get(quantized or "", 0),
                     tuple(policy.plain_names(options.trust_remote_code)) if quantized else ())


def skeleton_of(named: models.ModelOrModule, numerics: models.Numerics) -> Any:
    """A model on the meta device, with the dtype of its weights in a run; a module as it is."""
    if not isinstance(named, ModelSource):
        return named
    config = load.load_config(named, trust_remote_code=numerics.trust_remote_code)
    return load.skeleton(config, dtype=load.weights_dtype(numerics.precision),
                         trust_remote_code=numerics.trust_remote_code).eval()
