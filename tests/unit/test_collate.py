"""The tensors of a forward pass against a construction by hand."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import tree
from tropism.data.batching.collate import Batch, collate, collate_leaves
from tropism.data.tree import Completion, PromptTree


def masked(ids: list[int], bits: list[bool]) -> Completion:
    whole = Completion.supervised(ids)
    return Completion(whole.ids, whole.loss_mask & bits)


@st.composite
def trees(draw) -> list[PromptTree]:
    found = []
    for _ in range(draw(st.integers(1, 4))):
        prompt = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
        distinct: dict[bytes, Completion] = {}
        for _ in range(draw(st.integers(1, 4))):
            ids = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
            bits = draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)).filter(any))
            completion = masked(ids, bits)
            distinct[completion.key] = completion
        found.append(tree(prompt, *distinct.values()))
    return found


def sequences(forest: Sequence[PromptTree]) -> list[tuple[list[int], int, Completion]]:
    """For each completion: prompt + completion ids, the prompt's length, the completion."""
    return [([*t.prompt_ids.tolist(), *c.ids.tolist()], len(t.prompt_ids), c) for t in forest for c in t.completions]


def check_labels(batch: Batch, forest: Sequence[PromptTree]) -> None:
    """Targets, owners and lengths, in order; by walking over every completion token."""
    targets, owners = [], []
    for number, (_, _, completion) in enumerate(sequences(forest)):
        for token, counts in zip(completion.ids.tolist(), completion.loss_mask.tolist(), strict=True):
            if counts:
                targets.append(token)
                owners.append(number)
    assert batch.target_ids.tolist() == targets
    assert batch.completion_index.tolist() == owners
    assert batch.lengths.tolist() == [c.length for _, _, c in sequences(forest)]
    assert batch.lengths.sum() == len(targets)


def visible_path(batch: Batch, query: int) -> list[int]:
    """Tokens that a query position sees, itself last, by the rule of `Segments`; and their positions must count up."""
    assert batch.segments is not None
    segments = batch.segments
    segment = next(s for s in range(len(segments.query_lengths))
                   if segments.cu_queries[s] <= query < segments.cu_queries[s + 1])
    keys = segments.key_index[segments.cu_keys[segment] : segments.cu_keys[segment + 1]]
    behind = int(segments.cu_queries[segment + 1]) - 1 - query  # the last query is aligned to the last key
    seen = keys[: len(keys) - behind]
    assert batch.position_ids[0, seen].tolist() == list(range(len(seen)))
    assert int(seen[-1]) == query
    return batch.input_ids[0, seen].tolist()


@given(trees())
def test_tree_layout(forest: list[PromptTree]) -> None:
    """P1: each supervised token is predicted from exactly prompt + own completion up to it, at flat positions."""
    batch = collate(forest, "tree")
    check_labels(batch, forest)
    assert batch.attention_mask is None
    assert batch.input_ids.shape == batch.position_ids.shape == (1, batch.tokens)
    assert batch.tokens == sum(t.tokens for t in forest)
    queries = batch.predict_index.tolist()
    at = 0
    for ids, depth, completion in sequences(forest):
        for offset in range(len(completion.ids)):
            if completion.loss_mask[offset]:
                assert visible_path(batch, queries[at]) == ids[: depth + offset]
                at += 1
    assert at == len(queries)


