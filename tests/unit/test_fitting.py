"""Passes without gradients: a pack that does not fit into memory is divided; a completion that does not is named."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import tree
from tropism.data.batching.collate import Batch
from tropism.data.tree import PromptTree
from tropism.distributed import World
from tropism.distributed.mesh import Mesh
from tropism.errors import TropismError
from tropism.train.out_of_memory import PackOutOfMemory, naming, undivided
from tropism.train.score_packs import Fitting, score_trees

WORLD = World(0, 1, torch.device("cpu"))


class Small:
    """A model whose passes fit up to so many tokens. A score is the ids of prompt and completion."""

    def __init__(self, tokens: int, layout: str = "tree") -> None:
        self.model: Any = SimpleNamespace(layout=layout, device=torch.device("cpu"))
        self.tokens, self.failed, self.passes = tokens, 0, 0

    def score(self, trees: Sequence[PromptTree], batch: Batch) -> list[tuple[int, ...]]:
        assert not torch.is_grad_enabled()
        self.passes += 1
        if batch.tokens > self.tokens:
            self.failed += 1
            raise RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes.")
        return ids(trees)


def ids(trees: Sequence[PromptTree]) -> list[tuple[int, ...]]:
    return [(*one.prompt_ids.tolist(), *completion.ids.tolist()) for one in trees for completion in one.completions]


def pack(*widths: int) -> list[PromptTree]:
    return [tree([number, 1, 2], *([number, 9, *([7] * k)] for k in range(width)))
            for number, width in enumerate(widths)]


@settings(max_examples=15)  # each that runs out of memory collects garbage
@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(12, 60), st.sampled_from(["tree", "padded"]))
def test_results_keep_their_order(widths: list[int], tokens: int, layout: str) -> None:
    small = Small(tokens, layout)
    assert Fitting(small.model, small.score, WORLD)(pack(*widths)) == ids(pack(*widths))


def test_later_packs_of_that_size_are_divided_at_once() -> None:
    small = Small(20)
    fitting = Fitting(small.model, small.score, WORLD)
    fitting(pack(1, 1, 1, 1, 1, 1, 1, 1))
    failed = small.failed
    assert failed > 0
    for _ in range(3):
        fitting(pack(1, 1, 1, 1, 1, 1, 1, 1))
    assert small.failed == failed


def test_a_completion_that_does_not_fit_is_named() -> None:
    small = Small(6)
    with pytest.raises(TropismError, match=r"rows.jsonl:7: 8 tokens do not fit into memory, in a pass over one "
                                           r"completion without gradients \(DefaultCPUAllocator: .*--max-length"):
        score_trees(small.model, [tree([1], [2, 3]), tree([1, 2, 3, 4], [5, 6, 7, 8, 9])], 100, small.score, WORLD,
                    place=lambda one: f"rows.jsonl:{len(one.prompt_ids) + 3}")


def test_other_errors_are_not_tried_again() -> None:
    small = Small(10**9)

    def broken(trees: Sequence[PromptTree], batch: Batch) -> list[int]:
        small.passes += 1
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        Fitting(small.model, broken, WORLD)(pack(2, 2))
    assert small.passes == 1


def test_a_sharded_model_is_not_left_alone() -> None:
    """The other processes wait inside the pass."""
    small = Small(5)
    world = World(0, 2, torch.device("cpu"), mesh=object.__new__(Mesh))
    with pytest.raises(PackOutOfMemory):
        Fitting(small.model, small.score, world)(pack(2, 2))
    assert small.passes == 1


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError(
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), RuntimeError("std::bad_alloc")])
def test_a_pack_that_ran_out_of_memory_is_known(error: Exception) -> None:
    inner, outer = pack(1), pack(1, 1)
    with pytest.raises(PackOutOfMemory) as raised, naming(outer), naming(inner):
        raise error
    assert raised.value.trees == tuple(inner)
    with pytest.raises(TropismError, match="out of memory in the update of step 4, which may"), undivided(4):
        raise error
