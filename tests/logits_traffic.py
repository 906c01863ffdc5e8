"""What operations do to memory: the largest tensor that they make, and the bytes that they move of large ones."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operations that return a view, or memory that is not written yet.
FREE = {"aten.empty", "aten.empty_like", "aten.new_empty", "aten.detach", "aten.slice", "aten.split", "aten.t",
        "aten.transpose", "aten.unsqueeze", "aten.select", "aten.view", "aten.expand", "aten.squeeze", "aten.alias",
        "aten.new_empty_strided", "aten.lift_fresh"}
# Reads and writes of its input by an operation that is several in one.
PASSES = {"aten.logsumexp": 6, "aten._log_softmax": 4}


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes, the backward pass included."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(one.numel() for one in tree_leaves(made) if isinstance(one, Tensor))])
        return made


class Traffic(TorchDispatchMode):
    """Bytes read and written of tensors whose memory is at least `least` bytes, views of them included."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least = least
        self.moved = 0

    def _bytes(self, values: Any) -> int:
        return sum(one.numel() * one.element_size() for one in tree_leaves(values)
                   if isinstance(one, Tensor) and one.untyped_storage().nbytes() >= self.least)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = str(func).rsplit(".", 1)[0]
        if name not in FREE and not isinstance(made, torch.Size):
            self.moved += self._bytes([args, kwargs]) * PASSES.get(name, 1) + self._bytes(made)
        return made
