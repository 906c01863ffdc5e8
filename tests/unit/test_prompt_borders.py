"""Batches whose sides do not end their prompts alike, or have none: each side keeps its own border of supervision."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers import tree
from published_batches import (
    coati_dpo,
    coati_kto,
    coati_sft,
    known,
    nemo_dpo,
    nemo_kto,
    openrlhf_dpo,
    openrlhf_kto,
    openrlhf_sft_with_lengths,
)
from tropism.data.batching.collate import Layout, collate, collate_leaves, occurrences
from tropism.data.batching.pack import build_trees, mismatched_trees, tokens_in_layout
from tropism.data.dataloaders.rows import BatchRows, remarks_on, rows_of_batch
from tropism.data.rows import EncodedRow
from tropism.data.tree import Completion, PromptTree, prompt_key, token_ids
from tropism.errors import DataError
from tropism.model.attention import attention
from tropism.model.language_model import LanguageModel, computing

PAD, EOS = 0, 9
ROWS = [known([1, 2], [3, EOS], [4, EOS], label=False), known([5], [6, 7, EOS], [8], label=True)]
VIEWS: dict[Callable[..., Any], Any] = {
    openrlhf_kto: "unpaired", coati_kto: "unpaired", nemo_kto: "unpaired", openrlhf_dpo: "paired", coati_dpo: "paired",
    nemo_dpo: "paired", coati_sft: "single", openrlhf_sft_with_lengths: "single"}


def read(batch: Any, collator: Callable[..., Any], keep_partners: bool = False) -> BatchRows:
    return rows_of_batch(batch, VIEWS[collator], number=3, keep_partners=keep_partners)


def check(row: EncodedRow, prompt: list[int], *completions: list[int], heads: Sequence[int] = (0, 0)) -> None:
    """A row with these ids, of which the first `heads` of each completion are not supervised."""
    assert row.prompt_ids.tolist() == prompt
    assert row.prompt_ids.dtype == np.int32
    for side, ids, head in zip(row.completions, completions, heads, strict=False):
        assert side.ids.tolist() == ids
        assert side.loss_mask.tolist() == [place >= head for place in range(len(ids))]


# --- what is read -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("collator", VIEWS)
def test_rows_without_a_prompt_count_from_their_second_token(collator: Any) -> None:
    """Nothing predicts the first token, which is context, as in the published trainers."""
    bare = known([], [6, 7, EOS], [6, 8], label=True)
    found = read(collator([ROWS[0], bare], PAD, "right"), collator).rows
    check(found[1], [6], [7, EOS], [8])
    assert remarks_on(found)[0].startswith("1 row without a prompt (first: batch 3 row 2)")
    assert not remarks_on(found[:1])
    with pytest.raises(DataError, match=r"^batch 3 row 2.*only the first token is supervised"):
        read(collator([ROWS[0], known([], [6], [6], label=True)], PAD, "right"), collator)


def pairs_of(collator: Any, chosen: list[int], rejected: list[int]) -> Any:
    """A batch whose second row has two prompts."""
    one, other = (collator([ROWS[0], replace(ROWS[1], prompt=prompt)], PAD, "right") for prompt in (chosen, rejected))
    return {name: (one if name.startswith("chosen") else other)[name] for name in one}


@pytest.mark.parametrize("collator", [coati_dpo, nemo_dpo])
@pytest.mark.parametrize(("chosen", "rejected", "shared", "warned"), [
    ([1, 2, 3], [1, 2, 4], 2, False), ([1, 2, 3], [1, 2], 2, False), ([1, 2], [1, 2, 3, 4], 2, False),
    ([1, 2, 3], [2, 3], 0, False), ([1, 2, 3], [1, 3], 1, False), ([1], [2], 0, False),  # truncated on the left
    ([1, 2, 3], [1, 4, 3], 1, True), ([1, 2, 3], [4, 5, 6, 7], 0, True)])
def test_pairs_whose_prompts_differ(collator: Any, chosen: list[int], rejected: list[int], shared: int,
                                    warned: bool) -> None:
    """Only prompts that have little in common are worth a sentence."""
    row, = (found := read(pairs_of(collator, chosen, rejected), collator)).rows[1:]
    heads = len(chosen) - shared, len(rejected) - shared
    check(row, chosen[:shared], [*chosen[shared:], 6, 7, EOS], [*rejected[shared:], 8], heads=heads)
    assert row.asked.tolist() == chosen
    assert row.prompt_key == prompt_key(token_ids(chosen))
    assert row.split_key == token_ids(chosen).tobytes()
    said = remarks_on(found.rows)
    assert len(said) == warned
    assert not warned or said[0].startswith("1 row whose sides have less than half of their prompts in common (fir")


def test_a_token_may_grow_over_the_border() -> None:
    """OpenRLHF measures the prompt alone but encodes it with the completion."""
    chosen, chosen_mask, reject, reject_mask, lengths = openrlhf_dpo(ROWS, PAD, "right")
    reject[0, 0, 1] = 8
    found = read((chosen, chosen_mask, reject, reject_mask, lengths), openrlhf_dpo)
    check(found.rows[0], [1], [2, 3, EOS], [8, 4, EOS], heads=(1, 1))
    check(found.rows[1], [5], [6, 7, EOS], [8])
    assert not remarks_on(found.rows)


@pytest.mark.parametrize("collator", [openrlhf_kto, coati_kto, nemo_kto])
def test_mismatched_rows_whose_prompt_differs(collator: Any) -> None:
    """Only where they are used."""
    batch = collator(ROWS, PAD, "right")
    if isinstance(batch, tuple):
        batch[0][2, 0, 1] = 8
    else:
        batch["kl_samples" if "kl_samples" in batch else "kl_input_ids"][0, 1] = 8
    plain, own = (read(batch, collator, keep).rows[0] for keep in (False, True))
    check(plain, [1, 2], [3, EOS])
    check(own, [1], [2, 3, EOS], heads=(1,))
    assert own.partner is not None
    assert own.partner.ids.tolist() == [8, *ROWS[1].completions[0]]
    assert own.partner.loss_mask.tolist() == [False, True, True, True]
    assert own.prompt_key == plain.prompt_key


# --- what is computed -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float64).eval()


def padded_alone(model: Any, side: Any, row: int) -> float:
    """The log-prob of one side of one row, as a published trainer computes it: logits of all, then labels shifted."""
    ids, mask, start = side
    text = ids[row, 0][mask[row, 0].bool()]
    with torch.no_grad(), attention(model, "sdpa"), computing(model, "fp64", model.device):
        logps = model(text[None]).logits[0, :-1].log_softmax(-1).gather(1, text[1:, None])[:, 0]
    return float(logps[max(0, start[row] - 1):].sum())


SHARED = [known([7, 8, 9, 10], [11, 12, 13], [14, 15]), known([7, 8, 9], [11, 12, 13], [14, 15]),
          known([], [21, 22, 23], [31, 32]), known([], [21, 22, 23], [21, 32]), known([5], [6], [6, 7])]
"""Rows with a border that the test moves, with no prompt, and with a first token in common."""


@pytest.mark.parametrize("layout", ["tree", "padded"])
def test_each_side_scores_as_if_alone(layout: Layout, model: Any) -> None:
    """Joint tokenisation changes the last tokens of the prompt, per side; the reference computes one side, padded."""
    chosen, chosen_mask, reject, reject_mask, lengths = openrlhf_dpo(SHARED, PAD, "right")
    reject[0, 0, 3], chosen[1, 0, 0] = 40, 41  # at the border; from the first token on
    batch = chosen, chosen_mask, reject, reject_mask, lengths
    rows = read(batch, openrlhf_dpo).rows
    assert [len(row.prompt_ids) for row in rows] == [3, 0, 0, 1, 1]
    placed = build_trees(rows, range(len(rows)))
    assert len(placed) == len(rows)  # what has no token in common is not one tree that no pack can hold
    trees = [entry.tree for entry in placed]
    packed = collate(trees, layout)
    assert packed.tokens == sum(tokens_in_layout(tree, layout) for tree in trees)
    assert occurrences(trees, [1] * 10, layout).numel() == packed.input_ids.numel()
    with torch.no_grad():
        found = LanguageModel(model, layout, "fp64", torch.device("cpu")).logps(packed).tolist()
    alone = [padded_alone(model, side, row) for row in range(len(rows))
             for side in ((chosen, chosen_mask, lengths), (reject, reject_mask, lengths))]
    assert found == pytest.approx(alone, abs=1e-10)
    assert packed.lengths.tolist() == [3, 2, 3, 2, 2, 1, 2, 1, 1, 2]


def test_mismatched_rows_continue_prompts_that_are_empty(model: Any) -> None:
    """In the pass over the mismatched completions only, after the prompts of the main pass."""
    ids, mask, labels, lengths = openrlhf_kto([known([4, 5], [6, 7]), known([3, 5], [8])], PAD, "right")
    ids[2, 0, 0] = 11
    rows = rows_of_batch((ids, mask, labels, lengths), "unpaired", number=1, keep_partners=True).rows
    assert [len(row.prompt_ids) for row in rows] == [0, 2]
    planted, partners = build_trees(rows, [0, 1]), mismatched_trees(rows, [0, 1], 64)
    trees = [[entry.tree for entry in entries] for entries in (planted, partners)]
    policy = LanguageModel(model, "tree", "fp64", torch.device("cpu"))
    main = collate(trees[0], "tree")
    earlier = policy.tree_pass(main, record=True)
    leaves = collate_leaves(trees[1], trees[0])
    with torch.no_grad():
        found = policy.logps(main, earlier).tolist()
        found += policy.logps(leaves, policy.tree_pass(leaves, earlier=earlier)).tolist()
    alone = [padded_alone(model, (ids, mask, lengths), row) for row in range(4)]
    assert found == pytest.approx(alone, abs=1e-10)


def test_many_completions_of_an_empty_prompt_beside_a_shared_one(model: Any) -> None:
    """Attention that merges prompts and own keys has nothing to merge for them."""
    empty = PromptTree(token_ids([]), tuple(
        Completion(token_ids([start, 21, 22]), np.array([False, True, True])) for start in (3, 4, 5)))
    shared = tree(list(range(7, 27)), *([word, 28, 29] for word in range(30, 42)))
    batch = collate([empty, shared], "tree")
    assert batch.segments is not None
    assert batch.segments.shared is not None
    both = [LanguageModel(model, layout, "fp64", torch.device("cpu")).logps(collate([empty, shared], layout)).tolist()
            for layout in ("tree", "padded")]
    assert both[0] == pytest.approx(both[1], abs=1e-10)


def test_trees_without_a_prompt() -> None:
    """From Python too: the first token of every completion is then context."""
    masked = Completion(token_ids([3, 4]), np.array([False, True]))
    assert PromptTree(token_ids([]), (masked,)).tokens == 1
    with pytest.raises(ValueError, match="a prompt of at least one token, or completions whose first token is not"):
        PromptTree(token_ids([]), (masked, Completion.supervised([5, 6])))
