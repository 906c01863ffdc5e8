"""How a run is distributed over processes, decided before anything is loaded."""

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import torch
from pydantic import ValidationError

from tropism.distributed.world import World
from tropism.errors import UsageError
from tropism.train.options import ParallelOptions


def parallelize(world: World, options: ParallelOptions, whole: str = "", learns: bool = True,
                quantized: bool = False) -> World:
    """Arrange the processes as the options say. All processes call this together. If a run may keep full copies, they
    have them until its inputs are known.

    Args:
        whole: why each process must hold a full copy of the model, to follow the name of an option; empty if it need
            not.
        learns: the run computes gradients.
        quantized: frozen weights are quantized.

    Raises:
        UsageError: for options that have no effect or cannot work here.
    """
    if whole:
        shards = world.size if options.shard == "on" else options.given_shard or 1
        for name, value in (("shard", shards > 1), ("tensor", options.tensor > 1),
                            ("offload", options.offload), ("reduce_once", options.reduce_once),
                            ("replicate", options.replicate not in (None, 1, world.size))):
            if value:
                raise UsageError(f"--parallel.{name.replace('_', '-')} {whole}")
        options = ParallelOptions(shard=1, replicate=world.size)
    sizes = options.sizes(world.size)
    found = world if learns and options.may_copy else world.spread(*sizes)
    if options.offload and found.mesh is None:
        raise UsageError("--parallel.offload requires weights that are sharded over processes. Start several processes "
                         "with torchrun.")
    if options.offload and quantized:
        raise UsageError("--parallel.offload does not support --lora.quantize. Remove one of them.")
    if options.offload and world.device.type == "cpu":
        raise UsageError("--parallel.offload has no effect without a GPU: the weights are already in host memory")
    if options.reduce_once and not (learns and found.mesh is not None and found.mesh.size("shard") > 1):
        raise UsageError("--parallel.reduce-once has no effect unless gradients are summed over --parallel.shard")
    return found


def unusable_sizes(recorded: Mapping[str, Any], given: Mapping[str, Any], count: int) -> list[str]:
    """The fewest recorded parallel options to drop so that a resumed run fits its processes.

    Args:
        recorded: parallel options of the run so far, by their names in the group.
        given: sizes that the user sets now; these are never dropped.
        count: number of processes now.

    Returns:
        Names from `recorded`. Empty if no choice fits.
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
    return []  # the sizes that the user set do not fit
