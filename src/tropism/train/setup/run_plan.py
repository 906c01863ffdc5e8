"""The memory and time of a run, before any weight is loaded.

Data are read and packed as the run would. The step that is counted is the run's own, on tensors without values.
"""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from tropism.data.batching.collate import Layout
from tropism.distributed.world import World
from tropism.errors import ModelError, TropismError, clause, first_line
from tropism.model.compiled import worth_compiling
from tropism.observe.console import Voice
from tropism.train.adamw8bit import NAMES as EIGHT_BIT
from tropism.train.adamw8bit import check_usable
from tropism.train.planning.choose import TOKENS, Choice, candidates, limit_of
from tropism.train.planning.count import GAPS
from tropism.train.planning.devices import GPUS, Device, this_gpu, this_machine
from tropism.train.planning.memory import BASE, HELD, available, base_bytes, resident
from tropism.train.planning.needs import quick_bound
from tropism.train.setup import models
from tropism.train.setup.build import RunInputs
from tropism.train.setup.inputs import check_start, read_inputs
from tropism.train.setup.planned import PLENTY, blueprint_of, likely_layout, needs_of, planner_of, predicted
from tropism.train.setup.python_objects import PythonObjects
from tropism.train.step_packs import StepPacks, StepPlanner

COMPONENTS = (BASE, *HELD, "activations", "head tiles", "prompt keys/values", GAPS)
_SAMPLED = 8
"""Steps of which the one with the median number of tokens is counted."""
_COUNTED = 4
"""Packs of it that are counted."""


