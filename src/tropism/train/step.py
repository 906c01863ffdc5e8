"""One optimizer step, readable as the algorithm."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tropism.distributed.shard import Owned
from tropism.distributed.world import World
from tropism.methods.method import to_device
from tropism.model.moe_router import RouterLogits
from tropism.observe.metrics import Tally
from tropism.train.engine import Engine
from tropism.train.look_ahead import look_ahead, pooled_reference_point
from tropism.train.step_packs import StepPacks
from tropism.train.step_statistics import ReferencePoint


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


def train_step(engine: Engine, work: StepPacks) -> StepOutcome:
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
        routed = RouterLogits() if balance else None
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


def clip(owned: Owned, max_norm: float, world: World) -> Tensor:
    """The norm of the whole gradient; gradients are scaled down to `max_norm` where they exceed it (0: never)."""
    norm = owned.norm(world)
    if max_norm:
        torch.nn.utils.clip_grads_with_norm_(owned.parts, max_norm, norm)
    return norm


