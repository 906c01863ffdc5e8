"""Prepares a step on the host: trees are divided over processes, packed and laid out. No result depends on how."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch

from tropism.data.batching.collate import Batch, Layout, collate, collate_leaves
from tropism.data.batching.pack import (
    Mismatched,
    PlacedTree,
    assign_to_ranks,
    balance,
    build_trees,
    cost,
    mismatched_trees,
    packs_needed,
    tokens_in_layout,
)
from tropism.data.row_facts import facts_of
from tropism.data.rows import EncodedRow
from tropism.data.schedule import STEP, GivenSchedule, Parts, Steps
from tropism.data.tree import PromptTree
from tropism.distributed.world import World
from tropism.errors import UsageError
from tropism.methods import Method, Units
from tropism.train.settings import Settings

_REPORT_EVERY = 100  # steps that are surveyed: some tens of milliseconds


@dataclass(frozen=True)
class Pack:
    """Some trees of a step with their rows, as one forward and backward pass.

    Args:
        trees: the trees, in the batch's order.
        batch: their tensors.
        units: the rows that use them.
        rows: which rows those are.
        counts: the denominator of each term of the method, over these rows.
        leaves: mismatched completions that continue its prompts; None if these are computed in packs of their own.
    """

    trees: tuple[PromptTree, ...]
    batch: Batch
    units: Units
    rows: tuple[int, ...]
    counts: tuple[float, ...]
    leaves: "Leaves | None" = None


@dataclass(frozen=True)
class MismatchedPack:
    """Mismatched trees as one forward pass; `counts[j, c]` units of part j have completion c as their partner."""

    trees: tuple[PromptTree, ...]
    batch: Batch
    counts: torch.Tensor


@dataclass(frozen=True)
class Leaves(MismatchedPack):
    """Mismatched completions that continue the prompts of a pack, which are not computed again."""


@dataclass(frozen=True)
class StepPacks:
    """The work of this process in a step.

    Args:
        step: its number, from 1.
        units: units of the step over all processes.
        counts: the denominator of each term of the method: units or tokens of the step, over all processes.
        packs, mismatched: of this process; every process has the same number, including empty ones.
        rows: all rows of the step over all processes, in ascending order.
        forwards_first: the forward passes of all packs come before the backward passes, so that what the losses need
            from the whole step is known without further passes.
        flat_tokens: prompt + completion tokens of the rows of all processes, without prompt sharing.
        computed_tokens: tokens of the packs of all processes.
        parts: of the step, which decide its reference point.
    """

    step: int
    units: int
    counts: tuple[float, ...]
    packs: tuple[Pack, ...]
    mismatched: tuple[MismatchedPack, ...]
    rows: tuple[int, ...]
    forwards_first: bool
    flat_tokens: int
    computed_tokens: int
    parts: Parts

    @property
    def leaves(self) -> tuple[Leaves, ...]:
        """Mismatched completions that continue the prompts of packs, of all packs."""
        return tuple(pack.leaves for pack in self.packs if pack.leaves is not None)


@dataclass(frozen=True)
class StepPlanner:
    """Prepares steps for one process."""

    rows: Sequence[EncodedRow]
    schedule: Steps
    method: Method
    layout: Layout
    microbatch_tokens: int
    max_length: int
    world: World
    reuse_prompts: bool = True
    """Let mismatched completions continue the main pass's prompts where they can (not with a live reference,
    which would need its own)."""
    balanced: bool = False
    """The losses of a step need its expert load, for the routers' load-balancing loss."""
    forwards_first_tokens: int = 0
    """Tokens of a process's largest step of several packs whose forward passes may all come before the backward
    passes."""

    def under(self, settings: Settings) -> "StepPlanner":
        """This planner with the settings of a run."""
        return replace(self, microbatch_tokens=settings.microbatch_tokens,
                       forwards_first_tokens=settings.forwards_first_tokens)

    @property
    def continues(self) -> bool:
        """Whether mismatched completions can continue the prompts of packs."""
        return self.method.needs_reference_point and self.layout == "tree" and self.reuse_prompts

    @property
    def saves(self) -> bool:
        """Whether steps of several packs need fewer passes if all forward passes come first."""
        return self.method.looks_ahead or self.balanced or self.continues

    def survey(self, report: Callable[[int, int], None] = lambda done, total: None) -> tuple[list[PromptTree], int]:
        """Every tree of the schedule that the reference will score, mismatched ones included; and how many prompts
        exceed a pack.

        Args:
            report: called with (steps done, total steps) now and then, by all processes together.
        """
        found: list[PromptTree] = []
        oversized: set[bytes] = set()
        wide = self.method.needs_reference_point
        heavy = self._heavy_rows()
        for step in range(1, self.schedule.total_steps + 1) if wide or heavy.any() else ():
            if step % _REPORT_EVERY == 0:
                report(step, self.schedule.total_steps)
            rows = self.schedule.step(step)
            if not wide and not heavy[rows].any():
                continue
            trees = all_trees(self.rows, rows, self.method, self.max_length, self.schedule.parts(step))
            oversized |= {tree.prompt_ids.tobytes() for tree in trees
                          if tokens_in_layout(tree, self.layout) > self.microbatch_tokens}
            if wide:  # otherwise a row is scored with the same in every epoch
                found += trees
        if not wide and self.method.needs_reference:
            found = own_trees(self.rows, self.schedule)
        return found, len(oversized)

    def _heavy_rows(self) -> npt.NDArray[np.bool_]:
        """`[n]` rows of trees whose completions may not fit into a pack if one step has all of them."""
        facts = facts_of(self.rows)
        tokens = np.bincount(facts.tree_numbers, facts.prompt_tokens * facts.sides + facts.tokens.sum(axis=1))
        heavy: npt.NDArray[np.bool_] = (tokens > self.microbatch_tokens)[facts.tree_numbers]
        return heavy

    def packs_of(self, step: int) -> StepPacks:
        """Prepare everything of a step that does not need the model."""
        indices, parts = self.schedule.step(step), self.schedule.parts(step)
        shares = shares_of_parts(self.rows, indices, parts, self.method)
        planted = build_trees(self.rows, indices)
        partners: list[Mismatched] = []
        if self.method.needs_reference_point:
            partners = mismatched_trees(self.rows, indices, self.max_length, parts)
        # Trees and mismatched trees stand in the same order, one of each per prompt, and stay together.
        costs = [3 * cost(planted[i].tree) + (cost(partners[i].tree) if partners else 0) for i in range(len(planted))]
        ranks = assign_to_ranks(costs, self.world.parts)
        packs = self._packs([entry.tree for entry in planted], ranks)
        together = len(packs) == 1 or (self.saves and self._largest(planted, ranks) <= self.forwards_first_tokens)
        continues = together and self.continues
        lone = self._packs([entry.tree for entry in partners], ranks) if partners and not continues else []
        made = [make_pack([planted[i] for i in pack], self.rows, self.layout, self.method, shares) for pack in packs]
        if continues:
            made = [replace(one, leaves=make_leaves([partners[i] for i in pack], [planted[i] for i in pack], parts))
                    for one, pack in zip(made, packs, strict=True)]
        passes = 2 if (self.method.looks_ahead or self.balanced) and not together else 1
        trees = passes * [entry.tree for entry in planted] + [entry.tree for entry in partners]
        saved = sum(len(entry.tree.prompt_ids) for entry in partners) if continues else 0
        return StepPacks(
            step, len(indices), self.method.counts(self.rows[index] for index in indices),
            tuple(made),
            tuple(make_mismatched_pack([partners[i] for i in pack], self.layout, parts) for pack in lone),
            tuple(sorted({*indices})), together, sum(self.rows[index].flat_tokens for index in indices),
            sum(tokens_in_layout(tree, self.layout) for tree in trees) - saved, parts)

    def _largest(self, planted: Sequence[PlacedTree], shares: Sequence[Sequence[int]]) -> int:
        """Tokens of the process that has most of them."""
        return max(sum(tokens_in_layout(planted[i].tree, self.layout) for i in rank) for rank in shares)

    def _packs(self, trees: Sequence[PromptTree], shares: Sequence[Sequence[int]]) -> list[list[int]]:
        """This process's packs as indices of trees: as many as on the process that needs most, of similar size."""
        sizes = [tokens_in_layout(tree, self.layout) for tree in trees]
        needed = [packs_needed([sizes[i] for i in rank], self.microbatch_tokens) for rank in shares]
        own, number = shares[self.world.part], max(map(len, needed))
        packs = balance(needed[self.world.part], [sizes[i] for i in own], self.microbatch_tokens, number)
        return [[own[i] for i in pack] for pack in packs]


