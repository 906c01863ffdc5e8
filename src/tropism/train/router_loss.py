"""The routers' load-balancing loss of a step, pooled over packs and processes so that it depends on neither."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tropism.data.batching.collate import collate, occurrences
from tropism.data.batching.transfer import sent
from tropism.data.tree import PromptTree
from tropism.distributed.world import World
from tropism.errors import ModelError
from tropism.model.language_model import LanguageModel
from tropism.model.moe_router import OPTION, Experts, RouterLogits, balance_loss, expert_counts, probabilities
from tropism.observe.metrics import Tally
from tropism.train.out_of_memory import naming
from tropism.train.step_packs import Pack

KEY = "router_aux"
_FLAG = OPTION


@dataclass(frozen=True)
class RouterLoss:
    """The load-balancing loss of a run.

    Args:
        weight: factor of the loss.
        experts: of the policy.
    """

    weight: float
    experts: Experts

    def of_step(self, model: LanguageModel, world: World) -> "StepRouterLoss":
        """Begin a step."""
        return StepRouterLoss(self, model, world)

    def with_loss(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """A train record whose `loss` includes the weighted load-balancing loss."""
        if KEY not in metrics or "loss" not in metrics:
            return dict(metrics)
        return {**metrics, "loss": metrics["loss"] + self.weight * metrics[KEY]}


class StepRouterLoss:
    """The loss of one step. The gradient of each pack depends on the expert load of the whole step.

    `see` all packs, then take the `share` of each. All processes have the same number of packs, and call everything
    here together.

    Args:
        balance: of the run.
        model: the policy.
        world: the processes that share the step.
    """

    def __init__(self, balance: RouterLoss, model: LanguageModel, world: World) -> None:
        self.balance, self.model, self.world = balance, model, world
        self._own = torch.zeros(balance.experts.number + 1, dtype=torch.float64, device=model.device)
        self._pooled: Tensor | None = None

    @torch.no_grad()
    def look_ahead(self, packs: Sequence[Pack]) -> None:
        """Add the expert load of all packs, by a pass over each."""
        for pack in packs:
            with naming(pack.trees):
                routed, batch = RouterLogits(), pack.batch.to(self.model.device)
                self.model.hidden(batch, self.model.tree_pass(batch), routed)
                self.see(routed, pack)

    @torch.no_grad()
    def see(self, routed: RouterLogits, pack: Pack) -> None:
        """Add the expert load of a pack."""
        self._own += expert_counts(routed.logits, self._weights(pack), self.balance.experts.top_k)

    def share(self, routed: RouterLogits, pack: Pack, tally: Tally) -> Tensor:
        """The weighted part of a pack in the step's loss, to be differentiated."""
        weights = self._weights(pack)
        if self._pooled is None:
            self._pooled = self.world.sum(self._own)
        part = balance_loss(self._pooled, probabilities(routed.logits, weights))
        tokens = weights.sum() * len(routed.logits)
        tally.add({KEY: (part, tokens / self._pooled[-1])})  # the counts of a step sum to 1
        return self.balance.weight * part

    def _weights(self, pack: Pack) -> Tensor:
        return sent(token_weights(pack, self.model), self.model.device)


def token_weights(pack: Pack, model: LanguageModel) -> Tensor:
    """`[B * L]` how often each token of a pack counts: as often as its rows contain it if computed one by one.

    The shared beginnings of completions that `ld_alpha` adds do not count as rows.
    """
    completions = sum(len(tree.completions) for tree in pack.trees)
    counts = torch.bincount(pack.units.members[:, :2].flatten(), minlength=completions).tolist()
    return occurrences(pack.trees, counts, model.layout)


@torch.no_grad()
def build_router_loss(weight: float, model: LanguageModel, trees: Sequence[PromptTree]) -> RouterLoss | None:
    """The load-balancing loss with this weight; None if it is 0.

    Args:
        trees: a small batch, on which the model's router logits are checked.

    Raises:
        ModelError: if the model returns no usable router logits.
    """
    if not weight:
        return None
    experts = Experts.of(model.module.config)
    assert experts is not None  # checked before the model was loaded
    routed, batch = RouterLogits(), collate(trees, model.layout).to(model.device)
    model.hidden(batch, model.tree_pass(batch), routed)
    expected = (batch.input_ids.numel(), experts.number)
    for layer in routed.logits:
        if layer.shape != expected:
            raise ModelError(f"{_FLAG} does not support this model: its router logits have shape {tuple(layer.shape)} "
                             f"instead of (tokens, experts) {expected}. Remove {_FLAG}.")
        if bool((layer >= 0).all()) and torch.allclose(layer.sum(-1), torch.ones_like(layer[:, 0]), atol=1e-2):
            raise ModelError(f"{_FLAG} does not support this model: it returns router probabilities instead of logits. "
                             f"Remove {_FLAG}.")
    return RouterLoss(weight, experts)
