"""Evaluation: a few scalars per row, pooled over the whole set; the same figures whatever the layout or ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from tropism.data.pack import cost, fill, mismatch, plant, share, size
from tropism.data.rows import EncodedRow
from tropism.losses.scored import Scored
from tropism.methods import Units
from tropism.train.statistics import Array, accuracy, auc, resamples, with_interval
from tropism.train.step import Engine, ReferencePoint, pool, reference_moments
from tropism.train.work import MismatchedPack, Pack, make_mismatched_pack, make_pack


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
        self._packs: tuple[list[Pack], list[MismatchedPack]] | None = None
        self.baselines: dict[str, float] = {}

    def __call__(self, engine: Engine, report: Callable[[int, int], None] = lambda done, total: None,
                 ) -> dict[str, float]:
        """The evaluation record of the policy as it is; every rank gets the same."""
        packs, lone = self._prepare(engine)
        done, total = 0, len(packs) + len(lone)
        values: list[tuple[int, list[float], list[float], list[int]]] = []
        with torch.no_grad():
            for pack in packs:
                batch = pack.batch.to(engine.model.device)
                logps, reference = engine.model.logps(batch).cpu(), engine.reference.score(pack.trees, batch).cpu()
                for row, members in zip(pack.rows, pack.units.members, strict=True):
                    values.append((row, logps[members].tolist(), reference[members].tolist(),
                                   pack.batch.lengths[members].tolist()))
                report(done := done + 1, total)
            moments = torch.zeros(5, dtype=torch.float64)
            for other in lone:
                batch = other.batch.to(engine.model.device)
                logratios = (engine.model.logps(batch) - engine.reference.score(other.trees, batch)).cpu()
                moments += reference_moments(logratios, other.counts)
                report(done := done + 1, total)
        gathered = sorted(value for part in engine.world.gather(values) for value in part)
        scores = Scores(torch.tensor([logps for _, logps, _, _ in gathered], dtype=torch.float64),
                        torch.tensor([reference for _, _, reference, _ in gathered], dtype=torch.float64),
                        torch.tensor([lengths for _, _, _, lengths in gathered]))
        pooled = torch.stack(engine.world.gather(moments)).sum(0)
        return self.summarise(engine, scores, pool(pooled) if pooled[1] else None)

    def _prepare(self, engine: Engine) -> tuple[list[Pack], list[MismatchedPack]]:
        """This rank's share of the set, laid out once."""
        if self._packs is None:
            layout, world = engine.model.layout, engine.world
            planted = plant(self.rows, range(len(self.rows)))
            own = share([cost(entry.tree) for entry in planted], world.size)[world.rank]
            packs = [make_pack([planted[own[i]] for i in pack], self.rows, layout)
                     for pack in fill([size(planted[i].tree, layout) for i in own], self.budget)]
            lone = []
            if engine.method.row.needs_reference_point and len(planted) > 1:
                entries = mismatch(self.rows, range(len(self.rows)), self.max_length)
                lone = [make_mismatched_pack([entries[own[i]] for i in pack], layout)
                        for pack in fill([size(entries[i].tree, layout) for i in own], self.budget)]
            self._packs = packs, lone
        return self._packs

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
        noise = engine.noise(flat.logps)
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

    @cached_property
    def _resamples(self) -> Array:
        return resamples([row.prompt_key for row in self.rows])

    def _ranking(self, scores: Array, with_ends: bool = True) -> dict[str, float]:
        """AUC of single completions, or accuracy of pairs, with its interval."""
        weights = self._resamples if with_ends else np.ones((1, len(scores)))
        if scores.shape[1] == 2:
            margins = scores[:, 0] - scores[:, 1]
            return with_interval("rewards/accuracies", accuracy(margins)[0], accuracy(margins, weights)
                                 if with_ends else np.zeros(0))
        desirable = np.array([bool(row.desirable) for row in self.rows])
        flat = scores[:, 0]
        return with_interval("rewards/auc", auc(flat, desirable)[0], auc(flat, desirable, weights)
                             if with_ends else np.zeros(0))


def add_margins(record: dict[str, float]) -> None:
    """The margin of unpaired data: difference of the class means, where both classes are there."""
    if "rewards/margins" not in record and {"rewards/chosen", "rewards/rejected"} <= record.keys():
        record["rewards/margins"] = record["rewards/chosen"] - record["rewards/rejected"]


def point_record(point: ReferencePoint) -> dict[str, float]:
    """`kl`, `kl/raw` and, where it exists, `kl/stderr`."""
    record = {"kl": float(point.value), "kl/raw": float(point.raw)}
    stderr = float(point.stderr)
    return record | ({"kl/stderr": stderr} if np.isfinite(stderr) else {})
