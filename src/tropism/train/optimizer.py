"""Optimizer and learning rate. The rate is a function of the step number and needs no state."""

from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import get_scheduler

from tropism.borders import is_out_of_memory
from tropism.distributed.shard import Owned
from tropism.distributed.training_state import check_plain
from tropism.distributed.world import World
from tropism.errors import TropismError, UsageError, first_line
from tropism.spans import timed_as
from tropism.train.adamw8bit import NAMES as EIGHT_BIT
from tropism.train.adamw8bit import AdamW8bit, eight_bit
from tropism.train.options import RunOptions
from tropism.train.out_of_memory import ADVICE


def build_optimizer(name: str, owned: Owned, weight_decay: float,
                    embeddings: Collection[int] = ()) -> torch.optim.Optimizer:
    """AdamW or SGD over this process's parts of the trainable weights; decay acts on matrices, not on norms and biases.

    Those of torch are the fused kernels, which take `found_inf`: a step with a non-finite gradient is then a no-op on
    the device, without asking the host.

    Args:
        name: of the option `optimizer`.
        owned: the weights.
        weight_decay: of matrices.
        embeddings: ids of weights that keep float32 moments. Few rows of an embedding have a gradient in a step.

    Raises:
        UsageError: if nothing is trainable.
    """
    if not owned.parts:
        raise UsageError("the model has no trainable weights. Set requires_grad on those to train.")
    groups = [{"params": [p for p in owned.parts if p.dim() >= 2], "weight_decay": weight_decay},
              {"params": [p for p in owned.parts if p.dim() < 2], "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    if name in EIGHT_BIT:
        fits = eight_bit(owned.weights, embeddings)
        narrow = [id(part) for part, small in zip(owned.parts, fits, strict=True) if small]
        return AdamW8bit(groups, narrow, paged=name.startswith("paged"))
    if name == "sgd":
        return torch.optim.SGD(groups, lr=0.0, fused=True)
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.999), eps=1e-8, fused=True)


def trainable(module: Any) -> Owned:
    """The trainable weights of a module."""
    return Owned([parameter for parameter in module.parameters() if parameter.requires_grad])


