"""OpenRLHF's trainers: the published numbers, arguments, metrics and counting."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import published_reference as published
from compat_helpers import Actor, apart, loader_of, models, optimizer_of, rows_of, strategy_of, weights_of
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
        result = trainer.fit(strategy.args, 0, len(rows) // (size * accumulation))
        other, schedule = optimizer_of(theirs)
        rates = published.train(theirs, frozen, other, schedule, [loader_of(rows, collate, size)], loss, epochs=epochs,
                                accumulation=accumulation)
        return policy, theirs, start, result, rates

    return go


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_weights_are_the_published_ones(name: str, accumulation: int, trained: Callable[..., Any]) -> None:
    """20 updates over two epochs in different orders, a shorter last micro-batch, and with accumulation one micro-batch
    carried into the next epoch and one that is left over at the end."""
    for dtype, close in ((torch.float64, 1e-8), (torch.float32, 1e-4)):
        policy, theirs, start, result, rates = trained(name, accumulation, dtype, 29 if accumulation == 1 else 92)
        assert result.steps == len(rates) == 20
        far = apart(policy, theirs, start)
        print(name, accumulation, dtype, far)
        assert far < 1, (name, accumulation, dtype)
