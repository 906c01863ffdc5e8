"""A head divided over two processes of gloo, against one process: values, gradients, and what memory holds."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from logits_traffic import Largest
from processes import run_ranks
from tropism.losses.divergence import DIVERGENCES
from tropism.model.head import divergence
from tropism.model.head.divergence import Comparison, FullTargets, top_k
from tropism.model.head.logprob import Head, head_of
from tropism.model.head.vocab_parallel import UNDIVIDED, Columns, Divided

S, D, V, VOCABULARY, CHUNK = 48, 6, 127, 61, 4  # the second process has 63 columns, and none below the vocabulary


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def a_head(seed: int, rows: slice) -> Head:
    return Head(random(V, D, seed=seed)[rows], random(V, seed=seed + 1)[rows], 0.7, 5.0)


def results(kind: str, name: str, vocabulary: int, head: Head, teacher: Head) -> Iterator[Tensor]:
    """Values, then gradients by hidden states, weight and bias."""
    learns = kind != "frozen head"
    weight, bias = (leaf.clone().requires_grad_(learns) for leaf in (head.weight, head.bias))
    head = replace(head, weight=weight, bias=bias)
    hidden, others = random(S, D, seed=1).requires_grad_(), random(S, D, seed=2)
    ids = torch.randint(VOCABULARY, (S,), generator=torch.Generator().manual_seed(3))
    if kind in ("log-probs", "frozen head"):
        yield head.log_collisions(hidden, CHUNK)
        found: Sequence[Tensor] = (head.per_token_logps(hidden, ids, CHUNK),)
    else:
        compare = Comparison(partial(DIVERGENCES[name], mix=0.3), 2.0, 4.0, vocabulary)
        targets: Any = FullTargets(others, teacher) if kind == "exact" else top_k(others, teacher, 5, 2.0, vocabulary)
        if kind == "top-k":
            yield from (targets.ids, targets.logps, targets.tail)
        found = compare.per_token(hidden, head, ids, targets, CHUNK)
    yield from (one.detach() for one in found)
    total = sum((one * random(S, seed=8 + number)).sum() for number, one in enumerate(found))
    yield from torch.autograd.grad(total, (hidden, weight, bias) if learns else (hidden,))


CASES = [("log-probs", "", V), ("frozen head", "", V), *(
    (kind, name, vocabulary) for kind in ("exact", "top-k") for name, vocabulary in zip(
        DIVERGENCES, (V, 100, VOCABULARY, V, VOCABULARY), strict=True))]


def one_rank(rank: int, size: int, port: int, folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port)}
    from tropism.distributed import connect
    from tropism.distributed.vocab_group import Peers

    torch.set_num_threads(1)
    divergence._CPU_CHUNK = CHUNK * 64  # of top_k
    with connect():
        columns = Divided.of(V, Peers())
        rows = slice(columns.start, columns.start + columns.width)
        head, teacher = (replace(a_head(seed, rows), columns=Divided.of(V, Peers())) for seed in (10, 20))
        with Largest() as largest:
            found = [list(results(*case, head, teacher)) for case in CASES]
        torch.save({"found": found, "largest": largest.elements, "width": columns.width,
                    "of a model": of_a_model(columns)}, folder / f"{rank}.pt")


def of_a_model(columns: Columns) -> list[Tensor]:
    """A head whose weight torch has sharded: log-probs, and the gradient that the parameter gets; joined again."""
    sharded = a_head(10, slice(None)).weight
    if isinstance(columns, Divided):
        sharded = distribute_tensor(sharded, init_device_mesh("cpu", (columns.group.size,)), [Shard(0)])
    weight = torch.nn.Parameter(sharded)
    model = SimpleNamespace(get_output_embeddings=lambda: SimpleNamespace(weight=weight),
                            config=SimpleNamespace(get_text_config=SimpleNamespace))
    logps = head_of(model, columns=columns).per_token_logps(random(S, D, seed=1), torch.arange(S), CHUNK)
    logps.sum().backward()
    assert weight.grad is not None
    return [logps.detach(), weight.grad.full_tensor() if isinstance(weight.grad, DTensor) else weight.grad]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("columns")
    assert run_ranks(2, one_rank, folder) == [0, 0]
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("number", range(len(CASES)), ids=["-".join(map(str, case)) for case in CASES])
def test_two_processes_equal_one(ranks: list[dict[str, Any]], number: int) -> None:
    """O1, L2, V1: to 1e-12 in float64, and to the bit among them where both have the whole of something."""
    right = list(results(*CASES[number], a_head(10, slice(None)), a_head(20, slice(None))))
    ours, others = (rank["found"][number] for rank in ranks)
    divided = 0 if CASES[number][0] == "frozen head" else 2  # weight and bias
    for position, wanted in enumerate(right):
        got = ours[position]
        if position >= len(right) - divided:
            got = torch.cat((got, others[position]))
        else:
            assert torch.equal(got, others[position])
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_a_weight_that_torch_has_sharded(ranks: list[dict[str, Any]]) -> None:
    """X1: a DTensor parameter, divided as torch divides it, gets the gradient of its own rows."""
    for number, wanted in enumerate(of_a_model(UNDIVIDED)):
        assert torch.equal(*(rank["of a model"][number] for rank in ranks))
        torch.testing.assert_close(ranks[0]["of a model"][number], wanted, rtol=1e-12, atol=1e-12)


def test_no_process_has_the_logits_of_all_positions_or_columns(ranks: list[dict[str, Any]]) -> None:
    """O1: nothing larger than the rows that are here, or the hidden states, or one chunk's local logits."""
    assert [rank["width"] for rank in ranks] == [64, 63]
    for rank in ranks:
        # The weight is [64, D]; a chunk's logits with the spare column that takes ids of other processes [CHUNK, 65].
        assert rank["largest"] <= max(64 * D, S * D, CHUNK * 65) < min(S * 63, CHUNK * V)
