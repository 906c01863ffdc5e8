"""DPO on padded batches whose prompts differ at the border: the updates of an independent padded computation."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from integration.conftest import distance, records
from published_batches import known, openrlhf_dpo
from tropism import DPOTrainer
from tropism.model.language_model import computing

PAD = 2


def batches() -> list[Any]:
    """Two batches of OpenRLHF: joint tokenisation changed the last token of the prompt, one pair is cut on the left by
    different amounts, one has nothing in common, and one has no prompt."""
    first = openrlhf_dpo([known([7, 8, 9], [20, 21, 1], [22, 1]), known([7, 8, 9, 10], [23, 24, 25, 1], [26, 1]),
                          known([30, 31], [27, 28, 1], [29, 32, 33, 1])], PAD, "right")
    first[2][0, 0, 2] = 40
    first[2][1, 0, :4] = torch.tensor([8, 9, 10, 41])
    second = openrlhf_dpo([known([], [12, 13, 14, 1], [12, 15, 1]), known([], [16, 17], [18, 19, 34])], PAD, "right")
    return [first, second]


def reference_run(model: Any, steps: list[Any], beta: float, lr: float) -> list[float]:
    """Losses of DPO by SGD, which trains the model in place: whole padded logits, and masks shifted by one."""
    frozen = {name: weight.detach().clone() for name, weight in model.named_parameters()}

    def logps(weights: dict[str, Any], ids: Any, mask: Any, lengths: Any) -> Any:
        ids, mask = ids[:, 0], mask[:, 0]
        logits = torch.func.functional_call(model, weights, kwargs={"input_ids": ids, "attention_mask": mask}).logits
        counted = mask.bool() & (torch.arange(ids.shape[1]) >= torch.tensor(lengths)[:, None])
        each = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
        return (each * counted[:, 1:]).sum(1)

    optimizer, losses = torch.optim.SGD(model.parameters(), lr=lr), []
    for chosen, chosen_mask, reject, reject_mask, lengths in steps:
        sides = [(chosen, chosen_mask, lengths), (reject, reject_mask, lengths)]
        own = [logps(dict(model.named_parameters()), *side) for side in sides]
        base = [logps(frozen, *side).detach() for side in sides]
        loss = -functional.logsigmoid(beta * ((own[0] - base[0]) - (own[1] - base[1]))).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("layout", ["tree", "padded"])
def test_updates_are_those_of_a_padded_computation(layout: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    ours, theirs = (AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float64) for _ in range(2))
    before = {name: weight.detach().clone() for name, weight in ours.named_parameters()}
    result = DPOTrainer(ours, train_dataloader=batches(), optimizer=torch.optim.SGD(ours.parameters(), lr=0.1),
                        epochs=2, max_grad_norm=0, beta=0.3, precision="fp64", layout=layout, samples=9,
                        output=str(tmp_path / "run"), store=str(tmp_path / "store"), quiet=True).fit()
    with computing(theirs, "fp64", theirs.device):
        losses = reference_run(theirs, batches() * 2, 0.3, 0.1)
    assert [record["loss"] for record in records(result)] == pytest.approx(losses, abs=1e-8)
    after, wanted = ({name: weight.detach() for name, weight in model.named_parameters()} for model in (ours, theirs))
    # The norms of the family round to float32.
    assert distance(after, wanted) < 1e-7 * distance(wanted, before)
    asked = [json.loads(line)["prompt"] for line in (result.directory / "samples.jsonl").read_text().splitlines()]
    assert len(asked) == 5
    assert all(asked)
