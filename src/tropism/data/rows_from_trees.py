"""Rows from prompt trees that a user has built."""

from collections.abc import Iterable, Sequence
from typing import Any

from tropism.data.formats import View, fields
from tropism.data.rows import EncodedRow
from tropism.data.sources.python_values import plain
from tropism.data.tree import PromptTree
from tropism.errors import DataError, count_of

Labeled = PromptTree | tuple[PromptTree, Sequence[bool]]


def rows_of_trees(trees: Iterable[Labeled], view: View) -> list[EncodedRow]:
    """One row per pair, or per completion.

    Args:
        trees: for `paired` trees of (chosen, rejected); for `single` trees of any number of completions; for `unpaired`
            (tree, labels), with one label per completion, True for desirable.

    Raises:
        DataError: naming the first tree of another kind.
    """
    rows: list[EncodedRow] = []
    for number, entry in enumerate(trees, start=1):
        place = f"tree {number}"
        tree, labels = entry if isinstance(entry, tuple) and len(entry) == 2 else (entry, None)
        if not isinstance(tree, PromptTree):
            raise DataError(f"{place}: must be a PromptTree, not {type(tree).__name__}")
        if (labels is not None) != (view == "unpaired"):
            raise DataError(f"{place}: " + ("KTO needs labels: give (tree, [True, False, ...])" if view == "unpaired"
                                            else "only KTO uses labels: give the tree alone"))
        if view == "paired":
            if len(tree.completions) != 2:
                raise DataError(f"{place}: a pair needs two completions, chosen and rejected, not "
                                f"{len(tree.completions)}")
            rows.append(_row(place, tree, tree.completions, None))
            continue
        labels = plain(labels)
        if labels is not None and not isinstance(labels, list | tuple):
            raise DataError(f"{place}: labels must be a list with one label per completion, not "
                            f"{type(labels).__name__}")
        if labels is not None and len(labels) != len(tree.completions):
            raise DataError(f"{place}: {count_of(len(labels), 'label')} for "
                            f"{count_of(len(tree.completions), 'completion')}")
        for position, completion in enumerate(tree.completions):
            label = None if labels is None else _label(labels[position], place)
            rows.append(_row(f"{place} completion {position + 1}", tree, (completion,), label))
    return rows


def _label(value: Any, place: str) -> bool:
    if not isinstance(value, int | float) or value not in (0, 1):
        raise DataError(f"{place}: label {fields.short_repr(value)} is not True or False")
    return bool(value)


def _row(place: str, tree: PromptTree, completions: tuple, desirable: bool | None) -> EncodedRow:  # type: ignore[type-arg]
    return EncodedRow(place, place, tree.prompt_ids, completions, desirable, tree.prompt_ids.tobytes())
