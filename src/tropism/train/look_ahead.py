"""What the losses of a step take from the whole of it, before any backward pass."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from tropism.losses.scored import Scored
from tropism.methods import StepInputs
from tropism.methods.method import to_device
from tropism.model.attention import TreePass
from tropism.model.moe_router import RouterLogits
from tropism.train.engine import Engine
from tropism.train.router_loss import StepRouterLoss
from tropism.train.step_packs import MismatchedPack, Pack
from tropism.train.step_statistics import ReferencePoint, pool, ranks_of_step, reference_moments, rewards_of_step


@torch.no_grad()
def look_ahead(engine: Engine, packs: Sequence[Pack], balance: StepRouterLoss | None = None) -> list[StepInputs]:
    """What the losses of each pack take from the whole step besides the reference point, by a forward pass of it.

    BCO's running mean is moved on, and stays so once the step is known to be finite. `balance` sees the same pass.
    """
    method, device = engine.method, engine.model.device
    if not method.looks_ahead:
        if balance:
            balance.look_ahead()
        return [StepInputs()] * len(packs)
    found = []
    for pack in packs:
        batch = pack.batch.to(device)
        routed = RouterLogits() if balance else None
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
        return [StepInputs(shift=shift)] * len(packs)
    wide = ranks_of_step(method, found, [pack.rows for pack in packs], engine.world, device)
    return [replace(of_pack, shift=shift) for of_pack in wide]


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
