"""The routers' load-balancing loss of a step: pooled over packs and ranks, so that it depends on neither."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tropism.data.batching.collate import collate, occurrences
from tropism.data.tree import PromptTree
from tropism.distributed.world import World
from tropism.errors import ModelError
from tropism.model.language_model import LanguageModel
from tropism.model.moe_router import OPTION, Experts, RouterLogits, balance_loss, expert_counts, probabilities
from tropism.observe.metrics import Tally
from tropism.train.step_packs import Pack

KEY = "router_aux"


@dataclass(frozen=True)
class RouterLoss:
    """The load-balancing loss of a run.

    Args:
        weight: what it is multiplied with.
        experts: of the policy.
    """

    weight: float
    experts: Experts

    def of_step(self, model: LanguageModel, world: World, packs: Sequence[Pack]) -> "StepRouterLoss":
        """Begin a step."""
        return StepRouterLoss(self, model, world, packs)

    def with_loss(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """A train record whose `loss` has the load-balancing loss in it, weighted."""
        if KEY not in metrics or "loss" not in metrics:
            return dict(metrics)
        return {**metrics, "loss": metrics["loss"] + self.weight * metrics[KEY]}


class StepRouterLoss:
    """The loss of one step. What is differentiated for a pack needs the load of the whole step.

    That load comes from a look ahead; a step of one pack per rank takes it from the pass that is differentiated.
    All ranks have equally many packs, so they call everything here together.

    Args:
        balance: of the run.
        model: the policy.
        world: whose ranks share the step.
        packs: of this rank.
    """

    def __init__(self, balance: RouterLoss, model: LanguageModel, world: World, packs: Sequence[Pack]) -> None:
        self.balance, self.model, self.world, self.packs = balance, model, world, packs
        self._own = torch.zeros(balance.experts.number + 1, dtype=torch.float64, device=model.device)
        self._pooled: Tensor | None = None

    def look_ahead(self) -> None:
        """A pass over the packs for nothing but this loss, where there are several."""
        if len(self.packs) > 1:
            for pack in self.packs:
                routed, batch = RouterLogits(), pack.batch.to(self.model.device)
                self.model.hidden(batch, self.model.tree_pass(batch), routed)
                self.see(routed, pack)

    def see(self, routed: RouterLogits, pack: Pack) -> None:
        """Count the choices of a pack, in a pass over all of them."""
        self._own += expert_counts(routed.logits, self._weights(pack), self.balance.experts.top_k)

    def share(self, routed: RouterLogits, pack: Pack, tally: Tally) -> Tensor:
        """What a pack adds to the scalar that is differentiated: its part of the step's loss, weighted."""
        weights, top_k = self._weights(pack), self.balance.experts.top_k
        if self._pooled is None:
            own = self._own if len(self.packs) > 1 else expert_counts(routed.logits, weights, top_k)
            self._pooled = self.world.sum(own)
        part = balance_loss(self._pooled, probabilities(routed.logits, weights))
        tokens = weights.sum() * len(routed.logits)
        tally.add({KEY: (part, tokens / self._pooled[-1])})  # the counts of a step sum to 1
        return self.balance.weight * part

    def _weights(self, pack: Pack) -> Tensor:
        return token_weights(pack, self.model).to(self.model.device, non_blocking=True)


def token_weights(pack: Pack, model: LanguageModel) -> Tensor:
    """`[B * L]` how often each token of a pack counts: as often as its rows would feed it if each were computed alone.

    The beginnings of sides that `ld_alpha` looks at besides are no rows of their own.
    """
    completions = sum(len(tree.completions) for tree in pack.trees)
    counts = torch.bincount(pack.units.members[:, :2].flatten(), minlength=completions).tolist()
    return occurrences(pack.trees, counts, model.layout)


@torch.no_grad()
def build_router_loss(weight: float, model: LanguageModel, trees: Sequence[PromptTree]) -> RouterLoss | None:
    """The load-balancing loss with this weight; None if it is 0.

    Args:
        trees: a small batch, on which is tried whether the model tells what its routers say.

    Raises:
        ModelError: if it does not.
    """
    if not weight:
        return None
    experts = Experts.of(model.module.config)
    assert experts is not None  # refused before the model was loaded
    routed, batch = RouterLogits(), collate(trees, model.layout).to(model.device)
    model.hidden(batch, model.tree_pass(batch), routed)
    expected = (batch.input_ids.numel(), experts.number)
    for layer in routed.logits:
        if layer.shape != expected:
            raise ModelError(f"{OPTION}: the model's router logits are {tuple(layer.shape)}, not one for each token "
                             f"and expert {expected}; leave {OPTION} out")
        if bool((layer >= 0).all()) and torch.allclose(layer.sum(-1), torch.ones_like(layer[:, 0]), atol=1e-2):
            raise ModelError(f"{OPTION}: what this model's code calls router logits are probabilities already; leave "
                             f"{OPTION} out")
    return RouterLoss(weight, experts)
