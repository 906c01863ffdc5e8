"""Score every completion of some trees once. All ranks do it together, in equally many rounds."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch

from tropism.data.batching.collate import Batch, collate
from tropism.data.batching.pack import assign_to_ranks, cost, scoring_packs, tokens_in_layout
from tropism.data.tree import PromptTree
from tropism.distributed.world import World
from tropism.model.language_model import LanguageModel
from tropism.train.out_of_memory import PackOutOfMemory, by_ids, naming, release, too_large

T = TypeVar("T")

ScorePack = Callable[[Sequence[PromptTree], Batch], Iterable[T]]
"""Takes a pack and its tensors on the model's device; gives one result per completion, in the batch's order."""

ReportProgress = Callable[[int, int], None]
"""Called with (packs done, packs in total) by all ranks alike. To stop them all, it raises `StoppedEarly`."""


class KnownKeys(Protocol):
    """A dict or a store of results by the key of (prompt, completion)."""

    def __contains__(self, key: bytes, /) -> bool:
        """Whether it holds the key."""
        ...


PlaceOf = Callable[[PromptTree], str]
"""Names the row that a completion belongs to, for errors."""


def silent(done: int, total: int) -> None:
    """Report no progress."""


class Fitting(Generic[T]):
    """Scores packs without gradients. One that does not fit into memory is divided until its parts do, and so are later
    ones of its size. A sharded model is passed by all ranks together, so there it is an error.

    Args:
        model: gives layout and device of the batches.
        score: called without gradient.
        world: this rank among the others.
        place: names the row of a completion in errors.
    """

    def __init__(self, model: LanguageModel, score: ScorePack[T], world: World, place: PlaceOf = by_ids) -> None:
        self.model, self.score, self.world, self.place = model, score, world, place
        self._most = math.inf

    @torch.no_grad()
    def __call__(self, pack: Sequence[PromptTree]) -> list[T]:
        """One result per completion, in the order of the pack.

        Raises:
            TropismError: if a completion does not fit into memory by itself.
        """
        size, parts = sum(tokens_in_layout(tree, self.model.layout) for tree in pack), halves(pack)
        if size <= self._most or not parts:
            try:
                with naming(pack):
                    return list(self.score(pack, collate(pack, self.model.layout).to(self.model.device)))
            except PackOutOfMemory as error:
                if self.world.mesh is not None:
                    raise
                if not parts:
                    place = self.place(pack[0]) if pack else "an empty pack"
                    raise too_large(place, size, str(error), "in a pass over one completion without gradients"
                                    ) from error
            self._most = size // 2
            release(self.model.device)
        return [result for part in parts for result in self(part)]


def halves(pack: Sequence[PromptTree]) -> list[Sequence[PromptTree]]:
    """Two packs with the completions of a pack, in its order; none if it has only one completion."""
    if len(pack) > 1:
        return [pack[: len(pack) // 2], pack[len(pack) // 2 :]]
    return [[PromptTree(tree.prompt_ids, some)] for tree in pack if (middle := len(tree.completions) // 2)
            for some in (tree.completions[:middle], tree.completions[middle:])]


def score_packs(model: LanguageModel, packs: Sequence[Sequence[PromptTree]], score: ScorePack[T], world: World,
                report: ReportProgress = silent, place: PlaceOf = by_ids) -> Iterator[dict[bytes, T]]:
    """Score packs in rounds and yield this rank's results of each round, by the key of (prompt, completion).

    A rank that has no pack left scores an empty one: ranks that share a model must run it equally often. A round is
    reported when the caller asks for the next one, so that its results are stored by then.

    Args:
        model: gives layout and device of the batches.
        packs: the same on every rank.
        score: called without gradient.
        place: names the row of a completion in errors.

    Raises:
        TropismError: if a completion does not fit into memory by itself.
    """
    shares = assign_to_ranks([sum(map(cost, pack)) for pack in packs], world.parts)
    own = shares[world.part]
    fitting = Fitting(model, score, world, place)

    def score_one(pack: Sequence[PromptTree]) -> dict[bytes, T]:
        return dict(zip((key for tree in pack for key in tree.score_keys), fitting(pack), strict=True))

    for number in range(max(map(len, shares))):
        yield world.computed(partial(score_one, packs[own[number]] if number < len(own) else []))
        report(sum(min(number + 1, len(one)) for one in shares), len(packs))


def score_trees(model: LanguageModel, trees: Iterable[PromptTree], microbatch_tokens: int, score: ScorePack[T],
                world: World, report: ReportProgress = silent, place: PlaceOf = by_ids) -> dict[bytes, T]:
    """Score each distinct (prompt, completion) of some trees; every rank gets all results.

    Args:
        microbatch_tokens: tokens of a pack.
        score: called without gradient.
    """
    packs = scoring_packs(trees, microbatch_tokens, model.layout)
    own: dict[bytes, T] = {}
    for results in score_packs(model, packs, score, world, report, place):
        own |= results
    return {key: result for results in world.gather(own) for key, result in results.items()}


def unscored(packs: Iterable[list[PromptTree]], known: KnownKeys) -> list[list[PromptTree]]:
    """The packs that hold at least one (prompt, completion) whose key is not known."""
    return [pack for pack in packs if any(key not in known for tree in pack for key in tree.score_keys)]