@given(trees())
def test_segments_add_up(forest: list[PromptTree]) -> None:
    """DESIGN 4: one segment per prompt and per completion with an input of its own; sums are T and K."""
    segments = collate(forest, "tree").segments
    assert segments is not None
    wanted_queries, wanted_keys = [], []
    for t in forest:
        wanted_queries.append(len(t.prompt_ids))
        wanted_keys.append(len(t.prompt_ids))
        for number, c in enumerate(t.completions):
            if len(c.ids) > 1 and t.carriers[number] == number:
                wanted_queries.append(len(c.ids) - 1)
                wanted_keys.append(len(t.prompt_ids) + len(c.ids) - 1)
    assert list(segments.query_lengths) == wanted_queries
    assert list(segments.key_lengths) == wanted_keys
    for cumulative, lengths in ((segments.cu_queries, wanted_queries), (segments.cu_keys, wanted_keys)):
        assert cumulative.dtype == torch.int32
        assert cumulative.tolist() == [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    assert segments.key_index.dtype == torch.int64
    assert len(segments.key_index) == sum(wanted_keys)


@given(trees(), st.data())
def test_leaves_continue_the_prompts_of_another_batch(roots: list[PromptTree], data) -> None:
    """K2: completions without their prompts: every token sees the other batch's prompt and its own completion."""
    others = data.draw(st.lists(trees(), min_size=1, max_size=1))[0]
    leaves = [PromptTree(root.prompt_ids, others[number % len(others)].completions)
              for number, root in enumerate(roots)]
    whole, batch = collate(roots, "tree"), collate_leaves(leaves, roots)
    check_labels(batch, leaves)
    assert batch.tokens == sum(leaf.tokens - len(leaf.prompt_ids) for leaf in leaves)
    assert batch.segments is not None
    ids = torch.cat((whole.input_ids[0], batch.input_ids[0]))
    positions = torch.cat((whole.position_ids[0], batch.position_ids[0]))
    owner = {whole.tokens + query: segment for segment in range(len(batch.segments.query_lengths))
             for query in range(batch.segments.cu_queries[segment], batch.segments.cu_queries[segment + 1])}
    queries = iter(batch.predict_index.tolist())
    for sequence, depth, completion in sequences(leaves):
        for offset in range(len(completion.ids)):
            if not completion.loss_mask[offset]:
                continue
            query = next(queries)
            if offset == 0:  # predicted by the prompt's last token, which the other batch has computed
                assert query < whole.tokens
                assert visible_path(whole, query) == sequence[:depth]
                continue
            segment = owner[query]
            keys = batch.segments.key_index[batch.segments.cu_keys[segment] : batch.segments.cu_keys[segment + 1]]
            seen = keys[: len(keys) - (whole.tokens + int(batch.segments.cu_queries[segment + 1]) - 1 - query)]
            assert int(seen[-1]) == query
            assert ids[seen].tolist() == sequence[: depth + offset]
            assert positions[seen].tolist() == list(range(depth + offset))


@given(trees())
def test_padded_layout(forest: list[PromptTree]) -> None:
    """P1, M4: one line per completion, padded on the right by the mask and by nothing else."""
    batch = collate(forest, "padded")
    check_labels(batch, forest)
    assert batch.segments is None
    assert batch.attention_mask is not None
    lines = [ids[:-1] for ids, _, _ in sequences(forest)]
    width = max(map(len, lines))
    assert batch.input_ids.tolist() == [line + [0] * (width - len(line)) for line in lines]
    assert batch.attention_mask.tolist() == [[1] * len(line) + [0] * (width - len(line)) for line in lines]
    assert batch.position_ids.tolist() == [list(range(width))] * len(lines)
    assert batch.tokens == sum(map(len, lines))
    wanted = [number * width + depth + offset - 1 for number, (_, depth, c) in enumerate(sequences(forest))
              for offset in range(len(c.ids)) if c.loss_mask[offset]]
    assert batch.predict_index.tolist() == wanted


def test_tree_layout_in_numbers() -> None:
    """DESIGN 4: `[prompt, completion, completion]`, positions restart after the prompt, last tokens predict nothing."""
    batch = collate([tree([1, 2], [3, 4, 5], [6], [7, 8]), tree([9], [3, 3])], "tree")
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 7, 9, 3]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 2, 0, 1]]
    assert batch.segments is not None
    assert batch.segments.query_lengths == (2, 2, 1, 1, 1)
    assert batch.segments.key_lengths == (2, 4, 3, 1, 2)
    assert batch.segments.key_index.tolist() == [0, 1, 0, 1, 2, 3, 0, 1, 4, 5, 5, 6]
    assert batch.predict_index.tolist() == [1, 2, 3, 1, 1, 4, 5, 6]
    assert batch.target_ids.tolist() == [3, 4, 5, 6, 7, 8, 3, 3]
    assert batch.completion_index.tolist() == [0, 0, 0, 1, 2, 2, 3, 3]
    assert batch.lengths.tolist() == [3, 1, 2, 2]


@pytest.mark.parametrize("layout", ["tree", "padded"])
def test_completion_of_one_token(layout: str) -> None:
    """P1: it adds no input; the prompt's last token predicts it."""
    batch = collate([tree([4, 5, 6], [7])], layout)
    assert batch.input_ids.tolist() == [[4, 5, 6]]
    assert batch.predict_index.tolist() == [2]
    assert batch.target_ids.tolist() == [7]
    assert batch.tokens == 3


@pytest.mark.parametrize("layout", ["tree", "padded"])
def test_empty_batch(layout: str) -> None:
    """X1: a rank without trees runs a forward of one token that supervises nothing and counts nothing."""
    batch = collate([], layout)
    assert batch.input_ids.shape == batch.position_ids.shape == (1, 1)
    assert batch.tokens == 0
    for name in ("predict_index", "target_ids", "completion_index", "lengths"):
        values = getattr(batch, name)
        assert values.dtype == torch.int64
        assert values.shape == (0,)
    if layout == "tree":
        assert visible_path(batch, 0) == [0]


@given(trees(), st.sampled_from(["tree", "padded"]))
def test_dtypes(forest: list[PromptTree], layout: str) -> None:
    """Indices are int64 whatever the data, as embedding and gather want them."""
    batch = collate(forest, layout)
    for name in ("input_ids", "position_ids", "predict_index", "target_ids", "completion_index", "lengths"):
        assert getattr(batch, name).dtype == torch.int64, name
