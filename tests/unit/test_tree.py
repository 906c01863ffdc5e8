"""Trees whose completions begin alike: what stands in another's input is computed once, and exactly."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from helpers import row, tree
from tropism.data.batching.collate import collate, collate_leaves
from tropism.data.batching.pack import build_trees
from tropism.data.tree import Completion, PromptTree
from tropism.model.language_model import LanguageModel


def masked(ids: list[int], *bits: bool) -> Completion:
    whole = Completion.supervised(ids)
    return Completion(whole.ids, whole.loss_mask & list(bits))


@st.composite
def completions(draw, most: int = 7) -> Completion:
    ids = draw(st.lists(st.integers(1, 2), min_size=1, max_size=most))
    return masked(ids, *draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)).filter(any)))


FORKS = st.lists(completions(), min_size=1, max_size=5, unique_by=lambda completion: completion.key)


# --- beginnings -------------------------------------------------------------------------------------------------------


@given(completions(), st.integers(1, 9))
def test_the_first_supervised_tokens(whole: Completion, count: int) -> None:
    """L2: LD-DPO: as many supervised tokens as asked for and no id behind the last of them; itself if it has fewer."""
    part = whole.first(count)
    assert part.length == min(count, whole.length)
    assert part.ids.tolist() == whole.ids[: len(part.ids)].tolist()
    assert part.loss_mask.tolist() == whole.loss_mask[: len(part.ids)].tolist()
    assert part is whole if count >= whole.length else part.loss_mask[-1]


def test_pairs_with_the_beginnings_of_both_sides() -> None:
    """L2: LD-DPO: chosen, rejected, then each cut to the shorter side's supervised tokens; counted as a pair still."""
    pair = row([1, 2], [3, 4, 5, 6], [7, 8])
    longer = pair.with_shared_lengths()
    assert [side.ids.tolist() for side in longer.completions] == [[3, 4, 5, 6], [7, 8], [3, 4], [7, 8]]
    assert longer.completions[3] is longer.completions[1]
    assert longer.flat_tokens == pair.flat_tokens == 2 + 4 + 2 + 2
    holes = masked([3, 4, 5, 6, 7], False, True, False, True, True)
    rejected = masked([8, 8, 8, 8], True, False, True, False)
    mixed = replace(pair, completions=(holes, rejected)).with_shared_lengths()  # 3 and 2 supervised tokens
    assert [side.ids.tolist() for side in mixed.completions[2:]] == [[3, 4, 5, 6], [8, 8, 8, 8]]


# --- carriers ---------------------------------------------------------------------------------------------------------


def test_carriers_by_hand() -> None:
    """Promise 2: an input that begins another's input is carried by it; the last token is no input."""
    assert tree([1], [5, 6, 7], [5, 6], [5], [6, 6, 6]).carriers == (0, 0, 0, 3)
    assert tree([1], [5], [5, 6], [5, 6, 7]).carriers == (2, 2, 2)
    assert tree([1], [5, 6, 7], [5, 6, 8]).carriers == (0, 0)  # they differ in what predicts nothing
    assert tree([1], [5, 6, 7], [5, 9, 7]).carriers == (0, 1)
    assert tree([1], [5], [9]).carriers == (0, 0)  # no input at all
    ids = [5, 6, 7]
    assert tree([1], masked(ids, True, False, True), masked(ids, False, True, True)).carriers == (0, 0)


@given(FORKS)
def test_carriers_hold_what_they_carry_and_nothing_twice(forks: list[Completion]) -> None:
    """Promise 2: each input stands in its carrier's, a carrier carries itself, and no input begins another's."""
    found = tree([3, 3], *forks)
    inputs = [fork.ids[:-1].tolist() for fork in forks]
    for number, carrier in enumerate(found.carriers):
        assert found.carriers[carrier] == carrier
        assert inputs[carrier][: len(inputs[number])] == inputs[number]
    whole = [ids for number, ids in enumerate(inputs) if found.carriers[number] == number]
    for one in range(len(whole)):
        assert not any(other != one and whole[other][: len(whole[one])] == whole[one] for other in range(len(whole)))
    assert found.tokens == 2 + sum(map(len, whole)) == collate([found], "tree").tokens


def test_beginnings_cost_nothing() -> None:
    """Promise 2: a pair with the beginnings of both sides is packed as large as the pair alone."""
    pair = row([1, 2, 3], [4, 5, 6, 7], [8, 9])
    (plain,), (longer,) = build_trees([pair], [0]), build_trees([pair.with_shared_lengths()], [0])
    assert longer.tree.tokens == plain.tree.tokens == 3 + 3 + 1
    assert longer.members == ((0, 1, 2, 1),)
    batch = collate([longer.tree], "tree")
    assert batch.tokens == 7
    assert batch.lengths.tolist() == [4, 2, 2]
    assert len(batch.segments.query_lengths) == 3  # prompt, chosen, rejected


