"""How processes are arranged by the options, and what is refused."""

import pytest
import torch

from tropism.distributed import World, connect
from tropism.errors import UsageError
from tropism.train.options import ParallelOptions
from tropism.train.setup.parallel import parallelize, unusable_sizes


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
    with pytest.raises(UsageError, match=f"does not equal the number of processes, {world}"):
        ParallelOptions(**options).sizes(world)


@pytest.mark.parametrize(("options", "whole", "learns", "sentence"), [
    ({"offload": True}, "", True, "--parallel.offload requires weights that are sharded"),
    ({"reduce_once": True}, "", True, "--parallel.reduce-once has no effect"),
    ({"shard": 2}, "does not support modules", True, "--parallel.shard does not support modules"),
    ({"tensor": 2}, "does not support modules", True, "--parallel.tensor does not support modules"),
    ({"replicate": 3}, "does not support modules", True, "--parallel.replicate does not support modules"),
    ({"reduce_once": True}, "does not support modules", True, "--parallel.reduce-once does not support modules")])
def test_options_without_effect_are_refused(options: dict[str, int], whole: str, learns: bool, sentence: str) -> None:
    """L3."""
    with pytest.raises(UsageError, match=sentence):
        parallelize(World(0, 1, torch.device("cpu")), ParallelOptions(**options), whole, learns)


@pytest.mark.parametrize(("recorded", "given", "count", "left_out"), [
    ({"tensor": 2}, {}, 1, ["tensor"]), ({"tensor": 2}, {}, 4, []), ({"tensor": 2}, {}, 3, ["tensor"]),
    ({"replicate": 2}, {}, 1, ["replicate"]), ({"shard": 1}, {}, 1, []),
    ({"replicate": 2, "shard": 2}, {}, 8, ["replicate"]), ({"replicate": 2, "shard": 2}, {}, 2, ["replicate"]),
    ({"replicate": 2, "shard": 2, "tensor": 2}, {}, 2, ["replicate", "shard"]),
    ({"replicate": 2, "shard": 2, "tensor": 2}, {}, 1, ["replicate", "shard", "tensor"]),
    ({"replicate": 2}, {"tensor": "2"}, 2, ["replicate"]), ({"replicate": 2}, {"tensor": "2"}, 1, []),
    ({"reduce_once": True}, {}, 2, []), ({"reduce_once": True}, {}, 1, ["reduce_once"]),
    ({"reduce_once": True}, {"shard": 1}, 2, ["reduce_once"]), ({"offload": True}, {}, 1, ["offload"])])
def test_as_few_recorded_options_as_can_be_are_left_out(recorded: dict[str, int], given: dict[str, int], count: int,
                                                        left_out: list[str]) -> None:
    """C2: what one number of processes saved another goes on from."""
    assert unusable_sizes(recorded, given, count) == left_out


@pytest.mark.parametrize(("variables", "sentence"), [
    ({"WORLD_SIZE": "2"}, "RANK and MASTER_ADDR and MASTER_PORT are not set.*torchrun"),
    ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "h"}, "MASTER_PORT is not set"),
    ({"WORLD_SIZE": "two"}, "WORLD_SIZE.*'two'"), ({"WORLD_SIZE": "0"}, "WORLD_SIZE.*'0'")])
def test_an_environment_that_says_half_is_refused(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str],
                                                  sentence: str) -> None:
    """X1: before anything waits for processes that nobody starts."""
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=sentence), connect():
        pass
