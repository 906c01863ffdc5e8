"""Triton's kernels of divergences, run by its interpreter on the CPU, against plain torch.

Run them as tests/unit/test_head_triton.py says.
"""

import os
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from tropism.losses.divergence import DIVERGENCES
from tropism.model.head import divergence, folds
from tropism.model.head.divergence import Comparison, FullTargets
from tropism.model.head.logprob import Head

if find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs Triton and TRITON_INTERPRET=1", allow_module_level=True)

from tropism.model.head import divergence_triton_kernels

N = 4


def draw(columns: int, seed: int, size: float) -> Tensor:
    return size * torch.randn(N, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", list(DIVERGENCES))
@pytest.mark.parametrize(("columns", "size", "temperature"), [
    (1, 1.0, 1.0), (7, 3.0, 2.0), (4096, 3.0, 0.7), (5000, 0.01, 1.0), (5000, 30.0, 1.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_plain_torch(kind: str, columns: int, size: float, temperature: float, dtype: torch.dtype) -> None:
    """Value and derivative by the student's logits, against float64; also of equal and of masked logits."""
    student, teacher = draw(columns, 1, size).to(dtype), draw(columns, 2, size).to(dtype)
    student[0] = teacher[0]
    if columns > 1:
        student[1, 0] = teacher[2, -1] = -torch.inf
    mix = 0.3
    log_p, log_q = (torch.log_softmax(one.double() / temperature, -1) for one in (teacher, student))
    value, slope = DIVERGENCES[kind](log_p, log_q, mix=mix)
    right = slope - log_q.exp() * slope.sum(-1, keepdim=True)
    got, numbers = divergence_triton_kernels.compare(student, teacher, temperature, kind, mix)
    torch.testing.assert_close(got.double(), value, rtol=1e-4, atol=1e-6)
    found = divergence_triton_kernels.slope(student, teacher, numbers, temperature, kind, mix)
    bound = 3e-2 if kind == "tvd" else 5e-5  # the sign of a difference may be rounding; log-probs reach -200
    assert (found.double() - right).norm() <= bound * right.norm() + 1e-7
    assert (got[0], found[0].abs().max()) == (0, 0) or kind == "tvd"


@pytest.mark.parametrize("kind", list(DIVERGENCES))
def test_a_full_comparison(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Values and gradients of heads with padded vocabularies and a soft-cap, in several tiles."""
    monkeypatch.setattr("tropism.model.head.logprob.COLUMNS", 16)
    used: list[int] = []
    plain = divergence_triton_kernels.slope
    monkeypatch.setattr(divergence_triton_kernels, "slope", lambda *given: (used.append(1), plain(*given))[1])
    results = []
    for fused in (False, True):
        monkeypatch.setattr(folds, "on_triton", lambda logits, fused=fused: fused)
        hidden, weight, other, theirs = (draw_of(*shape, seed=seed).requires_grad_(seed < 2)
                                         for seed, shape in enumerate([(N, 6), (37, 6), (N, 5), (40, 5)]))
        comparison = Comparison(partial(DIVERGENCES[kind], mix=0.3), 1.7, 2.0, 35)
        logps, values = comparison.per_token(hidden, Head(weight, None, 0.7, 3.0), torch.tensor([0, 15, 16, 34]),
                                             FullTargets(other, Head(theirs)), 3)
        pull = torch.linspace(-1, 1, N)
        results.append([logps, values, *torch.autograd.grad((logps * pull + values * pull.exp()).sum(),
                                                            [hidden, weight])])
        assert bool(used) is fused
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert divergence.kernel_of(torch.zeros(2, 3), comparison.divergence, Head(weight).columns) is not None


def draw_of(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
