"""`reference_point` of the plain trainers: what the batches of a dataloader decide."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import published_reference as published
from compat_helpers import loader_of, models, optimizer_of, rows_of, weights_of
from published_batches import following, mismatched, openrlhf_dpo, openrlhf_kto
from tropism import DPOTrainer, KTOTrainer
from tropism.errors import UsageError
from tropism.observe.console import Voice


@pytest.fixture
def fit(tiny_model_dir: Path, tmp_path: Path) -> Callable[..., tuple[Any, Any, list[dict[str, Any]]]]:
    """Train on 4 batches of 6 rows; policy, reference, and the train records."""
    count = 0

    def go(kind: Any, collate: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        policy, frozen = models(tiny_model_dir, torch.float64)
        optimizer, scheduler = optimizer_of(policy)
        loader = loader_of(rows_of(24, 1 + (kind is DPOTrainer), seed=4), collate, 6, shuffle=False)
        result = kind(policy, frozen, optimizer=optimizer, scheduler=scheduler, train_dataloader=loader, samples=0,
                      output=str(tmp_path / f"run{count}"), store=str(tmp_path / "store"), beta=0.3, max_grad_norm=0.0,
                      voice=Voice(loud=False), precision="fp64", **options).fit()
        lines = [json.loads(line) for line in (result.directory / "metrics.jsonl").read_text().splitlines()]
        return policy, frozen, lines

    return go


@pytest.mark.parametrize(("kind", "collate", "loss"), [(KTOTrainer, openrlhf_kto, published.kto(0.3)),
                                                       (DPOTrainer, openrlhf_dpo, published.dpo(0.3))])
def test_published_is_what_the_source_of_the_batches_did(kind: Any, collate: Any, loss: Any, fit: Callable[..., Any],
                                                         tiny_model_dir: Path) -> None:
    """Two updates of three batches, the second one with what the first epoch left over."""
    policy, frozen, lines = fit(kind, collate, reference_point="published", accumulation_steps=3, epochs=2)
    theirs = models(tiny_model_dir, torch.float64)[0]
    start = weights_of(theirs)
    loader = loader_of(rows_of(24, 1 + (kind is DPOTrainer), seed=4), collate, 6, shuffle=False)
    published.train(theirs, frozen, *optimizer_of(theirs), [loader], loss, epochs=2, accumulation=3)
    assert [line["step"] for line in lines] == [1, 2]
    assert float((weights_of(policy) - weights_of(theirs)).norm() / (weights_of(theirs) - start).norm()) < 1e-6


def test_the_scope_of_our_own_pairs(fit: Callable[..., Any], tiny_model_dir: Path) -> None:
    """`micro_batch` pools over each batch, and equals `step` where a batch is a step."""
    whole = fit(KTOTrainer, openrlhf_kto)
    same = fit(KTOTrainer, openrlhf_kto, reference_point="micro_batch")
    assert torch.equal(weights_of(whole[0]), weights_of(same[0]))
    assert [line["kl"] for line in whole[2]] == [line["kl"] for line in same[2]]
    step, batch = (fit(KTOTrainer, openrlhf_kto, accumulation_steps=4, reference_point=scope)[2][0]
                   for scope in ("step", "micro_batch"))
    assert batch["kl/raw"] != pytest.approx(step["kl/raw"])  # other pairs at the borders of batches
    policy, frozen = models(tiny_model_dir)
    points, neighbors = [], []
    for start in range(0, 24, 6):
        rows = rows_of(24, seed=4)[start : start + 6]
        partners = [next(other for other in [*range(number + 1, 6), *range(number)]
                         if rows[other].prompt != rows[number].prompt) for number in range(6)]
        neighbors.append(partners == following(6))
        ids, mask, _, lengths = openrlhf_kto(mismatched(rows, partners), 2, "right")
        with torch.no_grad():
            ratios = [published.logps_of(model, ids[:6], mask[:6], lengths[:6])[0] for model in (policy, frozen)]
        points.append(max(0.0, float((ratios[0] - ratios[1]).mean())))
    assert len({*points}) > 1
    assert not all(neighbors)  # some neighbors share a prompt
    assert batch["kl"] == pytest.approx(sum(points) / 4, abs=1e-5)


def test_a_batch_with_one_prompt_has_no_own_pairs(fit: Callable[..., Any]) -> None:
    def one_prompt(rows: Any, fill: int, side: str) -> Any:
        return openrlhf_kto([copy.copy(row).__class__(rows[0].prompt, row.completions, row.masks, row.label)
                             for row in rows], fill, side)

    with pytest.raises(UsageError, match="step 1: all 6 rows of a micro-batch have the same prompt"):
        fit(KTOTrainer, one_prompt, reference_point="micro_batch", accumulation_steps=2)


def test_it_needs_a_dataloader(tiny_model_dir: Path) -> None:
    with pytest.raises(UsageError, match="reference_point has no effect without train_dataloader"):
        KTOTrainer(str(tiny_model_dir), train_dataset=[{}], reference_point="published")
