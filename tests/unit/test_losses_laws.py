"""Laws that hold for whole families of losses, tried on every one of them."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from torch import Tensor

from loss_calls import OF_POLICY, OF_REFERENCE, OF_STEP, PAIRED, PairLoss, gradients, scored
from tropism.losses import Scored
from tropism.losses.aot import aot
from tropism.losses.f_divergence_links import alpha, forward_kl, js, reverse_kl
from tropism.losses.pairwise import apo_zero, bco_pair, exo_pair, robust, sigmoid
from tropism.losses.reference_free import cpo, simpo
from tropism.losses.unpaired import apo_zero_unpaired, bco, kto, kto_no_reference_point

Pairs = tuple[Scored, Scored]


@st.composite
def pairs(draw: st.DrawFn, least: int = 1) -> Pairs:
    """Some pairs, in float64: log-probs on a grid, so that equal values occur; log-ratios up to 8 nats."""
    count = draw(st.integers(least, 6))

    def numbers(low: int, high: int) -> Tensor:
        drawn = draw(st.lists(st.integers(8 * low, 8 * high), min_size=count, max_size=count))
        return torch.tensor(drawn, dtype=torch.float64) / 8

    sides = []
    for _ in range(2):
        reference = numbers(-40, -9)
        lengths = draw(st.lists(st.integers(1, 30), min_size=count, max_size=count))
        sides.append(scored(reference + numbers(-8, 8), reference, lengths))
    return sides[0], sides[1]


# Fewer examples of each law than usual, since each example is tried on up to 55 losses.
few = settings(max_examples=settings().max_examples // 5)
every_loss = pytest.mark.parametrize("loss", PAIRED.values(), ids=PAIRED.keys())


def each(losses: Mapping[str, Any]) -> Iterator[Any]:
    """The losses, one after the other; of the names that a failed example notes, the last is that of the loss."""
    for name, loss in losses.items():
        note(name)
        yield loss


def same(actual: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(actual, wanted, rtol=1e-10, atol=1e-10)


def taken(of: Pairs, index: list[int]) -> Pairs:
    chosen, rejected = (side.take(torch.tensor(index, dtype=torch.int64)) for side in of)
    return chosen, rejected


def shifted(of: Scored, by: float) -> Scored:
    return Scored(of.logps + by, of.reference_logps + by, of.lengths)


# --- pairs -----------------------------------------------------------------------------------------------------------


# The others treat their sides differently, or have beta as a factor.
SYMMETRIC = {name: loss for name, loss in PAIRED.items() if name not in ("nca_pair", "apo_down", "odds_ratio")}


@few
@given(of=pairs())
def test_swapping_sides_turns_the_sign_of_beta(of: Pairs) -> None:
    """L2: a loss of beta h, or of beta c and -beta r, sees swapped sides as a negative beta."""
    for loss in each(SYMMETRIC):
        swapped, turned = loss(of[1], of[0], beta=0.3), loss(*of, beta=-0.3)
        if loss is OF_STEP["aot"]:  # equal margins may meet their partners in another order
            same(swapped.sum(), turned.sum())
        else:
            same(swapped, turned)


@given(of=pairs(), smoothing=st.sampled_from([0.05, 0.2, 0.45]))
def test_swapping_sides_flips_the_label(of: Pairs, smoothing: float) -> None:
    """L2: the label of a swapped pair is wrong with probability 1 - e."""
    for loss in (sigmoid, robust, exo_pair, cpo):
        same(loss(of[1], of[0], beta=0.3, label_smoothing=smoothing),
             loss(*of, beta=0.3, label_smoothing=1 - smoothing))
    same(simpo(of[1], of[0], beta=2.0, simpo_gamma=0.5, label_smoothing=smoothing),
         simpo(*of, beta=2.0, simpo_gamma=-0.5, label_smoothing=1 - smoothing))
    partner = torch.linspace(-3, 4, len(of[0].logps), dtype=torch.float64)
    same(aot(of[1], of[0], beta=0.3, label_smoothing=smoothing, partner=-partner),
         aot(*of, beta=0.3, label_smoothing=1 - smoothing, partner=partner))


@few
@given(of=pairs(), by=st.tuples(st.integers(-9, 9), st.integers(-9, 9)))
def test_only_log_ratios_count(of: Pairs, by: tuple[int, int]) -> None:
    """L2: one constant added to policy and reference of a side changes nothing; for `aot`, one for both sides."""
    for loss in each(OF_REFERENCE | OF_STEP):
        up, down = by if loss is not OF_STEP["aot"] else (by[0], by[0])
        same(loss(shifted(of[0], up), shifted(of[1], down), beta=0.3), loss(*of, beta=0.3))


@few
@given(of=pairs())
def test_the_reference_does_not_count(of: Pairs) -> None:
    """L2: losses without a reference do not look at its log-probs."""
    nothing = [Scored(side.logps, torch.full_like(side.logps, torch.nan), side.lengths) for side in of]
    for loss in each(OF_POLICY):
        same(loss(*nothing, beta=0.3), loss(*of, beta=0.3))


@few
@given(of=pairs(least=2), data=st.data())
def test_permuting_pairs_permutes_losses(of: Pairs, data: st.DataObject) -> None:
    """L1: no loss depends on the order of the pairs; among equal values, AOT's ranks do, but not their sum."""
    order = data.draw(st.permutations(range(len(of[0].logps))))
    for loss in each(PAIRED):
        losses, permuted = loss(*of, beta=0.3), loss(*taken(of, order), beta=0.3)
        if loss in OF_STEP.values():
            same(permuted.sum(), losses.sum())
        else:
            same(permuted, losses[torch.tensor(order)])


