"""How a run is parallelize over processes: decided before anything is loaded, and said once it is done."""

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import torch
from pydantic import ValidationError

from tropism.distributed.world import World
from tropism.errors import UsageError
from tropism.train.options import ParallelOptions


def parallelize(world: World, options: ParallelOptions, whole: str = "", learns: bool = True) -> World:
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
        raise UsageError("parallel.offload needs weights that are parallelize over processes: start more than one with "
                         "torchrun")
    if options.offload and world.device.type == "cpu":
        raise UsageError("parallel.offload keeps weights in the host's memory, where they are without a GPU")
    if options.reduce_once and not (learns and found.mesh is not None and found.mesh.size("shard") > 1):
        raise UsageError("parallel.reduce_once has no effect where no gradients are summed over parallel.shard")
    return found


def unusable_sizes(recorded: Mapping[str, Any], given: Mapping[str, Any], count: int) -> list[str]:
    """Options with which a run was parallelize that do not fit the processes that go on with it; as few as can be.

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


