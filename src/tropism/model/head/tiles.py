"""Tiles of the logits: some positions by some columns. No more of the logits exists at once.

Each tile comes from one matrix product. What follows works on blocks of a tile's rows that stay in a CPU's cache while
several operations are applied to them, so that a tile crosses the memory bus once for all of them.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Elements of one tile: 128 MiB of float32 on a CPU, 512 MiB on a GPU (4096 positions by 32768 columns), where each tile
# reads and writes the gradient of its columns of the head.
CPU_TILE, GPU_TILE = 2**25, 2**27
COLUMNS = 2**15
# Elements of one block, of which up to 14 arrays exist at once: 1 MiB on a CPU, 64 MiB on a GPU.
CPU_BLOCK, GPU_BLOCK = 2**18, 2**24


@dataclass(frozen=True)
class Planned:
    """How tiles are computed on tensors without values, to count what they cost.

    Args:
        gpu: tiles have the size that they have on a GPU.
        repeated: within it, each operation counts so many times.
        kernels: stands for the fused kernels of the device; None if it has none.
    """

    gpu: bool
    repeated: Callable[[float], AbstractContextManager[None]]
    kernels: Any = None


_planned: ContextVar[Planned | None] = ContextVar("planned", default=None)


@contextmanager
def planning(planned: Planned) -> Iterator[None]:
    """Compute tiles as they are planned."""
    token = _planned.set(planned)
    try:
        yield
    finally:
        _planned.reset(token)


def planned_kernels() -> Any:
    """What stands for fused kernels; None outside of plans for a GPU."""
    found = _planned.get()
    return None if found is None else found.kernels


def slices(total: int, step: int) -> Iterator[slice]:
    """Consecutive ranges of `step` below `total`."""
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))


def column_slices(total: int, width: int = COLUMNS) -> Iterator[slice]:
    """The columns of each tile; one empty range if this process has no columns."""
    return slices(total, width) if total else iter((slice(0, 0),))


def tile_elements(weight: Tensor) -> int:
    """Elements of a tile on the device of a head's weight."""
    return GPU_TILE if on_gpu(weight) else CPU_TILE


def on_gpu(tensor: Tensor) -> bool:
    """Whether tiles of a tensor have the size that they have on a GPU."""
    planned = _planned.get()
    return tensor.is_cuda if planned is None else planned.gpu


def by_blocks(find: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Apply a function that works row by row to blocks of rows, and join what it returns for each.

    Args:
        find: takes a block of each tensor, and returns tensors with as many rows.
        tensors: `[n, ...]`, the first one the widest.
    """
    widest, planned = tensors[0], _planned.get()
    step = max(1, (GPU_BLOCK if on_gpu(widest) else CPU_BLOCK) // max(1, widest.shape[1]))
    if len(widest) <= step:
        return find(*tensors)
    if planned is not None:  # blocks are alike
        with planned.repeated(len(widest) / step):
            return tuple(one.new_empty(len(widest), *one.shape[1:]) for one in find(*(one[:step] for one in tensors)))
    found = zip(*(find(*parts) for parts in zip(*(one.split(step) for one in tensors), strict=True)), strict=True)
    return tuple(map(torch.cat, found))


def at(tile: Tensor, ids: Tensor, first: int) -> Tensor:
    """`[n, k]` values of the `[n, k]` ids in a tile whose first column has the id `first`; 0 for ids elsewhere."""
    if not tile.shape[1]:
        return tile.new_zeros(ids.shape)
    column, here = _locate(tile, ids, first)
    return tile.gather(1, column).where(here, 0)


def put(tile: Tensor, ids: Tensor, values: Tensor, first: int) -> Tensor:
    """Set the columns of `[n, k]` ids, distinct within a row, to `[n, k]` values, in place. Ignores ids elsewhere."""
    if not tile.shape[1]:
        return tile
    column, here = _locate(tile, ids, first)
    # An id elsewhere repeats what another id of its row does. If all are elsewhere, the first column stays as it is.
    other = here.to(torch.uint8).argmax(1, keepdim=True)
    any_here = here.gather(1, other)
    spare, value = column.gather(1, other).where(any_here, 0), values.gather(1, other).where(any_here, tile[:, :1])
    return tile.scatter_(1, column.where(here, spare), values.where(here, value))


def _locate(tile: Tensor, ids: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """The column of each id, clamped into range, and whether the tile has it."""
    column = ids - first
    return column.clamp(0, tile.shape[1] - 1), (column >= 0) & (column < tile.shape[1])
