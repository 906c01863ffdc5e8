"""Passes over a sharded model: when its weights are gathered and freed, and when its gradients are summed."""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

T = TypeVar("T")

_WITHIN, _STAYS, _BESIDE = "tropism_within", "tropism_stays_gathered", "tropism_units_beside"


def connect_layers(module: Any, layers: Sequence[Any], beside: Sequence[Any]) -> None:
    """Prepare a model that was just sharded for passes: gradients are summed, never averaged, and each layer asks for
    the weights of the next one, forwards and backwards, before it computes.

    Args:
        beside: units outside of the layers, whose weights are used without a call of theirs.
    """
    for part in _units(module):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    for before, after in zip([module, *layers], layers, strict=False):
        before.set_modules_to_forward_prefetch([after])
    for before, after in pairwise(layers):
        after.set_modules_to_backward_prefetch([before])
    setattr(module, _BESIDE, tuple(beside))
    setattr(module, _WITHIN, MethodType(_call, module))
    register_fsdp_forward_method(module, _WITHIN)


def _units(module: torch.nn.Module) -> Iterable[FSDPModule]:
    return (part for part in module.modules() if isinstance(part, FSDPModule))


def _call(module: Any, action: Callable[[], tuple[Tensor | None, ...]]) -> tuple[Tensor | None, ...]:
    """The result of the action, without views: FSDP attaches its backward pass to the tensors."""
    for unit in getattr(module, _BESIDE):
        unit.unshard()
    return tuple(one if one is None or one._base is None else one.clone() for one in action())


def within(module: Any, action: Callable[[], T], stay: bool = False) -> T:
    """Run an action that calls parts of a model and returns a tuple of tensors and None. If the model is sharded, the
    weights outside its layers are gathered for it.

    Args:
        stay: keep them gathered after a pass without gradients.
    """
    if not isinstance(module, FSDPModule):
        return action()
    found: T = getattr(module, _WITHIN)(action)
    if not stay:
        rest(module)
    return found


def let_go(module: Any) -> None:
    """Free all gathered weights of a model."""
    for unit in _units(module):
        unit.reshard()


def rest(module: Any) -> None:
    """Free the weights that a pass without gradients left gathered, unless a step keeps them."""
    if isinstance(module, FSDPModule) and not torch.is_grad_enabled() and not getattr(module, _STAYS, False):
        for unit in (module, *getattr(module, _BESIDE)):
            unit.reshard()


def begin_step(module: Any) -> None:
    """Keep what a sharded model gathers from now on, until the last backward pass of the step has used it."""
    if isinstance(module, FSDPModule):
        _keep(module, True)


def prepare_backward(module: Any, last: bool, once: bool) -> None:
    """Set what the next backward pass of a sharded model does with gradients.

    Args:
        last: it is the last of the step. Gradients are summed over replicas only then.
        once: sum them over all axes only then. Each process holds complete gradients until then.
    """
    if isinstance(module, FSDPModule):
        module.set_is_last_backward(last)
        module.set_requires_all_reduce(last)
        if once:
            module.set_requires_gradient_sync(last)
        if last and getattr(module, _STAYS, False):
            _keep(module, False)


def _keep(module: Any, keep: bool) -> None:
    """Whether layers stay gathered after passes. What is outside of them always stays until the backward pass."""
    setattr(module, _STAYS, keep)
    module.set_reshard_after_backward(not keep)
    for unit in _units(module):
        if unit is not module:
            unit.set_reshard_after_forward(not keep, recurse=False)
