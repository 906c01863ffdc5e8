"""Trees that a user has made, as rows: one per pair or completion, or refused by the tree's number."""

from typing import Any

import numpy as np
import pytest
import torch

from helpers import tree
from tropism.data.batching.pack import build_trees
from tropism.data.rows_from_trees import rows_of_trees
from tropism.data.tree import Completion, token_ids
from tropism.errors import DataError

ONE, TWO, THREE = tree([1, 2], [3, 9]), tree([1, 2], [3, 9], [4, 9]), tree([5], [6], [7, 8], [9])


def shapes(rows: Any) -> list[tuple[str, list[int], list[list[int]], Any]]:
    return [(row.place, row.prompt_ids.tolist(), [side.ids.tolist() for side in row.completions], row.desirable)
            for row in rows]


def test_pairs_keep_their_order() -> None:
    """The first completion is the chosen one."""
    assert shapes(rows_of_trees([TWO, tree([1, 2], [4, 9], [3, 9])], "paired")) == [
        ("tree 1", [1, 2], [[3, 9], [4, 9]], None), ("tree 2", [1, 2], [[4, 9], [3, 9]], None)]


def test_each_labeled_completion_is_a_row() -> None:
    assert shapes(rows_of_trees([(ONE, [True]), (THREE, [False, True, False])], "unpaired")) == [
        ("tree 1 completion 1", [1, 2], [[3, 9]], True), ("tree 2 completion 1", [5], [[6]], False),
        ("tree 2 completion 2", [5], [[7, 8]], True), ("tree 2 completion 3", [5], [[9]], False)]


def test_each_text_is_a_row() -> None:
    assert shapes(rows_of_trees(iter([THREE, ONE]), "single")) == [
        ("tree 1 completion 1", [5], [[6]], None), ("tree 1 completion 2", [5], [[7, 8]], None),
        ("tree 1 completion 3", [5], [[9]], None), ("tree 2 completion 1", [1, 2], [[3, 9]], None)]
    assert rows_of_trees([], "single") == []


def test_masks_are_kept() -> None:
    """M5: which tokens count is what the user says."""
    masked = Completion(token_ids([3, 4, 5]), np.array([False, True, True]))
    row, = rows_of_trees([tree([1], masked)], "single")
    assert row.completions[0] is masked
    assert row.completions[0].length == 2


def test_rows_of_a_tree_share_it_again() -> None:
    """Within a step the rows grow together into the tree that they came from, whose prompt is computed once."""
    rows = rows_of_trees([(THREE, [False, True, False]), (ONE, [True])], "unpaired")
    assert len({row.id for row in rows}) == 4
    assert rows[0].split_key == rows[1].split_key != rows[3].split_key
    planted = build_trees(rows, [0, 1, 2, 3])
    assert [entry.rows for entry in planted] == [(0, 1, 2), (3,)]
    assert [len(entry.tree.completions) for entry in planted] == [3, 1]


@pytest.mark.parametrize("labels", [
    (True, False), [1, 0], np.array([True, False]), torch.tensor([True, False]), torch.tensor([1, 0])])
def test_labels_of_any_kind(labels: Any) -> None:
    assert [row.desirable for row in rows_of_trees([(TWO, labels)], "unpaired")] == [True, False]


@pytest.mark.parametrize("label", ["false", "yes", 2, -1, 0.5, None, float("nan")])
def test_labels_that_are_none(label: Any) -> None:
    """K3: a value that is no label stops with its place; text would be true, whatever it says."""
    with pytest.raises(DataError, match=f"tree 2: label {label!r} is not True or False"):
        rows_of_trees([(ONE, [True]), (TWO, [True, label])], "unpaired")


@pytest.mark.parametrize(("trees", "view", "message"), [
    ([(ONE, [True]), TWO], "unpaired", r"tree 2: KTO needs labels: give \(tree, \[True, False"),
    ([TWO, (TWO, [True, False])], "paired", "tree 2: only KTO uses labels"),
    ([(ONE, [True])], "single", "tree 1: only KTO uses labels"),
    ([(TWO, [True])], "unpaired", "tree 1: 1 label for 2 completions"),
    ([TWO, ONE], "paired", "tree 2: a pair needs two completions, chosen and rejected, not 1"),
    ([THREE], "paired", "tree 1: a pair needs two completions, chosen and rejected, not 3"),
    ([TWO, {"prompt": "text"}], "paired", "tree 2: must be a PromptTree, not dict"),
    ([(ONE, [True]), [TWO, [True, False]]], "unpaired", "tree 2: must be a PromptTree, not list"),
    ([(ONE, [True]), (TWO, [True, False], 3)], "unpaired", "tree 2: must be a PromptTree, not tuple"),
])
def test_trees_of_another_kind(trees: Any, view: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        rows_of_trees(trees, view)
