"""KTO's reference point z0: pooled over the units of a step on all processes, then clamped at 0."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tropism.data.batching.transfer import sent
from tropism.data.schedule import ONE, Parts
from tropism.losses.scored import Scored
from tropism.model.attention import TreePass
from tropism.train.engine import Engine
from tropism.train.out_of_memory import naming
from tropism.train.step_packs import MismatchedPack


@dataclass(frozen=True, slots=True)
class ReferencePoint:
    """KTO's z0 of a step, and the estimate it comes from; all on the device.

    Args:
        values: `[M]` z0 of each micro-batch that has its own; else one, for the step.
        raw: mean log-ratio of the mismatched completions, over the units of all processes.
        stderr: its standard error over the distinct mismatched pairs; NaN if there are fewer than two.
        positive: mean over the units of the log-ratios above 0, with 0 for the others.
    """

    values: Tensor
    raw: Tensor
    stderr: Tensor
    positive: Tensor

    @property
    def value(self) -> Tensor:
        """z0: max(0, raw) over the step, or the mean of the micro-batches."""
        return self.values.mean()


def reference_moments(logratios: Tensor, counts: Tensor) -> Tensor:
    """`[..., 6]` sums that pool over packs and processes: S and n over units; m, sum and sum of squares over pairs; the
    part of S above 0.

    Args:
        logratios: `[C]` of the mismatched completions.
        counts: `[..., C]` number of units that have each as their partner, for each part of a step.
    """
    logratios = logratios.double()  # the spread of large log-ratios is a small difference of large squares
    pairs = (counts > 0).double()
    return torch.stack(((counts * logratios).sum(-1), counts.sum(-1), pairs.sum(-1), (pairs * logratios).sum(-1),
                        (pairs * logratios * logratios).sum(-1), (counts * logratios.clamp(min=0)).sum(-1)), dim=-1)


def pool(moments: Tensor, parts: Parts = ONE) -> ReferencePoint:
    """The reference point from pooled sums.

    Args:
        moments: `[6]`, or `[J, 6]` for J parts.
        parts: of the step. Their rule says where the point is pooled, and whether parts are averaged before the result
            is clamped, or clamped before.
    """
    moments = moments.reshape(-1, 6)
    total, units, pairs, pair_sum, pair_squares, positive = moments.sum(0).unbind()
    raw = total / units
    variance = (pair_squares - pair_sum * pair_sum / pairs).clamp(min=0) / (pairs - 1)
    stderr = torch.where(pairs > 1, (variance / pairs).sqrt(), torch.full_like(raw, math.nan))
    if parts.rule.point == "step":
        return ReferencePoint(raw.clamp(min=0)[None], raw, stderr, positive / units)
    each = moments[:, 0] / moments[:, 1]
    if parts.rule.point == "process":
        each = each.clamp(min=0)
    values = torch.stack([own.mean() for own in each.split([len(sizes) for sizes in parts.sizes])])
    return ReferencePoint(values.clamp(min=0), raw, stderr, positive / units)


def point_record(point: ReferencePoint) -> dict[str, float]:
    """`kl`, `kl/raw` and, where it exists, `kl/stderr`."""
    record = {"kl": float(point.value), "kl/raw": float(point.raw)}
    stderr = float(point.stderr)
    return record | ({"kl/stderr": stderr} if np.isfinite(stderr) else {})


@torch.no_grad()
def mismatched_moments(engine: Engine, pack: MismatchedPack, prompts: TreePass | None = None) -> Tensor:
    """`[J, 6]` sums of a pack of mismatched trees, for each part of its step. Those of all packs of a step on all
    processes give z0 = max(0, S / n) (KTO paper, section 4.1), as `pool` says.

    Args:
        prompts: the pass that has computed their prompts already, if one has.
    """
    assert engine.reference is not None
    with naming(pack.trees):
        batch = pack.batch.to(engine.model.device)
        leaf_pass = engine.model.tree_pass(batch, earlier=prompts)
        scored = Scored(engine.model.logps(batch, leaf_pass), engine.reference.score(pack.trees, batch), batch.lengths)
        return reference_moments(engine.method.compared(scored).logratios, sent(pack.counts, batch.lengths.device))
