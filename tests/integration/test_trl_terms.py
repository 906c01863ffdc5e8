"""The likelihood term of TRL's DPO: a mean over the chosen tokens of each micro-batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_data import rows_for
from tropism.compat import trl as ours
from tropism.compat.trl.encode import Rules, encode

ROWS = rows_for("dpo", 7)


def flat(module: Any) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in module.parameters()])


def logps(module: Any, row: Any, side: int) -> torch.Tensor:
    ids = torch.tensor([[*row.prompt_ids, *row.completions[side].ids]])
    values = module(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])
    return values[len(row.prompt_ids) - 1 :].flatten()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_likelihood_is_a_mean_over_the_tokens_of_a_micro_batch(accumulation: int, tiny_model_dir: Path,
                                                                   tmp_path: Path) -> None:
    """Rows of different lengths, and a short micro-batch at the end."""
    module, reference, plain = (AutoModelForCausalLM.from_pretrained(tiny_model_dir).double() for _ in range(3))
    rows, _ = encode(ROWS, AutoTokenizer.from_pretrained(tiny_model_dir), Rules("dpo", None), "train_dataset")
    order = torch.randperm(7, generator=torch.Generator().manual_seed(42)).tolist()
    micro = [order[start : start + 3] for start in range(0, 7, 3)]
    for step in (micro[start : start + accumulation] for start in range(0, 3, accumulation)):
        for batch in step:
            chosen = [logps(plain, rows[index], 0) for index in batch]
            margins = [own.sum() - logps(plain, rows[index], 1).sum()
                       - (logps(reference, rows[index], 0).sum() - logps(reference, rows[index], 1).sum()).detach()
                       for own, index in zip(chosen, batch, strict=True)]
            loss = -torch.nn.functional.logsigmoid(0.1 * torch.stack(margins)).mean() - 0.5 * torch.cat(chosen).mean()
            (loss / len(step)).backward()
        with torch.no_grad():
            for weight in plain.parameters():
                weight -= 1e-2 * weight.grad
                weight.grad = None
    start = flat(module)
    ours.DPOTrainer(module, args=ours.DPOConfig(
        output_dir=str(tmp_path / "run"), per_device_train_batch_size=3, gradient_accumulation_steps=accumulation,
        num_train_epochs=1, learning_rate=1e-2, lr_scheduler_type="constant", max_grad_norm=0.0, optim="sgd",
        loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.5], save_strategy="no", max_length=None, tropism_options={
            "store": str(tmp_path / "store"), "quiet": True, "precision": "fp64"}), train_dataset=ROWS).train()
    assert (flat(module) - flat(plain)).norm() / (flat(plain) - start).norm() < 1e-6
