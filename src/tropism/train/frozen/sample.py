"""A sample of stored scores is computed again before they are used. The name of a file shows damage, but whoever can
write to the store can write another score under a right name."""

import secrets
import time
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch

from tropism.data.batching.collate import Batch
from tropism.data.tree import Completion, PromptTree, score_key
from tropism.distributed.world import World
from tropism.losses.scored import Scored
from tropism.model.language_model import LanguageModel
from tropism.train.frozen.reference import StoredReference
from tropism.train.frozen.teacher import StoredTeacher, likeliest
from tropism.train.frozen.topk_store import TopkEntry
from tropism.train.reward_rounding import reward_noise
from tropism.train.score_packs import score_trees

_MOST = 64
_MOST_TOKENS = 2048
_DRAWS = 4096
_SLACK = {"fp32": 10.0, "bf16": 3.0}
"""Factor on the rounding of a log-prob: other machines have other matrix products."""
_TOP_K_GAP = {"fp32": 1e-4, "bf16": 0.02}


@dataclass(frozen=True, slots=True)
class Difference:
    """A stored score that is not the model's.

    Args:
        tree: its prompt, and its completion alone.
        text: how it differs.
    """

    tree: PromptTree
    text: str

    @property
    def key(self) -> bytes:
        """The key of the score."""
        return self.tree.score_keys[0]


@dataclass(frozen=True, slots=True)
class Sample:
    """Result of a sample.

    Args:
        count: number of scores that were computed again.
        seconds: time that it took.
        differences: those beyond rounding.
    """

    count: int
    seconds: float
    differences: list[Difference]


def draw(trees: Sequence[PromptTree], stored: Container[bytes]) -> list[PromptTree]:
    """Some stored completions with their prompts, of 2,048 tokens together at most; a single one if all are longer.

    Nobody can know which, so the choice does not depend on the seed.
    """
    chosen: dict[bytes, PromptTree] = {}
    longer: PromptTree | None = None
    tokens = 0
    for tree, completion in _in_random_order(trees):
        key = score_key(tree.prompt_ids, completion)
        if key in chosen or key not in stored:
            continue
        one = PromptTree(tree.prompt_ids, (completion,))
        if tokens + one.tokens > _MOST_TOKENS:
            longer = longer or one
            continue
        chosen[key] = one
        tokens += one.tokens
        if len(chosen) == _MOST:
            break
    return list(chosen.values()) or ([longer] if longer else [])


def _in_random_order(trees: Sequence[PromptTree]) -> Iterator[tuple[PromptTree, Completion]]:
    """All completions of few trees; of many, those of random trees, which may repeat."""
    random = secrets.SystemRandom()
    if len(trees) <= _DRAWS:
        yield from random.sample(every := [(tree, one) for tree in trees for one in tree.completions], len(every))
        return
    for _ in range(_DRAWS):
        tree = random.choice(trees)
        yield tree, random.choice(tree.completions)


def sample_reference(model: LanguageModel, reference: StoredReference, trees: Sequence[PromptTree],
                     microbatch_tokens: int, world: World) -> Sample:
    """Compare some scores that were in the store with the frozen model's. All processes call this together."""
    def score(pack: Sequence[PromptTree], batch: Batch) -> list[float]:
        return model.logps(batch).tolist()

    began = time.monotonic()
    chosen = world.broadcast(world.on_main(partial(draw, trees, reference.stored)) or [])
    found = score_trees(model, chosen, microbatch_tokens, score, world)
    again, stored = ([scores[tree.score_keys[0]] for tree in chosen] for scores in (found, reference.scores))
    scored = Scored(torch.tensor(again, dtype=torch.float64), torch.tensor(stored, dtype=torch.float64),
                    torch.tensor([tree.completions[0].length for tree in chosen], dtype=torch.int64))
    precision = _rounds_like(model)
    allowed = _SLACK[precision] * reward_noise(scored, 1.0, precision, model.rounding)
    differences = [Difference(tree, f"the stored log-prob is {one:.6g}, but the reference gives {other:.6g}")
                   for tree, one, other, most in zip(chosen, stored, again, allowed.tolist(), strict=True)
                   if not abs(one - other) <= most]
    return Sample(len(chosen), time.monotonic() - began, world.broadcast(differences))


def sample_teacher(model: LanguageModel, teacher: StoredTeacher, trees: Sequence[PromptTree], microbatch_tokens: int,
                   k: int, world: World) -> Sample:
    """As `sample_reference`, for the teacher's most likely tokens."""
    def score(pack: Sequence[PromptTree], batch: Batch) -> list[TopkEntry]:
        return likeliest(model, batch, teacher.comparison, k)

    began = time.monotonic()
    chosen = world.broadcast(world.on_main(partial(draw, trees, teacher.stored)) or [])
    found = score_trees(model, chosen, microbatch_tokens, score, world)
    allowed = max(_TOP_K_GAP[_rounds_like(model)], 4 * model.rounding if model.precision == "bf16" else 0.0)
    gaps = [total_variation(teacher.store.read(tree.score_keys[0]), found[tree.score_keys[0]]) for tree in chosen]
    differences = [Difference(tree, f"{gap:.1%} of the stored probabilities are not the teacher's")
                   for tree, gap in zip(chosen, gaps, strict=True) if not gap <= allowed]
    return Sample(len(chosen), time.monotonic() - began, world.broadcast(differences))


def _rounds_like(model: LanguageModel) -> Literal["fp32", "bf16"]:
    """In float64 too, transformers' norms and rotary tables round through float32."""
    return "bf16" if model.precision == "bf16" else "fp32"


def total_variation(stored: TopkEntry, computed: TopkEntry) -> float:
    """Distance of two lists of most likely tokens, 0 to 1, averaged over the completion's tokens.

    Rounding may exchange tokens of nearly equal probability at the end of the lists, so a token that only one of them
    has counts by how much it exceeds the least of the other one.
    """
    if stored[0].shape != computed[0].shape:
        return 1.0
    gaps = []
    for ids, logps, tail, other_ids, other_logps, other_tail in zip(*stored, *computed, strict=True):
        p, q = np.exp(logps.astype(np.float64)), np.exp(other_logps.astype(np.float64))
        _, here, there = np.intersect1d(ids, other_ids, return_indices=True)
        if len(np.unique(ids)) < len(ids):
            return 1.0
        gaps.append(0.5 * (np.abs(p[here] - q[there]).sum() + abs(np.exp(float(tail)) - np.exp(float(other_tail)))
                           + np.maximum(np.delete(p, here) - q.min(), 0).sum()
                           + np.maximum(np.delete(q, there) - p.min(), 0).sum()))
    return float(np.mean(gaps))
