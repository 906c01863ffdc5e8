"""The table of methods: units, first-step values and metrics."""

import math

import pytest
import torch
from torch import Tensor

from helpers import case_yaml, expected
from tropism.losses import Scored
from tropism.methods import LOSSES, Method, Units

BETA = 0.1
LABELS = [True, False, True, True, False, False]
LOGRATIOS = [2.0, -3.0, 4.0, -1.5, 5.0, -0.5]
NO_NOISE = torch.zeros(6, dtype=torch.float64)


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def fixture(rows: list[int]) -> tuple[Scored, Tensor]:
    """Rows of the fixture with their own completions, ready for a gradient; and their labels."""
    reference = doubles(*(-(20 + 3 * i + 2 * i) for i in rows))
    policy = (reference + doubles(*(LOGRATIOS[i] for i in rows))).requires_grad_()
    return Scored(policy, reference, torch.ones(len(rows), dtype=torch.int64)), torch.tensor([LABELS[i] for i in rows])


def close(actual: Tensor, wanted: list[float] | float, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(actual, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=tolerance)


def one_pair() -> tuple[Scored, Scored]:
    inputs = case_yaml("21-pref-loss-table.yaml")["inputs"]
    return tuple(Scored(doubles(inputs[f"policy_{side}"]).requires_grad_(), doubles(inputs[f"ref_{side}"]),
                        torch.tensor([inputs[f"len_{side}"]])) for side in ("chosen", "rejected"))


def test_first_step_values() -> None:
    """R1, K5: while policy and reference agree, DPO costs ln 2 and KTO half the mean weight, as the table predicts."""
    same = torch.linspace(-40, -3, 6, dtype=torch.float64)
    scored = Scored(same, same.clone(), torch.arange(1, 7))
    pairs = Units(torch.tensor([[0, 1], [2, 3], [4, 5]]), None)
    dpo = Method(LOSSES["sigmoid"], {"beta": 0.1, "label_smoothing": 0.1})
    close(dpo.losses(scored, pairs, None).mean(), math.log(2), 1e-12)
    assert dpo.row.at_start(dpo.options, None) == math.log(2)

    labels = torch.tensor([True, True, False, True, False, True])
    singles = Units(torch.arange(6)[:, None], labels)
    method = Method(LOSSES["kto"], {"beta": 0.1, "desirable_weight": 1.1, "undesirable_weight": 1.33})
    wanted = 0.5 * (4 * 1.1 + 2 * 1.33) / 6
    close(method.losses(scored, singles, torch.zeros((), dtype=torch.float64)).mean(), wanted, 1e-12)
    assert method.row.at_start(method.options, labels) == pytest.approx(wanted, abs=1e-12)


def test_units_choose_completions_of_shared_trees() -> None:
    """L1: several units may look at one completion, in any order; each gets its own loss."""
    scored = Scored(doubles(-1.0, -2.0, -4.0), doubles(-1.5, -1.0, -4.5), torch.tensor([1, 2, 3]))
    dpo = Method(LOSSES["sigmoid"], {"beta": 0.5, "label_smoothing": 0.0})
    losses = dpo.losses(scored, Units(torch.tensor([[2, 1], [0, 1], [1, 0], [2, 1]]), None), None)
    margins = 0.5 * doubles(0.5 + 1.0, 0.5 + 1.0, -1.0 - 0.5, 0.5 + 1.0)
    torch.testing.assert_close(losses, torch.log1p(torch.exp(-margins)), rtol=0, atol=1e-12)


def test_pair_metrics() -> None:
    """L2: logged rewards and margin of the published pair: 0.1, -0.1 and 0.2."""
    chosen, rejected = one_pair()
    scored = Scored(torch.cat((chosen.logps, rejected.logps)),
                    torch.cat((chosen.reference_logps, rejected.reference_logps)), torch.tensor([6, 5]))
    method = Method(LOSSES["sigmoid"], {"beta": 0.1, "label_smoothing": 0.0})
    units = Units(torch.tensor([[0, 1]]), None)
    metrics = method.metrics(scored, units, method.losses(scored, units, None), torch.zeros(2, dtype=torch.float64))
    means = {key: float(total.detach()) / int(count) for key, (total, count) in metrics.items()}
    assert set(means) == set(method.metric_keys)
    assert means["rewards/chosen"] == pytest.approx(expected("21")["reward_chosen"])
    assert means["rewards/rejected"] == pytest.approx(expected("21")["reward_rejected"])
    assert means["rewards/margins"] == pytest.approx(expected("21")["logged_margin"])
    assert means["rewards/accuracies"] == 1.0
    assert means["logps/chosen"] == -12.0


def test_rewards_within_rounding_are_ties() -> None:
    """R1: a reward no larger than the noise of its log-prob is 0, so accuracy is one half before step 1."""
    scored = Scored(doubles(-5 + 1e-7, -6, -5, -6.0), doubles(-5, -6, -6, -6.0), torch.ones(4, dtype=torch.int64))
    method = Method(LOSSES["sigmoid"], {"beta": 0.5, "label_smoothing": 0.0})
    units = Units(torch.tensor([[0, 1], [2, 3], [1, 0], [3, 2]]), None)
    noise = torch.full((4,), 1e-6, dtype=torch.float64)
    total, count = method.metrics(scored, units, method.losses(scored, units, None), noise)["rewards/accuracies"]
    assert (float(total), int(count)) == (0.5 + 1 + 0.5 + 0, 4)
    assert method.rewards(scored, noise).tolist() == [0.0, 0.0, 0.5, 0.0]


def test_kto_metrics_count_each_class() -> None:
    """K4: rewards of case A by class are 0.15 and 0.05; an absent class has count 0."""
    scored, labels = fixture(list(range(6)))
    method = Method(LOSSES["kto"], {"beta": BETA, "desirable_weight": 1.0, "undesirable_weight": 1.33})
    everyone = Units(torch.arange(6)[:, None], labels)
    metrics = method.metrics(scored, everyone, method.losses(scored, everyone, doubles(0.5)[0]), NO_NOISE)
    assert set(metrics) == set(method.metric_keys)
    for key, wanted in (("rewards/chosen", 0.15), ("rewards/rejected", 0.05)):
        total, count = metrics[key]
        assert (float(total.detach()) / int(count), int(count)) == (pytest.approx(wanted), 3)
    good = Units(torch.tensor([[0], [2], [3]]), labels[[0, 2, 3]])
    metrics = method.metrics(scored, good, method.losses(scored, good, doubles(0.5)[0]), NO_NOISE)
    assert int(metrics["rewards/rejected"][1]) == int(metrics["logps/rejected"][1]) == 0
