"""BCO's running mean in a run: by hand, step by step; unchanged by evaluation and by a step that is not finite."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.conftest import train_steps
from tropism.config import METHODS
from tropism.data.batching.collate import collate
from tropism.data.tree import PromptTree, score_key
from tropism.distributed import World
from tropism.errors import NonFiniteError, count_of
from tropism.observe.console import Voice
from tropism.runner import Run
from tropism.train.frozen.reference import StoredReference

BETA, DESIRABLE_WEIGHT = 0.7, 1.5


@pytest.fixture
def opened(tiny_model_dir: Path, data_of: dict[str, Path], tmp_path: Path) -> Callable[..., Run]:
    """A run whose steps can be watched one by one."""
    def go(method: str = "kto", **changes: Any) -> Run:
        settings = {"model": str(tiny_model_dir), "data": str(data_of[method]), "output": str(tmp_path / "none"),
                    "store": str(tmp_path / "store"), "batch_size": 8, "max_steps": 3, "learning_rate": 0.05,
                    "optimizer": "sgd", "schedule": "constant", "precision": "fp64", "microbatch_tokens": 128,
                    "eval_fraction": 0.2, **changes}
        return Run(METHODS[method](**settings), World(0, 1, torch.device("cpu")), Voice(loud=False))

    return go


def rewards_of(run: Run, rows: list[int]) -> torch.Tensor:
    """Rewards of some training rows, each computed alone."""
    assert run.engine.reference is not None
    found = []
    with torch.no_grad():
        for index in rows:
            row = run.inputs.data.train[index]
            trees = [PromptTree(row.prompt_ids, row.completions)]
            batch = collate(trees, "tree")
            found.append(BETA * (run.engine.model.logps(batch) - run.engine.reference.score(trees, batch)))
    return torch.cat(found)


def test_three_steps_by_hand(opened: Callable[..., Run]) -> None:
    """K2, L1, L5: the shift of step k is the mean reward of all rows of steps 1 to k under the policy as it was then.

    An evaluation takes the mean so far, and leaves it as it is.
    """
    run = opened(loss="bco", beta=BETA, desirable_weight=DESIRABLE_WEIGHT)
    engine = run.build()
    total, count, shifts = 0.0, 0, []
    records = train_steps(run)
    for step in (1, 2, 3):
        before = None if engine.shift.sums is None else engine.shift.sums.clone()
        evaluated = [run.evaluate()["loss"] for _ in range(2)]
        assert evaluated[0] == evaluated[1]
        assert before is None if engine.shift.sums is None else torch.equal(engine.shift.sums, before)
        rows = run.inputs.schedule.step(step)
        rewards = rewards_of(run, rows)
        total, count = total + float(rewards.sum()), count + len(rows)
        shifts.append(total / count)
        labels = [run.inputs.data.train[index].desirable for index in rows]
        wanted = sum((DESIRABLE_WEIGHT if label else 1.0)
                     * math.log1p(math.exp(-(reward - shifts[-1]) * (1 if label else -1)))
                     for reward, label in zip(rewards.tolist(), labels, strict=True)) / len(rows)
        record = next(records)
        assert record.metrics["loss"] == pytest.approx(wanted, rel=1e-9)
        assert engine.shift.sums is not None
        assert engine.shift.sums.tolist() == pytest.approx([total, count], rel=1e-9, abs=1e-12)
    assert shifts[0] == pytest.approx(0.0, abs=1e-9)
    assert min(abs(shifts[1]), abs(shifts[2] - shifts[1])) > 1e-3


def test_an_evaluation_sees_the_mean(opened: Callable[..., Run]) -> None:
    """L3: the shift moves the evaluation's loss, by which it is told from `bco` without one."""
    run = opened(loss="bco", beta=BETA)
    engine = run.build()
    for _ in train_steps(run):
        pass
    with_mean = run.evaluate()["loss"]
    engine.shift.sums = None
    assert abs(run.evaluate()["loss"] - with_mean) > 1e-4


def poison(monkeypatch: pytest.MonkeyPatch, key: bytes, value: float) -> None:
    """From now on the reference gives one completion this log-prob."""
    real = StoredReference.score

    def poisoned(self: Any, trees: Any, batch: Any) -> torch.Tensor:
        scores = real(self, trees, batch)
        keys = [name for tree in trees for name in tree.score_keys]
        return torch.where(torch.tensor([name == key for name in keys], dtype=torch.bool), value, scores)

    monkeypatch.setattr(StoredReference, "score", poisoned)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize(("method", "loss"), [("kto", "bco"), ("kto", "kto,sft"), ("dpo", "aot"),
                                              ("dpo", "aot_unpaired"), ("dpo", "hinge")])
def test_a_step_that_is_not_finite(opened: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, method: str, loss: str,
                                   value: float) -> None:
    """N1: it leaves weights and running mean as they were; only the rows that are not finite themselves are named."""
    run = opened(method, loss=loss)
    engine = run.build()
    records = train_steps(run)
    next(records)
    before = {name: weight.detach().clone() for name, weight in engine.model.module.named_parameters()}
    sums = None if engine.shift.sums is None else engine.shift.sums.clone()
    bad = run.inputs.data.train[run.inputs.schedule.step(2)[3]]
    key = score_key(bad.prompt_ids, bad.completions[0])
    poison(monkeypatch, key, value)
    with pytest.raises(NonFiniteError, match="step 2") as error:
        next(records)
    for name, weight in engine.model.module.named_parameters():
        assert torch.equal(weight, before[name])
    assert engine.shift.sums is None if sums is None else torch.equal(engine.shift.sums, sums)
    guilty = [row.place for row in (run.inputs.data.train[index] for index in run.inputs.schedule.step(2))
              if key in (score_key(row.prompt_ids, completion) for completion in row.completions)]
    assert f"the loss of {count_of(len(guilty), 'row')} is not finite: {', '.join(guilty)}" in str(error.value)
