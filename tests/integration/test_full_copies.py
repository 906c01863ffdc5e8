"""`--parallel.shard auto`: full copies where they fit as well as shared weights, decided together and kept."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from integration.conftest import records
from integration.test_invariance import Left
from integration.test_sharding import compare
from processes import one_rank, run_ranks
from tropism.config import METHODS
from tropism.distributed.world import World
from tropism.observe.console import Voice
from tropism.runner import Run, run
from tropism.train.options import ParallelOptions
from tropism.train.planning import choose
from tropism.train.planning.memory import Needs, Pass
from tropism.train.settings import Settings
from tropism.train.setup import planned
from tropism.train.setup.announce import describe_processes

STEP = "step-00000002"


@pytest.fixture(scope="module")
def settings(tiny_model_dir: Path, pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {"model": str(tiny_model_dir), "data": str(pairs), "batch_size": 8, "max_steps": 3, "learning_rate": 1e-3,
            "precision": "fp64", "export_dtype": "float64", "samples": 0, "log_every": 1, "save_every": 2, "keep": 0,
            "store": str(tmp_path_factory.mktemp("store"))}


def disagreeing(rank: int, size: int, port: int, jobs: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """`one_rank` where a full copy does not fit on process 1 alone, unless the run is called `copies`."""
    planned._copies_fit = lambda inputs: rank == 0 or inputs.options.output.endswith("copies")
    one_rank(rank, size, port, jobs)


def kept(directory: Path) -> str:
    found: str = json.loads((directory / "manifest.json").read_text())["settings"]["shard"]
    return found


def test_both_ways_equal_one_process_and_resume_each_other(settings: dict[str, Any], tiny_model_dir: Path,
                                                          tmp_path: Path) -> None:
    """One process alone without the memory decides for both. What was chosen is kept, and each kind of checkpoint is
    resumed by the other kind on request."""
    start = {name: ("dpo", {**settings, "output": str(tmp_path / name)}) for name in ("copies", "shared", "kept")}
    run(METHODS["dpo"](**settings, output=str(tmp_path / "one")))
    assert run_ranks(2, disagreeing, list(start.values())) == [0, 0]
    assert [kept(tmp_path / name) for name in start] == ["off", "on", "on"]
    for name in ("copies", "shared"):
        compare(tiny_model_dir, tmp_path / "one", tmp_path / name, "fp64")
    changes = {"copies": {"parallel": {"shard": "on"}}, "shared": {"parallel": {"shard": "off"}}, "kept": {}}
    assert run_ranks(2, one_rank, [
        (method, {**own, "resume": str(tmp_path / name / "checkpoints" / STEP), **changes[name]})
        for name, (method, own) in start.items()]) == [0, 0]
    assert [kept(tmp_path / name) for name in start] == ["", "", "on"]
    for name in start:
        compare(tiny_model_dir, tmp_path / "one", tmp_path / name, "fp64")
        assert [line["step"] for line in records(Left(tmp_path / name)) if line["split"] == "train"] == [1, 2, 3]


def inputs_of(settings: dict[str, Any], method: str = "dpo", **changes: Any) -> Any:
    """Inputs of a process of two, without the other one."""
    given = METHODS[method](**{**settings, "output": "none", **changes})
    return replace(Run(given, World(0, 1, torch.device("cpu")), Voice(loud=False)).inputs,
                   world=World(0, 2, torch.device("cpu")))


def test_copies_are_kept_where_they_cost_no_speed(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """None while shared weights alone leave room for packs of which nothing is computed again, then always."""
    inputs = inputs_of(settings, microbatch_tokens=2048)
    held = {"weights": 4e6, "gradients": 4e6, "optimizer": 8e6, "reference": 0.0, "teacher": 0.0}
    per_token = {"none": 1e5, "selective": 4e4, "full": 1e4}

    def measured(*arguments: Any) -> Needs:
        bytes_per_token = per_token[arguments[4].checkpointing]
        passes = (Pass(tokens, {"0 forward": {"activations": bytes_per_token * tokens, "gradients": 4e6}})
                  for tokens in (100, 400))
        return Needs(1e6, held, *passes)

    monkeypatch.setattr(planned, "measure", measured)
    monkeypatch.setattr(choose, "_GROWTH", 0)

    def fits(size: float) -> bool:
        options = inputs.options.model_copy(update={"memory_limit": str(round(size))})
        return planned._copies_fit(replace(inputs, options=options))

    most = max(sum(pack.batch.tokens for pack in planned.planner_of(inputs, "tree", 2048).packs_of(step).packs)
               for step in (1, 2, 3))
    packs = 1.04 * per_token["none"] * most
    module = inputs.policy.skeleton(inputs.numerics)
    shares = planned.shared(held, planned.blueprint_of(inputs, module, "tree"), 2)
    alone, both = ((1e6 + sum(state.values()) + packs) / choose._LIMITED for state in (shares, held))
    assert alone < 0.9 * both
    steps = [alone + share * (both - alone) for share in (0.02, 0.3, 0.6, 0.98, 1.02, 2, 10, 1000)]
    assert [fits(size) for size in steps] == [False] * 4 + [True] * 4
    assert not fits(1e6)


def test_weights_are_gathered_once_where_all_of_them_fit(settings: dict[str, Any],
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """They then take more memory, and so do gradients, but no smaller packs and no recomputation."""
    inputs = inputs_of(settings, microbatch_tokens=2048, checkpointing="none")
    options = inputs.options.model_copy(update={"memory_limit": "1GiB"})
    inputs = replace(inputs, options=options)
    module = inputs.policy.skeleton(inputs.numerics)
    blueprint, planner = planned.blueprint_of(inputs, module, "tree"), planned.planner_of(inputs, "tree", 2048)
    size = float(sum(weight.nbytes for weight in module.parameters()))
    held = {"weights": size, "gradients": size, "optimizer": 2 * size, "reference": 0.0, "teacher": 0.0}
    one = Pass(400, {"0 forward": {"activations": 1.0, "gradients": size}})
    monkeypatch.setattr(planned, "measure", lambda *_: Needs(0.0, held, one, one))
    monkeypatch.setattr(choose, "_GROWTH", 0)
    needs = planned.needs_of(blueprint, planner, 2048, 0.0)
    apart, once = (sum(planned.shared(held, blueprint, 2, way).values()) / choose._LIMITED for way in (False, True))
    assert 1.1 * apart < once
    tried = choose.candidates(options, "cpu", None)
    found = [planned.predicted(needs, planner, tried, round(limit), options, 2, "cpu")
             for limit in (0.9 * apart, 1.02 * apart, 0.98 * once, 1.02 * once)]
    assert [choice.fits for choice in found] == [False, True, True, True]
    assert [bool(choice.settings.gather_once) for choice in found] == [False, False, False, True]
    assert sum(found[3].components.values()) == pytest.approx(once * choose._LIMITED, rel=0.01)
    assert found[3].sentence.endswith("weights gathered once per step")
    summed = replace(blueprint, options=options.model_copy(update={"parallel": ParallelOptions(reduce_once=True)}))
    assert planned.shared(held, summed, 2)["gradients"] == held["gradients"] == 2 * planned.shared(
        held, blueprint, 2)["gradients"]


@pytest.mark.parametrize(("memory", "fits"), [(2**40, True), (2**16, False)])
def test_models_that_do_not_learn_are_copied_where_there_is_room(
        tiny_model_dir: Path, memory: int, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "available", lambda *_: memory)
    configs = [AutoConfig.from_pretrained(tiny_model_dir)]
    assert planned.weights_fit(World(0, 1, torch.device("cpu")), configs, False) is fits


def test_a_large_teacher_of_a_small_model_is_counted(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where everything is small, nothing is."""
    large = torch.nn.Linear(2**20, 2**20, device="meta")
    inputs = inputs_of(settings, teacher=settings["model"])
    calls: list[Any] = []
    monkeypatch.setattr(planned, "measure", lambda *arguments: calls.append(arguments))
    for teacher, counted in ((torch.nn.Linear(2, 2, device="meta"), 0), (large, 1)):
        monkeypatch.setattr(planned, "skeleton_of", lambda *_, teacher=teacher: teacher)
        assert planned._copies_fit(inputs) is not bool(counted)
        assert len(calls) == counted


