"""The share of saturated units: those whose loss has no slope where they are."""

from typing import Any

import pytest
import torch

from tropism.losses.scored import Scored
from tropism.methods import LOSSES, StepInputs, Units
from tropism.methods.build import build_method

EDGE = 6.9068  # sigmoid(6.9068) = 0.999


def shown(view: Any, values: list[float], labels: list[bool], **options: Any) -> tuple[float | None, torch.Tensor]:
    """The metric for pairs with these margins (or completions with these rewards), and d loss / d log-prob."""
    method = build_method(view, options, labels)
    rewards = torch.tensor(values, dtype=torch.float64)
    width = 2 if view == "paired" else 1
    logps = torch.zeros(len(values), width, dtype=torch.float64)
    logps[:, 0] = rewards / method.beta - 40.0
    logps[:, 1:] = -40.0
    flat = logps.reshape(-1).clone().requires_grad_()
    scored = Scored(flat, torch.full_like(flat, -40.0), torch.ones(len(flat), dtype=torch.int64))
    units = Units(torch.arange(len(flat)).reshape(-1, width), None if width == 2 else torch.tensor(labels))
    zero = torch.zeros((), dtype=torch.float64)
    losses = method.losses(scored, units, StepInputs(zero, zero))
    slopes, = torch.autograd.grad(losses[0].sum(), flat)
    found = method.metrics(scored, units, losses, method.counts([]) or (1,), torch.zeros_like(flat)).get("saturated")
    return (None if found is None else float(found[0])), slopes.reshape(-1, width)[:, 0].abs() / method.beta


@pytest.mark.parametrize("loss", ["sigmoid", "hinge", "bco_pair"])
def test_pairs_that_are_told_apart_are_saturated(loss: str) -> None:
    """Far on the right side there is no slope; far on the wrong side there is."""
    values = [20.0, 40.0, 0.1, -20.0, -40.0]
    count, slopes = shown("paired", values, [], loss=loss)
    assert count == (2 if loss != "bco_pair" else 0)  # its other side has slope until it moves too
    assert (slopes < 1e-3).sum() == 2
    if loss == "sigmoid":
        assert shown("paired", [EDGE - 1e-3, EDGE + 1e-3], [], loss=loss)[0] == 1


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired", "kto_no_reference_point", "bco"])
def test_single_completions_saturate_at_both_ends_of_a_sigmoid(loss: str) -> None:
    """Whatever the weight of their class; the logistic loss of BCO only at one."""
    values, labels = [20.0, -20.0, 20.0, -20.0, 0.0], [True, True, False, False, True]
    count, slopes = shown("unpaired", values, labels, loss=loss, desirable_weight=3.0, undesirable_weight=0.5)
    assert count == int((slopes < 1e-3).sum()) == (2 if loss == "bco" else 4)


@pytest.mark.parametrize("options", [
    {"loss": "ipo"}, {"loss": "sigmoid", "label_smoothing": 0.1}, {"loss": "apo_zero"}])
def test_where_the_value_of_the_loss_does_not_tell_the_metric_is_absent(options: dict[str, Any]) -> None:
    assert shown("paired", [20.0], [], **options)[0] is None
    assert "saturated" not in build_method("paired", options, []).metric_keys


def test_keys_are_those_of_the_table() -> None:
    """The tally reads exactly the keys that a method says it has."""
    for loss, row in LOSSES["paired"].items():
        if row.reward is not None:
            method = build_method("paired", {"loss": loss}, [])
            assert ("saturated" in method.metric_keys) == method.reports_saturation == bool(row.flat)
