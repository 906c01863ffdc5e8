"""Evaluation: a few scalars per row, pooled over the whole set; the same figures whatever the layout or ranks."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tropism.data.batching.collate import collate
from tropism.data.batching.pack import assign_to_ranks, cost, mismatched_trees, scoring_packs
from tropism.data.rows import EncodedRow
from tropism.data.tree import PromptTree, score_key
from tropism.losses.scored import Scored
from tropism.methods import StepInputs, Units
from tropism.train.engine import Engine
from tropism.train.evaluation.bootstrap import Array, accuracy, auc, resamples, with_interval
from tropism.train.step_packs import all_trees, has_partners
from tropism.train.step_statistics import (
    ReferencePoint,
    point_record,
    pool,
    reference_moments,
    side_values,
    sorted_partners,
)

Values = tuple[float, float, float, float]
"""Policy log-prob, reference log-prob, divergence and confidence of a completion; 0 where there is none."""


def evenly(rows: Sequence[EncodedRow], limit: int | None) -> Sequence[EncodedRow]:
    """All rows, or so many of them at even distances."""
    if limit is None or limit >= len(rows):
        return rows
    return [rows[number * len(rows) // limit] for number in range(limit)]


class Evaluator:
    """Evaluates a fixed set of rows.

    Args:
        rows: the evaluation rows, in file order.
        microbatch_tokens: tokens of a pack.
        max_length: tokens of a prompt with its completion.
    """

    def __init__(self, rows: Sequence[EncodedRow], microbatch_tokens: int, max_length: int) -> None:
        self.rows = rows
        self.microbatch_tokens = microbatch_tokens
        self.max_length = max_length
        self.baselines: dict[str, float] = {}

    def __call__(self, engine: Engine, report: Callable[[int, int], None] = lambda done, total: None,
                 ) -> dict[str, float]:
        """The evaluation record of the policy as it is; every rank gets the same."""
        found = self.score(engine, report)
        world = engine.world
        return world.broadcast(world.on_main(lambda: self._record(engine, found)) or {})

    @torch.no_grad()
    def score(self, engine: Engine, report: Callable[[int, int], None]) -> dict[bytes, Values]:
        """What is known of every (prompt, completion), mismatched ones included, by all ranks."""
        model = engine.model
        trees = all_trees(self.rows, range(len(self.rows)), engine.method, self.max_length)
        packs = scoring_packs(trees, self.microbatch_tokens, model.layout)
        shares = assign_to_ranks([sum(map(cost, pack)) for pack in packs], engine.world.parts)
        own, rounds = shares[engine.world.part], max(map(len, shares))
        found: dict[bytes, Values] = {}

        for number in range(rounds):
            pack = packs[own[number]] if number < len(own) else []
            keys = [key for tree in pack for key in tree.score_keys]
            found |= dict(zip(keys, engine.world.computed(partial(_values, engine, pack)), strict=True))
            report(number + 1, rounds)  # by all ranks alike: it may stop them
        return {key: value for part in engine.world.gather(found) for key, value in part.items()}

    def _record(self, engine: Engine, found: dict[bytes, Values]) -> dict[str, float]:
        values = [[found[score_key(row.prompt_ids, completion)] for completion in row.completions] for row in self.rows]
        flat = torch.tensor(values, dtype=torch.float64).flatten(0, 1)
        lengths = torch.tensor([completion.length for row in self.rows for completion in row.completions])
        scored = Scored(flat[:, 0], flat[:, 1], lengths, flat[:, 2], flat[:, 3])
        point = None
        if engine.method.needs_reference_point and has_partners(self.rows, range(len(self.rows))):
            entries = mismatched_trees(self.rows, range(len(self.rows)), self.max_length)
            pairs = torch.tensor([found[key] for entry in entries for key in entry.tree.score_keys],
                                 dtype=torch.float64)
            counts = torch.tensor([count for entry in entries for count in entry.counts], dtype=torch.float64)
            point = pool(reference_moments(pairs[:, 0] - pairs[:, 1], counts))
        return self.summarize(engine, scored, point)

    def summarize(self, engine: Engine, scored: Scored, point: ReferencePoint | None) -> dict[str, float]:
        """Figures of the set.

        Args:
            scored: completions of all rows, row after row.
            point: the reference point over the whole set, where there is one.
        """
        method = engine.method
        members = torch.arange(len(scored.logps)).reshape(len(self.rows), -1)
        labels = [row.desirable for row in self.rows]
        units = Units(members, None if None in labels else torch.tensor(labels))
        noise = engine.noise(scored)
        losses = [torch.zeros(len(members), dtype=torch.float64)] * len(method.terms)
        known = point is not None or not method.needs_reference_point
        if known:
            wide = StepInputs(point.value if point else None, engine.shift.value.cpu())
            if method.needs_sorting:
                wide = StepInputs(wide.reference_point, wide.shift,
                                  *sorted_partners(side_values(method, scored, units)))
            losses = method.losses(scored, units, wide)
        sums = method.metrics(scored, units, losses, method.counts(self.rows), noise)
        terms = {"saturated", *(term.key for term in method.terms)}  # what follows from the losses
        record = method.combine({key: float(total) / int(count) for key, (total, count) in sums.items()
                                 if int(count) and (known or key not in terms)})
        if point is not None:
            record |= point_record(point)
        if method.view != "single":
            record |= ranking(self.rows, method.clear_rewards(scored, units, noise).numpy())
            record |= self._baselines(scored, members[:, :2] if method.view == "paired" else members)
        return record

    def _baselines(self, scored: Scored, members: Tensor) -> dict[str, float]:
        """How well the initial policy's own log-prob, and length, rank the completions; found once."""
        if not self.baselines:  # the first evaluation is that of the initial policy
            for name, value in (("logps", scored.logps), ("logps_per_token", scored.logps / scored.lengths),
                                ("length", scored.lengths.double())):
                found = ranking(self.rows, value[members].numpy(), with_ends=False)
                self.baselines |= {f"baselines/{name}": share for share in found.values()}
        return self.baselines


def ranking(rows: Sequence[EncodedRow], scores: Array, with_ends: bool = True) -> dict[str, float]:
    """AUC of single completions, or accuracy of pairs, with its interval.

    Args:
        scores: `[n, 1]` or `[n, 2]` for each row.
        with_ends: the interval too.
    """
    if scores.shape[1] == 2:
        key, statistic = "rewards/accuracies", partial(accuracy, scores[:, 0] - scores[:, 1])
    else:
        key, statistic = "rewards/auc", partial(auc, scores[:, 0], np.array([bool(row.desirable) for row in rows]))
    drawn = resamples([row.prompt_key for row in rows]) if with_ends else ()
    return with_interval(key, statistic()[0], np.concatenate([np.zeros(0), *map(statistic, drawn)]))


def _values(engine: Engine, pack: Sequence[PromptTree]) -> list[Values]:
    """What is known of each completion of a pack."""
    scored = engine.score(pack, collate(pack, engine.model.layout).to(engine.model.device))
    zeros = torch.zeros_like(scored.logps)
    columns = [zeros if column is None else column for column in (
        scored.logps, scored.reference_logps, scored.divergence, scored.confidence)]
    return [(a, b, c, d) for a, b, c, d in torch.stack(columns, dim=1).tolist()]


