"""OpenRLHF's trainers: the published numbers, arguments, metrics and counting."""

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import published_reference as published
from compat_helpers import Actor, apart, loader_of, models, optimizer_of, rows_of, strategy_of, weights_of
from integration.test_sharding import whole_norms
from processes import run_ranks
from published_batches import openrlhf_dpo, openrlhf_kto, openrlhf_sft
from tropism.compat.openrlhf import DPOTrainer, KDTrainer, KTOTrainer

# Class, its collate function, completions per row, what args has, what the constructor gets, and the published loss.
CASES: dict[str, tuple[Any, Any, int, dict[str, Any], dict[str, Any], Any]] = {
    "kto": (KTOTrainer, openrlhf_kto, 1, {"desirable_loss_weight": 1.3, "undesirable_loss_weight": 0.8}, {"beta": 0.3},
            published.kto(0.3, 1.3, 0.8)),
    "dpo": (DPOTrainer, openrlhf_dpo, 2, {"ipo": False, "label_smoothing": 0.0}, {"beta": 0.2}, published.dpo(0.2)),
    "cdpo": (DPOTrainer, openrlhf_dpo, 2, {"label_smoothing": 0.2}, {"beta": 0.2}, published.dpo(0.2, 0.2)),
    "ipo": (DPOTrainer, openrlhf_dpo, 2, {"ipo": True, "label_smoothing": 0.3}, {"beta": 0.5},
            published.dpo(0.5, ipo=True)),
    "nll": (DPOTrainer, openrlhf_dpo, 2, {"nll_loss_coef": 0.7}, {}, published.dpo(0.01, nll=0.7)),
    "kd": (KDTrainer, openrlhf_sft, 1, {"kd_coef": 0.3}, {}, published.kd(0.3)),
}


@pytest.fixture
def trained(tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Train with a class of ours and as published; the models, the weights before, and what `fit` returned."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TROPISM_STORE", str(tmp_path / "store"))

    def go(name: str, accumulation: int, dtype: torch.dtype, count: int, size: int = 3, epochs: int = 2) -> Any:
        kind, collate, completions, args, given, loss = CASES[name]
        policy, frozen = models(tiny_model_dir, dtype)
        theirs, start = copy.deepcopy(policy), weights_of(policy)
        rows = rows_of(count, completions)
        optimizer, scheduler = optimizer_of(policy)
        loader = loader_of(rows, collate, size)
        strategy = strategy_of(accumulation, ckpt_path=str(tmp_path / "ckpt"), **args)
        own = {"tokenizer": None} if kind is not KDTrainer else {}
        frozen_name = "teacher_model" if kind is KDTrainer else "ref_model"
        trainer = kind(model=Actor(policy), **{frozen_name: Actor(copy.deepcopy(frozen))}, strategy=strategy, **own,
                       optim=optimizer, train_dataloader=loader, eval_dataloader=None, scheduler=scheduler,
                       max_epochs=epochs, **given)
        if accumulation > 1:  # several packs, which have rows of several micro-batches
            trainer.door.options = {**trainer.door.options, "microbatch_tokens": 60}
        result = trainer.fit(strategy.args, 0, len(rows) // (size * accumulation))
        other, schedule = optimizer_of(theirs)
        rates = published.train(theirs, frozen, other, schedule, [loader_of(rows, collate, size)], loss, epochs=epochs,
                                accumulation=accumulation)
        return policy, theirs, start, result, rates

    return go


RUNS = [pytest.param(name, accumulation, dtype, close, marks=[] if (name, accumulation, close) in (
            ("kto", 3, 1e-8), ("nll", 3, 1e-8), ("kd", 3, 1e-4)) else pytest.mark.slow)
        for name in CASES for accumulation in (1, 3) for dtype, close in ((torch.float64, 1e-8), (torch.float32, 1e-4))]


@pytest.mark.parametrize(("name", "accumulation", "dtype", "close"), RUNS)
def test_weights_are_the_published_ones(name: str, accumulation: int, dtype: torch.dtype, close: float,
                                        trained: Callable[..., Any]) -> None:
    """20 updates over two epochs in different orders, with shorter last micro-batches; with accumulation, one of them
    is carried into the next epoch, and two are left over at the end."""
    with whole_norms():
        policy, theirs, start, result, rates = trained(name, accumulation, dtype, 29 if accumulation == 1 else 92)
    assert result.steps == len(rates) == 20
    assert apart(policy, theirs, start) < close
    lines = [json.loads(line) for line in (result.directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["train/lr"] for line in lines if line["split"] == "train"] == pytest.approx(rates)


def one_process(rank: int, size: int, port: int, directory: str, folder: str, dtype: str) -> None:
    """A process of a run in which each reads its own micro-batches."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                   "TROPISM_STORE": f"{folder}/store"}
    rows, (policy, frozen) = rows_of(45), models(directory, getattr(torch, dtype))
    strategy = strategy_of(2, ckpt_path=f"{folder}/ckpt", train_batch_size=12)
    optimizer, scheduler = optimizer_of(policy)
    loaders = [loader_of(rows, openrlhf_kto, 3, rank, size, shuffle) for shuffle in (True, False)]
    with whole_norms():
        trainer = KTOTrainer(Actor(policy), Actor(frozen), strategy, None, optimizer, *loaders, scheduler, beta=0.3)
        trainer.fit(strategy.args, 0, 4)
        metrics = trainer.evaluate(loaders[1])
    torch.save((policy.state_dict(), metrics), f"{folder}/{rank}.pt")


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "close"), [("float64", 1e-8), ("float32", 1e-4)])
def test_two_processes_give_what_two_published_processes_gave(tiny_model_dir: Path, tmp_path: Path, dtype: str,
                                                              close: float) -> None:
    """z0 of micro-batch j is the mean over both processes' rows, and both processes end with the same weights."""
    assert run_ranks(2, one_process, str(tiny_model_dir), str(tmp_path), dtype) == [0, 0]
    policy, frozen = models(tiny_model_dir, getattr(torch, dtype))
    start, rows, loss = weights_of(policy), rows_of(45), published.kto(0.3)
    ours = copy.deepcopy(policy)
    with whole_norms():
        published.train(policy, frozen, *optimizer_of(policy), [loader_of(rows, openrlhf_kto, 3, rank, 2)
                                                                for rank in range(2)], loss, epochs=2, accumulation=2)
        loaders = [loader_of(rows, openrlhf_kto, 3, rank, 2, shuffle=False) for rank in range(2)]
        evaluated = [float(loss(policy, frozen, batches).detach()) for batches in zip(*loaders, strict=True)]
    for rank in range(2):
        state, metrics = torch.load(tmp_path / f"{rank}.pt")
        ours.load_state_dict(state)
        assert apart(ours, policy, start) < close
        assert metrics["eval/eval_loss"] == pytest.approx(sum(evaluated) / len(evaluated), rel=1e-5)
