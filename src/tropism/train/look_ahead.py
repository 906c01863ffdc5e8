"""Values that the losses need from all units of a step, computed without gradients before the backward passes."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tropism.data.batching.collate import Batch
from tropism.methods import StepInputs
from tropism.model.attention import TreePass
from tropism.model.moe_router import RouterLogits
from tropism.observe.metrics import Tally
from tropism.train.engine import Engine
from tropism.train.out_of_memory import naming
from tropism.train.reference_point import ReferencePoint, pooled_reference_point
from tropism.train.step_packs import Pack, StepPacks
from tropism.train.step_statistics import ranks_of_step, rewards_of_step


class LookAhead:
    """KTO's reference point, AOT's sorted partners, BCO's running mean and the load of a MoE's experts in one step.

    All processes make one together. BCO's running mean is only proposed: `engine.shift.settle` keeps or drops it.

    Args:
        engine: of the run.
        step: the packs of this process.

    Attributes:
        point: the reference point; with `step.leaves` it is known once `inputs` was called.
    """

    def __init__(self, engine: Engine, step: StepPacks) -> None:
        self.engine, self.step = engine, step
        self.point: ReferencePoint | None = None
        if step.mismatched:
            self.point = pooled_reference_point(engine, step.mismatched, step.parts)
        self._router = engine.router_loss and engine.router_loss.of_step(engine.model, engine.world, step.packs)
        self._inputs = self._from_all_packs(step.packs)

    def tree_pass(self, batch: Batch) -> TreePass | None:
        """A new pass over a pack's trees. It keeps the prompts if mismatched completions continue them."""
        return self.engine.model.tree_pass(batch, record=self.step.leaves is not None)

    def routed(self) -> RouterLogits | None:
        """A place for the router logits of a pack's forward pass, if the router loss is trained on."""
        return RouterLogits() if self._router else None

    def inputs(self, number: int, prompts: TreePass | None) -> StepInputs:
        """The inputs of the losses of pack `number` that depend on the whole step.

        Args:
            prompts: the pack's own pass; mismatched completions of a step of one pack continue it.
        """
        if self.step.leaves is not None:
            self.point = pooled_reference_point(self.engine, [self.step.leaves], self.step.parts, prompts)
        if self.point is None:
            return self._inputs[number]
        own = self.step.packs[number].units.micro_batches
        return replace(self._inputs[number], reference_point=self.point.value if own is None else
                       self.point.values[own.to(self.point.values.device)])

    def router_share(self, routed: RouterLogits | None, pack: Pack, tally: Tally) -> Tensor | float:
        """What the router loss adds to the scalar that is differentiated for a pack; 0 without one."""
        return self._router.share(routed, pack, tally) if self._router and routed else 0.0

    @torch.no_grad()
    def _from_all_packs(self, packs: Sequence[Pack]) -> list[StepInputs]:
        """The inputs of each pack except the reference point. The router loss uses the same passes."""
        engine, method, router = self.engine, self.engine.method, self._router
        if not method.looks_ahead:
            if router:
                router.look_ahead()
            return [StepInputs()] * len(packs)
        scored = []
        for pack in packs:  # an empty one too: processes may share the model
            with naming(pack.trees):
                routed = self.routed()
                found = engine.score(pack.trees, pack.batch.to(engine.model.device), routed=routed, distill=False)
                scored.append((found, pack.units.to(engine.model.device)))
                if router and routed and pack.rows:
                    router.see(routed, pack)
        shift = None
        if method.needs("shift"):
            shift = engine.shift.propose(engine.world.sum(rewards_of_step(method, scored, engine.model.device)))
        if not method.needs_sorting:
            return [StepInputs(shift=shift)] * len(packs)
        ranked = ranks_of_step(method, scored, [pack.rows for pack in packs], engine.world, engine.model.device)
        return [replace(of_pack, shift=shift) for of_pack in ranked]
