"""The process group, and the collective operations of a training step.

With one process there is no process group, and every operation returns its argument without a copy.
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

from tropism.borders import is_out_of_memory
from tropism.distributed.mesh import Mesh
from tropism.distributed.rendezvous import meeting_place
from tropism.errors import TropismError, UsageError
from tropism.spans import timed_as

T = TypeVar("T")

_BUCKET_BYTES = 64 * 2**20  # gradients travel in buckets, so that no second copy of all of them exists


@dataclass(frozen=True)
class World:
    """This process, and the group of processes that train together.

    Args:
        rank, size: number of this process, and of processes.
        device: where tensors live.
        mesh: how models are sharded; None if each process has a complete copy.
        group: process group for exchanges; None for the default one.
        control: process group for waiting while one process reads, hashes or writes, which can take hours; None for the
            default one.
        before_exchange: called when this process has allocated what an exchange of a step needs.
    """

    rank: int
    size: int
    device: torch.device
    mesh: Mesh | None = None
    group: Any = None
    control: Any = None
    before_exchange: Callable[[], None] = lambda: None

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and messages."""
        return self.rank == 0

    @property
    def _tensor(self) -> int:
        return 1 if self.mesh is None else self.mesh.size("tensor")

    @property
    def parts(self) -> int:
        """Number of parts that the rows of a step are divided into. A tensor-parallel group shares one part."""
        return self.size // self._tensor

    @property
    def part(self) -> int:
        """Number of the part of this process."""
        return self.rank // self._tensor

    @property
    def leads(self) -> bool:
        """Whether this process is the first of its part."""
        return self.rank % self._tensor == 0

    def spread(self, replicate: int, shard: int, tensor: int) -> "World":
        """The same processes in a mesh. A collective call.

        Args:
            replicate, shard, tensor: sizes whose product is `size`. If `shard` and `tensor` are 1, each process has a
                complete copy and there is no mesh.
        """
        if shard == tensor == 1:
            return replace(self, mesh=None)
        return replace(self, mesh=Mesh.of(self.device.type, replicate, shard, tensor))

    def apart(self) -> "World":
        """The same processes with a separate group, for a thread that runs in parallel to the steps. A collective
        call."""
        if self.size == 1:
            return self
        own = _patient_group()
        return replace(self, group=own, control=own)

    @timed_as("communication")
    def sum(self, values: Tensor) -> Tensor:
        """Elementwise sum over the parts of a step, on every process. Does not modify `values`."""
        if self.parts == 1:
            return values
        total = values.clone()
        self.before_exchange()
        dist.all_reduce(total, group=None if self.mesh is None else self.mesh.data)
        return total

    def of_parts(self, value: T) -> list[T]:
        """One picklable object of each part of a step, on every process."""
        return self.gather(value)[:: self._tensor]

    @timed_as("communication")
    def gather(self, value: T) -> list[T]:
        """One picklable object of each process, on every process, in rank order."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        self.before_exchange()
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    @timed_as("communication")
    def broadcast(self, value: T) -> T:
        """The main process's object, on every process."""
        if self.size == 1:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0, device=None, group=self.group)
        return box[0]

    def max(self, values: Sequence[int]) -> list[int]:
        """Elementwise maximum over processes, on every process. Used for decisions that all must share."""
        if self.size == 1:
            return list(values)
        return _max(values, self.group)

    def broadcast_into(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors with those of the main process. All processes pass the same ones in the same order."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def on_main(self, action: Callable[[], T]) -> T | None:
        """Run an action on the main process only. Its error is raised on every process, as in `together`."""
        return self.together(lambda: action() if self.is_main else None)

    def together(self, action: Callable[[], T]) -> T:
        """Run an action on every process. An error on one is raised on all, so that none waits for it.

        Raises:
            TropismError: the error of another process; with the name of its type if it was not a `TropismError`.
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
        """Run a computation with a model on every process. As `together` if each has a complete copy. With a sharded
        model the others wait inside the model: this process raises its error at once, and they see a closed connection.

        Raises:
            TropismError: as in `together`, if each process has a complete copy.
        """
        return self.together(action) if self.mesh is None else action()

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Run the block on the main process first, then on the others, which find its files."""
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

    @timed_as("communication")
    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Replace each gradient by its sum over the parts of a step. A missing gradient becomes zero, also with one
        process: optimizers treat the two differently."""
        buckets: list[list[Tensor]] = []
        held = 0
        for parameter in parameters:
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = parameter.grad
            if not buckets or held + gradient.nbytes > _BUCKET_BYTES or gradient.dtype != buckets[-1][0].dtype:
                buckets.append([])
                held = 0
            buckets[-1].append(gradient)
            held += gradient.nbytes
        if self.parts > 1:
            self._sum_buckets(buckets)

    def _sum_buckets(self, buckets: Sequence[Sequence[Tensor]]) -> None:
        """Sum each bucket in one exchange. All share the memory of the largest, so processes agree once that they have
        it."""
        sizes = [sum(gradient.numel() for gradient in bucket) for bucket in buckets]
        most: dict[torch.dtype, int] = {}
        for bucket, size in zip(buckets, sizes, strict=True):
            most[bucket[0].dtype] = max(most.get(bucket[0].dtype, 0), size)
        device = buckets[0][0].device if buckets else self.device
        room = {dtype: torch.empty(size, dtype=dtype, device=device) for dtype, size in most.items()}
        self.before_exchange()
        for bucket, size in zip(buckets, sizes, strict=True):
            flat = room[bucket[0].dtype][:size]
            torch.cat([gradient.reshape(-1) for gradient in bucket], out=flat)
            dist.all_reduce(flat, group=None if self.mesh is None else self.mesh.data)
            for gradient, summed in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(summed.view_as(gradient))


@timed_as("communication")
def _max(values: Sequence[int], group: Any) -> list[int]:
    highest = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    return [int(value) for value in highest.tolist()]


def _portable(error: Exception, rank: int) -> TropismError:
    """An error in a form that other processes can raise."""
    if isinstance(error, TropismError):
        return error
    if is_out_of_memory(error):
        return TropismError(f"process {rank} is out of memory. Its own error says what to do.")
    return TropismError(f"process {rank}: {type(error).__name__}: {error}")


@contextmanager
def connect(stay: bool = False) -> Iterator[World]:
    """Join the process group that torchrun describes in the environment, if any, and leave it at the end.

    Args:
        stay: leave it only when the process ends. Sharded models need it until then.

    Raises:
        UsageError: as in `processes`.
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
"""The group in which processes wait for one of them, for the current default group."""


def _patient_group() -> Any:
    """All processes, for waiting while one reads data, hashes a checkpoint, or writes a model. The default group times
    out after 30 minutes."""
    return dist.new_group(backend="gloo", timeout=timedelta(days=7))


def processes() -> int:
    """Number of processes, from the environment.

    Raises:
        UsageError: if WORLD_SIZE is invalid, or set without the other variables of torchrun.
    """
    named = os.environ.get("WORLD_SIZE", "1")
    if not named.isdecimal() or named == "0":
        raise UsageError(f"WORLD_SIZE={named!r} in the environment is not a number of processes. Start with torchrun, "
                         "which sets it, or unset it to run a single process.")
    lacking = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if int(named) > 1 and lacking and not dist.is_initialized():
        raise UsageError(f"WORLD_SIZE is {named} in the environment, but {' and '.join(lacking)} "
                         f"{'are' if len(lacking) > 1 else 'is'} not set. Start the processes with torchrun "
                         f"(torchrun --nproc-per-node {named} -m tropism ...), or unset WORLD_SIZE to run a single "
                         "process.")
    return int(named)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def lost_another(error: BaseException) -> bool:
    """Whether an error means that another process ended during an exchange."""
    signs = ("Connection closed by peer", "Connection reset by peer", "remote process exited")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
