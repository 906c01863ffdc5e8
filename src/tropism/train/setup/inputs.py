"""Reads and checks the inputs of a run before a model is loaded. All processes do it together."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tropism import store
from tropism.data.read_rows import check_embedding
from tropism.distributed.agreement import check_same
from tropism.distributed.world import World
from tropism.methods.build import build_method
from tropism.model import load
from tropism.model import moe_router as router
from tropism.model.config import check_rope
from tropism.model.content import pinned
from tropism.model.source import ModelSource
from tropism.observe.console import Voice
from tropism.train.adamw8bit import check_usable
from tropism.train.setup import models
from tropism.train.setup.agreement import check_weights, facts_at_start, facts_of_data
from tropism.train.setup.build import RunInputs
from tropism.train.setup.data import (
    PreparedData,
    check_row_weights,
    labels_of,
    make_schedule,
    prepare_data,
    prepare_rows,
)
from tropism.train.setup.given_optimizer import check_given, check_length
from tropism.train.setup.memory_and_speed import check_compute
from tropism.train.setup.policy import PolicyBuilder
from tropism.train.setup.python_objects import PythonObjects
from tropism.train.step_packs import check_partners

Named = Mapping[str, Any]
"""The policy (`model`), `reference` and `teacher`: each a `ModelSource`, a module, or None."""


@dataclass(frozen=True)
class _Parts:
    """Configs and tokenizers of the models, checked against each other."""

    policy: PolicyBuilder
    configs: list[Any]
    tokenizer: Any


def check_start(options: Any, world: World, objects: PythonObjects) -> Named:
    """Find the models, and check that all processes have the same ones, and the same options and versions.

    Args:
        options: of the run.

    Raises:
        UsageError: naming what differs.
        ModelError: if a model is not found.
    """
    def find() -> Named:
        if objects.optimizer is None:
            check_usable(options.optimizer, options.precision, world.device, options.parallel.tensor)
        found: dict[str, Any] = {
            "model": pinned(ModelSource.of(options.model)) if objects.model is None else objects.model}
        for name in ("reference", "teacher"):
            module, value = getattr(objects, name), options.values.get(name)
            by_name = module is None and value is not None and (name, value) != ("reference", "live")
            found[name] = pinned(ModelSource.of(value)) if by_name else models.given(module, name)
        return found

    check_compute(options, world.device)
    named = world.together(find)
    check_same(world, lambda: facts_at_start(options.method, options, named, objects))
    for name, model in named.items():
        if model is not None and not isinstance(model, ModelSource):
            check_weights(world, name, model)
    return named


def read_inputs(options: Any, world: World, voice: Voice, objects: PythonObjects, named: Named) -> RunInputs:
    """Tokenizer, data, method and schedule.

    Args:
        options: of the run.
        named: from `check_start`.

    Raises:
        TropismError: a subclass that names the problem.
    """
    parts = world.together(lambda: _read_parts(options, world, objects, named))
    config, tokenizer = parts.configs[0], parts.tokenizer
    data = world.together(lambda: _read_data(options, world, voice, objects, parts))
    check_same(world, lambda: facts_of_data(data, tokenizer, options, objects),
               "Pass all rows to every process, without a DistributedSampler. Tropism divides each step over them.")
    method = build_method(options.view, options.values, labels_of(data.train),
                          check_row_weights(data, options.weight_divisor))
    if objects.steps is not None and objects.steps.rule.average:
        method = replace(method, average=True)
    if method.discounts_length:
        for audit in filter(None, (data.audit, data.eval_audit)):
            audit.decided |= {"length"}
    if method.ld_alpha is not None:
        data = replace(data, train=[row.with_shared_lengths() for row in data.train],
                       evaluation=[row.with_shared_lengths() for row in data.evaluation])
    schedule = check_partners(objects.steps, data.train, method) if objects.steps else (
        make_schedule(options, options, data.train, method.needs_reference_point))
    check_length(objects.scheduler, schedule.total_steps)
    return RunInputs(options, world, voice, objects, models.numerics_of(options, world), options.store_root, tokenizer,
                     data, method, schedule, parts.policy, named["reference"], named["teacher"],
                     options.values.get("reference") == "live",
                     [*models.turned_off(config, options.router_aux_weight), *models.generation_notes(named["model"]),
                      *models.gguf_notes(named["model"], options.lora)])


def _read_parts(options: Any, world: World, objects: PythonObjects, named: Named) -> _Parts:
    remote, model = options.trust_remote_code, named["model"]
    policy = PolicyBuilder.of(model, options.lora, objects.optimizer)
    if isinstance(model, ModelSource):
        config = load.load_config(model, trust_remote_code=remote)
    else:
        config = model.config
        check_given(objects.optimizer, objects.scheduler, model, models.numerics_of(options, world))
    policy.check(config, remote, options.parallel.tensor)
    router.check_option(options.router_aux_weight, config)
    tokenizer = objects.tokenizer or load.load_tokenizer(
        model if isinstance(model, ModelSource) else ModelSource.of(config.name_or_path), trust_remote_code=remote)
    models.tokenizer_of(named["reference"], "reference", tokenizer, remote)
    models.check_teacher(named["teacher"], config, tokenizer, options.values.get("top_k"), remote)
    others = [other for other in (named["reference"], named["teacher"]) if other is not None]
    return _Parts(policy, [config, *(models.config_of(other, remote) for other in others)], tokenizer)


def _read_data(options: Any, world: World, voice: Voice, objects: PythonObjects, parts: _Parts) -> PreparedData:
    """The rows. The main process reads them first, so that the others find them in the store."""
    tokenizer, configs = parts.tokenizer, parts.configs
    if objects.rows is not None:
        published = objects.steps is not None and objects.steps.rule.published
        data = prepare_rows(options, tokenizer, configs, options.view, objects.rows, objects.eval_rows, published,
                            objects.steps.first_pass if objects.steps is not None else None)
    else:
        if objects.train is None:
            voice.say(f"reading {' and '.join(filter(None, (options.data, options.eval_data)))}")
        with voice.bar("read") as report, world.main_first():
            data = prepare_data(options, tokenizer, configs, options.view, objects.train, objects.evaluation,
                                cache=options.store_root / store.ROWS, report=report, most=options.most_rows)
    for config in configs:
        check_rope(config, data.max_length)
        for rows in (data.train, data.evaluation):
            check_embedding(rows, config.get_text_config().vocab_size, tokenizer.convert_ids_to_tokens)
    return data
