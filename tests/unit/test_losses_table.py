"""The published table of one pair, and the odds of a probability next to 1."""

import math
from functools import partial

import pytest
import torch

from helpers import case_yaml, expected
from loss_calls import PairLoss, gradients, scored
from tropism.losses.pairwise import hinge, ipo, ipo_mean, robust, sigmoid
from tropism.losses.reference_free import log_odds_difference, odds_ratio, simpo
from tropism.losses.scalar_functions import log1mexp
from tropism.losses.scored import Scored
from tropism.losses.sft import nll

CASE = case_yaml("21-pref-loss-table.yaml")
BETA, SMOOTHING = CASE["settings"]["beta"], CASE["settings"]["label_smoothing"]
SIMPO = CASE["settings"]["simpo"]


def side(name: str) -> Scored:
    inputs = CASE["inputs"]
    return scored([inputs[f"policy_{name}"]], [inputs[f"ref_{name}"]], [inputs[f"len_{name}"]])


@pytest.mark.parametrize(("key", "loss"), [
    ("sigmoid", partial(sigmoid, beta=BETA, label_smoothing=0.0)),
    ("sigmoid_label_smoothing_0.1", partial(sigmoid, beta=BETA, label_smoothing=SMOOTHING)),
    ("robust_0.1", partial(robust, beta=BETA, label_smoothing=SMOOTHING)),
    ("hinge", partial(hinge, beta=BETA)),
    ("ipo_sequence_sum", partial(ipo, beta=BETA)),
    ("ipo_token_mean", partial(ipo_mean, beta=BETA)),
    ("simpo", partial(simpo, beta=SIMPO["beta"], simpo_gamma=SIMPO["gamma"], label_smoothing=0.0)),
    ("orpo_odds_term", partial(odds_ratio, beta=1.0)),  # the table has the term without its weight
])
def test_one_pair(key: str, loss: PairLoss) -> None:
    """L2: the values that any correct implementation gives."""
    assert loss(side("chosen"), side("rejected")).item() == pytest.approx(expected("21")[key], rel=0, abs=1e-6)


def test_weight_of_the_odds_term() -> None:
    """L2: ORPO's lambda scales its term."""
    weight = CASE["settings"]["orpo"]["lambda"]
    loss = odds_ratio(side("chosen"), side("rejected"), beta=weight)
    assert loss.item() == pytest.approx(weight * expected("21")["orpo_odds_term"], rel=0, abs=1e-6)


def test_simpo_on_sums_is_the_known_mistake() -> None:
    """L2: the margin is one of means per token; sums give another number."""
    sums = [scored(of.logps, of.reference_logps, [1]) for of in (side("chosen"), side("rejected"))]
    loss = simpo(*sums, beta=SIMPO["beta"], simpo_gamma=SIMPO["gamma"], label_smoothing=0.0)
    assert loss.item() == pytest.approx(expected("21")["simpo_wrong_with_sums"], rel=0, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_odds_next_to_certainty(dtype: torch.dtype) -> None:
    """N1: a mean log-prob of -1e-7: 1 - exp(x) has one digit in float32, log(1 - exp(x)) must have all of them."""
    given = CASE["near_one"]
    means = [torch.tensor([given[f"policy_{name}_mean"]], dtype=dtype, requires_grad=True)
             for name in ("chosen", "rejected")]
    difference = log_odds_difference(*means)
    assert difference.item() == pytest.approx(expected("21")["orpo_near_one_log_odds"], rel=0, abs=5e-6)
    for gradient, mean in zip(torch.autograd.grad(difference.sum(), means), means, strict=True):
        assert abs(gradient.item()) == pytest.approx(1 / -math.expm1(mean.item()), rel=1e-6)


def test_log1mexp_against_exact_values() -> None:
    """N1: at both ends and at the seam, in float32, with its derivative -exp(x) / (1 - exp(x))."""
    arguments = [-1e-10, -1e-7, -1e-3, -0.5, -math.log(2), -0.6931472, -1.0, -20.0, -80.0]
    x = torch.tensor(arguments, requires_grad=True)
    wide = x.detach().double()
    values = log1mexp(x)
    torch.testing.assert_close(values.detach().double(), torch.log(-torch.expm1(wide)), rtol=3e-7, atol=1e-30)
    (slope,) = torch.autograd.grad(values.sum(), x)
    torch.testing.assert_close(slope.double(), -1 / torch.expm1(-wide), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("certain", ["chosen", "rejected"])
def test_certain_completions_have_finite_odds(certain: str) -> None:
    """N1: a float32 softmax gives a log-prob of exactly 0; loss and gradient stay finite on either side."""
    sides = [scored(torch.tensor([0.0 if name == certain else -3.0]), torch.zeros(1), [1])
             for name in ("chosen", "rejected")]
    loss = odds_ratio(*sides, beta=0.1)
    assert loss.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients(loss, *sides))


def test_nll() -> None:
    """L1: summed over tokens; the caller divides by the step's tokens."""
    of = scored([-12.0, -1.5], [0.0, 0.0], [6, 1])
    assert nll(of).tolist() == [12.0, 1.5]
    assert gradients(nll(of), of)[0].tolist() == [-1.0, -1.0]