def own_trees(rows: Sequence[EncodedRow], schedule: Steps) -> list[PromptTree]:
    """A tree for each row that the schedule takes, without mismatched completions."""
    taken = {index for step in range(1, schedule.total_steps + 1) for index in schedule.step(step)}
    return [build_trees(rows, [index])[0].tree for index in sorted(taken)]


def all_trees(rows: Sequence[EncodedRow], indices: Sequence[int], method: Method, max_length: int,
              parts: Parts | None = None) -> list[PromptTree]:
    """Trees of some rows, and their mismatched trees if the method needs them and they exist."""
    trees = [entry.tree for entry in build_trees(rows, indices)]
    if method.needs_reference_point and has_partners(rows, indices):
        trees += [entry.tree for entry in mismatched_trees(rows, indices, max_length, parts)]
    return trees


def has_partners(rows: Sequence[EncodedRow], indices: Sequence[int]) -> bool:
    """Whether each of some rows has a completion of another prompt as its mismatched completion."""
    return (all(rows[index].partner is not None for index in indices)
            or len({rows[index].prompt_key for index in indices}) > 1)


def check_partners(steps: GivenSchedule, rows: Sequence[EncodedRow], method: Method) -> GivenSchedule:
    """Check that each given step has mismatched completions for all of its rows, if the method needs them.

    Raises:
        UsageError: for the first step that has not.
    """
    for number, own in enumerate(steps.steps, start=1):
        for places in steps.parts(number).ranges() if method.needs_reference_point else ():
            if not has_partners(rows, [own[place] for place in places]):
                scope, remedy = (("micro-batch", "use larger batches") if steps.sizes else
                                 ("step", "raise accumulation_steps"))
                raise UsageError(f"step {number}: all {len(places)} rows {'of a micro-batch ' * bool(steps.sizes)}have "
                                 f"the same prompt, but KTO needs completions of another prompt in the same {scope}. "
                                 f"Shuffle the rows before batching, {remedy}, or use kl_source='batch'.")
    return steps


