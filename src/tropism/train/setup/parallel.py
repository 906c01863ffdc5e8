"""How a run is spread over processes: decided before anything is loaded, and said once it is done."""

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import torch
from pydantic import ValidationError

from tropism.data.schedule import Steps
from tropism.distributed.shard import describe
from tropism.distributed.world import World
from tropism.errors import UsageError
from tropism.observe.console import Voice
from tropism.train.options import ParallelOptions, RunOptions
from tropism.train.setup.data import Prepared
from tropism.train.setup.python_objects import Objects


def spread(world: World, options: ParallelOptions, whole: str = "", learns: bool = True) -> World:
    """The processes as the options arrange them. All ranks call this together.

    Args:
        whole: why each process must have a whole copy of the model, if it must.
        learns: there are gradients.

    Raises:
        UsageError: for options that cannot work here.
    """
    if whole:
        for name, value in (("shard", (options.shard or 1) > 1), ("tensor", options.tensor > 1),
                            ("offload", options.offload), ("reduce_once", options.reduce_once),
                            ("replicate", options.replicate not in (None, 1, world.size))):
            if value:
                raise UsageError(f"parallel.{name}: {whole}")
        options = ParallelOptions(shard=1, replicate=world.size)
    sizes = options.sizes(world.size)
    found = world.spread(*sizes)
    if options.offload and found.mesh is None:
        raise UsageError("parallel.offload needs weights that are spread over processes: start more than one with "
                         "torchrun")
    if options.offload and world.device.type == "cpu":
        raise UsageError("parallel.offload keeps weights in the host's memory, where they are without a GPU")
    if options.reduce_once and not (learns and found.mesh is not None and found.mesh.size("shard") > 1):
        raise UsageError("parallel.reduce_once has no effect where no gradients are summed over parallel.shard")
    return found


def unfit(recorded: Mapping[str, Any], given: Mapping[str, Any], count: int) -> list[str]:
    """Options with which a run was spread that do not fit the processes that go on with it; as few as can be.

    Args:
        recorded: options that the run had, by their names in the group.
        given: sizes that are to be used now, whatever comes of it.
        count: how many processes there are.

    Returns:
        Names out of `recorded`: without them it fits, if that is possible.
    """
    sizes = [name for name in ("replicate", "shard", "tensor") if name in recorded]
    for leave_out in (names for number in range(len(sizes) + 1) for names in combinations(sizes, number)):
        kept = {name: recorded[name] for name in sizes if name not in leave_out}
        try:
            _, shard, tensor = ParallelOptions(**{**kept, **given}).sizes(count)
        except (UsageError, ValidationError):
            continue
        without_effect = {"offload": shard == tensor == 1 or not torch.cuda.is_available(), "reduce_once": shard == 1}
        return [*leave_out, *(name for name, value in without_effect.items() if value and recorded.get(name))]
    return []  # it is what was given that does not fit


def describe_spread(world: World) -> str:
    """`2 x cpu`, with how they are arranged where a model is spread over them."""
    text = f"{world.size} x {world.device.type}"
    if world.mesh is not None:
        sizes = {axis: world.mesh.size(axis) for axis in ("replicate", "shard", "tensor")}
        text += " (" + ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) + ")"
    return text


def introduce_plan(options: RunOptions, data: Prepared, schedule: Steps, evaluated: int, precision: str, world: World,
                   objects: Objects, voice: Voice) -> None:
    """What is about to be done, where, and how it is spread."""
    held_out = f", {len(data.evaluation)} rows held out" if data.evaluation else ""
    if evaluated < len(data.evaluation):
        held_out += f" ({evaluated} of them evaluated, the same every time)"
    size = "a dataloader's batches" if objects.steps is not None else str(options.batch_size)
    own = objects.optimizer is None
    rate = f"{options.learning_rate:g}" if own else "the optimizer's own"
    voice.say(f"plan: {len(data.train)} rows{held_out}; {schedule.total_steps} steps of {size}, learning rate {rate}, "
              f"max_length {data.max_length}, {precision}, {describe_spread(world)}")
    if options.learning_rate == 0 and own:
        voice.warn("learning_rate is 0: nothing will change")


def table(models: dict[str, Any], world: World) -> list[str]:
    """A line for each model: how many of its weights are divided, and what that leaves to a process."""
    lines = []
    for name, module in models.items():
        divided, tensors, here, total, size = describe(module)
        most, largest = world.max([here, size])
        lines.append(f"sharding: {name}: {divided} of {tensors} weights divided; a process holds at most "
                     f"{most:,} of {total:,} elements ({most / total:.0%}), in {largest / 2**20:.2f} MiB")
    return lines
