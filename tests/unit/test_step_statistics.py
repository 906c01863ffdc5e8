"""What losses take from the whole step: BCO's running mean, and AOT's values of equal rank."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tropism.distributed import World
from tropism.losses import Scored
from tropism.methods import Method, Units
from tropism.methods.build import build_method
from tropism.train.step_statistics import RunningMean, ranks_of_step, rewards_of_step, side_values, sorted_partners

CPU = torch.device("cpu")
YES, NO = torch.tensor(True), torch.tensor(False)


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def method_of(view: Any, loss: str, **options: Any) -> Method:
    return build_method(view, {"loss": loss, **options}, [])


def scored(logps: list[float], reference: list[float]) -> Scored:
    return Scored(doubles(*logps), doubles(*reference), torch.ones(len(logps), dtype=torch.int64))


# --- the running mean -------------------------------------------------------------------------------------------------


def test_running_mean_over_three_steps() -> None:
    """K2, DESIGN, Step-wide inputs: the mean of all rewards so far, the step's own included, by their number."""
    mean = RunningMean()
    assert float(mean.value) == 0.0
    found = []
    for rewards in ([1.0, 2.0], [6.0], [-1.0, -1.0, -1.0]):
        found.append(float(mean.propose(doubles(sum(rewards), len(rewards)))))
        mean.settle(YES)
        assert float(mean.value) == found[-1]
    assert found == [1.5, 3.0, 1.0]


@pytest.mark.parametrize("bad", [[float("nan"), 2.0], [float("inf"), 1.0], [5.0, 2.0]])
def test_a_step_that_is_not_finite_leaves_no_trace(bad: list[float]) -> None:
    """N1: neither at the start nor later; nor in what a checkpoint would hold."""
    mean = RunningMean()
    mean.propose(doubles(*bad))
    mean.settle(NO)
    assert float(mean.value) == 0.0
    assert float(mean.propose(doubles(3.0, 2.0))) == 1.5
    mean.settle(YES)
    mean.propose(doubles(*bad))
    mean.settle(NO)
    assert float(mean.value) == 1.5
    assert mean.sums is not None
    assert mean.sums.tolist() == [3.0, 2.0]
    mean.settle(YES)  # nothing is proposed: a step of another method
    assert mean.sums.tolist() == [3.0, 2.0]


def test_a_mean_that_was_only_proposed_is_not_seen() -> None:
    """L5: an evaluation between proposing and settling would see the mean before the step."""
    mean = RunningMean(doubles(3.0, 2.0))
    mean.propose(doubles(100.0, 1.0))
    assert float(mean.value) == 1.5


def test_rewards_of_a_step_are_counted_by_units() -> None:
    """K2, X1: beta x log-ratio of each unit of this rank's packs; a shared completion counts for each of its units."""
    found = [(scored([-1.0, -4.0], [-3.0, -3.0]), Units(torch.tensor([[0], [1], [0]]), torch.tensor([True] * 3))),
             (scored([], []), Units(torch.zeros(0, 4, dtype=torch.int64), None)),
             (scored([-2.0], [-7.0]), Units(torch.tensor([[0]]), torch.tensor([False])))]
    sums = rewards_of_step(method_of("unpaired", "bco", beta=0.5), found, CPU)
    assert sums.tolist() == [0.5 * (2 - 1 + 2 + 5), 4.0]
    assert rewards_of_step(method_of("unpaired", "bco"), [], CPU).tolist() == [0.0, 0.0]


# --- ranks ------------------------------------------------------------------------------------------------------------


def test_sorted_partners_by_hand() -> None:
    """L2: AOT: policy margins 3, 1, 2 meet the reference's sorted -1, 0, 5; log-ratios the other side's."""
    values = torch.stack((doubles(3, 1, 2), doubles(0, 5, -1), doubles(0.5, 0.1, 0.3), doubles(-7, 9, 8)), dim=1)
    partner, of_chosen, of_rejected = sorted_partners(values)
    assert partner.tolist() == [5, -1, 0]
    assert of_chosen.tolist() == [9, -7, 8]
    assert of_rejected.tolist() == [0.1, 0.5, 0.3]


def test_equal_values_take_their_ranks_in_row_order() -> None:
    """L1: ties are broken by the row, so that packs and ranks cannot."""
    values = torch.stack((doubles(1, 1, 0), doubles(7, 8, 9), doubles(0, 0, 0), doubles(3, 2, 1)), dim=1)
    partner, of_chosen, _ = sorted_partners(values)
    assert partner.tolist() == [8, 9, 7]
    assert of_chosen.tolist() == [1, 2, 3]


def test_side_values() -> None:
    """L2: margins of policy and reference and both log-ratios; under LD-DPO those of the desensitised sides."""
    of = scored([-1.0, -4.0, -2.0], [-3.0, -3.0, -2.5])
    units = Units(torch.tensor([[0, 1, 0, 2]]), None)
    assert side_values(method_of("paired", "aot"), of, units).tolist() == [[3.0, 0.0, 2.0, -1.0]]
    half = side_values(method_of("paired", "aot", ld_alpha=0.5), of, units).tolist()
    assert half == [[-1 + 3, -3 + 2.75, 2.0, -3 + 2.75]]


class Told(Exception):
    """Ends a rank's first run, in which it only says what it would share."""


@dataclass(frozen=True)
class Recorded:
    """A world of many ranks in one process, run rank by rank: once to tell, and once to hear."""

    parts: list[Any]
    telling: bool

    def sum(self, values: Tensor) -> Tensor:
        if self.telling:
            self.parts.append(values)
            raise Told
        return torch.stack(self.parts).sum(0)


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=1, max_size=9), st.integers(1, 3),
       st.integers(1, 3), st.randoms(use_true_random=False))
def test_ranks_depend_on_the_rows_alone(pairs: list[tuple[int, int]], ranks: int, packs: int,
                                        chance: random.Random) -> None:
    """L1: any order of rows, any packs and any ranks give each row the partners of the whole step, ties included."""
    method = method_of("paired", "aot,aot_unpaired")
    rows = chance.sample(range(100), len(pairs))
    sides = {row: ([float(a), float(b)], [float(b % 3), float(a % 2)]) for row, (a, b) in zip(rows, pairs, strict=True)}

    whole = sorted(rows)

    def ranked(share: list[list[int]], world: Any) -> list[Any]:
        found = [(scored(*([value for row in pack for value in sides[row][model]] for model in (0, 1))),
                  Units(torch.arange(2 * len(pack)).reshape(-1, 2), None)) for pack in share]
        return ranks_of_step(method, found, [tuple(pack) for pack in share], whole, world, CPU)

    wanted, = ranked([whole], World(0, 1, CPU))
    shares: list[list[list[int]]] = [[[] for _ in range(packs)] for _ in range(ranks)]
    for row in rows:
        shares[chance.randrange(ranks)][chance.randrange(packs)].append(row)
    told: list[Any] = []
    for share in shares:
        with pytest.raises(Told):
            ranked(share, Recorded(told, telling=True))
    for share in shares:
        for pack, wide in zip(share, ranked(share, Recorded(told, telling=False)), strict=True):
            at = torch.tensor([whole.index(row) for row in pack], dtype=torch.int64)
            for name in ("partner", "chosen_partner", "rejected_partner"):
                torch.testing.assert_close(getattr(wide, name), getattr(wanted, name)[at], rtol=0, atol=0)
