"""The forward passes of a step, and the values that its losses need from all of its units before any backward pass."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tropism.data.batching.transfer import sent
from tropism.losses.scored import Scored
from tropism.methods import StepInputs, Units
from tropism.model.moe_router import RouterLogits
from tropism.observe.metrics import Tally
from tropism.train.engine import Engine
from tropism.train.out_of_memory import naming
from tropism.train.reference_point import ReferencePoint, mismatched_moments, pool
from tropism.train.step_packs import Pack, StepPacks
from tropism.train.step_statistics import ranks_of_step, rewards_of_step


@dataclass(frozen=True, slots=True)
class Forward:
    """A pack after its forward pass.

    Args:
        pack: the pack.
        units: its units, on the device.
        scored: its completions, with the graph for the backward pass.
        routed: the router logits of the pass; None without a router loss.
    """

    pack: Pack
    units: Units
    scored: Scored
    routed: RouterLogits | None


class LookAhead:
    """KTO's reference point, AOT's sorted partners, BCO's running mean and the load of a MoE's experts in one step.

    If all forward passes of the step come before its backward passes, these values come from them, and mismatched
    completions continue the prompts of the pack that was just computed. Otherwise passes without gradients find them
    first, and each pack is computed again with gradients. All processes do either together. BCO's running mean is only
    proposed: `engine.shift.settle` keeps or drops it.

    Args:
        engine: of the run.
        step: the packs of this process.

    Attributes:
        point: the reference point, known when `forwards` yields.
    """

    def __init__(self, engine: Engine, step: StepPacks) -> None:
        self.engine, self.step = engine, step
        self.point: ReferencePoint | None = None
        self._router = engine.router_loss and engine.router_loss.of_step(engine.model, engine.world)
        self._moments = torch.zeros(step.parts.number, 6, dtype=torch.float64, device=engine.model.device)

    def forwards(self) -> Iterator[tuple[Forward, StepInputs]]:
        """Each pack after its forward pass, and the inputs of its losses that depend on the whole step. The backward
        pass of a pack must be done when the next one is requested."""
        step = self.step
        for mismatched in step.mismatched:
            self._moments += mismatched_moments(self.engine, mismatched)
        if step.forwards_first:
            waiting = deque(self._forward(pack, looks=True) for pack in step.packs)
            inputs = self._inputs(waiting)
            for of_pack in inputs:
                yield waiting.popleft(), of_pack
            return
        inputs = self._inputs(self._without_gradients())
        for pack, of_pack in zip(step.packs, inputs, strict=True):
            yield self._forward(pack), of_pack

    def router_share(self, done: Forward, tally: Tally) -> Tensor | float:
        """What the router loss adds to the scalar that is differentiated for a pack; 0 without one."""
        return self._router.share(done.routed, done.pack, tally) if self._router and done.routed else 0.0

    def _forward(self, pack: Pack, looks: bool = False, distill: bool = True) -> Forward:
        """The forward pass of a pack; an empty one too, since processes may share the model.

        Args:
            looks: add what the whole step needs from it.
            distill: compare with the teacher.
        """
        engine = self.engine
        with naming(pack.trees):
            batch, units = pack.batch.to(engine.model.device), pack.units.to(engine.model.device)
            prompts = engine.model.tree_pass(batch, record=pack.leaves is not None)
            routed = RouterLogits() if self._router else None
            scored = engine.score(pack.trees, batch, prompts, routed, distill)
            if looks and self._router and routed:
                self._router.see(routed, pack)
        if pack.leaves is not None and prompts is not None:
            self._moments += mismatched_moments(engine, pack.leaves, prompts)
            prompts.forget()
        return Forward(pack, units, scored, routed)

    @torch.no_grad()
    def _without_gradients(self) -> list[Forward]:
        """All packs, if the losses need values of the whole step; else none. The router loss uses the same passes."""
        if self.engine.method.looks_ahead:
            return [self._forward(pack, looks=True, distill=False) for pack in self.step.packs]
        if self._router:
            self._router.look_ahead(self.step.packs)
        return []

    @torch.no_grad()
    def _inputs(self, found: Sequence[Forward]) -> list[StepInputs]:
        """The inputs of each pack, from all of them."""
        engine, method, step = self.engine, self.engine.method, self.step
        if method.needs_reference_point:
            self.point = pool(engine.world.sum(self._moments), step.parts)
        shift = None
        scored = [(one.scored, one.units) for one in found]
        if method.needs("shift"):
            sums = rewards_of_step(method, scored, engine.model.device)
            shift = engine.shift.propose(engine.world.sum(sums))
        inputs = [StepInputs()] * len(step.packs)
        if method.needs_sorting:
            inputs = ranks_of_step(method, scored, [pack.rows for pack in step.packs], step.rows, engine.world,
                                   engine.model.device)
        return [replace(of_pack, reference_point=self._point_of(pack), shift=shift)
                for of_pack, pack in zip(inputs, step.packs, strict=True)]

    def _point_of(self, pack: Pack) -> Tensor | None:
        """The reference point of a pack, or of each of its units if micro-batches have one each."""
        own = pack.units.micro_batches
        if self.point is None or own is None:
            return self.point and self.point.value
        return self.point.values[sent(own, self.point.values.device)]
