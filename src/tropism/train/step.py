"""One optimizer step, readable as the algorithm."""

import torch

from tropism.train.engine import Engine
from tropism.train.look_ahead import LookAhead
from tropism.train.optimizer import clip
from tropism.train.out_of_memory import naming, undivided
from tropism.train.step_log import StepLog, StepOutcome
from tropism.train.step_packs import StepPacks


def train_step(engine: Engine, step: StepPacks) -> StepOutcome:
    """Sum the losses of all units over packs and processes, divide once, clip, and update if everything is finite."""
    model, method, owned = engine.model, engine.method, engine.updater.owned
    ahead, log = LookAhead(engine, step), StepLog(engine, step)
    for number, (done, inputs) in enumerate(ahead.forwards()):
        with naming(done.pack.trees):
            losses = method.losses(done.scored, done.units, inputs)
            share = method.total(losses, step.counts, done.units.shares) + ahead.router_share(done, log.tally)
            model.backward(share, last=number == len(step.packs) - 1)
            log.add(done.pack, done.units, done.scored, losses, share)
    owned.collect(engine.world)
    norm = clip(owned, engine.max_grad_norm, engine.world)
    finite = torch.isfinite(norm) & log.finite()
    engine.world.before_exchange()
    with undivided(step.step):
        engine.shift.settle(finite)
        rate = engine.updater.apply(step.step, finite)
    return log.outcome(norm, finite, ahead.point, rate)
