"""Triton's kernels of the head, run by its interpreter on the CPU, against plain torch.

Triton is no test dependency because of its size (about 1 GB). To run these: `pip install triton` on Linux, then
`TRITON_INTERPRET=1 pytest tests/unit/test_head_triton.py`.
"""

import os
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from tropism.model.head import folds
from tropism.model.head.logprob import Head
from tropism.model.head.shape import Shape

if find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs Triton and TRITON_INTERPRET=1", allow_module_level=True)

from tropism.model.head import triton_kernels

N, FIRST = 5, 40
SHAPES = [(False, 1.0, None), (True, 0.3, None), (True, 0.5, 3.0), (False, 1.0, 3.0)]


def draw(*shape: int, seed: int) -> Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("with_bias", "scale", "softcap"), SHAPES)
@pytest.mark.parametrize("columns", [1, 7, 4096, 5000])
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
def test_against_plain_torch(with_bias: bool, scale: float, softcap: float | None, columns: int,
                             out: torch.dtype) -> None:
    """O1, N1: forward and backward of one tile, with targets in it, before it and after it."""
    raw, shape = draw(N, columns, seed=1), Shape(draw(columns, seed=2) if with_bias else None, scale, softcap)
    ids = FIRST + torch.tensor([0, columns - 1, -1, columns, columns // 2])
    upstream, log_z = draw(N, seed=3), draw(N, seed=4).abs() + 12
    found = triton_kernels.fold(raw, shape, ids, FIRST)
    for got, right in zip(found, folds.fold(raw.clone(), shape, ids, FIRST), strict=True):
        torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-5)
    to = None if out == torch.float32 else torch.empty_like(raw, dtype=out)
    right = folds.unfold(raw.clone(), shape, ids, FIRST, log_z, upstream)
    got = triton_kernels.unfold(raw.clone(), shape, ids, FIRST, log_z, upstream, to)
    assert got.dtype == out
    bound = 1e-5 if out == torch.float32 else 2**-7  # the interpreter truncates to bfloat16, where a GPU rounds
    torch.testing.assert_close(got.float(), right, rtol=bound, atol=1e-6)


def test_masked_and_huge_logits() -> None:
    """M4, N2: columns that are never said, a whole block of them, and logits of 1e4."""
    raw = 1e4 * draw(N, 9000, seed=1)
    raw[:, :4500], raw[0] = -torch.inf, -torch.inf
    raw[0, -1] = 1.0
    ids = torch.arange(N) + 8000
    for got, right in zip(triton_kernels.fold(raw, Shape(None, 1.0, None), ids, 0),
                          folds.fold(raw.clone(), Shape(None, 1.0, None), ids, 0), strict=True):
        torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_whole_head(monkeypatch: pytest.MonkeyPatch, frozen: bool, softcap: float | None) -> None:
    """L3, O1: the same log-probs and gradients of a head of several tiles."""
    monkeypatch.setattr("tropism.model.head.logprob.COLUMNS", 16)
    results = []
    for fused in (False, True):
        monkeypatch.setattr(folds, "fused", lambda raw, fused=fused: fused)
        hidden, weight, bias = (draw(*shape, seed=seed).div_(3).requires_grad_() for seed, shape in enumerate(
            [(N, 4), (37, 4), (37,)]))
        leaves = [hidden] if frozen else [hidden, weight, bias]
        head = Head(weight.detach(), bias.detach(), 0.7, softcap) if frozen else Head(weight, bias, 0.7, softcap)
        logps = head.per_token_logps(hidden, torch.tensor([0, 15, 16, 36, 20]), 2)
        results.append([logps, *torch.autograd.grad((logps * draw(N, seed=9)).sum(), leaves)])
    for plain, got in zip(*results, strict=True):
        torch.testing.assert_close(got, plain, rtol=1e-5, atol=1e-5)
