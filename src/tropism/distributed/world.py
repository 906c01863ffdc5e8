"""Process group and rank facts, and the verbs that the step is written with.

At world size 1 every verb is its simplest case: no process group exists and nothing is copied.
"""

import atexit
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from tropism.distributed.meeting import meeting_place
from tropism.distributed.mesh import Mesh
from tropism.errors import TropismError, UsageError

T = TypeVar("T")

_BUCKET_BYTES = 64 * 2**20  # gradients travel in buckets, so that no second copy of all of them exists


@dataclass(frozen=True)
class World:
    """Who we are among how many, and where our tensors live.

    Args:
        rank, size: this process among all of them.
        device: where tensors live.
        mesh: how a model is spread over them; None where each has a whole copy.
        group: the process group in which they speak; None for the usual one.
        control: the one for what one of them does while others wait, which may be reading, hashing or writing for
            hours; None for the usual one.
    """

    rank: int
    size: int
    device: torch.device
    mesh: Mesh | None = None
    group: Any = None
    control: Any = None

    @property
    def is_main(self) -> bool:
        """Whether this rank writes and speaks."""
        return self.rank == 0

    @property
    def _tensor(self) -> int:
        return 1 if self.mesh is None else self.mesh.size("tensor")

    @property
    def parts(self) -> int:
        """Into how many parts the rows of a step are divided; processes that compute a layer together share one."""
        return self.size // self._tensor

    @property
    def part(self) -> int:
        """Which of them is ours."""
        return self.rank // self._tensor

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for its part."""
        return self.rank % self._tensor == 0

    def spread(self, replicate: int, shard: int, tensor: int) -> "World":
        """The same processes in a mesh. All ranks call this together.

        Args:
            replicate, shard, tensor: sizes whose product is `size`. Where the last two are 1 each process has a whole
                copy, and there is no mesh.
        """
        if shard == tensor == 1:
            return replace(self, mesh=None)
        return replace(self, mesh=Mesh.of(self.device.type, replicate, shard, tensor))

    def apart(self) -> "World":
        """The same processes with a group of their own, for what a thread does beside the steps. All ranks call this
        together."""
        if self.size == 1:
            return self
        own = _patient_group()
        return replace(self, group=own, control=own)

    def sum(self, values: Tensor) -> Tensor:
        """Elementwise sum over the parts of a step, on every rank; `values` itself is not changed."""
        if self.parts == 1:
            return values
        total = values.clone()
        dist.all_reduce(total, group=None if self.mesh is None else self.mesh.data)
        return total

    def of_parts(self, value: T) -> list[T]:
        """One picklable object of each part of a step, on every rank."""
        return self.gather(value)[:: self._tensor]

    def gather(self, value: T) -> list[T]:
        """One picklable object of each rank, on every rank, in rank order."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def broadcast(self, value: T) -> T:
        """The main rank's object, on every rank."""
        if self.size == 1:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0, device=None, group=self.group)
        return box[0]

    def max(self, values: Sequence[int]) -> list[int]:
        """Elementwise maximum of small numbers over ranks, on every rank: how a decision is taken together."""
        if self.size == 1:
            return list(values)
        return _max(values, self.group)

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
        if _max([failure is not None], self.control) == [1]:
            told = self.gather(None if failure is None else _portable(failure, self.rank))
            raise failure or next(filter(None, told))
        return cast(T, result)

    def computed(self, action: Callable[[], T]) -> T:
        """What every rank computes with a model. Where each has a whole copy this is `together`. Else others wait for
        this rank inside of the model: it raises its error at once, and theirs is that of a closed connection.

        Raises:
            TropismError: as `together` says, where each has a whole copy.
        """
        return self.together(action) if self.mesh is None else action()

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """The main rank goes through the block first, and leaves in files what the others then find there."""
        if self.size == 1:
            yield
            return
        if not self.is_main:
            dist.barrier(group=self.control)
        try:
            yield
        finally:
            if self.is_main:
                dist.barrier(group=self.control)

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Replace each gradient by its sum over ranks. A missing gradient counts as zero, on any number of ranks:
        an optimizer treats the two differently."""
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


def _max(values: Sequence[int], group: Any) -> list[int]:
    highest = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    return [int(value) for value in highest.tolist()]


def _portable(error: Exception, rank: int) -> TropismError:
    """An error as other ranks may raise it."""
    return error if isinstance(error, TropismError) else TropismError(f"rank {rank}: {type(error).__name__}: {error}")


def _sum_bucket(bucket: list[Tensor]) -> None:
    flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
    dist.all_reduce(flat)
    for gradient, summed in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
        gradient.copy_(summed.view_as(gradient))


@contextmanager
def connect(stay: bool = False) -> Iterator[World]:
    """Join the process group that torchrun describes in the environment, or be alone; leave it at the end.

    Args:
        stay: leave it when the process ends: a model that is spread over processes is bound to it.

    Raises:
        UsageError: as `processes` says.
    """
    size = processes()
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
        store, _, _ = next(rendezvous("env://"))
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                                store=meeting_place(store, rank, size), rank=rank, world_size=size)
        if stay:
            atexit.register(_leave)
    if _control.get("of") is not dist.group.WORLD:
        _control.update(of=dist.group.WORLD, group=_patient_group())
    try:
        yield World(rank, size, device, control=_control["group"])
    finally:
        if joined_here and not stay:
            _leave()


_control: dict[str, Any] = {}
"""The group in which processes wait for one of them, of the process group that there is."""


def _patient_group() -> Any:
    """All processes, for those that wait while one reads data, hashes a checkpoint, or writes a model. The usual group
    gives up after half an hour."""
    return dist.new_group(backend="gloo", timeout=timedelta(days=7))


def processes() -> int:
    """How many processes there are, by the environment.

    Raises:
        UsageError: if it says that there are several, and not which of them this is and where the others are.
    """
    named = os.environ.get("WORLD_SIZE", "1")
    if not named.isdecimal() or named == "0":
        raise UsageError(f"WORLD_SIZE is {named!r} in the environment, which is no number of processes; torchrun sets "
                         "it, and for one process it is not needed")
    lacking = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if int(named) > 1 and lacking and not dist.is_initialized():
        raise UsageError(f"WORLD_SIZE is {named} in the environment, and {' and '.join(lacking)} "
                         f"{'are' if len(lacking) > 1 else 'is'} not set: start the processes with torchrun, which "
                         f"sets them all (torchrun --nproc-per-node {named} -m tropism ...), or unset WORLD_SIZE to "
                         "run in one")
    return int(named)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def lost_another(error: BaseException) -> bool:
    """Whether an error is what remains of an exchange with a process that is gone."""
    signs = ("Connection closed by peer", "Connection reset by peer", "remote process exited")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
