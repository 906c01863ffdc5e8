"""Trees that a user has made, as rows."""

from collections.abc import Iterable, Sequence

from tropism.data.formats import View
from tropism.data.rows import EncodedRow
from tropism.data.tree import PromptTree
from tropism.errors import DataError

Labeled = PromptTree | tuple[PromptTree, Sequence[bool]]


def rows_of_trees(trees: Iterable[Labeled], view: View) -> list[EncodedRow]:
    """One row per pair, or per completion.

    Args:
        trees: for `paired` trees of (chosen, rejected); for `single` trees of any number of completions; for `unpaired`
            (tree, labels), one label per completion, True for desirable.

    Raises:
        DataError: naming the first tree that is not of that kind.
    """
    rows: list[EncodedRow] = []
    for number, entry in enumerate(trees, start=1):
        place = f"tree {number}"
        tree, labels = entry if isinstance(entry, tuple) and len(entry) == 2 else (entry, None)
        if not isinstance(tree, PromptTree):
            raise DataError(f"{place}: is a {type(tree).__name__}, not a PromptTree like those before it")
        if (labels is not None) != (view == "unpaired"):
            what = "needs labels: (tree, [True, False, ...])" if view == "unpaired" else "brings labels"
            raise DataError(f"{place}: a tree for this method {what}" + ("" if view == "unpaired" else
                                                                         ", which only KTO looks at"))
        if view == "paired":
            if len(tree.completions) != 2:
                raise DataError(f"{place}: has {len(tree.completions)} completions; a pair has two, chosen and "
                                "rejected")
            rows.append(_row(place, tree, tree.completions, None))
            continue
        if labels is not None and len(labels) != len(tree.completions):
            raise DataError(f"{place}: {len(labels)} labels for {len(tree.completions)} completions")
        for position, completion in enumerate(tree.completions):
            if labels is not None and labels[position] not in (0, 1):
                raise DataError(f"{place}: label {labels[position]!r} is not True or False")
            label = None if labels is None else bool(labels[position])
            rows.append(_row(f"{place} completion {position + 1}", tree, (completion,), label))
    return rows


def _row(place: str, tree: PromptTree, completions: tuple, desirable: bool | None) -> EncodedRow:  # type: ignore[type-arg]
    return EncodedRow(place, place, tree.prompt_ids, completions, desirable, tree.prompt_ids.tobytes())
