"""Process group and rank facts, and the verbs that the step is written with.

At world size 1 every verb is its simplest case: no process group exists and nothing is copied.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from tropism.errors import TropismError

T = TypeVar("T")

_BUCKET_BYTES = 64 * 2**20  # gradients travel in buckets, so that no second copy of all of them exists


@dataclass(frozen=True)
class World:
    """Who we are among how many, and where our tensors live."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this rank writes and speaks."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Elementwise sum over ranks, on every rank; `values` itself is not changed."""
        if self.size == 1:
            return values
        total = values.clone()
        dist.all_reduce(total)
        return total

    def gather(self, value: T) -> list[T]:
        """One picklable object of each rank, on every rank, in rank order."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value)
        return gathered

    def broadcast(self, value: T) -> T:
        """The main rank's object, on every rank."""
        if self.size == 1:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0, device=None)
        return box[0]

    def max(self, values: Sequence[int]) -> list[int]:
        """Elementwise maximum of small numbers over ranks, on every rank: how a decision is taken together."""
        if self.size == 1:
            return list(values)
        highest = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        return [int(value) for value in highest.tolist()]

    def broadcast_into(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors with those of the main rank. All ranks name equal ones in equal order."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def on_main(self, action: Callable[[], T]) -> T | None:
        """What the main rank alone does; an error of it is raised on every rank, as `together` says."""
        return self.together(lambda: action() if self.is_main else None)

    def together(self, action: Callable[[], T]) -> T:
        """What every rank does for itself; an error of any is raised on all of them, so that none waits for it.

        Raises:
            TropismError: that of another rank; naming its type, if it was no error of ours.
        """
        if self.size == 1:
            return action()
        result, failure = None, None
        try:
            result = action()
        except Exception as error:
            failure = error
        if self.max([failure is not None]) == [1]:
            told = self.gather(None if failure is None else _portable(failure, self.rank))
            raise failure or next(filter(None, told))
        return cast(T, result)

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """The main rank goes through the block first, and leaves in files what the others then find there."""
        if self.size > 1 and not self.is_main:
            dist.barrier()
        try:
            yield
        finally:
            if self.size > 1 and self.is_main:
                dist.barrier()

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Replace each gradient by its sum over ranks. A missing gradient counts as zero, on any number of ranks:
        an optimiser treats the two differently."""
        bucket: list[Tensor] = []
        held = 0
        for parameter in parameters:
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = parameter.grad
            if self.size == 1:
                continue
            if bucket and (held + gradient.nbytes > _BUCKET_BYTES or gradient.dtype != bucket[0].dtype):
                _sum_bucket(bucket)
                bucket, held = [], 0
            bucket.append(gradient)
            held += gradient.nbytes
        if bucket:
            _sum_bucket(bucket)


def _portable(error: Exception, rank: int) -> TropismError:
    """An error as other ranks may raise it."""
    return error if isinstance(error, TropismError) else TropismError(f"rank {rank}: {type(error).__name__}: {error}")


def _sum_bucket(bucket: list[Tensor]) -> None:
    flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
    dist.all_reduce(flat)
    for gradient, summed in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
        gradient.copy_(summed.view_as(gradient))


@contextmanager
def connect() -> Iterator[World]:
    """Join the process group that torchrun describes in the environment, or be alone; leave it at the end."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    if size == 1:
        yield World(0, 1, device)
        return
    joined_here = not dist.is_initialized()
    if joined_here:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield World(rank, size, device)
    finally:
        if joined_here:
            dist.destroy_process_group()