# --- exactness --------------------------------------------------------------------------------------------------------

IDS = st.integers(5, 8)  # few ids, so that many completions begin alike
FOREST = st.lists(st.tuples(
    st.lists(st.integers(5, 101), min_size=1, max_size=6),
    st.lists(st.lists(IDS, min_size=1, max_size=6), min_size=1, max_size=3),
    st.lists(st.integers(1, 5), max_size=3)), min_size=1, max_size=3)


def forest_of(parts: list[tuple[list[int], list[list[int]], list[int]]]) -> list[PromptTree]:
    """Trees with completions, and beginnings of them, some with unsupervised tokens."""
    forest = []
    for prompt, texts, cuts in parts:
        whole = [Completion.supervised(ids) for ids in texts]
        forks = [*whole, *(whole[n % len(whole)].first(cut) for n, cut in enumerate(cuts)),
                 *(masked(ids, *(i % 2 == 1 for i in range(len(ids)))) for ids in texts[:1] if len(ids) > 1)]
        forest.append(tree(prompt, *{fork.key: fork for fork in forks}.values()))
    return forest


@pytest.fixture(scope="module")
def module(tiny_model_dir: Path) -> Any:
    """The tiny model in float64, with weights so large that tokens matter."""
    found = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.mul_(6.0 if parameter.dim() == 2 else 1.0)
    return found


def logps_and_gradient(module: Any, layout: Any, batches: list[list[PromptTree]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of all completions, and the gradient of a sum of them in which each has its own weight."""
    model = LanguageModel(module, layout, "fp64", torch.device("cpu"))
    logps = torch.cat([model.logps(collate(batch, layout)) for batch in batches])
    module.zero_grad()
    (logps * torch.linspace(-1.0, 2.0, len(logps), dtype=torch.float64)).sum().backward()
    return logps.detach(), torch.cat([weight.grad.flatten().clone() for weight in module.parameters()])


@given(FOREST)
def test_carried_completions_are_exact(module: Any, parts: Any) -> None:
    """P1, L1: log-probs and gradients of trees with beginnings equal those of every completion computed alone."""
    forest = forest_of(parts)
    alone = [[PromptTree(entry.prompt_ids, (fork,))] for entry in forest for fork in entry.completions]
    wanted, slope = logps_and_gradient(module, "padded", alone)
    for layout in ("tree", "padded"):
        logps, gradient = logps_and_gradient(module, layout, [forest])
        torch.testing.assert_close(logps, wanted, rtol=1e-6, atol=1e-6)
        assert float((gradient - slope).norm()) <= 1e-6 * (float(slope.norm()) + 1.0)


def test_carried_leaves_are_exact(module: Any) -> None:
    """K2, P1: mismatched completions that begin alike, as the continuation of another pass's prompts."""
    roots = [tree([9, 8, 7], [20, 21, 1]), tree([30], [31, 1], [32, 33, 1])]
    leaves = [tree([9, 8, 7], [40, 41, 42], [40, 41], [40]), tree([30], [50, 51], [50, 52, 53])]
    model = LanguageModel(module, "tree", "fp64", torch.device("cpu"))
    with torch.no_grad():
        whole = collate(roots, "tree")
        earlier = model.tree_pass(whole, record=True)
        model.logps(whole, earlier)
        batch = collate_leaves(leaves, roots)
        assert batch.tokens == 2 + 2  # [50] stands in [50, 52]
        found = model.logps(batch, model.tree_pass(batch, earlier=earlier))
        alone = [collate([PromptTree(entry.prompt_ids, (fork,))], "tree") for entry in leaves
                 for fork in entry.completions]
        torch.testing.assert_close(found, torch.cat([model.logps(one) for one in alone]), rtol=1e-6, atol=1e-6)


def test_many_completions_of_one_prompt_are_told_apart_at_once() -> None:
    """Tens of thousands of answers to one prompt, as the reference pass has them, half of them beginnings of others."""
    longer = [[7, *divmod(number, 97), 5, 1] for number in range(10_000)]
    whole = tree([1], *longer, *([*ids[:3], 1] for ids in longer))
    assert whole.carriers[:10_000] == tuple(range(10_000))
    assert whole.carriers[10_000:] == tuple(range(10_000))
