"""One optimiser step, readable as the algorithm."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tropism.data.batching.collate import Batch
from tropism.data.tree import PromptTree
from tropism.distributed.shard import Owned
from tropism.distributed.world import World
from tropism.losses.scored import Scored
from tropism.methods import Method, Units, Wide
from tropism.model.attention import TreePass
from tropism.model.language_model import LanguageModel
from tropism.model.moe_router import Routed
from tropism.observe.metrics import Tally
from tropism.train.frozen.reference import Reference
from tropism.train.frozen.teacher import Teacher
from tropism.train.optimizer import Updater
from tropism.train.router_loss import KEY, Balance, StepBalance
from tropism.train.step_packs import MismatchedPack, Pack, StepWork
from tropism.train.step_statistics import RunningMean, ranks_of_step, rewards_of_step


@dataclass(frozen=True)
class Engine:
    """What a step works with."""

    model: LanguageModel
    reference: Reference | None
    method: Method
    updater: Updater
    world: World
    max_grad_norm: float
    teacher: Teacher | None = None
    shift: RunningMean = field(default_factory=RunningMean)
    """Running mean of the rewards, for BCO."""
    rounding: float = 0.0
    """Largest difference between our log-prob of a completion and the model's own, measured at start, in nats per
    root of its tokens; what bfloat16 explains."""
    balance: Balance | None = None
    """The routers' load-balancing loss, if it is trained on."""

    @property
    def modules(self) -> dict[str, Any]:
        """The models in memory, by what they are to the run."""
        held = {"policy": self.model, "reference": getattr(self.reference, "model", None),
                "teacher": getattr(self.teacher, "model", None)}
        return {name: model.module for name, model in held.items() if model is not None}

    @property
    def metric_keys(self) -> tuple[str, ...]:
        """Keys of a step's tally, the same on every rank."""
        return self.method.metric_keys + ((KEY,) if self.balance is not None else ())

    def score(self, trees: Sequence[PromptTree], batch: Batch, tree: TreePass | None = None,
              routed: Routed | None = None) -> Scored:
        """What the losses are a function of, for the completions of a batch on the model's device."""
        comparison = targets = None
        if self.teacher is not None:
            comparison, targets = self.teacher.comparison, self.teacher.targets(trees, batch)
        out = self.model.outcome(batch, tree, comparison=comparison, targets=targets, confidence=self.method.wpo,
                                 routed=routed)
        reference = (torch.zeros_like(out.logps.detach()) if self.reference is None
                     else self.reference.score(trees, batch))
        return Scored(out.logps, reference, batch.lengths, out.divergence, out.confidence)

    def noise(self, scored: Scored) -> Tensor:
        """`[C]` how large a reward can be through rounding alone; 0 for one that is no difference."""
        beta = self.method.beta
        if not self.method.needs_reference:
            return torch.zeros_like(scored.logps.detach())
        if self.model.precision == "bf16":
            return beta * max(2 * self.rounding, 1e-3) * scored.lengths.double().sqrt()
        return {"fp32": 1e-6, "fp64": 1e-12}[self.model.precision] * (1 + beta * scored.logps.detach().abs())


@dataclass(frozen=True, slots=True)
class ReferencePoint:
    """KTO's z0 of a step, and the estimate it comes from; all on the device.

    Args:
        value: max(0, raw): clamped after pooling.
        raw: mean log-ratio of the mismatched completions, over the units of all ranks.
        stderr: its standard error over the distinct mismatched pairs; NaN if there are fewer than two.
    """

    value: Tensor
    raw: Tensor
    stderr: Tensor


@dataclass
class StepOutcome:
    """What a step leaves for the log; nothing here has been read by the host yet."""

    step: int
    tally: Tally
    grad_norm: Tensor
    finite: Tensor
    point: ReferencePoint | None
    losses: list[tuple[Tensor, tuple[int, ...]]] = field(default_factory=list)
    """`[3, U]` for the units of each of this rank's packs, with their rows: the loss, NaN where a log-prob was not
    finite; then 0, or NaN where a log-prob of its own was not, of the policy and of the reference."""
    learning_rate: float = 0.0
    size: Tensor | None = None
    """What this rank's packs contribute to the step's loss, without its sign; 0 where there is nothing to learn."""


