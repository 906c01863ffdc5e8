"""Evaluation: a few scalars per row, pooled over the whole set; the same figures whatever the layout or ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tropism.data.collate import collate
from tropism.data.pack import cost, mismatch, scoring_packs, share
from tropism.data.rows import EncodedRow
from tropism.data.tree import score_key
from tropism.losses.scored import Scored
from tropism.methods import Units
from tropism.train.statistics import Array, accuracy, auc, resamples, with_interval
from tropism.train.step import Engine, ReferencePoint, pool, reference_moments
from tropism.train.work import all_trees


@dataclass(frozen=True)
class Scores:
    """Per row of the evaluation set, in file order; `[n, m]` with m completions per row."""

    logps: Tensor
    reference_logps: Tensor
    lengths: Tensor


class Evaluator:
    """Evaluates a fixed set of rows.

    Args:
        rows: the evaluation rows, in file order.
        budget: tokens of a pack.
        max_length: tokens of a prompt with its completion.
    """

    def __init__(self, rows: Sequence[EncodedRow], budget: int, max_length: int) -> None:
        self.rows = rows
        self.budget = budget
        self.max_length = max_length
        self.baselines: dict[str, float] = {}

    def __call__(self, engine: Engine, report: Callable[[int, int], None] = lambda done, total: None,
                 ) -> dict[str, float]:
        """The evaluation record of the policy as it is; every rank gets the same."""
        found = self._score(engine, report)
        return engine.world.broadcast(self._record(engine, found) if engine.world.is_main else {})

    @torch.no_grad()
    def _score(self, engine: Engine, report: Callable[[int, int], None]) -> dict[bytes, tuple[float, float]]:
        """Policy and reference log-prob of every (prompt, completion), mismatched ones included, by all ranks."""
        model = engine.model
        trees = all_trees(self.rows, range(len(self.rows)), engine.method, self.max_length)
        packs = scoring_packs(trees, self.budget, model.layout)
        own = share([sum(map(cost, pack)) for pack in packs], engine.world.size)[engine.world.rank]
        found: dict[bytes, tuple[float, float]] = {}
        for done, index in enumerate(own, start=1):
            batch = collate(packs[index], model.layout).to(model.device)
            values = zip(model.logps(batch).tolist(), engine.reference.score(packs[index], batch).tolist(), strict=True)
            found |= zip((key for tree in packs[index] for key in tree.score_keys), values, strict=True)
            report(done, len(own))
        return {key: value for part in engine.world.gather(found) for key, value in part.items()}

    def _record(self, engine: Engine, found: dict[bytes, tuple[float, float]]) -> dict[str, float]:
        values = [[found[score_key(row.prompt_ids, completion)] for completion in row.completions] for row in self.rows]
        both = torch.tensor(values, dtype=torch.float64)
        lengths = torch.tensor([[completion.length for completion in row.completions] for row in self.rows])
        scores = Scores(both[..., 0], both[..., 1], lengths)
        point = None
        if engine.method.row.needs_reference_point and len({row.prompt_key for row in self.rows}) > 1:
            entries = mismatch(self.rows, range(len(self.rows)), self.max_length)
            pairs = torch.tensor([found[key] for entry in entries for key in entry.tree.score_keys],
                                 dtype=torch.float64)
            counts = torch.tensor([count for entry in entries for count in entry.counts], dtype=torch.float64)
            point = pool(reference_moments(pairs[:, 0] - pairs[:, 1], counts))
        return self.summarise(engine, scores, point)

    def summarise(self, engine: Engine, scores: Scores, point: ReferencePoint | None) -> dict[str, float]:
        """Figures of the set from its per-row scores."""
        record: dict[str, float] = {}
        flat = Scored(scores.logps.flatten(), scores.reference_logps.flatten(), scores.lengths.flatten())
        members = torch.arange(len(flat.logps)).reshape(scores.logps.shape)
        labels = [row.desirable for row in self.rows]
        units = Units(members, None if None in labels else torch.tensor(labels))
        if point is not None or not engine.method.row.needs_reference_point:
            losses = engine.method.losses(flat, units, point.value if point else None)
            record["loss"] = float(losses.mean())
        else:
            losses = torch.zeros(len(members))
        noise = engine.noise(flat)
        sums = engine.method.metrics(flat, units, losses, noise)
        record |= {key: float(total) / int(count) for key, (total, count) in sums.items()
                   if key != "loss" and int(count)}
        add_margins(record)
        if point is not None:
            record |= point_record(point)
        record |= self._ranking(engine.method.rewards(flat, noise).reshape(scores.logps.shape).numpy())
        if not self.baselines:  # the first evaluation is that of the initial policy
            per_token = scores.logps / scores.lengths
            for name, score in (("logps", scores.logps), ("logps_per_token", per_token),
                                ("length", scores.lengths.double())):
                ranking = self._ranking(score.numpy(), with_ends=False)
                self.baselines |= {f"baselines/{name}": value for value in ranking.values()}
        return record | self.baselines

    def _ranking(self, scores: Array, with_ends: bool = True) -> dict[str, float]:
        """AUC of single completions, or accuracy of pairs, with its interval."""
        if scores.shape[1] == 2:
            key, statistic = "rewards/accuracies", partial(accuracy, scores[:, 0] - scores[:, 1])
        else:
            desirable = np.array([bool(row.desirable) for row in self.rows])
            key, statistic = "rewards/auc", partial(auc, scores[:, 0], desirable)
        drawn = resamples([row.prompt_key for row in self.rows]) if with_ends else ()
        return with_interval(key, statistic()[0], np.concatenate([np.zeros(0), *map(statistic, drawn)]))


def add_margins(record: dict[str, float]) -> None:
    """The margin of unpaired data: difference of the class means, where both classes are there."""
    if "rewards/margins" not in record and {"rewards/chosen", "rewards/rejected"} <= record.keys():
        record["rewards/margins"] = record["rewards/chosen"] - record["rewards/rejected"]


def point_record(point: ReferencePoint) -> dict[str, float]:
    """`kl`, `kl/raw` and, where it exists, `kl/stderr`."""
    record = {"kl": float(point.value), "kl/raw": float(point.raw)}
    stderr = float(point.stderr)
    return record | ({"kl/stderr": stderr} if np.isfinite(stderr) else {})
