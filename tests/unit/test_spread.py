"""How processes are arranged by the options, and what is refused."""

import pytest
import torch

from tropism.dist.world import World
from tropism.errors import UsageError
from tropism.train.options import ParallelOptions
from tropism.train.spread import spread


@pytest.mark.parametrize(("options", "world", "sizes"), [
    ({}, 1, (1, 1, 1)), ({}, 8, (1, 8, 1)), ({"shard": 1}, 8, (8, 1, 1)), ({"shard": 4}, 8, (2, 4, 1)),
    ({"replicate": 2}, 8, (2, 4, 1)), ({"tensor": 2}, 8, (1, 4, 2)), ({"tensor": 2, "shard": 1}, 8, (4, 1, 2)),
    ({"replicate": 2, "shard": 2, "tensor": 2}, 8, (2, 2, 2))])
def test_what_is_not_given_is_what_the_others_leave(options: dict[str, int], world: int,
                                                    sizes: tuple[int, int, int]) -> None:
    assert ParallelOptions(**options).sizes(world) == sizes


@pytest.mark.parametrize(("options", "world"), [
    ({"shard": 3}, 8), ({"replicate": 3}, 8), ({"tensor": 16}, 8), ({"shard": 2}, 1),
    ({"replicate": 2, "shard": 2}, 8)])
def test_sizes_that_do_not_come_out_are_named(options: dict[str, int], world: int) -> None:
    """X1: before anything is loaded."""
    with pytest.raises(UsageError, match=f"does not make the number of processes, which is {world}"):
        ParallelOptions(**options).sizes(world)


@pytest.mark.parametrize(("options", "whole", "learns", "sentence"), [
    ({"offload": True}, "", True, "parallel.offload needs weights that are spread"),
    ({"reduce_once": True}, "", True, "parallel.reduce_once has no effect"),
    ({"shard": 2}, "a module stays whole", True, "parallel.shard: a module stays whole"),
    ({"tensor": 2}, "a module stays whole", True, "parallel.tensor: a module stays whole"),
    ({"replicate": 3}, "a module stays whole", True, "parallel.replicate: a module stays whole"),
    ({"reduce_once": True}, "a module stays whole", True, "parallel.reduce_once: a module stays whole")])
def test_options_without_effect_are_refused(options: dict[str, int], whole: str, learns: bool, sentence: str) -> None:
    """L3."""
    with pytest.raises(UsageError, match=sentence):
        spread(World(0, 1, torch.device("cpu")), ParallelOptions(**options), whole, learns)
