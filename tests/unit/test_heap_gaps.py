"""Gaps that freed tensors leave in the heap, as a plan counts them."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tropism.train.planning.count import GAPS, Counter
from tropism.train.planning.heap import Gaps
from tropism.train.planning.memory import Needs, Pass


def test_a_gap_takes_smaller_tensors_but_none_of_its_own_size() -> None:
    gaps = Gaps()
    gaps.free(4096)
    gaps.allocate(4096)
    assert gaps.total == 4096
    gaps.allocate(1000)
    assert gaps.total == 3096
    gaps.allocate(3096)
    assert gaps.total == 3096
    gaps.allocate(3000)
    assert gaps.total == 96


def test_the_smallest_gap_is_taken() -> None:
    gaps = Gaps()
    for size in (8000, 2000, 4000):
        gaps.free(size)
    gaps.allocate(1500)
    gaps.allocate(3900)
    assert gaps.total == 8000 + 500 + 100


def test_a_tensor_freed_in_a_forward_pass_counts_until_the_pass_ends() -> None:
    with FakeTensorMode(), Counter() as counter:
        counter.gaps = Gaps()
        weight = torch.ones(1000, requires_grad=True)
        kept = [(weight * 2) * 3 for _ in range(4)]  # the product within is freed, and the next one does not fit
        assert counter.gaps.total == 4 * 4000
        counter.mark("here")
        with torch.no_grad():
            _ = (weight * 2) * 3  # nothing is kept, so what is freed merges
        assert counter.gaps.total == 4 * 4000
        counter.gaps = None
        counter.mark("after")
    assert kept
    assert counter.count.peaks["here"][GAPS] == 4 * 4000
    assert GAPS not in counter.count.peaks["after"]


def test_processes_that_share_the_state_have_none() -> None:
    passes = [Pass(tokens, {"kept": {"activations": 10.0 * tokens, GAPS: 5.0 * tokens}}) for tokens in (4, 16)]
    needs = Needs(0.0, {"gradients": 0.0}, *passes)
    assert needs.components(16)[GAPS] > 0
    assert needs.without(GAPS).components(16) == {
        name: size for name, size in needs.components(16).items() if name != GAPS}