@few
@given(of=pairs(least=2), data=st.data())
def test_splitting_changes_nothing(of: Pairs, data: st.DataObject) -> None:
    """L1: micro-batches give what the whole batch gives, values and gradients."""
    count = len(of[0].logps)
    cut = data.draw(st.integers(1, count - 1))
    for loss in each(OF_REFERENCE | OF_POLICY):
        parts = [loss(*taken(of, list(range(*ends))), beta=0.3) for ends in ((0, cut), (cut, count))]
        split, whole = torch.cat(parts), loss(*of, beta=0.3)
        same(split, whole)
        for one, other in zip(gradients(split, *of), gradients(whole, *of), strict=True):
            same(one, other)


LN2 = math.log(2)
FIRST_STEP: dict[str, Callable[[float], float]] = {
    "sigmoid": lambda beta: LN2,
    "cdpo": lambda beta: LN2,
    "robust": lambda beta: LN2,
    "hinge": lambda beta: 1.0,
    "ipo": lambda beta: 1 / (4 * beta**2),
    "ipo_mean": lambda beta: 1 / (4 * beta**2),
    "sigmoid_norm": lambda beta: LN2,
    "exo_pair": lambda beta: -LN2 - 0.5 * (math.log(0.9) + math.log(0.1)),
    "discopop": lambda beta: 0.5 * (LN2 + 1),
    "nca_pair": lambda beta: 2 * LN2,
    "bco_pair": lambda beta: 2 * LN2,
    "sppo_hard": lambda beta: 0.5 / beta**2,
    "apo_zero": lambda beta: 1.0,
    "apo_down": lambda beta: 1.0,
    "aot": lambda beta: LN2,
    "aot_unpaired": lambda beta: LN2,
}


@pytest.mark.parametrize("name", [*OF_REFERENCE, *OF_STEP])
@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_first_step(name: str, beta: float) -> None:
    """R1: while policy and reference agree, every loss has a known value, with every link."""
    same_logps = torch.linspace(-40, -3, 5, dtype=torch.float64)
    sides = [scored(logps, logps, [1, 2, 3, 4, 5]) for logps in (same_logps, same_logps.flip(0) - 1)]
    losses = PAIRED[name](*sides, beta=beta)
    same(losses.detach(), torch.full((5,), FIRST_STEP[name.split()[0]](beta), dtype=torch.float64))


@every_loss
@pytest.mark.parametrize("far", [200.0, 1e4])
def test_far_out_all_is_finite(loss: PairLoss, far: float) -> None:
    """N1: in float32, hopeless and safe pairs have finite losses and gradients: no 0 x infinity, no overflow."""
    reference = torch.full((4,), -2e4)
    sides = [scored(reference + far * torch.tensor(signs), reference, torch.full((4,), 7))
             for signs in ([1.0, 1.0, -1.0, -1.0], [1.0, -1.0, 1.0, -1.0])]
    losses = loss(*sides, beta=0.1)
    assert losses.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients(losses, *sides))


def test_robust_is_unbiased_under_flips() -> None:
    """L2: the mean over labels flipped with probability e is the loss on true labels."""
    of = scored([-12.0], [-13.0], [6]), scored([-15.0], [-14.0], [5])
    right, wrong = (robust(*at, beta=0.1, label_smoothing=0.2) for at in (of, of[::-1]))
    same(0.8 * right + 0.2 * wrong, sigmoid(*of, beta=0.1, label_smoothing=0.0))


# --- links -----------------------------------------------------------------------------------------------------------


@given(r=st.floats(-20, 20))
def test_links_meet(r: float) -> None:
    """L2: alpha = 1 is the log-ratio, also as a limit, and alpha = 0 the forward KL."""
    of = torch.tensor([r], dtype=torch.float64)
    same(alpha(1.0)(of), reverse_kl(of))
    torch.testing.assert_close(alpha(1 + 1e-12)(of), of, rtol=1e-9, atol=1e-12)
    same(alpha(0.0)(of), forward_kl(of))
    same(forward_kl(of), 1 - torch.exp(-of))
    same(js(of), torch.log(2 * torch.sigmoid(of)))
    same(alpha(0.5)(of), 2 * (1 - torch.exp(-of / 2)))


