"""The settings of a run, from what its packs need: counted on a copy of its models without values."""

import os
from typing import Any

from tropism.data.row_facts import facts_of
from tropism.distributed.shard import is_sharded
from tropism.distributed.world import World
from tropism.model import load
from tropism.model.compiled import worth_compiling
from tropism.model.source import ModelSource
from tropism.train.frozen import teacher as teachers
from tropism.train.planning.blueprint import Blueprint
from tropism.train.planning.choose import Choice, candidates, choose, limit_of, unpredicted
from tropism.train.planning.memory import Needs, available, base_bytes
from tropism.train.planning.needs import measure, quick_bound, quick_tokens
from tropism.train.settings import Settings
from tropism.train.setup import models
from tropism.train.step_packs import StepPlanner

_FIRST = 8
"""Steps that are looked at."""
_PLENTY = 8
"""Nothing is counted for a model whose generous bound is this many times below what there is."""


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
    if options.memory_limit is None and _PLENTY * quick_bound(own, tried[0].microbatch_tokens) < limit:
        enough = quick_tokens(own, tried[0].microbatch_tokens, limit / 2) if first else 0
        return _agreed(unpredicted(tried, None, enough), tried, world)
    base = base_bytes(world.device, before)

    def needs(settings: Settings) -> Needs:
        blueprint = blueprint_of(inputs, own, planner.layout)
        return measure(blueprint, planner, tried[0].microbatch_tokens, base, settings, shards=shards)

    try:
        found = choose(tried, limit, options.memory_limit is not None, needs, *tree_and_step(planner), kind, first)
    except Exception as error:  # models may do anything with their tensors; a run does not fail by its prediction
        found = unpredicted(tried, error)
    return _agreed(found, tried, world)


def _agreed(found: Choice, tried: list[Settings], world: World) -> Choice:
    """The choice of all processes, from that of each."""
    number, tokens = world.max([tried.index(found.settings), -found.forwards_first_tokens])
    return found.at(tried, number).with_forwards_first(-tokens)


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
