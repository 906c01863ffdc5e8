"""Evaluation: a few scalars per row, pooled over the whole set; the same figures whatever the layout or ranks."""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tropism.data.batching.collate import Batch
from tropism.data.batching.pack import mismatched_trees
from tropism.data.rows import EncodedRow
from tropism.data.schedule import ONE, Parts
from tropism.data.tree import PromptTree, score_key
from tropism.losses.scored import CompletionScore, Scored
from tropism.methods import Method, StepInputs, Units
from tropism.observe.metrics import BASELINES
from tropism.train.engine import Engine
from tropism.train.evaluation.bootstrap import Array, accuracy, auc, resamples, with_interval
from tropism.train.out_of_memory import place_of
from tropism.train.reference_point import ReferencePoint, point_record, pool, reference_moments
from tropism.train.score_packs import ReportProgress, score_trees, silent
from tropism.train.step_packs import all_trees, has_partners, shares_of_parts, users_of_parts
from tropism.train.step_statistics import side_values, sorted_partners


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
        parts: the micro-batches of the rows, if losses and the reference point are averaged over them.
    """

    def __init__(self, rows: Sequence[EncodedRow], microbatch_tokens: int, max_length: int,
                 parts: Parts | None = None) -> None:
        self.rows = rows
        self.parts = parts or Parts(((len(rows),),))
        self.microbatch_tokens = microbatch_tokens
        self.max_length = max_length
        self.baselines: dict[str, float] = {}
        self.first: Scored | None = None
        """Completions of all rows, row after row, under the initial policy."""
        self.last: Scored | None = None
        """The same under the policy that was evaluated last."""

    def __call__(self, engine: Engine, report: ReportProgress = silent) -> dict[str, float]:
        """The evaluation record of the policy as it is; every rank gets the same."""
        found = self.score(engine, report)
        self.last = self.own(found)
        self.first = self.first or self.last
        world = engine.world
        return world.broadcast(world.on_main(lambda: self.record(engine, found)) or {})

    def own(self, found: Mapping[bytes, CompletionScore]) -> Scored:
        """The scores of the rows' own completions, row after row."""
        return Scored.join(found[score_key(row.prompt_ids, completion)]
                           for row in self.rows for completion in row.completions)

    def score(self, engine: Engine, report: ReportProgress) -> dict[bytes, CompletionScore]:
        """The score of every (prompt, completion), mismatched ones included; every rank gets all of them."""
        trees = all_trees(self.rows, range(len(self.rows)), engine.method, self.max_length, self.parts)
        return score_trees(engine.model, trees, self.microbatch_tokens, partial(_values, engine), engine.world, report,
                           partial(place_of, self.rows))

    def record(self, engine: Engine, found: Mapping[bytes, CompletionScore]) -> dict[str, float]:
        """The evaluation record of scores."""
        scored, point = self.own(found), None
        if engine.method.needs_reference_point and has_partners(self.rows, range(len(self.rows))):
            entries = mismatched_trees(self.rows, range(len(self.rows)), self.max_length, self.parts)
            partners = Scored.join(found[key] for entry in entries for key in entry.tree.score_keys)
            point = pool(reference_moments(partners.logratios, users_of_parts(entries, self.parts)), self.parts)
        record = summarize(self.rows, engine.method, scored, engine.noise(scored), point, engine.shift.value.cpu(),
                           self.parts)
        if engine.method.view != "single":
            if not self.baselines:  # the first evaluation is that of the initial policy
                self.baselines |= baselines(self.rows, scored)  # in place: checkpoints keep this dict
            record |= self.baselines
        return record


def summarize(rows: Sequence[EncodedRow], method: Method, scored: Scored, noise: Tensor,
              point: ReferencePoint | None = None, shift: Tensor | None = None,
              parts: Parts = ONE) -> dict[str, float]:
    """Metrics of a set of rows: what training logs of a step, and the ranking of the rewards with its interval.

    Args:
        method: says what a reward is and which losses there are.
        scored: completions of all rows, row after row, on the host.
        noise: `[C]` rewards no larger than this count as 0 in the ranking.
        point: reference point over the set; None leaves out the losses that need it.
        shift: running mean of the rewards, for a method that needs it.
        parts: of the rows, which may have a reference point each.
    """
    units = units_of(rows, scored, method.weights(rows))
    members = units.members
    losses = [torch.zeros(len(members), dtype=torch.float64)] * len(method.terms)
    known = point is not None or not method.needs_reference_point
    shares = shares_of_parts(rows, range(len(rows)), parts, method)
    if known:
        own = torch.tensor([number for number, _ in shares.values()], dtype=torch.int64)
        inputs = StepInputs(point and (point.values[own] if shares else point.value), shift)
        if method.needs_sorting:
            inputs = StepInputs(inputs.reference_point, inputs.shift,
                                *sorted_partners(side_values(method, scored, units)))
        losses = method.losses(scored, units, inputs)
    sums = method.metrics(scored, units, losses, method.counts(rows), noise)
    terms = {"saturated", *(term.key for term in method.terms)}  # what follows from the losses
    means = {key: float(total) / float(count) for key, (total, count) in sums.items()
             if float(count) and (known or key not in terms)}
    if known and shares and parts.rule.division != "step":
        factors = torch.tensor([share for _, share in shares.values()], dtype=torch.float64)
        if parts.rule.division == "sum":  # which steps accumulate; an evaluation averages
            factors /= len(parts.sizes)
        means |= {term.key: float((own * factor).sum())
                  for term, own, factor in zip(method.terms, losses, factors.unbind(1), strict=True)}
    record = method.combine(means)
    if point is not None:
        record |= point_record(point)
    if method.view != "single":
        record |= ranking(rows, method.clear_rewards(scored, units, noise).numpy())
    return record


def baselines(rows: Sequence[EncodedRow], scored: Scored) -> dict[str, float]:
    """How well the policy's log-prob, summed and per token, and the mere length rank labeled or paired completions.

    Args:
        scored: completions of all rows, row after row, on the host.
    """
    members = units_of(rows, scored).members[:, :2]
    found: dict[str, float] = {}
    for name, value in (("logps", scored.logps), ("logps_per_token", scored.logps / scored.lengths),
                        ("length", scored.lengths.double())):
        ranked = ranking(rows, value[members].numpy(), with_ends=False)
        found |= {f"{BASELINES}{name}": share for share in ranked.values()}
    return found


def units_of(rows: Sequence[EncodedRow], scored: Scored, weights: Tensor | None = None) -> Units:
    """The units of rows whose completions were scored, row after row.

    Args:
        weights: `[n]` of the rows; None for none.
    """
    labels = [row.desirable for row in rows]
    return Units(torch.arange(len(scored.logps)).reshape(len(rows), -1),
                 None if None in labels else torch.tensor(labels), weights)


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


def _values(engine: Engine, pack: Sequence[PromptTree], batch: Batch) -> list[CompletionScore]:
    return engine.score(pack, batch).split()