def test_a_prediction_that_fails_shares(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = inputs_of(settings)
    assert planned._copies_fit(inputs)  # a small model is not even counted

    def fail(*_: Any) -> None:
        raise RuntimeError("strange model")

    monkeypatch.setattr(planned, "quick_bound", fail)
    assert not planned._copies_fit(inputs)


@pytest.mark.parametrize("changes", [
    {"parallel": {"shard": 2}}, {"parallel": {"shard": "on"}}, {"parallel": {"shard": "off"}},
    {"parallel": {"shard": 1}}, {"parallel": {"reduce_once": True}}, {"parallel": {"tensor": 2}}])
def test_what_is_given_is_not_decided_again(settings: dict[str, Any], changes: dict[str, Any],
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = inputs_of(settings)
    options = METHODS["dpo"](**{**settings, "output": "none", **changes})
    monkeypatch.setattr(planned, "_copies_fit", None)
    inputs = replace(inputs, options=options)
    assert planned.arranged(inputs, Settings(shard="on")) is inputs


def test_the_plan_line_says_what_was_chosen() -> None:
    world = World(0, 2, torch.device("cpu"))
    assert describe_processes(world) == "2 x cpu"
    assert describe_processes(world, "off") == "2 x cpu (a full copy in each, which fits)"
    assert describe_processes(world, "on").startswith("2 x cpu (since full copies would not fit")

