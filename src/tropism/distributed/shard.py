"""Sharded models: FSDP2 by decoder layer, optionally in replicas.

A sharded weight is a DTensor of which each process holds a part. `part_of` returns that part as a plain tensor, and
optimizers, norms and hashes work on it. Gradients are summed over processes, never averaged: the loss of a step is
divided once, by the counts of the entire step.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from tropism.distributed.mesh import AXES, Mesh
from tropism.distributed.passes import connect_layers

T = TypeVar("T")

_TRAVELS = "tropism_travels_in"


@dataclass(frozen=True)
class Sharding:
    """How models are sharded.

    Args:
        mesh: the axes.
        compute: dtype in which layers compute and their matrices are gathered; None for that of the weights.
        offload: keep weights, gradients and optimizer state in CPU memory.
    """

    mesh: Mesh
    compute: torch.dtype | None = None
    offload: bool = False


def shard(module: torch.nn.Module, layers: Sequence[torch.nn.Module], how: Sharding) -> None:
    """Shard a model in place: one FSDP unit per layer, and one for everything outside the layers.

    Layers are gathered for their own forward and backward pass, the rest for the time of both. Matrices are gathered in
    the dtype in which layers compute. An embedding is not: one process does not round it either. A head of its own is a
    unit for that reason. Norms and other vectors are not sharded: each process holds them, in the dtype of the weights,
    as under autocast in one process. Weights that are kept in host memory are all sharded.
    """
    offload = CPUOffloadPolicy() if how.offload else OffloadPolicy()
    common: dict[str, Any] = {"mesh": how.mesh.fsdp, "offload_policy": offload}
    policy = MixedPrecisionPolicy(how.compute, None if how.compute is None else torch.float32,
                                  cast_forward_inputs=False)
    small = {part for part in module.modules() if _is_small(part)}
    if how.offload:
        for layer in layers:
            if norms := [part for part in layer.modules() if part in small]:
                fully_shard(norms, **common)
    else:
        common["ignored_params"] = {weight for part in small for weight in part.parameters()}
    for layer in layers:
        fully_shard(layer, mp_policy=policy, **common)
    head = _narrow_head(module, how)
    for part in head:
        fully_shard(part, mp_policy=policy, **common)
    fully_shard(module, **common)
    connect_layers(module, layers, head)
    setattr(module, _TRAVELS, how.compute)


def _narrow_head(module: Any, how: Sharding) -> list[torch.nn.Linear]:
    """The output head, if its weight is gathered in another dtype than the embedding's."""
    head, embedding = module.get_output_embeddings(), module.get_input_embeddings()
    apart = type(head) is torch.nn.Linear and head.weight is not embedding.weight
    return [head] if apart and how.compute is not None and how.mesh.size("tensor") == 1 and not how.offload else []


def _is_small(part: torch.nn.Module) -> bool:
    """Whether a module has only vectors, as a norm does. Autocast does not convert those."""
    own = list(part.parameters())
    return bool(own) and all(parameter.dim() < 2 for parameter in own)


