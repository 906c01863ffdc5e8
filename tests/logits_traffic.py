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
# Reads and writes of its input by an operation that is several in one, unless a cache holds it.
PASSES = {"aten.logsumexp": 6, "aten._log_softmax": 4}
CACHE = 2**20  # bytes of one tensor that stay in a CPU's cache from one operation to the next


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
    """Bytes that cross the memory bus for tensors whose memory is at least `least` bytes, views of them included.

    A view of at most `CACHE` bytes crosses it once to be read and once to be written while operations work on it alone.
    """

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least = least
        self.moved = 0
        self.cached: dict[Any, set[str]] = {}

    def _count(self, values: Any, way: str, passes: int = 1) -> None:
        for one in tree_leaves(values):
            if not isinstance(one, Tensor) or one.untyped_storage().nbytes() < self.least:
                continue
            size = one.numel() * one.element_size()
            if size > CACHE:
                self.moved += size * passes
                continue
            ways = self.cached.pop((key := one.data_ptr()), set())
            self.moved += 0 if way in ways or (way == "read" and ways) else size
            self.cached[key] = ways | {way}
            if len(self.cached) > 4:
                self.cached.pop(next(iter(self.cached)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = str(func).rsplit(".", 1)[0]
        if name not in FREE and not isinstance(made, torch.Size):
            self._count([args, kwargs], "read", PASSES.get(name, 1))
            self._count(made, "written")
        return made