Shares = Mapping[int, tuple[int, tuple[float, ...] | None]]
"""For each row of a step, its micro-batch, and its `Units.shares`."""


def shares_of_parts(rows: Sequence[EncodedRow], indices: Sequence[int], parts: Parts, method: Method) -> Shares:
    """What the parts of a step decide about its rows; nothing for a step that is pooled as a whole."""
    if parts.rule == STEP:
        return {}
    found: dict[int, tuple[int, tuple[float, ...] | None]] = {}
    for places, number in zip(parts.ranges(), parts.micro_batches, strict=True):
        own = [indices[place] for place in places]
        equal = 1 / len(parts.sizes[number]) / (1 if parts.rule.division == "sum" else len(parts.sizes))
        shares = method.shares([rows[index] for index in own], equal, parts.rule.per_token)
        found |= {index: (number, share if parts.rule.division != "step" else None)
                  for index, share in zip(own, shares, strict=True)}
    return found


def make_pack(planted: Sequence[PlacedTree], rows: Sequence[EncodedRow], layout: Layout, method: Method,
              shares: Shares = MappingProxyType({})) -> Pack:
    """Trees with their rows as a pack.

    Args:
        shares: of `shares_of_parts`.
    """
    members: list[tuple[int, ...]] = []
    indices: list[int] = []
    offset = 0
    for entry in planted:
        members += [tuple(offset + position for position in positions) for positions in entry.members]
        indices += entry.rows
        offset += len(entry.tree.completions)
    labels = [rows[index].desirable for index in indices]
    desirable = None if None in labels else torch.tensor(labels, dtype=torch.bool)
    weights = method.weights(rows[index] for index in indices)
    width = len(members[0]) if members else 4  # an empty pack has no units of any view
    trees = tuple(entry.tree for entry in planted)
    units = Units(torch.tensor(members, dtype=torch.int64).reshape(-1, width), desirable, weights)
    if own := [shares[index] for index in indices if shares]:
        units = replace(units, micro_batches=torch.tensor([number for number, _ in own], dtype=torch.int64))
        if own[0][1] is not None:
            units = replace(units, shares=torch.tensor([share for _, share in own], dtype=torch.float64))
    return Pack(trees, collate(trees, layout), units, tuple(indices), method.counts(rows[index] for index in indices))


def make_mismatched_pack(entries: Sequence[Mismatched], layout: Layout, parts: Parts) -> MismatchedPack:
    """Mismatched trees as a pack."""
    trees = tuple(entry.tree for entry in entries)
    return MismatchedPack(trees, collate(trees, layout), users_of_parts(entries, parts))


def make_leaves(entries: Sequence[Mismatched], roots: Sequence[PlacedTree], parts: Parts) -> Leaves:
    """Mismatched completions as the continuation of a pack's prompts."""
    trees = tuple(entry.tree for entry in entries)
    return Leaves(trees, collate_leaves(trees, [root.tree for root in roots]), users_of_parts(entries, parts))


def users_of_parts(entries: Sequence[Mismatched], parts: Parts) -> torch.Tensor:
    """`[J, C]` number of units of each part that have each completion as their partner."""
    users = [own for entry in entries for own in entry.parts]
    counts = torch.zeros(parts.number, len(users), dtype=torch.float64)
    for completion, own in enumerate(users):
        for part in own:
            counts[part, completion] += 1
    return counts
