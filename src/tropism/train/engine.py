"""The models, method and optimizer that a training step uses."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tropism.data.batching.collate import Batch
from tropism.data.tree import PromptTree
from tropism.distributed.world import World
from tropism.losses.scored import Scored
from tropism.methods import Method
from tropism.model.attention import TreePass
from tropism.model.language_model import LanguageModel
from tropism.model.moe_router import RouterLogits
from tropism.train.frozen.reference import Reference
from tropism.train.frozen.teacher import Teacher
from tropism.train.optimizer import Updater
from tropism.train.reward_rounding import reward_noise
from tropism.train.router_loss import KEY, RouterLoss
from tropism.train.step_statistics import RunningMean


@dataclass(frozen=True)
class Engine:
    """The models, method and optimizer of a run, ready for a step."""

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
    square root of its tokens. It is the effect of bfloat16."""
    router_loss: RouterLoss | None = None
    """The routers' load-balancing loss, if it is trained on."""

    @property
    def modules(self) -> dict[str, Any]:
        """The models in memory, by their role in the run."""
        held = {"policy": self.model, "reference": getattr(self.reference, "model", None),
                "teacher": getattr(self.teacher, "model", None)}
        return {name: model.module for name, model in held.items() if model is not None}

    @property
    def metric_keys(self) -> tuple[str, ...]:
        """Keys of a step's tally, the same on every process."""
        return self.method.metric_keys + ((KEY,) if self.router_loss is not None else ())

    def score(self, trees: Sequence[PromptTree], batch: Batch, tree: TreePass | None = None,
              routed: RouterLogits | None = None, distill: bool = True) -> Scored:
        """The inputs of the losses, for the completions of a batch on the model's device.

        Args:
            trees: in the batch's order.
            tree: the pass to compute the trees in; by default a new one.
            routed: takes the router logits of the pass.
            distill: compare with the teacher, if there is one.
        """
        comparison = targets = None
        if self.teacher is not None and distill:
            comparison, targets = self.teacher.comparison, self.teacher.targets(trees, batch)
        out = self.model.score_completions(batch, tree, comparison=comparison, targets=targets,
                                           confidence=self.method.wpo, routed=routed)
        reference = (torch.zeros_like(out.logps.detach()) if self.reference is None
                     else self.reference.score(trees, batch))
        return Scored(out.logps, reference, batch.lengths, out.divergence, out.confidence)

    def noise(self, scored: Scored) -> Tensor:
        """`[C]` the largest reward that rounding alone can cause; 0 if rewards are not differences."""
        if not self.method.needs_reference:
            return torch.zeros_like(scored.logps.detach())
        return reward_noise(scored, self.method.beta, self.model.precision, self.rounding)
