"""Check that training changes the weights, once, after the first step with a learning rate above 0."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from tropism.distributed.shard import part_of
from tropism.errors import NothingLearnedError, count_of
from tropism.train.step_log import StepOutcome

_ROUNDING = 1e-6  # rounding of a stored teacher leaves this much of a divergence of 0, in nats; and of its gradient
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class FirstUpdate:
    """Compares the weights before and after the first step with a learning rate above 0.

    Args:
        module: the policy.
        done: the check was done before; True in a resumed run.
        pooled: sums a tensor over processes.
        most: takes the maximum of numbers over processes. Each can hold a part of the weights.
    """

    def __init__(self, module: Any, done: bool = False, pooled: Callable[[Tensor], Tensor] = lambda own: own,
                 most: Callable[[list[int]], list[int]] = lambda own: own) -> None:
        self.module = module
        self.done = done
        self.pooled = pooled
        self.most = most
        self._before = None if done else snapshot(_trainable(module).values())

    def look(self, outcome: StepOutcome) -> None:
        """Call after each step. Only the first applied step with a learning rate above 0 is checked.

        Raises:
            NothingLearnedError: if the step changed no weight, with the counts of trainable weights. Never if its loss
                is 0: a student that equals its teacher has nothing to learn.
        """
        if self.done or outcome.learning_rate == 0 or not bool(outcome.finite):
            return
        assert self._before is not None
        after = snapshot(_trainable(self.module).values())
        changed = sum(not torch.equal(one, other) for one, other in zip(self._before, after, strict=True))
        self.done, self._before = True, None
        anywhere, = self.most([changed])
        if not anywhere and not self._nothing_to_learn(outcome):
            raise NothingLearnedError(explain(self.module, outcome.learning_rate, float(outcome.grad_norm)))

    def _nothing_to_learn(self, outcome: StepOutcome) -> bool:
        """Whether the step's loss is 0, up to rounding."""
        if outcome.size is None:
            return False
        return float(self.pooled(outcome.size)) <= _ROUNDING and float(outcome.grad_norm) <= _ROUNDING


def snapshot(weights: Iterable[Tensor]) -> list[Tensor]:
    """A small tensor per weight that differs if the weight does: of a matrix the sums of its rows' bits.

    Sums bits, not values: a sum of values can round a change away.
    """
    def one(weight: Tensor) -> Tensor:
        bits = part_of(weight.detach()).view(_BITS[weight.element_size()])
        return bits.clone() if bits.dim() < 2 else bits.sum(dim=-1, dtype=torch.int64)

    return [one(weight) for weight in weights]


def explain(module: Any, learning_rate: float, grad_norm: float) -> str:
    """Why the step may have changed nothing, what to do, and which weights are trainable."""
    trainable = _trainable(module)
    total = sum(weight.numel() for weight in module.parameters())
    parts: dict[str, int] = {}
    for name, weight in trainable.items():
        part = ".".join(piece for piece in name.split(".")[:2] if not piece.isdigit() and piece != "weight")
        parts[part] = parts.get(part, 0) + weight.numel()
    counts = ", ".join(f"{part} {count:,}" for part, count in parts.items()) or "none"
    dtypes = ", ".join(sorted({str(weight.dtype).removeprefix("torch.") for weight in trainable.values()}))
    reason = ("its gradient is exactly 0. Either the loss does not depend on the trainable weights, or all examples "
              "are saturated."
              if grad_norm == 0 else
              f"its gradient has norm {grad_norm:.3g}, but an update at this rate is lost in the rounding of {dtypes}. "
              "Use a higher --learning-rate, or --optimizer adamw, whose steps do not shrink with the gradient.")
    return (f"a step with learning rate {learning_rate:g} changed no weight: {reason} Trainable: "
            f"{sum(parts.values()):,} of {total:,} weights in {count_of(len(trainable), 'tensor')} ({counts})")


def _trainable(module: Any) -> dict[str, Tensor]:
    return {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