def part_of(tensor: Tensor) -> Tensor:
    """This process's part of a tensor, sharing its memory; the tensor itself if it is not sharded."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor


def like(part: Tensor, whole: Tensor, mesh: DeviceMesh | None = None, shape: torch.Size | None = None) -> Tensor:
    """Wrap a part as the sharded tensor that it belongs to.

    Args:
        part: as `part_of(whole)`, possibly of another dtype.
        mesh: the same processes for the device of the part, if it differs from that of `whole`.
        shape: of the complete tensor, if it differs from that of `whole`.
    """
    if not isinstance(whole, DTensor):
        return part
    # Not by `from_local`, which moves a part that is kept in the host's memory to the mesh's device.
    meta = whole._spec.tensor_meta
    assert meta is not None
    meta = meta._replace(dtype=part.dtype)
    if shape is not None:
        meta = meta._replace(shape=shape, stride=torch.empty(shape, device="meta").stride())
    spec = DTensorSpec(mesh or whole.device_mesh, whole.placements, tensor_meta=meta)
    return DTensor(part, spec, requires_grad=False)


BLOCK = 256
"""Values that share a scale, where they are quantized."""


def block_shape(shape: torch.Size) -> torch.Size | None:
    """`[R, B]` of the scales of a contiguous tensor in blocks: R groups of rows, each of B full blocks; None if rows do
    not form full blocks. It is sharded as the tensor is, if each process holds whole groups."""
    row = shape[1:].numel()
    group = BLOCK // math.gcd(row, BLOCK)
    return torch.Size((shape[0] // group, row * group // BLOCK)) if shape and shape[0] % group == 0 else None


def rows_of_first(tensor: Tensor) -> int:
    """Rows of a tensor that the first process holds. Others hold as many, or the rest."""
    if not isinstance(tensor, DTensor):
        return len(tensor)
    rows = len(tensor)
    for axis, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            rows = -(-rows // tensor.device_mesh.size(axis))
    return rows


def whole_of(tensor: Tensor) -> Tensor:
    """The complete tensor on every process. A collective call."""
    if not isinstance(tensor, DTensor):
        return tensor
    kind = tensor.device_mesh.device_type
    if tensor.device.type != kind:  # weights that are kept in the host's memory travel where the mesh is
        tensor = like(part_of(tensor).to(kind), tensor)
    return tensor.detach().full_tensor()


def each_whole(tensors: Mapping[str, Tensor], action: Callable[[str, Tensor], T]) -> list[T]:
    """Results of an action for each complete tensor, in order, on every process. A collective call if any is sharded.

    Sharded tensors are gathered one at a time, and the processes share the work. The action must be thread-safe and
    release the interpreter lock.
    """
    if not any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        with ThreadPoolExecutor() as pool:
            return list(pool.map(action, tensors, tensors.values()))
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    own = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        whole = whole_of(tensor)
        if number % size == rank:
            own[number] = action(name, whole)
    gathered: list[Any] = [None] * size
    torch.distributed.all_gather_object(gathered, own)
    found = {number: value for part in gathered for number, value in part.items()}
    return [found[number] for number in range(len(tensors))]


def gathered(tensors: Mapping[str, Tensor], dtype: torch.dtype, here: bool) -> dict[str, Tensor]:
    """Complete tensors in CPU memory if `here`, gathered one at a time. A collective call.

    Args:
        dtype: for floating-point tensors.
        here: keep them on this process.
    """
    found: dict[str, Tensor] = {}
    made: dict[Any, Tensor] = {}  # tied weights stay one tensor
    for name, tensor in tensors.items():
        key = (part_of(tensor).data_ptr(), tensor.shape)
        whole = whole_of(tensor)
        if here:
            converted = made.get(key) if part_of(tensor).numel() else None
            if converted is None:
                converted = whole.detach().to("cpu", dtype if whole.is_floating_point() else None)
            found[name] = made[key] = converted
    return found


def axes_of(tensor: Tensor) -> tuple[str, ...]:
    """The mesh axes that divide a tensor."""
    if not isinstance(tensor, DTensor):
        return ()
    names = tensor.device_mesh.mesh_dim_names or ()
    return tuple(name for name, placement in zip(names, tensor.placements, strict=True) if not placement.is_replicate())


def region_of(tensor: Tensor) -> tuple[slice, ...]:
    """The region of the complete tensor that this process holds: a slice of each dim.

    The tensor axis divides first, then FSDP divides the result, both as `torch.chunk` does.
    """
    bounds = [(0, size) for size in tensor.shape]
    if isinstance(tensor, DTensor):
        mesh, names = tensor.device_mesh, tensor.device_mesh.mesh_dim_names or ()
        own = mesh.get_coordinate()
        assert own is not None
        for name in reversed(AXES):
            if name in names and not (placement := tensor.placements[axis := names.index(name)]).is_replicate():
                dim = placement.dim
                first, end = bounds[dim]
                step = -(-(end - first) // mesh.size(axis))
                start = min(first + own[axis] * step, end)
                bounds[dim] = start, min(start + step, end)
    return tuple(slice(*bound) for bound in bounds)


@torch.no_grad()
def give(weight: Tensor, whole: Tensor) -> None:
    """Overwrite a weight, or its part on this process, with the values of a complete tensor."""
    part_of(weight).copy_(whole[region_of(weight)])


def travels_in(module: Any) -> torch.dtype | None:
    """Dtype to which a sharded model's matrices are rounded when gathered; None if they are not."""
    found: torch.dtype | None = getattr(module, _TRAVELS, None)
    return found


