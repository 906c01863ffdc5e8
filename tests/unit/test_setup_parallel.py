"""How processes are arranged by the options, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from tropism.config_file import read_yaml
from tropism.distributed import World, connect
from tropism.errors import UsageError
from tropism.train.options import ParallelOptions
from tropism.train.setup.parallel import parallelize, unusable_sizes


@pytest.mark.parametrize(("options", "world", "sizes"), [
    ({}, 1, (1, 1, 1)), ({}, 8, (1, 8, 1)), ({"shard": 1}, 8, (8, 1, 1)), ({"shard": "on"}, 8, (1, 8, 1)),
    ({"shard": "off"}, 8, (8, 1, 1)), ({"shard": "on", "replicate": 4}, 8, (4, 2, 1)), ({"shard": "on"}, 1, (1, 1, 1)),
    ({"shard": "off", "tensor": 2}, 8, (4, 1, 2)), ({"shard": "4"}, 8, (2, 4, 1)), ({"shard": None}, 8, (1, 8, 1)),
    ({"shard": True}, 8, (1, 8, 1)), ({"shard": False}, 8, (8, 1, 1)), ({"shard": 4}, 8, (2, 4, 1)),
    ({"replicate": 2}, 8, (2, 4, 1)), ({"tensor": 2}, 8, (1, 4, 2)), ({"tensor": 2, "shard": 1}, 8, (4, 1, 2)),
    ({"replicate": 2, "shard": 2, "tensor": 2}, 8, (2, 2, 2))])
def test_what_is_not_given_is_what_the_others_leave(options: dict[str, Any], world: int,
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
    ({"shard": "on"}, "does not support modules", True, "--parallel.shard does not support modules"),
    ({"tensor": 2}, "does not support modules", True, "--parallel.tensor does not support modules"),
    ({"replicate": 3}, "does not support modules", True, "--parallel.replicate does not support modules"),
    ({"reduce_once": True}, "does not support modules", True, "--parallel.reduce-once does not support modules")])
def test_options_without_effect_are_refused(options: dict[str, Any], whole: str, learns: bool, sentence: str) -> None:
    """L3."""
    world = World(0, 2 if options.get("shard") == "on" else 1, torch.device("cpu"))
    with pytest.raises(UsageError, match=sentence):
        parallelize(world, ParallelOptions(**options), whole, learns)


def test_words_for_full_copies_in_a_file(tmp_path: Path) -> None:
    """YAML reads `on` and `off` as booleans, and earlier versions wrote null."""
    for text, expected in (("on", "on"), ("off", "off"), ("auto", "auto"), ("2", 2), ("null", None)):
        file = tmp_path / "run.yaml"
        compiled = text if text in ("on", "off") else "auto"
        file.write_text(f"method: kto\nparallel:\n  shard: {text}\ncompile: {compiled}\n")
        _, values = read_yaml(file)
        assert (values["parallel.shard"], values["compile"]) == (expected, compiled)
    file.write_text("method: kto\nparallel.tensor: on\n")
    with pytest.raises(UsageError, match=r"run\.yaml:2: parallel\.tensor: true is not a valid value"):
        read_yaml(file)
    with pytest.raises(ValidationError):
        ParallelOptions(shard=0)


def test_sizes_are_checked_before_full_copies_are_considered() -> None:
    world = World(0, 8, torch.device("cpu"))
    assert parallelize(world, ParallelOptions(replicate=2)) is world
    with pytest.raises(UsageError, match="does not equal the number of processes, 8"):
        parallelize(world, ParallelOptions(replicate=3))


@pytest.mark.parametrize(("recorded", "given", "count", "left_out"), [
    ({"tensor": 2}, {}, 1, ["tensor"]), ({"tensor": 2}, {}, 4, []), ({"tensor": 2}, {}, 3, ["tensor"]),
    ({"replicate": 2}, {}, 1, ["replicate"]), ({"shard": 1}, {}, 1, []),
    ({"replicate": 2, "shard": 2}, {}, 8, ["replicate"]), ({"replicate": 2, "shard": 2}, {}, 2, ["replicate"]),
    ({"replicate": 2, "shard": 2, "tensor": 2}, {}, 2, ["replicate", "shard"]),
    ({"replicate": 2, "shard": 2, "tensor": 2}, {}, 1, ["replicate", "shard", "tensor"]),
    ({"replicate": 2}, {"tensor": "2"}, 2, ["replicate"]), ({"replicate": 2}, {"tensor": "2"}, 1, []),
    ({"shard": "on"}, {}, 1, []), ({"shard": "auto"}, {}, 3, []), ({"shard": "off", "tensor": 2}, {}, 1, ["tensor"]),
    ({"shard": "off", "reduce_once": True}, {"shard": "on"}, 2, []),
    ({"reduce_once": True}, {}, 2, []), ({"reduce_once": True}, {}, 1, ["reduce_once"]),
    ({"reduce_once": True}, {"shard": 1}, 2, ["reduce_once"]), ({"offload": True}, {}, 1, ["offload"])])
def test_as_few_recorded_options_as_can_be_are_left_out(recorded: dict[str, Any], given: dict[str, Any], count: int,
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