@pytest.mark.parametrize("link", [reverse_kl, forward_kl, js, alpha(0.5), alpha(2.0)])
def test_links_increase_from_zero(link: Callable[[Tensor], Tensor]) -> None:
    """L2: 0 maps to 0, and the order of log-ratios is kept, also where the exponential goes on as its tangent."""
    of = torch.linspace(-70, 70, 1401, dtype=torch.float64, requires_grad=True)
    values = link(of)
    assert link(torch.zeros(1)).item() == pytest.approx(0, abs=1e-7)
    (slope,) = torch.autograd.grad(values.sum(), of)
    assert (values.diff() >= 0).all()
    assert (slope[of.abs() < 30] > 0).all()  # further out a bounded link is flat to the last digit
    steep = slope[slope > 1e-6]
    assert steep.log().diff().abs().max() < 0.1 + 1e-6  # one step of the exponential: no jump at the seam


# --- single completions ----------------------------------------------------------------------------------------------

WEIGHTS = {"desirable_weight": 1.5, "undesirable_weight": 0.7}
TURNED = {"desirable_weight": 0.7, "undesirable_weight": 1.5}


def double(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


UNPAIRED: dict[str, Callable[..., Tensor]] = {
    "kto": lambda of, labels, sign=1, **options: kto(of, labels, double(0.75), **options),
    "apo_zero_unpaired": lambda of, labels, sign=1, **options: apo_zero_unpaired(of, labels, **options),
    "kto_no_reference_point": lambda of, labels, sign=1, **options: kto_no_reference_point(of, labels, **options),
    "bco": lambda of, labels, sign=1, **options: bco(of, labels, double(0.2 * sign), **options),
}


@few
@given(of=pairs(least=2), data=st.data())
def test_unpaired_laws(of: Pairs, data: st.DataObject) -> None:
    """L1, L2: only log-ratios count; flipped labels are a negative beta; units do not see each other."""
    units, count = of[0], len(of[0].logps)
    labels = torch.tensor(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    order = torch.tensor(data.draw(st.permutations(range(count))))
    for loss in each(UNPAIRED):
        losses = loss(units, labels, beta=0.3, **WEIGHTS)
        same(loss(shifted(units, 4.0), labels, beta=0.3, **WEIGHTS), losses)
        same(loss(units, ~labels, sign=-1, beta=-0.3, **TURNED), losses)
        same(loss(units.take(order), labels[order], beta=0.3, **WEIGHTS), losses[order])
        parts = [loss(units.take(part), labels[part], beta=0.3, **WEIGHTS) for part in (order[:1], order[1:])]
        same(torch.cat(parts), losses[order])


@given(of=pairs())
def test_pairs_of_single_terms(of: Pairs) -> None:
    """L2: APO-zero and pairwise BCO are the sums of their unpaired terms; so is KTO at z0 = 0."""
    count = len(of[0].logps)
    good, bad = torch.ones(count, dtype=torch.bool), torch.zeros(count, dtype=torch.bool)
    options = {"beta": 0.3, "desirable_weight": 1.0, "undesirable_weight": 1.0}
    for loss in (apo_zero_unpaired, kto_no_reference_point):
        same(loss(of[0], good, **options) + loss(of[1], bad, **options), apo_zero(*of, beta=0.3))
    same(bco(of[0], good, double(0.0), **options) + bco(of[1], bad, double(0.0), **options), bco_pair(*of, beta=0.3))


def test_bco_by_hand() -> None:
    """L2: rewards 0.2 and -0.3 against a shift of 0.05, by the formula; no gradient into the shift."""
    of = scored([-10.0, -8.0], [-12.0, -5.0], [3, 4])
    shift = torch.tensor(0.05, dtype=torch.float64, requires_grad=True)
    losses = bco(of, torch.tensor([True, False]), shift, beta=0.1, desirable_weight=2.0, undesirable_weight=1.0)
    wanted = [2 * math.log1p(math.exp(-0.15)), math.log1p(math.exp(-0.35))]
    same(losses.detach(), torch.tensor(wanted, dtype=torch.float64))
    losses.sum().backward()
    assert shift.grad is None


def test_bco_at_the_first_step() -> None:
    """R1: ln 2 times the weight while rewards and shift are 0."""
    of = scored([-10.0, -8.0], [-10.0, -8.0], [3, 4])
    losses = bco(of, torch.tensor([True, False]), double(0.0), beta=0.1, **WEIGHTS)
    same(losses.detach(), torch.tensor([1.5 * LN2, 0.7 * LN2], dtype=torch.float64))