def is_sharded(module: Any) -> bool:
    """Whether a model is sharded."""
    return isinstance(module, FSDPModule)


def fill(module: torch.nn.Module, read: Callable[[str, Tensor, tuple[slice, ...]], Tensor],
         device: torch.device) -> None:
    """Allocate and set the weights of a model that was sharded on the meta device. Tied weights stay tied.

    Args:
        read: returns a part of a weight by its name. Called once per weight, in the same order on all processes.
        device: of the parts.
    """
    made: dict[int, torch.nn.Parameter] = {}
    values: dict[str, Tensor] = {}
    for name, weight in module.named_parameters(remove_duplicate=False):
        if id(weight) not in made:
            part = read(name, weight, region_of(weight)).to(device=device, dtype=weight.dtype).contiguous()
            made[id(weight)] = torch.nn.Parameter(like(part, weight), requires_grad=weight.requires_grad)
        values[name] = made[id(weight)]
    module.load_state_dict(values, strict=False, assign=True)


def convert(module: torch.nn.Module, weights: Mapping[str, torch.nn.Parameter], dtype: torch.dtype) -> None:
    """Convert frozen weights of a sharded model to another dtype, in place, before its first pass.

    Args:
        weights: by name, without tied ones.
    """
    for name, weight in weights.items():  # one after the other: what is let go makes room for the next
        part = torch.nn.Parameter(like(part_of(weight).to(dtype), weight), requires_grad=False)
        module.load_state_dict({name: part}, strict=False, assign=True)


class Owned:
    """The trainable weights, as held by this process.

    Args:
        weights: of the model.

    Attributes:
        parts: plain tensors that share memory with this process's parts; the weights themselves if not sharded. An
            elementwise optimizer over them equals one over the weights.
    """

    def __init__(self, weights: Sequence[torch.nn.Parameter]) -> None:
        self.weights = list(weights)
        self.parts = [torch.nn.Parameter(part_of(weight)) if isinstance(weight, DTensor) else weight
                      for weight in self.weights]

    def weight_of(self) -> dict[Tensor, torch.nn.Parameter]:
        """The weight of each part."""
        return dict(zip(self.parts, self.weights, strict=True))

    def collect(self, world: Any) -> None:
        """Sum the gradients of a step over processes and assign them to the parts. A missing one becomes zero."""
        for weight, part in zip(self.weights, self.parts, strict=True):
            if part is not weight:
                part.grad = torch.zeros_like(part) if weight.grad is None else part_of(weight.grad)
                weight.grad = None
        world.sum_gradients([part for weight, part in zip(self.weights, self.parts, strict=True)
                             if world.mesh is None or part is weight])
        for weight, part in zip(self.weights, self.parts, strict=True):
            if getattr(weight, "summed_over_tensor", False) and part.grad is not None:
                torch.distributed.all_reduce(part.grad, group=world.mesh.group("tensor"))

    def norm(self, world: Any) -> Tensor:
        """The norm of the complete gradient, equal on every process."""
        kinds: dict[tuple[str, ...], list[Tensor]] = {}
        for weight, part in zip(self.weights, self.parts, strict=True):
            if part.grad is not None:
                kinds.setdefault(axes_of(weight), []).append(part.grad)
        if set(kinds) <= {()}:
            return torch.nn.utils.get_total_norm(kinds.get((), []))
        total = torch.zeros((), dtype=torch.float64, device=world.device)
        for axes in sorted(kinds):
            square = torch.nn.utils.get_total_norm(kinds[axes]).to(world.device, torch.float64) ** 2
            for axis in axes:
                torch.distributed.all_reduce(square, group=world.mesh.group(axis))
            total += square
        return total.sqrt().to(self.parts[0].dtype)


def shard_sizes(module: torch.nn.Module) -> tuple[int, int, int, int, int]:
    """(sharded weights, all weights, elements held here, all elements, bytes held here)."""
    weights = list(module.parameters())
    parts = [part_of(weight) for weight in weights]
    return (sum(isinstance(weight, DTensor) for weight in weights), len(weights),
            sum(part.numel() for part in parts), sum(weight.numel() for weight in weights),
            sum(part.numel() * part.itemsize for part in parts))
