"""Score every completion of some trees once. All ranks do it together, in equally many rounds."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol, TypeVar

import torch

from tropism.data.batching.collate import Batch, collate
from tropism.data.batching.pack import assign_to_ranks, cost, scoring_packs
from tropism.data.tree import PromptTree
from tropism.distributed.world import World
from tropism.model.language_model import LanguageModel

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


def silent(done: int, total: int) -> None:
    """Report no progress."""


def score_packs(model: LanguageModel, packs: Sequence[Sequence[PromptTree]], score: ScorePack[T], world: World,
                report: ReportProgress = silent) -> Iterator[dict[bytes, T]]:
    """Score packs in rounds and yield this rank's results of each round, by the key of (prompt, completion).

    A rank that has no pack left scores an empty one: ranks that share a model must run it equally often. A round is
    reported when the caller asks for the next one, so that its results are stored by then.

    Args:
        model: gives layout and device of the batches.
        packs: the same on every rank.
        score: called without gradient.
    """
    shares = assign_to_ranks([sum(map(cost, pack)) for pack in packs], world.parts)
    own = shares[world.part]

    @torch.no_grad()
    def score_one(pack: Sequence[PromptTree]) -> dict[bytes, T]:
        batch = collate(pack, model.layout).to(model.device)
        keys = [key for tree in pack for key in tree.score_keys]
        return dict(zip(keys, score(pack, batch), strict=True))

    for number in range(max(map(len, shares))):
        yield world.computed(partial(score_one, packs[own[number]] if number < len(own) else []))
        report(sum(min(number + 1, len(one)) for one in shares), len(packs))


def score_trees(model: LanguageModel, trees: Iterable[PromptTree], microbatch_tokens: int, score: ScorePack[T],
                world: World, report: ReportProgress = silent) -> dict[bytes, T]:
    """Score each distinct (prompt, completion) of some trees; every rank gets all results.

    Args:
        microbatch_tokens: tokens of a pack.
        score: called without gradient.
    """
    packs = scoring_packs(trees, microbatch_tokens, model.layout)
    own: dict[bytes, T] = {}
    for results in score_packs(model, packs, score, world, report):
        own |= results
    return {key: result for results in world.gather(own) for key, result in results.items()}


def unscored(packs: Iterable[list[PromptTree]], known: KnownKeys) -> list[list[PromptTree]]:
    """The packs that hold at least one (prompt, completion) whose key is not known."""
    return [pack for pack in packs if any(key not in known for tree in pack for key in tree.score_keys)]
