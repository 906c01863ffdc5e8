"""Rows of a step to trees, trees to packs of `microbatch_tokens`, packs to ranks. Results do not depend on it."""

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from tropism.data.rows import EncodedRow
from tropism.data.schedule import Parts
from tropism.data.tree import Completion, PromptTree


@dataclass(frozen=True, slots=True)
class PlacedTree:
    """A tree and the rows that use it.

    Args:
        tree: the tree.
        rows: indices of the rows.
        members: for each row, the positions of its completions in `tree.completions`.
    """

    tree: PromptTree
    rows: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Mismatched:
    """A prompt with mismatched completions, for a forward pass only.

    Args:
        tree: the tree.
        parts: for each completion, the part of the step of each unit that it is the partner of.
    """

    tree: PromptTree
    parts: tuple[tuple[int, ...], ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """For each completion, the number of units of the step that it is the partner of."""
        return tuple(map(len, self.parts))


def build_trees(rows: Sequence[EncodedRow], indices: Sequence[int]) -> list[PlacedTree]:
    """Trees of the rows at `indices`: one for equal prompt ids, in which equal completions occur once."""
    groups: dict[bytes, list[int]] = {}
    for index in indices:
        groups.setdefault(rows[index].tree_key, []).append(index)
    trees = []
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
        trees.append(PlacedTree(tree, tuple(group), members))
    return trees


def mismatched_trees(rows: Sequence[EncodedRow], indices: Sequence[int], max_length: int,
                     parts: Parts | None = None) -> list[Mismatched]:
    """The mismatched trees of a step, in the order of `build_trees`.

    The partner of a row is its own one if every row has one, else the completion of a row with another prompt, as the
    prompts are before truncation. It is truncated to fit into `max_length` with the prompt.

    Args:
        parts: of the step. A partner is in the same part. Default: one part.
    """
    given = all(rows[index].partner is not None for index in indices)
    groups: dict[bytes, tuple[EncodedRow, dict[bytes, Completion], dict[bytes, list[int]]]] = {}
    for number, places in enumerate((parts or Parts(((len(indices),),))).ranges()):
        own = [indices[place] for place in places]
        partner_of = [] if given else partners([rows[index].prompt_key for index in own])
        for position, index in enumerate(own):
            row = rows[index]
            partner = row.partner if given else rows[own[partner_of[position]]].completions[0]
            assert partner is not None
            completion = partner.cut(max_length - len(row.prompt_ids))
            if completion is None:  # no supervised token fits: a conversation's first supervised message is too late
                completion = Completion.supervised(partner.ids[: max_length - len(row.prompt_ids)])
            _, distinct, users = groups.setdefault(row.tree_key, (row, {}, {}))
            distinct.setdefault(completion.key, completion)
            users.setdefault(completion.key, []).append(number)
    return [Mismatched(PromptTree(row.prompt_ids, tuple(distinct.values())), tuple(map(tuple, users.values())))
            for row, distinct, users in groups.values()]


def cost(tree: PromptTree) -> float:
    """Estimated work of a tree in tokens: its tokens and the attention over its prompt."""
    prompt = len(tree.prompt_ids)
    attended = prompt * prompt / 2 + sum(len(c.ids) * (prompt + len(c.ids) / 2) for c in tree.completions)
    return tree.tokens + attended / 4096  # attention costs as much as linear layers at a context of a few thousand


def assign_to_ranks(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Assign work to ranks, largest first to the least loaded: indices per rank, ascending."""
    load = [0.0] * ranks
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min(range(ranks), key=lambda r: (load[r], r))
        load[rank] += costs[index]
        shares[rank].append(index)
    return [sorted(indices) for indices in shares]


def best_fit(sizes: Sequence[int], microbatch_tokens: int) -> list[list[int]]:
    """Packs by best-fit-decreasing: indices per pack, ascending. An item that is too large gets its own pack."""
    rooms: list[int] = []  # that are left in a pack, distinct and ascending: few, whatever the number of packs
    waiting: dict[int, list[int]] = {}  # packs with such a room, as a heap
    packs: list[list[int]] = []
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        place = bisect_left(rooms, sizes[index])
        if place < len(rooms):
            room = rooms[place]
            pack = heappop(waiting[room])
            if not waiting[room]:
                del rooms[place]
        else:
            room, pack = microbatch_tokens, len(packs)
            packs.append([])
        packs[pack].append(index)
        left = room - sizes[index]
        if not waiting.setdefault(left, []):
            insort(rooms, left)
        heappush(waiting[left], pack)
    return [sorted(pack) for pack in packs]


def packs_needed(sizes: Sequence[int], microbatch_tokens: int) -> list[list[int]]:
    """The fewest packs that `best_fit` finds. A pack may exceed the budget by 5% if that saves one."""
    strict, stretched = best_fit(sizes, microbatch_tokens), best_fit(sizes, stretched_budget(microbatch_tokens))
    return stretched if len(stretched) < len(strict) else strict


def stretched_budget(microbatch_tokens: int) -> int:
    """A budget and the 5% by which packs may exceed it."""
    return microbatch_tokens + microbatch_tokens // 20


def balance(packs: Sequence[Sequence[int]], sizes: Sequence[int], microbatch_tokens: int,
            number: int) -> list[list[int]]:
    """The items of some packs in `number` packs of similar size, largest first to the smallest pack: indices per pack,
    ascending.

    An item that is too large stays alone. No pack becomes larger than the largest other one was; if this order does not
    find such packs, they stay as they are. The rest of `number` are empty packs.

    Args:
        packs: of `packs_needed`, at most `number`.
    """
    def most(some: Iterable[Sequence[int]]) -> int:
        return max((sum(sizes[index] for index in pack) for pack in some), default=0)

    alone = [[*pack] for pack in packs if len(pack) == 1 and sizes[pack[0]] > microbatch_tokens]
    others = [[*pack] for pack in packs if len(pack) != 1 or sizes[pack[0]] <= microbatch_tokens]
    loads = [(0, pack) for pack in range(number - len(alone))]
    spread: list[list[int]] = [[] for _ in loads]
    for index in sorted((index for pack in others for index in pack), key=lambda i: (-sizes[i], i)):
        load, pack = heappop(loads)
        spread[pack].append(index)
        heappush(loads, (load + sizes[index], pack))
    if most(spread) > most(others):
        spread = others
    found = [sorted(pack) for pack in alone + spread]
    return found + [[] for _ in range(number - len(found))]


def tokens_in_layout(tree: PromptTree, layout: str) -> int:
    """Tokens of a tree in a pack of this layout; in `padded` each completion has its own prompt."""
    if layout == "tree":
        return tree.tokens
    return sum(len(tree.prompt_ids) + len(completion.ids) - 1 for completion in tree.completions)


def merge_trees(trees: Iterable[PromptTree]) -> list[PromptTree]:
    """The distinct (prompt, completion) pairs of many trees, with one tree per prompt.

    The order depends on the content only, not on the order of the trees.
    """
    prompts: dict[bytes, tuple[PromptTree, dict[bytes, Completion]]] = {}
    for tree in trees:
        _, completions = prompts.setdefault(tree.prompt_ids.tobytes(), (tree, {}))
        for completion in tree.completions:
            completions.setdefault(completion.key, completion)
    return [PromptTree(tree.prompt_ids, tuple(completions[key] for key in sorted(completions)))
            for _, (tree, completions) in sorted(prompts.items())]


def scoring_packs(trees: Iterable[PromptTree], microbatch_tokens: int, layout: str) -> list[list[PromptTree]]:
    """Packs that compute each distinct (prompt, completion) of some trees once, without gradients.

    A tree that is too large for a pack is split into several with the same prompt.
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

    Args:
        prompts: of each unit, before truncation.

    Raises:
        ValueError: if all units have the same prompt.
    """
    count = len(prompts)
    if len(set(prompts)) < 2:
        raise ValueError("mismatched completions need two distinct prompts in a step")
    result = [-1] * count
    following = -1
    for position in range(2 * count - 1, -1, -1):  # backwards twice: the second lap knows the cyclic successor
        here = position % count
        successor = (here + 1) % count
        following = successor if prompts[successor] != prompts[here] else following
        if position < count:
            result[here] = following
    return result
