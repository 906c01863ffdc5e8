"""AdamW whose moments are held in 8 bits (Dettmers et al. 2021, arXiv:2110.02861), by the kernels of bitsandbytes.

Each block of 256 neighboring values of a moment has one float32 scale. A weight gets 8-bit moments only if its blocks
are the same however it is sharded, so an update does not depend on the number of processes.
"""

import importlib.util
import math
from collections.abc import Collection, Iterable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from tropism.distributed.shard import BLOCK, block_shape, rows_of_first
from tropism.distributed.training_state import SCALES
from tropism.errors import UsageError

NAMES = ("adamw8bit", "paged-adamw8bit")

_SMALLEST = 4096
_PAGED = 100_000
"""Elements. Smaller weights have float32 moments, and moments of fewer elements are not paged."""

_MOMENTS = ("exp_avg", "exp_avg_sq")


def check_usable(name: str, precision: str, device: torch.device, tensor: int, package: bool = True) -> None:
    """Check before anything is loaded that an optimizer can be used.

    Args:
        name: of the option.
        tensor: size of tensor parallelism.
        package: bitsandbytes must be installed.

    Raises:
        UsageError: with the reason, and what to do.
    """
    if name not in NAMES:
        return
    if package and importlib.util.find_spec("bitsandbytes") is None:
        raise UsageError(f"--optimizer {name} requires the package bitsandbytes. Install it with "
                         "`pip install 'tropism[quant]'`.")
    if precision == "fp64":
        raise UsageError(f"--optimizer {name} does not support --precision fp64. Use --optimizer adamw.")
    if tensor > 1:
        raise UsageError(f"--optimizer {name} does not support --parallel.tensor. Use --parallel.shard instead.")
    if name.startswith("paged") and device.type != "cuda":
        raise UsageError(f"--optimizer {name} requires a GPU: it moves optimizer state between GPU and host memory. "
                         "Use --optimizer adamw8bit.")


def eight_bit(weights: Iterable[Tensor], wide: Collection[int]) -> list[bool]:
    """Whether each weight gets 8-bit moments: matrices of at least 4096 elements whose sharded rows are full blocks.

    Args:
        weights: of the model, sharded or not.
        wide: ids of weights that keep float32 moments.
    """
    found = []
    for weight in weights:
        blocks = block_shape(weight.shape)
        # Each process has as many rows as the first one, or the rest.
        rows = rows_of_first(weight)
        full = blocks is not None and (rows == len(weight) or rows % (len(weight) // blocks[0]) == 0)
        found.append(full and weight.dim() >= 2 and weight.numel() >= _SMALLEST and id(weight) not in wide)
    return found


class AdamW8bit(torch.optim.Optimizer):
    """AdamW over plain float32 tensors. Those without 8-bit moments are updated as by torch's AdamW.

    Args:
        groups: parameter groups.
        narrow: ids of the parameters with 8-bit moments.
        paged: hold 8-bit moments in memory that CUDA moves to the host if the GPU is full.
    """

    def __init__(self, groups: list[dict[str, Any]], narrow: Collection[int], paged: bool = False) -> None:
        super().__init__(groups, {"lr": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0})
        self.narrow = frozenset(narrow)
        self.paged = paged

    @cached_property
    def _kernels(self) -> Any:
        from bitsandbytes import functional  # an optional package

        return functional

    @cached_property
    def _codes(self) -> list[Tensor]:
        """`[256]` values of the codes of each moment; the second one has no sign."""
        device = self.param_groups[0]["params"][0].device
        return [self._kernels.create_dynamic_map(signed=signed).to(device) for signed in (True, False)]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update the parameters that have a gradient."""
        paged = False
        for group in self.param_groups:
            plain = []
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self._state_of(weight)
                state["step"] += 1
                if id(weight) not in self.narrow:
                    plain.append(weight)
                elif weight.numel():
                    self._update(weight, state, group)
                    paged = paged or self.paged
            if plain:
                self._update_plain(plain, group)
        if paged:  # paged memory is moved asynchronously
            torch.cuda.synchronize()

    def reserve(self) -> None:
        """Allocate the state of all parameters, as the first update would."""
        for group in self.param_groups:
            for weight in group["params"]:
                self._state_of(weight)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a state into the own tensors: torch would convert codes to float32."""
        weights = [weight for group in self.param_groups for weight in group["params"]]
        for group, kept in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in kept.items() if name != "params"})
        self.state.clear()
        for index, entries in state_dict["state"].items():
            state = self._state_of(weights[index])
            for name, value in entries.items():
                if isinstance(value, Tensor):
                    state[name].copy_(value.reshape(state[name].shape))
                else:
                    state[name] = value

    def _state_of(self, weight: Tensor) -> dict[str, Any]:
        state = self.state[weight]
        if not state:
            state["step"] = 0
            narrow = id(weight) in self.narrow
            for name in _MOMENTS:
                state[name] = self._moment(weight) if narrow else torch.zeros_like(weight)
                if narrow:
                    state[f"{name}{SCALES}"] = torch.zeros(math.ceil(weight.numel() / BLOCK), device=weight.device)
        return state

    def _moment(self, weight: Tensor) -> Tensor:
        if not self.paged or weight.numel() < _PAGED:
            return torch.zeros_like(weight, dtype=torch.uint8)
        moment: Tensor = self._kernels.get_paged(*weight.shape, dtype=torch.uint8, device=weight.device)
        self._kernels.fill(moment, 0)
        return moment

    def _update(self, weight: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        assert weight.grad is not None
        for name in _MOMENTS:
            if getattr(state[name], "is_paged", False):
                self._kernels.prefetch_tensor(state[name])
        first, second = _MOMENTS
        self._kernels.optimizer_update_8bit_blockwise(
            "adam", weight.grad.contiguous(), weight, state[first], state[second], *group["betas"], 0.0, 0.0,
            group["eps"], state["step"], group["lr"], *self._codes, state[f"{first}{SCALES}"],
            state[f"{second}{SCALES}"], group["weight_decay"])

    def _update_plain(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        states = [self.state[weight] for weight in weights]
        # The function counts the step itself.
        steps = [torch.tensor(state["step"] - 1.0, device=weight.device)
                 for state, weight in zip(states, weights, strict=True)]
        beta1, beta2 = group["betas"]
        adamw(weights, [weight.grad for weight in weights if weight.grad is not None],
              *([state[name] for state in states] for name in _MOMENTS), [], steps, fused=True, amsgrad=False,
              beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
              maximize=False)


def bytes_per_value(optimizer: torch.optim.Optimizer, part: Tensor) -> float:
    """Bytes of optimizer state for each value of a parameter."""
    if isinstance(optimizer, AdamW8bit) and id(part) in optimizer.narrow:
        return len(_MOMENTS) * (1 + 4 / BLOCK)
    moments = len(_MOMENTS) if "adam" in type(optimizer).__name__.lower() else 1
    return moments * part.itemsize
