"""Rows to trees, trees to packs and ranks: nothing is lost, nothing is split, and nothing is computed twice."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from helpers import row, tree
from tropism.data.batching.pack import (
    assign_to_ranks,
    balance,
    best_fit,
    build_trees,
    cost,
    mismatched_trees,
    packs_needed,
    partners,
    scoring_packs,
    stretched_budget,
    tokens_in_layout,
)
from tropism.data.rows import EncodedRow
from tropism.data.tree import Completion, PromptTree, score_key

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=4)
PAIRS = st.tuples(TOKENS, TOKENS, TOKENS).map(lambda parts: row(*parts))
SINGLES = st.tuples(TOKENS, TOKENS, st.booleans()).map(lambda p: row(p[0], p[1], desirable=p[2]))
ROWS = st.lists(PAIRS, min_size=1, max_size=12) | st.lists(SINGLES, min_size=1, max_size=12)
KTO_ROWS = st.lists(SINGLES, min_size=2, max_size=12).filter(lambda rows: len({r.prompt_key for r in rows}) > 1)
LONGEST = 9  # more than any prompt above, so that a mismatched completion keeps at least one token


def flat(ids: PromptTree | EncodedRow, completion: Completion) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(ids.prompt_ids.tolist()), tuple(completion.ids.tolist())


@given(ROWS, st.randoms(use_true_random=False))
def test_plant_loses_and_splits_nothing(rows: list[EncodedRow], random) -> None:
    """L1: every row is in one tree, and its members are its own completions, in its order."""
    indices = list(range(len(rows)))
    random.shuffle(indices)
    planted = build_trees(rows, indices)
    assert sorted(index for entry in planted for index in entry.rows) == sorted(indices)
    for entry in planted:
        for index, members in zip(entry.rows, entry.members, strict=True):
            assert [flat(entry.tree, entry.tree.completions[position]) for position in members] == [
                flat(rows[index], completion) for completion in rows[index].completions]


@given(ROWS)
def test_plant_computes_each_prompt_and_completion_once(rows: list[EncodedRow]) -> None:
    """DESIGN, Rows and steps: equal prompts share a tree, equal completions of it are one, and no other is there."""
    planted = build_trees(rows, range(len(rows)))
    found = [flat(entry.tree, completion) for entry in planted for completion in entry.tree.completions]
    assert len({tuple(entry.tree.prompt_ids.tolist()) for entry in planted}) == len(planted)
    assert Counter(found) == dict.fromkeys({flat(r, completion) for r in rows for completion in r.completions}, 1)


def test_duplicates_count_though_computed_once() -> None:
    """DESIGN, Rows and steps: three equal rows are one completion with three members."""
    rows = [row([1, 2], [3, 4], desirable=True), row([1, 2], [3, 4], desirable=False),
            row([1, 2], [5], desirable=True), row([1, 2], [3, 4], desirable=True)]
    (entry,) = build_trees(rows, [0, 1, 2, 3])
    assert len(entry.tree.completions) == 2
    assert entry.members == ((0,), (0,), (1,), (0,))
    assert entry.tree.tokens == 2 + 1 + 0


def test_equal_ids_with_other_masks_are_other_completions() -> None:
    """L1: two rows that supervise different tokens of one text must not share a log-prob."""
    ids = Completion.supervised([3, 4, 5])
    last = Completion(ids.ids, ids.loss_mask & [False, False, True])
    rows = [row([1], [3, 4, 5], desirable=True), row([1], [3, 4, 5], desirable=True)]
    rows[1] = EncodedRow("x", "x", rows[1].prompt_ids, (last,), True, b"")
    (entry,) = build_trees(rows, [0, 1])
    assert entry.members == ((0,), (1,))
    assert [completion.length for completion in entry.tree.completions] == [3, 1]


@given(KTO_ROWS, st.integers(5, LONGEST), st.randoms(use_true_random=False))
def test_mismatched_trees_hold_each_partner_as_often_as_it_is_one(
    rows: list[EncodedRow], max_length: int, random,
) -> None:
    """K1, K2: the multiset of (prompt, partner's completion cut to what the prompt leaves), over units."""
    indices = list(range(len(rows)))
    random.shuffle(indices)
    partner_of = partners([rows[index].prompt_key for index in indices])
    wanted: Counter = Counter()
    for position, index in enumerate(indices):
        prompt, other = flat(rows[index], rows[indices[partner_of[position]]].completions[0])
        wanted[prompt, other[: max_length - len(prompt)]] += 1
    found: Counter = Counter()
    for entry in mismatched_trees(rows, indices, max_length):
        assert len(entry.tree.prompt_ids) + max(len(c.ids) for c in entry.tree.completions) <= max_length
        for completion, count in zip(entry.tree.completions, entry.counts, strict=True):
            found[flat(entry.tree, completion)] += count
    assert found == wanted
    assert sum(found.values()) == len(rows)


@given(KTO_ROWS)
def test_mismatched_trees_stand_in_the_order_of_the_trees(rows: list[EncodedRow]) -> None:
    """A tree and its mismatched tree go to the same rank: they are found by their position."""
    indices = range(len(rows))
    planted, partnered = build_trees(rows, indices), mismatched_trees(rows, indices, LONGEST)
    assert [entry.tree.prompt_ids.tolist() for entry in planted] == [
        entry.tree.prompt_ids.tolist() for entry in partnered]


def test_mismatched_completion_with_a_late_answer_is_still_scored() -> None:
    """K1: where the cut leaves nothing supervised, what is left counts instead, so that the unit keeps a partner."""
    late = Completion.supervised([3, 4, 5, 6])
    late = Completion(late.ids, late.loss_mask & [False, False, False, True])
    long = row([1, 1, 1], [2], desirable=True)
    other = EncodedRow("o", "o", row([9], [1]).prompt_ids, (late,), False, b"")
    entry = mismatched_trees([long, other], [0, 1], 5)[0]
    assert entry.tree.completions[0].ids.tolist() == [3, 4]
    assert entry.tree.completions[0].length == 2


def with_partner(entry: EncodedRow, *ids: int) -> EncodedRow:
    return replace(entry, partner=Completion.supervised(list(ids)))


def test_partners_that_came_with_the_rows_are_taken() -> None:
    """K1, K2: in place of other rows' completions, each counted for its own unit, cut to what the prompt leaves."""
    rows = [with_partner(row([1, 2], [3], desirable=True), 7, 8, 9),
            with_partner(row([4], [5, 6], desirable=False), 7, 8, 9),
            with_partner(row([1, 2], [5], desirable=False), 6), with_partner(row([1, 2], [6], desirable=True), 7, 8, 9)]
    found = mismatched_trees(rows, [0, 1, 2, 3], 4)
    assert [[completion.ids.tolist() for completion in entry.tree.completions] for entry in found] == [
        [[7, 8], [6]], [[7, 8, 9]]]
    assert [entry.counts for entry in found] == [(2, 1), (1,)]
    assert [entry.tree.prompt_ids.tolist() for entry in found] == [
        entry.tree.prompt_ids.tolist() for entry in build_trees(rows, range(4))]


def test_given_partners_need_no_second_prompt() -> None:
    """K4: a step of one prompt has a reference point where every row brought its partner."""
    rows = [with_partner(row([1], [3], desirable=True), 7), with_partner(row([1], [4], desirable=False), 8)]
    entry, = mismatched_trees(rows, [1, 0], LONGEST)
    assert [completion.ids.tolist() for completion in entry.tree.completions] == [[8], [7]]
    with pytest.raises(ValueError, match="two distinct prompts"):
        mismatched_trees([rows[0], row([1], [4], desirable=False)], [0, 1], LONGEST)


def test_partners_of_some_rows_only_are_not_mixed_with_others() -> None:
    """K2: one rule for all units of a step: as soon as one row came without, all take other rows' completions."""
    rows = [with_partner(row([1], [3], desirable=True), 7), row([2], [4], desirable=False)]
    assert [entry.tree.completions[0].ids.tolist() for entry in mismatched_trees(rows, [0, 1], LONGEST)] == [[4], [3]]


@given(KTO_ROWS)
def test_given_partners_are_scored_as_those_of_the_step_are(rows: list[EncodedRow]) -> None:
    """K2: bringing along the very completions that the step would take changes nothing."""
    partner_of = partners([entry.prompt_key for entry in rows])
    given = [replace(entry, partner=rows[partner_of[i]].completions[0]) for i, entry in enumerate(rows)]
    found, wanted = (mismatched_trees(some, range(len(rows)), 6) for some in (given, rows))
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.counts == theirs.counts
        assert ours.tree.score_keys == theirs.tree.score_keys


SIZES = st.lists(st.integers(1, 30), max_size=40)


@given(SIZES, st.integers(1, 40))
@example([40, 1, 39], 40)
def test_packs_hold_everything_within_the_budget(sizes: list[int], budget: int) -> None:
    """DESIGN, Rows and steps: a tree is in one pack; only a single tree may exceed the budget."""
    packs = best_fit(sizes, budget)
    assert sorted(index for pack in packs for index in pack) == list(range(len(sizes)))
    for pack in packs:
        assert pack == sorted(pack)
        assert sum(sizes[index] for index in pack) <= budget or len(pack) == 1


@given(SIZES, st.integers(1, 40))
def test_packs_are_not_wasteful(sizes: list[int], budget: int) -> None:
    """First fit: no two packs could be one, so at most twice as many as needed."""
    fills = sorted(sum(sizes[index] for index in pack) for pack in best_fit(sizes, budget))
    assert len(fills) < 2 or fills[0] + fills[1] > budget


@given(SIZES, st.integers(1, 60), st.integers(0, 3))
@example([40, 1, 39], 40, 0)
def test_balanced_packs_hold_everything_within_the_stretched_budget(sizes: list[int], budget: int, more: int) -> None:
    """Beyond the budget only where that saves a pack, and never more packs than without it."""
    strict, needed = best_fit(sizes, budget), packs_needed(sizes, budget)
    packs = balance(needed, sizes, budget, len(needed) + more)
    assert len(packs) == len(needed) + more
    assert sorted(index for pack in packs for index in pack) == list(range(len(sizes)))
    most = stretched_budget(budget) if len(needed) < len(strict) else budget
    for pack in packs:
        assert pack == sorted(pack)
        assert sum(sizes[index] for index in pack) <= most or len(pack) == 1


def test_a_small_rest_gets_no_pack_of_its_own() -> None:
    """16,384 tokens a pack: 33,260 tokens are two passes of equal size, not two full ones and one of 505 tokens."""
    sizes = [1000] * 32 + [380, 375, 505]
    assert sorted(sum(sizes[i] for i in pack) for pack in best_fit(sizes, 16384)) == [505, 16375, 16380]
    packs = balance(packs_needed(sizes, 16384), sizes, 16384, 2)
    assert sorted(sum(sizes[i] for i in pack) for pack in packs) == [16505, 16755]
    assert balance([[0, 1], [2]], [5, 5, 5], 10, 2) == [[0, 2], [1]]  # ties by position, on every process alike
    assert balance([], [], 10, 0) == []
    assert balance([], [], 10, 2) == [[], []]


@given(SIZES, st.integers(1, 8))
def test_shares_are_complete_and_balanced(sizes: list[int], ranks: int) -> None:
    """X1: every tree on one rank, any number of ranks, and no rank exceeds another by more than one tree."""
    shares = assign_to_ranks([float(entry) for entry in sizes], ranks)
    assert len(shares) == ranks
    assert sorted(index for indices in shares for index in indices) == list(range(len(sizes)))
    loads = [sum(sizes[index] for index in indices) for indices in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_share_and_fill_are_pure() -> None:
    """C1: ties are broken by position, so that every rank comes to the same shares."""
    assert assign_to_ranks([2.0, 2.0, 2.0, 1.0], 2) == [[0, 2], [1, 3]]
    assert best_fit([3, 3, 3, 3], 6) == [[0, 1], [2, 3]]
    assert assign_to_ranks([], 3) == [[], [], []]
    assert best_fit([], 5) == []


def test_size_by_layout() -> None:
    """Promise 2: the tree computes the prompt once, the padded layout once per completion."""
    three = tree([1] * 10, [1, 2], [3], [4, 5, 6])
    assert tokens_in_layout(three, "tree") == 10 + 1 + 0 + 2
    assert tokens_in_layout(three, "padded") == 11 + 10 + 12


@pytest.mark.parametrize(("less", "more"), [
    (tree([1], [2, 3]), tree([1], [2, 3, 4])),
    (tree([1], [2]), tree([1, 1], [2])),
    (tree([1], [2, 3]), tree([1], [2, 3], [3, 3])),
])
def test_cost_grows_with_the_tree(less: PromptTree, more: PromptTree) -> None:
    """Shares are balanced by it."""
    assert 0 < cost(less) < cost(more)


@pytest.mark.parametrize(("prompt", "completions"), [
    pytest.param([], [[1]], id="no prompt"),
    pytest.param([1], [], id="no completion"),
    pytest.param([1], [[2], [2]], id="equal completions"),
])
def test_a_tree_is_validated(prompt: list[int], completions: Sequence[list[int]]) -> None:
    """A tree that exists is a tree that can be trained on."""
    with pytest.raises(ValueError, match="tree"):
        tree(prompt, *completions)


def test_a_completion_is_validated() -> None:
    """D1: at least one supervised token, and one mask entry per id."""
    good = Completion.supervised([1, 2])
    with pytest.raises(ValueError, match="supervised"):
        Completion(good.ids, good.loss_mask & False)
    with pytest.raises(ValueError, match="1-d of equal length"):
        Completion(good.ids, good.loss_mask[:1])
    with pytest.raises(ValueError, match="read-only"):
        good.ids[0] = 5


def test_cut_keeps_the_start() -> None:
    """D2: a cut takes the end; what has nothing supervised left is nothing."""
    whole = Completion.supervised([1, 2, 3])
    late = Completion(whole.ids, whole.loss_mask & [False, False, True])
    assert whole.cut(3) is whole
    assert whole.cut(2).ids.tolist() == [1, 2]
    assert late.cut(2) is None
    assert whole.cut(0) is None


def test_score_keys_depend_on_prompt_ids_and_mask() -> None:
    """R4: a stored score is found by content, never by position or text."""
    one, other = tree([1, 2], [3]), tree([1], [2, 3])
    completion = one.completions[0]
    assert score_key(one.prompt_ids, completion) == tree([1, 2], [4], [3]).score_keys[1]
    masked = Completion(Completion.supervised([3, 3]).ids, Completion.supervised([3, 3]).loss_mask & [False, True])
    keys = {score_key(one.prompt_ids, completion), other.score_keys[0], score_key(one.prompt_ids, masked),
            score_key(one.prompt_ids, Completion.supervised([3, 3]))}
    assert len(keys) == 4


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(4, 40), st.sampled_from(["tree", "padded"]))
def test_scoring_packs_score_everything_once_within_the_budget(lengths: list[int], budget: int, layout: str) -> None:
    """O2, DESIGN, Reference: a prompt with very many completions is split where nothing learns."""
    whole = [tree([1, 2, 3], *([number, *range(length)] for number, length in enumerate(lengths))),
             tree([4], [0, 1]), tree([1, 2, 3], [0, *range(lengths[0])])]
    packs = scoring_packs(whole, budget, layout)
    keys = [key for pack in packs for part in pack for key in part.score_keys]
    assert sorted(keys) == sorted({key for entry in whole for key in entry.score_keys})
    for pack in packs:
        alone = len(pack) == 1 and len(pack[0].completions) == 1
        assert alone or sum(tokens_in_layout(part, layout) for part in pack) <= budget


class Counted(int):
    """A size that counts how often it is compared."""

    comparisons = 0

    def __eq__(self, other: object) -> bool:
        Counted.comparisons += 1
        return int(self) == other

    def __gt__(self, other: int) -> bool:
        Counted.comparisons += 1
        return int(self) > other

    __hash__ = int.__hash__


def test_packing_does_not_try_each_tree_in_each_pack() -> None:
    """A million rows must not take hours: the work for one tree grows like a logarithm of their number."""
    Counted.comparisons = 0
    packs = best_fit([Counted(100 + i % 900) for i in range(20_000)], 2048)
    assert sum(map(len, packs)) == 20_000
    assert 20_000 < Counted.comparisons < 20_000 * 40
