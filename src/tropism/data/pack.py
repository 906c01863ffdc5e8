"""Rows of a step to trees, trees to packs of a token budget, packs to ranks. Layout only: no result changes."""

from collections.abc import Sequence
from dataclasses import dataclass

from tropism.data.mismatch import partners
from tropism.data.rows import EncodedRow
from tropism.data.tree import Completion, PromptTree


@dataclass(frozen=True, slots=True)
class Planted:
    """A tree and the rows that it serves.

    Args:
        tree: the tree.
        rows: index of each row that looks at it.
        members: for each of those rows, positions of its completions in `tree.completions`.
    """

    tree: PromptTree
    rows: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Mismatched:
    """A prompt with completions of other prompts: forward only.

    Args:
        tree: the tree.
        counts: for each completion, how many units of the step it is the partner of.
    """

    tree: PromptTree
    counts: tuple[int, ...]


def plant(rows: Sequence[EncodedRow], indices: Sequence[int]) -> list[Planted]:
    """Trees of the rows at `indices`: rows with equal prompt ids share one, equal completions are one."""
    groups: dict[bytes, list[int]] = {}
    for index in indices:
        groups.setdefault(rows[index].prompt_key, []).append(index)
    planted = []
    for group in groups.values():
        distinct: dict[bytes, Completion] = {}
        positions: dict[bytes, int] = {}
        for index in group:
            for completion in rows[index].completions:
                positions.setdefault(completion.key, len(positions))
                distinct.setdefault(completion.key, completion)
        tree = PromptTree(rows[group[0]].prompt_ids, tuple(distinct.values()))
        members = tuple(tuple(positions[completion.key] for completion in rows[index].completions)
                        for index in group)
        planted.append(Planted(tree, tuple(group), members))
    return planted


def mismatch(rows: Sequence[EncodedRow], indices: Sequence[int], max_length: int) -> list[Mismatched]:
    """The mismatched trees of a step, in the order of `plant`.

    A mismatched completion is cut on the right to what the prompt leaves of `max_length`.
    """
    partner_of = partners([rows[index].prompt_key for index in indices])
    groups: dict[bytes, tuple[EncodedRow, dict[bytes, Completion], dict[bytes, int]]] = {}
    for position, index in enumerate(indices):
        row = rows[index]
        partner = rows[indices[partner_of[position]]].completions[0]
        completion = partner.cut(max_length - len(row.prompt_ids))
        if completion is None:  # nothing supervised fits (a conversation's first answer starts too late)
            completion = Completion.supervised(partner.ids[: max_length - len(row.prompt_ids)])
        _, distinct, counts = groups.setdefault(row.prompt_key, (row, {}, {}))
        distinct.setdefault(completion.key, completion)
        counts[completion.key] = counts.get(completion.key, 0) + 1
    return [Mismatched(PromptTree(row.prompt_ids, tuple(distinct.values())), tuple(counts.values()))
            for row, distinct, counts in groups.values()]


def cost(tree: PromptTree) -> float:
    """Estimated work of a tree: its tokens, and the attention over its prompt, in equal units."""
    prompt = len(tree.prompt_ids)
    attended = prompt * prompt / 2 + sum(len(c.ids) * (prompt + len(c.ids) / 2) for c in tree.completions)
    return tree.tokens + attended / 4096  # attention equals the linear layers at a context of a few thousand


def share(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Distribute work over ranks, largest first to the least loaded: indices per rank, in original order."""
    load = [0.0] * ranks
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min(range(ranks), key=lambda r: (load[r], r))
        load[rank] += costs[index]
        shares[rank].append(index)
    return [sorted(indices) for indices in shares]


def fill(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """First-fit-decreasing packs: indices per pack, in original order. A larger item gets a pack of its own."""
    room: list[int] = []
    packs: list[list[int]] = []
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        pack = next((p for p, left in enumerate(room) if sizes[index] <= left), None)
        if pack is None:
            room.append(budget)
            packs.append([])
            pack = len(packs) - 1
        room[pack] -= sizes[index]
        packs[pack].append(index)
    return [sorted(pack) for pack in packs]


def size(tree: PromptTree, layout: str) -> int:
    """Tokens that a tree fills in a pack of this layout; in `padded` each completion brings its own prompt."""
    if layout == "tree":
        return tree.tokens
    return sum(len(tree.prompt_ids) + len(completion.ids) - 1 for completion in tree.completions)
