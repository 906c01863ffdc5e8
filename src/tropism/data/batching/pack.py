"""Rows of a step to trees, trees to packs of `microbatch_tokens`, packs to ranks. Layout only: no result changes."""

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from tropism.data.rows import EncodedRow
from tropism.data.tree import Completion, PromptTree


@dataclass(frozen=True, slots=True)
class PlacedTree:
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


def build_trees(rows: Sequence[EncodedRow], indices: Sequence[int]) -> list[PlacedTree]:
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
        planted.append(PlacedTree(tree, tuple(group), members))
    return planted


def mismatched_trees(rows: Sequence[EncodedRow], indices: Sequence[int], max_length: int) -> list[Mismatched]:
    """The mismatched trees of a step, in the order of `build_trees`.

    The partner is the row's own where every row came with one, else another row's completion. It is cut on the right
    to what the prompt leaves of `max_length`.
    """
    given = all(rows[index].partner is not None for index in indices)
    partner_of = [] if given else partners([rows[index].prompt_key for index in indices])
    groups: dict[bytes, tuple[EncodedRow, dict[bytes, Completion], dict[bytes, int]]] = {}
    for position, index in enumerate(indices):
        row = rows[index]
        partner = row.partner if given else rows[indices[partner_of[position]]].completions[0]
        assert partner is not None
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


def assign_to_ranks(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Distribute work over ranks, largest first to the least loaded: indices per rank, in original order."""
    load = [0.0] * ranks
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min(range(ranks), key=lambda r: (load[r], r))
        load[rank] += costs[index]
        shares[rank].append(index)
    return [sorted(indices) for indices in shares]


def best_fit(sizes: Sequence[int], microbatch_tokens: int) -> list[list[int]]:
    """Best-fit-decreasing packs: indices per pack, in original order. A larger item gets a pack of its own."""
    rooms: list[tuple[int, int]] = []  # (room left, pack), ascending
    packs: list[list[int]] = []
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        place = bisect_left(rooms, (sizes[index], -1))
        if place < len(rooms):
            room, pack = rooms.pop(place)
        else:
            room, pack = microbatch_tokens, len(packs)
            packs.append([])
        packs[pack].append(index)
        insort(rooms, (room - sizes[index], pack))
    return [sorted(pack) for pack in packs]


def tokens_in_layout(tree: PromptTree, layout: str) -> int:
    """Tokens that a tree fills in a pack of this layout; in `padded` each completion brings its own prompt."""
    if layout == "tree":
        return tree.tokens
    return sum(len(tree.prompt_ids) + len(completion.ids) - 1 for completion in tree.completions)


def merge_trees(trees: Iterable[PromptTree]) -> list[PromptTree]:
    """The distinct (prompt, completion) pairs of many trees, one tree per prompt, in an order of their own.

    The order follows from the content alone, so packs made of it are a function of the whole set.
    """
    prompts: dict[bytes, tuple[PromptTree, dict[bytes, Completion]]] = {}
    for tree in trees:
        _, completions = prompts.setdefault(tree.prompt_ids.tobytes(), (tree, {}))
        for completion in tree.completions:
            completions.setdefault(completion.key, completion)
    return [PromptTree(tree.prompt_ids, tuple(completions[key] for key in sorted(completions)))
            for _, (tree, completions) in sorted(prompts.items())]


def scoring_packs(trees: Iterable[PromptTree], microbatch_tokens: int, layout: str) -> list[list[PromptTree]]:
    """Packs that score each distinct (prompt, completion) of some trees once.

    Nothing learns here, so a tree too big for a pack may be several with the same prompt: that is only layout.
    """
    parts = [part for tree in merge_trees(trees) for part in _split(tree, microbatch_tokens, layout)]
    sizes = [tokens_in_layout(part, layout) for part in parts]
    return [[parts[i] for i in pack] for pack in best_fit(sizes, microbatch_tokens)]


def _split(tree: PromptTree, microbatch_tokens: int, layout: str) -> list[PromptTree]:
    if tokens_in_layout(tree, layout) <= microbatch_tokens or len(tree.completions) == 1:
        return [tree]
    half = len(tree.completions) // 2
    return [part for some in (tree.completions[:half], tree.completions[half:])
            for part in _split(PromptTree(tree.prompt_ids, some), microbatch_tokens, layout)]


def partners(prompts: Sequence[Hashable]) -> list[int]:
    """For each unit of a step, the index of its partner: the next unit, cyclically, with another prompt.

    A unit is never its own partner, whatever the number of units or their order.

    Raises:
        ValueError: if all units have one prompt, since nobody has a partner then.
    """
    count = len(prompts)
    if len(set(prompts)) < 2:
        raise ValueError("a step needs two distinct prompts to have mismatched completions")
    result = [-1] * count
    following = -1
    for position in range(2 * count - 1, -1, -1):  # backwards twice: the second lap knows the cyclic successor
        here = position % count
        successor = (here + 1) % count
        following = successor if prompts[successor] != prompts[here] else following
        if position < count:
            result[here] = following
    return result