@dataclass(frozen=True)
class Plan:
    """What a run needs.

    Args:
        device: its name.
        memory_bytes: what may be used.
        choice: settings, and memory by component.
        seconds_per_step: predicted.
        steps: optimizer steps of the run.
        tokens_per_step: computed tokens of the counted step, over all processes.
        flops_per_step: executed by one process.
        checkpoint_bytes: of one checkpoint on the disk.
        reference_seconds: of the pass that stores the reference's scores.
        advice: what would fit, if this does not.
    """

    device: str
    memory_bytes: int
    choice: Choice
    seconds_per_step: float
    steps: int
    tokens_per_step: float
    flops_per_step: float
    checkpoint_bytes: int
    reference_seconds: float
    advice: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Content of `--json`."""
        found = self.choice.components
        return {
            "device": self.device, "memory_bytes": self.memory_bytes, "fits": self.choice.fits,
            "peak_bytes": sum(round(size) for size in found.values()),
            "components": {name: round(found.get(name, 0)) for name in COMPONENTS},
            "checkpoint_bytes": self.checkpoint_bytes, "seconds_per_step": self.seconds_per_step,
            "steps": self.steps, "seconds": self.seconds, "tokens_per_step": self.tokens_per_step,
            "flops_per_step": self.flops_per_step, "settings": asdict(self.choice.settings),
            "reason": self.choice.sentence, "advice": self.advice}

    @property
    def seconds(self) -> float:
        """Of the run, without reading data, evaluations and checkpoints."""
        return self.seconds_per_step * self.steps + self.reference_seconds


@dataclass(frozen=True)
class Prepared:
    """A run that was read and checked, and what it is planned for.

    Args:
        inputs: of the run.
        device: to plan for.
        base: bytes of the program.
    """

    inputs: RunInputs
    device: Device
    base: float

    @classmethod
    def of(cls, options: Any, device: str | None, voice: Voice) -> "Prepared":
        """Read and check the inputs of a run.

        Args:
            options: of the run.
            device: name of a device; None for this machine.

        Raises:
            TropismError: for options and data that training would refuse too.
        """
        world = World(0, 1, torch.device("cpu"))
        chosen = _device(device, options)
        check_usable(options.optimizer, options.precision, torch.device(chosen.kind), options.parallel.tensor, False)
        # Their packages are needed to train, not to plan.
        lora = options.lora.model_copy(update={"quantize": None})
        plain = options.model_copy(update={"optimizer": "adamw"} if options.optimizer in EIGHT_BIT else {})
        objects = PythonObjects()
        named = check_start(plain, world, objects)
        inputs = read_inputs(plain.model_copy(update={"lora": lora}), world, voice, objects, named)
        return cls(inputs, chosen, base_bytes(torch.device(chosen.kind), resident())).under(options)

    def under(self, options: Any) -> "Prepared":
        """The same with options that change neither data nor steps."""
        numerics = models.numerics_of(options, World(0, 1, torch.device(self.device.kind)))
        policy = replace(self.inputs.policy, lora=options.lora)
        return replace(self, inputs=replace(self.inputs, options=options, numerics=numerics, policy=policy))

    def needs_little(self) -> bool:
        """Whether a generous bound is so far below the memory that a run does not count what it needs either."""
        inputs = self.inputs
        if inputs.options.memory_limit is not None or inputs.teacher is not None:
            return False
        return PLENTY * quick_bound(inputs.policy.skeleton(inputs.numerics), TOKENS[self.device.kind]) < (
            self.device.memory_bytes)

    def plan(self) -> Plan:
        """The plan.

        Raises:
            ModelError: if the model cannot be planned.
        """
        try:
            return _planned(self.inputs, self.device, self.base)
        except TropismError:
            raise
        except Exception as error:  # models may do anything with their tensors
            raise ModelError(f"{self.inputs.options.model}: cannot be planned ({type(error).__name__}: "
                             f"{clause(first_line(error))}). Training does not need a plan.") from error


def _device(name: str | None, options: Any) -> Device:
    if name in GPUS:
        return GPUS[name]
    if name is None and torch.cuda.is_available():
        device = torch.device("cuda", 0)
        return this_gpu(device, available(device))
    return this_machine(available(torch.device("cpu"), _processes(options)))


def _processes(options: Any) -> int:
    parallel = options.parallel
    return (parallel.given_shard or 1) * (parallel.replicate or 1) * parallel.tensor


def _planned(inputs: RunInputs, device: Device, base: float) -> Plan:
    """The plan of checked inputs.

    Args:
        base: bytes of the program.
    """
    options, policy = inputs.options, inputs.policy
    module = policy.skeleton(inputs.numerics)
    layout: Layout = options.layout if options.layout != "auto" else likely_layout(module)
    processes = _processes(options)
    shards = 1 if options.parallel.given_shard is None else options.parallel.given_shard * options.parallel.tensor
    blueprint = blueprint_of(inputs, module, layout)
    tried = candidates(options, device.kind, None,
                       worth_compiling(inputs.schedule.total_steps, torch.device(device.kind)))
    planner = planner_of(inputs, layout, tried[0].microbatch_tokens, World(0, processes, torch.device("cpu")))
    limit = limit_of(options, device.memory_bytes)
    needs = needs_of(blueprint, planner, tried[0].microbatch_tokens, base)
    choice = predicted(needs, planner, tried, limit, options, shards, device.kind, planner.saves)
    choice = choice.with_forwards_first(choice.forwards_first_tokens)
    settings = choice.settings
    step, share = _typical(planner.under(settings))
    count = blueprint.count([step], settings.checkpointing, device.clock)
    seconds, steps = device.seconds(count) / share, inputs.schedule.total_steps
    held = needs(replace(settings, forwards_first_tokens=0), 1).held
    once = min(steps, -(-len(inputs.data.train) // options.batch_size))
    stored = inputs.method.needs_reference and not inputs.live
    return Plan(device.name, limit, choice, seconds, steps, step.computed_tokens, count.total().flops / share,
                round(held["gradients"] + held["optimizer"]), seconds / 3 * once * stored)


def _typical(planner: StepPlanner) -> tuple[StepPacks, float]:
    """A step with a typical number of tokens, cut to few packs, and the share of its tokens that these have."""
    numbers = range(1, min(_SAMPLED, planner.schedule.total_steps) + 1)
    steps = sorted((planner.packs_of(number) for number in numbers), key=lambda step: step.computed_tokens)
    step = steps[len(steps) // 2]
    if len(step.packs) <= _COUNTED:
        return step, 1.0
    tokens = [pack.batch.tokens for pack in step.packs]
    return replace(step, packs=step.packs[:_COUNTED], mismatched=step.mismatched[:_COUNTED]), (
        sum(tokens[:_COUNTED]) / sum(tokens))


def duration(seconds: float) -> str:
    """A time as people say it."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
