"""Checks of an optimizer and a scheduler that a Python caller passes, before anything is computed."""

from collections.abc import Callable, Iterator
from inspect import Parameter, signature
from typing import Any

import torch

from tropism.errors import UsageError, count_of
from tropism.model.load import weights_dtype
from tropism.train.optimizer import parameters_of
from tropism.train.setup.models import Numerics

_MOST = 20
"""Objects that are looked at in a wrapper; some make up any attribute that they are asked for."""


def check_given(optimizer: Any, scheduler: Any, module: Any, numerics: Numerics) -> None:
    """Check that the user's optimizer can train a module, and that the scheduler is the optimizer's.

    Args:
        optimizer: None if the user passes none.
        scheduler: may be None.
        module: the policy, as the user passed it.
        numerics: dtype and device that the module will have.

    Raises:
        UsageError: naming what does not fit.
    """
    if optimizer is None:
        return
    if not hasattr(optimizer, "param_groups"):
        raise UsageError(f"optimizer is of type {type(optimizer).__name__}, which has no param_groups. Pass an "
                         "optimizer of torch, or the name of one.")
    weights = parameters_of(optimizer)
    own = {id(parameter) for parameter in module.parameters()}
    if not all(id(weight) in own for weight in weights):
        raise UsageError("optimizer holds weights that are not the model's. Create it from model.parameters() of the "
                         "module that you pass as model.")
    if not any(weight.requires_grad for weight in weights):
        raise UsageError("optimizer holds no weight that requires a gradient, so nothing would be trained. Set "
                         "requires_grad on the weights to train, and create the optimizer from them.")
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UsageError("optimizer is a SparseAdam, which takes sparse gradients only. Use AdamW.")
    _check_step(optimizer, "optimizer", "Pass one whose step() takes no argument.")
    _check_state(optimizer, weights, numerics)
    if scheduler is not None:
        _check_scheduler(scheduler, optimizer)


def check_length(scheduler: Any, steps: int) -> None:
    """Check that a scheduler with a fixed length, such as OneCycleLR, is long enough.

    Args:
        scheduler: None if the user passes none.
        steps: planned optimizer steps.

    Raises:
        UsageError: if it would end before the run.
    """
    length = getattr(scheduler, "total_steps", None)
    left = length - getattr(scheduler, "last_epoch", 0) if isinstance(length, int) else steps
    if isinstance(scheduler, torch.optim.lr_scheduler.OneCycleLR) and left < steps:
        raise UsageError(f"scheduler is a OneCycleLR with {count_of(max(left, 0), 'step')} left, but the run has "
                         f"{count_of(steps, 'optimizer step')}. Create it with total_steps={steps}.")


def _check_state(optimizer: Any, weights: list[torch.nn.Parameter], numerics: Numerics) -> None:
    """Check that an optimizer that has stepped keeps weights of the dtype and device that they will have."""
    dtype, device = weights_dtype(numerics.precision), numerics.device
    state = getattr(optimizer, "state", None) or {}
    for weight in weights:
        if not state.get(weight):
            continue
        if weight.dtype != dtype:
            kept, new = (str(kind).removeprefix("torch.") for kind in (weight.dtype, dtype))
            raise UsageError(f"optimizer has stepped on weights in {kept}, which this run converts to {new}: its state "
                             f"would not fit them. Convert the module to {new} before its first step, or pass a new "
                             "optimizer.")
        if weight.device.type != device.type:
            raise UsageError(f"optimizer has stepped on weights on {weight.device}, but this run trains on {device}: "
                             f"its state would stay there. Move the module to {device} before its first step, or pass "
                             "a new optimizer.")


def _check_scheduler(scheduler: Any, optimizer: Any) -> None:
    for one in _within(scheduler, "scheduler", "_schedulers"):
        _check_step(one, "scheduler", "Use another one. To stop or keep a checkpoint by a metric, set stop_metric or "
                                      "keep_best.")
        its = getattr(one, "optimizer", None)
        if its is not None and not {*map(id, _within(its, "optimizer", "optim"))} & {
                *map(id, _within(optimizer, "optimizer", "optim"))}:
            raise UsageError(f"scheduler is a {type(one).__name__} of another optimizer, so it would not change the "
                             "learning rate. Create it from the optimizer that you pass.")


def _check_step(thing: Any, name: str, advice: str) -> None:
    """Check that `step()` needs no argument."""
    step: Callable[..., Any] | None = getattr(thing, "step", None)
    if step is None:
        raise UsageError(f"{name} is of type {type(thing).__name__}, which has no step(). {advice}")
    try:
        needed = [entry.name for entry in signature(step).parameters.values() if entry.default is Parameter.empty
                  and entry.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
                  and entry.name != "self"]  # schedulers replace the method of their optimizer by a function
    except (TypeError, ValueError):  # of compiled code, which does not tell
        return
    if needed:
        raise UsageError(f"{name} is a {type(thing).__name__}, whose step() requires {' and '.join(needed)}, which "
                         f"training does not have. {advice}")


def _within(thing: Any, *names: str) -> Iterator[Any]:
    """An object and those that it wraps under some attributes, as accelerate and ColossalAI wrap optimizers."""
    waiting, seen = [thing], set[int]()
    while waiting and len(seen) < _MOST:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        for name in names:
            held = getattr(one, name, None)
            waiting += held if isinstance(held, list | tuple) else [held]
