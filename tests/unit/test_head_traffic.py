"""What the head moves through memory, in passes over the logits of all positions, so that no pass comes back."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from logits_traffic import Traffic
from tropism.losses.divergence import DIVERGENCES
from tropism.model.head import divergence, logprob, tiles
from tropism.model.head.divergence import Comparison, FullTargets, top_k
from tropism.model.head.logprob import Head

S, D, V, TILE = 256, 8, 4096, 2**19


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 256 positions by 2048 columns in 8 blocks: more than `Traffic` takes to stay in a cache."""
    monkeypatch.setattr(tiles, "CPU_BLOCK", 2**16)
    monkeypatch.setattr(tiles, "CPU_TILE", TILE)
    monkeypatch.setattr(divergence, "_CPU_CHUNK", TILE)
    for module in (tiles, logprob):
        monkeypatch.setattr(module, "COLUMNS", 2048)


def passes(compute: Callable[[Head, Tensor, Tensor], Tensor], learns: bool, softcap: float | None = None) -> float:
    """Reads and writes of all logits of one model, forward and backward."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(V, D, generator=generator).mul_(0.1).requires_grad_(learns)
    hidden = torch.randn(S, D, generator=generator).requires_grad_()
    with Traffic(TILE * 4) as traffic:
        compute(Head(weight, None, 1.0, softcap), hidden, torch.arange(S)).sum().backward()
    return traffic.moved / (4 * S * V)


@pytest.mark.parametrize(("learns", "softcap", "expected"), [(True, None, 7), (True, 30.0, 8), (False, None, 5)])
def test_log_probs(learns: bool, softcap: float | None, expected: int) -> None:
    """O1: forward, the product writes and the fold reads (and writes, with a soft-cap). Backward, the product writes,
    the fold reads and writes, two products read; with a frozen head the forward pass does it all, with one product
    less."""
    found = passes(lambda head, hidden, ids: head.per_token_logps(hidden, ids), learns, softcap)
    assert found == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize(("name", "stored", "expected"), [*((name, False, 14) for name in DIVERGENCES),
                                                          ("js", True, 8)])
def test_divergences(name: str, stored: bool, expected: int) -> None:
    """O1: forward, the products write both logits; three reads for log-sum-exps, two for the values. Backward, the
    products write both again, both are read and one is written, and two products read it. With stored tokens the
    teacher's five and one of the student's fall away."""
    compare = Comparison(partial(DIVERGENCES[name], mix=0.3), 2.0, 4.0, V)
    generator = torch.Generator().manual_seed(1)
    states, teacher = torch.randn(S, D, generator=generator), Head(torch.randn(V, D, generator=generator))
    targets = top_k(states, teacher, 4, 2.0, V) if stored else FullTargets(states, teacher)
    found = passes(lambda head, hidden, ids: torch.cat(compare.per_token(hidden, head, ids, targets)), True)
    assert found == pytest.approx(expected, abs=0.05)