def learning_rates(schedule: str, peak: float, steps: int, warmup_ratio: float) -> Callable[[int], float]:
    """The learning rate of step k, from 1.

    Warm-up step k has k / warm-up steps of the peak; after it the schedule of that name in transformers follows,
    aligned so that the first step after warm-up has the peak. No step has rate 0 unless the peak is 0.
    """
    warmup = min(steps, -(-int(steps * warmup_ratio * 1_000_000) // 1_000_000))
    scratch = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    extra = {"min_lr_rate": 0.1} if schedule == "cosine_with_min_lr" else {}
    factor = get_scheduler(schedule, scratch, num_warmup_steps=warmup, num_training_steps=steps,
                           scheduler_specific_kwargs=extra).lr_lambdas[0]

    def rate(step: int) -> float:
        return peak * (step / warmup if step <= warmup else float(factor(step - 1)))

    return rate


class Updater(Protocol):
    """Changes the weights once per step."""

    optimizer: torch.optim.Optimizer
    owned: Owned

    def apply(self, step: int, finite: torch.Tensor) -> float:
        """Apply the gradients of step `step` (from 1), or nothing if `finite` is False. Returns the learning rate."""
        ...

    def state(self) -> dict[str, Any]:
        """Plain values that are not in the optimizer's own state."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state()`."""
        ...


class Scheduled:
    """Our optimizer with a learning rate that is a function of the step.

    Args:
        optimizer: of `build_optimizer`.
        owned: the weights that it changes.
        rate: the learning rate of step k, from 1.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, owned: Owned, rate: Callable[[int], float]) -> None:
        self.optimizer = optimizer
        self.owned = owned
        self.rate = rate

    @timed_as("optimizer")
    def apply(self, step: int, finite: torch.Tensor) -> float:
        """As `Updater` says. With torch's optimizers the device decides, and the host does not wait for it."""
        rate = self.rate(step)
        step_if_finite(self.optimizer, rate, finite.to(self.owned.parts[0].device))
        return rate

    def state(self) -> dict[str, Any]:
        """As `Updater` says: the rate is a function of the step."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """As `Updater` says."""


class Given:
    """An optimizer, and an optional scheduler, from the user. They keep their own learning rate.

    Args:
        optimizer: over weights of the model.
        scheduler: has `step()`, called after each update.
    """

    def __init__(self, optimizer: Any, scheduler: Any | None) -> None:
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.owned = Owned(parameters_of(optimizer))

    @timed_as("optimizer")
    def apply(self, step: int, finite: torch.Tensor) -> float:
        """As `Updater` says. Not every optimizer can skip a step on the device, so the host waits for `finite`."""
        rate = float(self.optimizer.param_groups[0]["lr"])
        if bool(finite):
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        return rate

    def state(self) -> dict[str, Any]:
        """As `Updater` says."""
        return {} if self.scheduler is None else {"scheduler": self.scheduler.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        """As `Updater` says."""
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])


def why_not_kept(updater: Updater) -> str | None:
    """Why a checkpoint cannot hold the user's optimizer or scheduler; None if it can."""
    optimizer = updater.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        return f"the optimizer, a {type(optimizer).__name__}, is not a torch.optim.Optimizer"
    try:
        for group in optimizer.param_groups:
            check_plain({name: value for name, value in group.items() if name != "params"}, "the optimizer")
        check_plain(updater.state(), "the scheduler")
    except (UsageError, AttributeError) as error:
        return str(error)
    return None


def build_updater(module: Any, options: RunOptions, steps: int, optimizer: Any = None,
                  scheduler: Any = None) -> tuple[Updater, list[torch.nn.Parameter]]:
    """The updater of a model: our optimizer and schedule, or the user's.

    Args:
        module: the policy.
        options: of the run.
        steps: planned optimizer steps.
        optimizer, scheduler: the user's own.

    Returns:
        The updater, and the weights that were frozen because the user's optimizer does not hold them.
    """
    if optimizer is None:
        rate = learning_rates(options.schedule, options.learning_rate, steps, options.warmup_ratio)
        owned = trainable(module)
        embeddings = {id(layer.weight) for layer in module.modules() if isinstance(layer, torch.nn.Embedding)}
        return Scheduled(build_optimizer(options.optimizer, owned, options.weight_decay, embeddings), owned, rate), []
    updater = Given(optimizer, scheduler)
    held = {id(parameter) for parameter in updater.owned.weights}
    idle = [parameter for parameter in module.parameters() if parameter.requires_grad and id(parameter) not in held]
    for parameter in idle:  # do not compute gradients that no optimizer uses
        parameter.requires_grad_(False)
    return updater, idle


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """The parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def step_if_finite(optimizer: torch.optim.Optimizer, learning_rate: float, finite: torch.Tensor) -> None:
    """Apply the gradients, or nothing if `finite` (a boolean scalar on the device) is False."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    if not isinstance(optimizer, AdamW8bit):
        optimizer.grad_scale = None
        optimizer.found_inf = (~finite).float().reshape(())
        optimizer.step()
    elif bool(finite):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def reserve(updater: Updater) -> None:
    """Allocate the state of our optimizer and the gradients, so that no update runs out of memory half-way.

    Raises:
        TropismError: if they do not fit.
    """
    optimizer = updater.optimizer
    if isinstance(updater, Given) or optimizer.state:
        return
    try:
        for part in updater.owned.parts:
            part.grad = torch.zeros_like(part)
        if isinstance(optimizer, AdamW8bit):
            optimizer.reserve()
        step_if_finite(optimizer, 0.0, torch.zeros((), dtype=torch.bool, device=updater.owned.parts[0].device))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise TropismError(f"gradients and optimizer state do not fit into memory ({first_line(error)}). {ADVICE}"
                           ) from error


@timed_as("optimizer")
def clip(owned: Owned, max_norm: float, world: World) -> Tensor:
    """The norm of the gradient over all processes. Gradients are scaled down to `max_norm` if they exceed it; 0 never
    clips."""
    norm = owned.norm(world)
    if max_norm:
        torch.nn.utils.clip_grads_with_norm_(owned.parts, max_norm, norm)
    return norm
