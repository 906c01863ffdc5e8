"""Losses of whole distributions: partners of equal rank, and the gradient of a sum over sorted values."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from loss_calls import aot_alone, aot_unpaired_alone, gradients, scored
from tropism.losses import Scored
from tropism.losses.aot import aot, aot_unpaired, partners
from tropism.losses.scalar_functions import logistic


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_partners_by_hand() -> None:
    """L1: ranks of 5, -1, 2 are 2, 0, 1; 30, 10, 20 sorted are 10, 20, 30."""
    assert partners(doubles(5, -1, 2), doubles(30, 10, 20)).tolist() == [30, 10, 20]
    assert partners(doubles(2, 2, 1, 2), doubles(4, 3, 2, 1)).tolist() == [2, 3, 1, 4]  # ties by position
    assert partners(doubles(), doubles()).tolist() == []


@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=1, max_size=7))
def test_partners_are_the_sorted_coupling(points: list[tuple[int, int]]) -> None:
    """L1: the pairs (value, partner) are those of the two sorted lists, and every point is used once."""
    values, others = doubles(*(a for a, _ in points)), doubles(*(b for _, b in points))
    coupled = sorted(zip(values.tolist(), partners(values, others).tolist(), strict=True))
    assert coupled == list(zip(sorted(values.tolist()), sorted(others.tolist()), strict=True))


def test_partners_are_constants() -> None:
    values = doubles(1, 2).requires_grad_()
    assert not partners(values, values * 2).requires_grad


def sides(count: int = 9) -> tuple[Scored, Scored]:
    generator = torch.Generator().manual_seed(3)

    def numbers() -> Tensor:
        return 4 * torch.randn(count, generator=generator, dtype=torch.float64)

    references = numbers() - 30, numbers() - 30
    lengths = torch.ones(count, dtype=torch.int64)
    return tuple(scored(reference + numbers(), reference, lengths) for reference in references)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_aot_is_the_plain_sort(smoothing: float) -> None:
    """L2: value and gradient of the loss of sorted margins."""
    chosen, rejected = sides()
    losses = aot_alone(chosen, rejected, beta=0.3, label_smoothing=smoothing)
    margins = (chosen.logps - rejected.logps).sort().values
    reference = (chosen.reference_logps - rejected.reference_logps).sort().values
    plain = logistic(0.3 * (margins - reference), smoothing)
    torch.testing.assert_close(losses.sum(), plain.sum(), rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients(losses, chosen, rejected), gradients(plain, chosen, rejected))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_aot_unpaired_is_the_plain_sort(smoothing: float) -> None:
    """L2: the pairs' shares sum to value and gradient of the loss of sorted log-ratios, which gradcheck confirms."""
    chosen, rejected = sides()

    def plain(up: Tensor, down: Tensor) -> Tensor:
        gaps = (up - chosen.reference_logps).sort().values - (down - rejected.reference_logps).sort().values
        return logistic(0.3 * gaps, smoothing).sum()

    losses = aot_unpaired_alone(chosen, rejected, beta=0.3, label_smoothing=smoothing)
    total = plain(chosen.logps, rejected.logps)
    torch.testing.assert_close(losses.sum(), total, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients(losses, chosen, rejected), gradients(total, chosen, rejected))
    assert torch.autograd.gradcheck(plain, (chosen.logps, rejected.logps))


def test_step_in_parts() -> None:
    """L1: with partners from the whole step, micro-batches of any pairs add up to the step, values and gradients."""
    chosen, rejected = sides()
    options = {"beta": 0.3, "label_smoothing": 0.1}
    over = partners(chosen.logps - rejected.logps, chosen.reference_logps - rejected.reference_logps)
    up = partners(chosen.logratios, rejected.logratios)
    down = partners(rejected.logratios, chosen.logratios)
    parts = [torch.tensor([8, 0, 3]), torch.tensor([1, 2, 7, 6, 5]), torch.tensor([4])]
    for whole, split in (
        (aot_alone(chosen, rejected, **options),
         [aot(chosen.take(part), rejected.take(part), partner=over[part], **options) for part in parts]),
        (aot_unpaired_alone(chosen, rejected, **options),
         [aot_unpaired(chosen.take(part), rejected.take(part), chosen_partner=up[part], rejected_partner=down[part],
                       **options) for part in parts]),
    ):
        torch.testing.assert_close(torch.cat(split), whole[torch.cat(parts)], rtol=1e-12, atol=1e-12)
        for ours, theirs in zip(gradients(torch.cat(split), chosen, rejected), gradients(whole, chosen, rejected),
                                strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_no_gradient_into_partners() -> None:
    """L1: partners that still carry a graph are constants all the same."""
    chosen, rejected = sides(3)
    partner = doubles(1, 2, 3).requires_grad_()
    aot(chosen, rejected, beta=0.1, label_smoothing=0.0, partner=partner).sum().backward()
    aot_unpaired(chosen, rejected, beta=0.1, label_smoothing=0.0, chosen_partner=partner,
                 rejected_partner=partner).sum().backward()
    assert partner.grad is None
