"""The first step's loss and gradient against plain transformers forwards and the formulas written out here."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from integration.conftest import train_steps
from tropism.config import METHODS
from tropism.data.rows import EncodedRow
from tropism.distributed import World
from tropism.observe.console import Voice
from tropism.runner import PythonObjects, Run

BETA = 0.4
RATE = 0.5


class Plain:
    """A transformers model, asked for one completion at a time."""

    def __init__(self, directory: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()

    def tokens(self, row: EncodedRow, side: int = 0) -> Tensor:
        """Log-prob of each token of a completion."""
        prompt, completion = row.prompt_ids.tolist(), row.completions[side].ids.tolist()
        table = self.model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        return table.gather(1, torch.tensor(completion)[:, None])[:, 0]

    def sides(self, row: EncodedRow) -> tuple[Tensor, Tensor]:
        return self.tokens(row, 0), self.tokens(row, 1)


def from_start(logps: Tensor) -> Tensor:
    """The log-ratio before step 1: its value is 0, and its slope is the policy's."""
    return logps - logps.detach()


def mean(values: list[Tensor]) -> Tensor:
    return torch.stack(values).mean()


def per_token(parts: list[Tensor]) -> Tensor:
    """Negative log-likelihood over all tokens of the step together."""
    return -torch.cat(parts).mean()


def sigmoid_and_sft(plain: Plain, rows: list[EncodedRow]) -> Tensor:
    pairs = [plain.sides(row) for row in rows]
    preference = mean([-logsigmoid(BETA * from_start(c.sum() - r.sum())) for c, r in pairs])
    return preference + 0.2 * per_token([chosen for chosen, _ in pairs])


def length_desensitised(plain: Plain, rows: list[EncodedRow]) -> Tensor:
    found = []
    for chosen, rejected in map(plain.sides, rows):
        shared = min(len(chosen), len(rejected))
        c, r = (side[:shared].sum() + 0.3 * side[shared:].sum() for side in (chosen, rejected))
        found.append(-logsigmoid(BETA * from_start(c - r)))
    return mean(found) + per_token([plain.tokens(row) for row in rows])


def simpo(plain: Plain, rows: list[EncodedRow]) -> Tensor:
    return mean([-logsigmoid(BETA * (c.mean() - r.mean()) - 0.5) for c, r in map(plain.sides, rows)])


def orpo(plain: Plain, rows: list[EncodedRow]) -> Tensor:
    pairs = [plain.sides(row) for row in rows]
    odds = [[(p := side.mean().exp()).log() - (1 - p).log() for side in pair] for pair in pairs]
    return mean([-BETA * logsigmoid(c - r) for c, r in odds]) + per_token([chosen for chosen, _ in pairs])


def cpo(plain: Plain, rows: list[EncodedRow]) -> Tensor:
    pairs = [plain.sides(row) for row in rows]
    return (mean([-logsigmoid(BETA * (c.sum() - r.sum())) for c, r in pairs])
            + 0.25 * per_token([chosen for chosen, _ in pairs]))


def aot(plain: Plain, rows: list[EncodedRow]) -> Tensor:
    margins = torch.stack([c.sum() - r.sum() for c, r in map(plain.sides, rows)])
    return -logsigmoid(BETA * (margins.sort().values - margins.detach().sort().values)).mean()


def aot_unpaired(plain: Plain, rows: list[EncodedRow]) -> Tensor:
    ends = [torch.stack([from_start(side.sum()) for side in sides]).sort().values
            for sides in zip(*map(plain.sides, rows), strict=True)]
    return -logsigmoid(BETA * (ends[0] - ends[1])).mean()


def kto_and_sft(plain: Plain, rows: list[EncodedRow]) -> Tensor:
    found = [plain.tokens(row) for row in rows]
    signs = [1.0 if row.desirable else -1.0 for row in rows]
    preference = mean([1 - torch.sigmoid(BETA * sign * from_start(logps.sum()))
                       for logps, sign in zip(found, signs, strict=True)])
    return preference + per_token([logps for logps, sign in zip(found, signs, strict=True) if sign > 0])


def bco(plain: Plain, rows: list[EncodedRow]) -> Tensor:
    return mean([(2.0 if row.desirable else 1.0) * -logsigmoid((1 if row.desirable else -1) * BETA
                                                               * from_start(plain.tokens(row).sum())) for row in rows])


def sft(plain: Plain, rows: list[EncodedRow]) -> Tensor:
    return per_token([plain.tokens(row) for row in rows])


@pytest.mark.parametrize(("by_hand", "method", "options"), [
    (sigmoid_and_sft, "dpo", {"loss": "sigmoid,sft", "loss_weights": "1,0.2"}),
    (length_desensitised, "dpo", {"loss": "sigmoid,sft", "ld_alpha": 0.3}),
    (simpo, "dpo", {"loss": "simpo"}),
    (orpo, "dpo", {"loss": "orpo"}),
    (cpo, "dpo", {"loss": "cpo", "cpo_alpha": 0.25}),
    (aot, "dpo", {"loss": "aot"}),
    (aot_unpaired, "dpo", {"loss": "aot_unpaired"}),
    (kto_and_sft, "kto", {"loss": "kto,sft"}),
    (bco, "kto", {"loss": "bco", "desirable_weight": 2.0}),
    (sft, "sft", {}),
])
def test_first_step(tiny_model_dir: Path, data_of: dict[str, Path], tmp_path: Path, by_hand: Callable[..., Tensor],
                    method: str, options: dict[str, Any]) -> None:
    """L1, L2: one SGD step of several packs moves the weights by the rate times the gradient of the formula.

    Preferences are divided by rows, likelihoods by the supervised tokens that they cover, over the whole step.
    """
    own = {} if method == "sft" else {"store": str(tmp_path / "store"), "beta": BETA}
    data = data_of["kto" if method == "sft" else method]
    module = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    run = Run(METHODS[method](
        model=str(tiny_model_dir), data=str(data), output="none", batch_size=9, max_steps=1, precision="fp64",
        learning_rate=RATE, optimizer="sgd", warmup_ratio=0.0, max_grad_norm=0.0, microbatch_tokens=100, **own,
        **options), World(0, 1, torch.device("cpu")), Voice(loud=False), PythonObjects(model=module))
    record, = train_steps(run)
    assert len(run.planner.packs_of(1).packs) > 2
    plain = Plain(tiny_model_dir)
    wanted = by_hand(plain, [run.inputs.data.train[index] for index in run.inputs.schedule.step(1)])
    wanted.backward()
    assert record.metrics["loss"] == pytest.approx(wanted.item(), rel=1e-6)
    moved = slope = difference = 0.0
    for (name, ours), theirs in zip(module.named_parameters(), plain.model.parameters(), strict=True):
        step = ours.detach() - theirs.detach()
        assert ours.dtype == torch.float64, name
        moved += float(step.square().sum())
        slope += float(theirs.grad.square().sum())
        difference += float((step + RATE * theirs.grad).square().sum())
    assert moved > 0
    assert difference**0.5 < 1e-5 * moved**0.5
    assert record.metrics["grad_norm"] == pytest.approx(slope**0.5, rel=1e-5)