def train_step(engine: Engine, work: StepWork) -> StepOutcome:
    """Sum the losses of all units over packs and ranks, divide once, clip, and update if all is finite."""
    device = engine.model.device
    tally = Tally()
    seen: list[tuple[Tensor, tuple[int, ...]]] = []
    spoilt, total = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(2))
    method = engine.method
    point = pooled_reference_point(engine, work.mismatched) if work.mismatched else None
    balance = engine.balance and engine.balance.of_step(engine.model, engine.world, work.packs)
    wide = look_ahead(engine, work.packs, balance)
    for number, pack in enumerate(work.packs):
        batch = pack.batch.to(device)
        units = to_device(pack.units, device)
        main = engine.model.tree_pass(batch, record=work.leaves is not None)
        routed = Routed() if balance else None
        scored = engine.score(pack.trees, batch, main, routed)
        if work.leaves is not None:
            point = pooled_reference_point(engine, [work.leaves], main)
        losses = method.losses(scored, units, replace(wide[number], reference_point=point.value if point else None))
        share = method.total(losses, work.counts)
        if balance and routed:
            share = share + balance.share(routed, pack, tally)
        engine.model.backward(share, last=number == len(work.packs) - 1)
        total += share.detach().abs()
        if pack.rows:
            tally.add(method.metrics(scored, units, losses, pack.counts, engine.noise(scored)))
            # A saturated loss can hide an infinite log-ratio; times 0 it is NaN, and 0 otherwise.
            policy, reference = (0.0 * logps.detach()[units.members].sum(dim=1)
                                 for logps in (scored.logps, scored.reference_logps))
            values = torch.stack(losses).detach().sum(0) + policy + reference
            spoilt += (~torch.isfinite(values)).sum()
            seen.append((torch.stack((values, policy, reference)), pack.rows))
    engine.updater.owned.collect(engine.world)
    norm = clip(engine.updater.owned, engine.max_grad_norm, engine.world)
    finite = torch.isfinite(norm) & (engine.world.sum(spoilt) == 0)
    engine.shift.settle(finite)
    rate = engine.updater.apply(work.step, finite)
    return StepOutcome(work.step, tally, norm.detach(), finite, point, seen, rate, total)


@torch.no_grad()
def look_ahead(engine: Engine, packs: Sequence[Pack], balance: StepBalance | None = None) -> list[Wide]:
    """What the losses of each pack take from the whole step besides the reference point, by a forward pass of it.

    BCO's running mean is moved on, and stays so once the step is known to be finite. `balance` sees the same pass.
    """
    method, device = engine.method, engine.model.device
    if not method.looks_ahead:
        if balance:
            balance.look_ahead()
        return [Wide()] * len(packs)
    found = []
    for pack in packs:
        batch = pack.batch.to(device)
        routed = Routed() if balance else None
        logps = engine.model.logps(batch, routed=routed)  # of an empty pack too: ranks may share the model
        scored = None
        if pack.rows:
            assert engine.reference is not None
            scored = Scored(logps, engine.reference.score(pack.trees, batch), batch.lengths)
            if balance and routed:
                balance.see(routed, pack)
        found.append((scored, to_device(pack.units, device)))
    shift = None
    if method.needs("shift"):
        shift = engine.shift.propose(engine.world.sum(rewards_of_step(method, found, device)))
    if not method.needs_sorting:
        return [Wide(shift=shift)] * len(packs)
    wide = ranks_of_step(method, found, [pack.rows for pack in packs], engine.world, device)
    return [replace(of_pack, shift=shift) for of_pack in wide]


def clip(owned: Owned, max_norm: float, world: World) -> Tensor:
    """The norm of the whole gradient; gradients are scaled down to `max_norm` where they exceed it (0: never)."""
    norm = owned.norm(world)
    if max_norm:
        torch.nn.utils.clip_grads_with_norm_(owned.parts, max_norm, norm)
    return norm


@torch.no_grad()
def pooled_reference_point(engine: Engine, packs: Sequence[MismatchedPack],
                           earlier: TreePass | None = None) -> ReferencePoint:
    """z0 = max(0, S / n) with S and n summed over all units of the step on all ranks (KTO paper, section 4.1).

    Args:
        packs: mismatched trees of this rank.
        earlier: the pass that computed their prompts already, if one did.
    """
    moments = torch.zeros(5, dtype=torch.float64, device=engine.model.device)
    for pack in packs:
        batch = pack.batch.to(engine.model.device)
        leaf_pass = engine.model.tree_pass(batch, earlier=earlier)
        assert engine.reference is not None
        logratios = engine.model.logps(batch, leaf_pass) - engine.reference.score(pack.trees, batch)
        moments += reference_moments(logratios, pack.counts.to(batch.lengths.device))
    return pool(engine.world.sum(moments))


def reference_moments(logratios: Tensor, counts: Tensor) -> Tensor:
    """`[5]` sums that pool over packs and ranks: S and n over units; m, sum and sum of squares over pairs."""
    logratios = logratios.double()  # the spread of large log-ratios is a small difference of large squares
    return torch.stack(((counts * logratios).sum(), counts.sum(),
                        torch.ones_like(logratios).sum(), logratios.sum(), (logratios * logratios).sum()))


def pool(moments: Tensor) -> ReferencePoint:
    """The reference point from pooled sums: divided first, clamped then."""
    total, units, pairs, pair_sum, pair_squares = moments.unbind()
    raw = total / units
    variance = (pair_squares - pair_sum * pair_sum / pairs).clamp(min=0) / (pairs - 1)
    stderr = torch.where(pairs > 1, (variance / pairs).sqrt(), torch.full_like(raw, math.nan))
    return ReferencePoint(raw.clamp(min=0), raw, stderr)


def to_device(units: Units, device: torch.device) -> Units:
    """The same units on a device."""
    desirable = None if units.desirable is None else units.desirable.to(device)
    return Units(units.members.to(device), desirable)
