"""What the trainers of coati and NeMo-Aligner share: counted dataloaders, rebuilt batches, unwrapped optimizers."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from published_batches import known, nemo_kto
from tropism.compat.base import optimizer_inside
from tropism.compat.coati import window, without_loss_mask
from tropism.compat.nemo_aligner.trainer import figures
from tropism.compat.session import Batches, Figures, as_batch
from tropism.data.dataloaders.rows import rows_of_batch


def test_passes_of_a_dataloader_are_counted_and_limited() -> None:
    """A pass that nothing limits is gone through to its end, where samplers draw their next order."""
    ended = []

    class Loader:
        sampler = SimpleNamespace(set_epoch=None)

        def __len__(self) -> int:
            return 3

        def __iter__(self):
            yield from (1, 2, 3)
            ended.append(True)

    batches = Batches(Loader(), lambda batch: 10 * batch, most=[3, 2])
    assert (len(batches), list(batches), list(batches), batches.passes) == (3, [10, 20, 30], [10, 20], [3, 2])
    assert ended == [True]
    assert not hasattr(batches, "sampler")
    assert Batches(Loader(), announce=True).sampler is Loader.sampler


def test_rows_become_the_batch_that_they_were() -> None:
    batch = nemo_kto([known([5, 6], [7, 3, 1], label=True), known([8], [9, 10, 1], label=False)], 0, "")
    batch["sample_labels"][0, 3] = -100  # inside a completion
    again = as_batch(rows_of_batch(batch, "unpaired", number=1, keep_partners=True).rows)
    for name in ("samples", "kl_samples", "sample_labels", "kl_sample_labels", "sample_length", "preference"):
        assert again[name].tolist() == batch[name].tolist(), name


def test_without_the_loss_mask_an_eos_inside_a_text_counts() -> None:
    """The attention mask excludes each EOS that is also the pad token; the supervised one ends the text."""
    ids = torch.tensor([[4, 2, 5, 2, 2, 2]])
    batch = {name: part for prefix in ("", "kl_") for name, part in (
        (f"{prefix}input_ids", ids), (f"{prefix}attention_mask", ids != 2),
        (f"{prefix}loss_mask", torch.tensor([[0, 0, 1, 1, 0, 0]])))}
    changed = without_loss_mask(batch)
    for prefix in ("", "kl_"):
        assert changed[f"{prefix}attention_mask"].long().tolist() == [[1, 1, 1, 1, 0, 0]]
        assert changed[f"{prefix}loss_mask"].tolist() == [[0, 1, 1, 1, 0, 0]]
    assert batch["loss_mask"].tolist() == [[0, 0, 1, 1, 0, 0]]


def test_optimizers_are_unwrapped() -> None:
    """At any depth; what is no wrapper is returned as it is."""
    own = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    inner = SimpleNamespace(optim=own, param_groups=own.param_groups)
    assert optimizer_inside(SimpleNamespace(optimizer=inner)) is own
    assert optimizer_inside(own) is own
    assert optimizer_inside(None) is None


def part(losses: list[float], ratios: list[float], labels: list[bool], positive: float = 1.0) -> Figures:
    return Figures(np.array(losses), np.array(ratios), np.array(labels), positive)


def test_figures_of_micro_batches() -> None:
    """coati: means of the micro-batches' means; NeMo-Aligner: over all rows, in nats."""
    found = [[part([0.5, 0.25], [2.0, -4.0], [True, False], 3.0)], [part([0.75], [6.0], [True], 0.0)]]
    assert window(found, 0.5) == {"loss": 0.5625, "chosen_rewards": 2.0, "rejected_rewards": -2.0, "margin": 4.0}
    theirs = figures(found)
    assert theirs["loss"] == 0.5625
    assert theirs["kl"] == 2.0
    assert (theirs["rewards_chosen_mean"], theirs["rewards_rejected_mean"], theirs["rewards_margin"]) == (4, -4, 8)
    assert theirs["rewards_all_std"] == pytest.approx(np.std([2, -4, 6], ddof=1))
    alone = figures([[part([0.5], [2.0], [True])]])
    assert math.isnan(alone["rewards_rejected_mean"])
    assert math.isnan(alone["rewards_all_std"])
    assert alone["rewards_margin"] == 2.0
