"""A model spread over processes: FSDP2 by decoder layer, within replicas where there are some.

A sharded weight is a DTensor of which each process holds a part; `part_of` is that part as a plain tensor, which is
what optimizers, norms and hashes work on. Gradients are summed over processes, never averaged: the loss of a step is
divided once, by the counts of the whole step.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MethodType
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
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from tropism.distributed.mesh import AXES, Mesh

T = TypeVar("T")

_WITHIN, _TRAVELS = "tropism_within", "tropism_travels_in"


@dataclass(frozen=True)
class Sharding:
    """How models are spread.

    Args:
        mesh: the axes.
        compute: dtype in which layers compute; their matrices travel in it. None for the weights' own.
        offload: weights, gradients and optimizer state stay in the host's memory.
    """

    mesh: Mesh
    compute: torch.dtype | None = None
    offload: bool = False


def shard(module: torch.nn.Module, layers: Sequence[torch.nn.Module], how: Sharding) -> None:
    """Shard a model in place, layer by layer; what lies outside of layers is one unit more.

    Layers are gathered for their forward and backward pass, and what is outside for the time of both. Norms keep the
    dtype of the weights, as they do under autocast in one process.
    """
    offload = CPUOffloadPolicy() if how.offload else OffloadPolicy()
    common: dict[str, Any] = {"mesh": how.mesh.fsdp, "offload_policy": offload}
    narrow = MixedPrecisionPolicy(how.compute, torch.float32, cast_forward_inputs=False)
    for layer in layers:
        if how.compute is None:
            fully_shard(layer, **common)
            continue
        if norms := [part for part in layer.modules() if _is_small(part)]:
            fully_shard(norms, **common)
        fully_shard(layer, mp_policy=narrow, **common)
    fully_shard(module, **common)
    for part in _units(module):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    setattr(module, _WITHIN, MethodType(_call, module))
    setattr(module, _TRAVELS, how.compute)
    register_fsdp_forward_method(module, _WITHIN)


def _is_small(part: torch.nn.Module) -> bool:
    """Whether a module has vectors alone, such as a norm; autocast leaves those as they are."""
    own = list(part.parameters())
    return bool(own) and all(parameter.dim() < 2 for parameter in own)


def _units(module: torch.nn.Module) -> Iterable[FSDPModule]:
    return (part for part in module.modules() if isinstance(part, FSDPModule))


def _call(module: torch.nn.Module, action: Callable[[], tuple[Tensor | None, ...]]) -> tuple[Tensor | None, ...]:
    """What the action gives; FSDP hangs its backward pass on tensors that are no views of others."""
    return tuple(one if one is None or one._base is None else one.clone() for one in action())


def within(module: Any, action: Callable[[], T], stay: bool = False) -> T:
    """What an action gives that calls parts of a model: a tuple of tensors and None. Where the model is sharded, what
    is outside of its layers is gathered for it.

    Args:
        stay: leave it gathered after a pass without gradients.
    """
    if not isinstance(module, FSDPModule):
        return action()
    found: T = getattr(module, _WITHIN)(action)
    if not stay:
        rest(module)
    return found


def let_go(module: Any) -> None:
    """Give back what a frozen model that is not needed any more holds beside its parts."""
    for unit in _units(module):
        unit.reshard()


def rest(module: Any) -> None:
    """Let go of what a pass without gradients left gathered: from then on a weight is its part again."""
    if isinstance(module, FSDPModule) and not torch.is_grad_enabled():
        module.reshard()


def prepare_backward(module: Any, last: bool, once: bool) -> None:
    """Say what follows with the gradients of the next backward pass of a sharded model.

    Args:
        last: it is the last of the step: only then are gradients summed over replicas.
        once: only then are they summed at all; each process holds whole gradients until then.
    """
    if isinstance(module, FSDPModule):
        module.set_is_last_backward(last)
        module.set_requires_all_reduce(last)
        if once:
            module.set_requires_gradient_sync(last)


def part_of(tensor: Tensor) -> Tensor:
    """This process's part of a tensor, sharing its memory; the tensor itself where it is not sharded."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor


def like(part: Tensor, whole: Tensor, mesh: DeviceMesh | None = None) -> Tensor:
    """A part as the tensor that it is a part of.

    Args:
        part: as `part_of(whole)` is; it may be of another dtype.
        mesh: in place of that of `whole`: the same processes where the part lies.
    """
    if not isinstance(whole, DTensor):
        return part
    # Not by `from_local`, which moves a part that is kept in the host's memory to the mesh's device.
    meta = whole._spec.tensor_meta
    assert meta is not None
    spec = DTensorSpec(mesh or whole.device_mesh, whole.placements, tensor_meta=meta._replace(dtype=part.dtype))
    return DTensor(part, spec, requires_grad=False)


def whole_of(tensor: Tensor) -> Tensor:
    """The whole tensor on every process. All processes call this together."""
    if not isinstance(tensor, DTensor):
        return tensor
    kind = tensor.device_mesh.device_type
    if tensor.device.type != kind:  # weights that are kept in the host's memory travel where the mesh is
        tensor = like(part_of(tensor).to(kind), tensor)
    return tensor.detach().full_tensor()


def each_whole(tensors: Mapping[str, Tensor], action: Callable[[str, Tensor], T]) -> list[T]:
    """What an action gives for each tensor as a whole, in their order, on every process.

    Of sharded ones each is whole for a moment on all processes, which share the work and call this together. It must
    be one that lets threads work side by side.
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
    """Whole tensors in the host's memory, where `here`; one after the other. All processes call this together.

    Args:
        dtype: of those of floating point.
        here: whether this process keeps them.
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
    """The axes along which a tensor is divided."""
    if not isinstance(tensor, DTensor):
        return ()
    names = tensor.device_mesh.mesh_dim_names or ()
    return tuple(name for name, placement in zip(names, tensor.placements, strict=True) if not placement.is_replicate())


def region_of(tensor: Tensor) -> tuple[slice, ...]:
    """Which part of a whole tensor this process holds: a slice of each dim.

    The tensor axis divides first and FSDP divides what that leaves, both as `torch.chunk` does.
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
    """Overwrite a weight, or the part of it that is here, with what a whole tensor has there."""
    part_of(weight).copy_(whole[region_of(weight)])


def travels_in(module: Any) -> torch.dtype | None:
    """Dtype to which the matrices of a sharded model's layers are rounded when they are gathered; None for none."""
    found: torch.dtype | None = getattr(module, _TRAVELS, None)
    return found


def is_sharded(module: Any) -> bool:
    """Whether a model is spread over processes."""
    return isinstance(module, FSDPModule)


def fill(module: torch.nn.Module, read: Callable[[str, Tensor, tuple[slice, ...]], Tensor],
         device: torch.device) -> None:
    """Give memory and values to the weights of a model that was sharded without any. Tied weights stay tied.

    Args:
        read: gives a part of a weight by its name; called for each weight once, by all processes in one order.
        device: where the parts are to lie.
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
    """Hold frozen weights of a sharded model that has not computed yet in another dtype, in place.

    Args:
        weights: by name; no name of a tied weight.
    """
    for name, weight in weights.items():  # one after the other: what is let go makes room for the next
        part = torch.nn.Parameter(like(part_of(weight).to(dtype), weight), requires_grad=False)
        module.load_state_dict({name: part}, strict=False, assign=True)


class Owned:
    """The weights that learn, as this process holds them.

    Args:
        weights: of the model.

    Attributes:
        parts: plain tensors that share the memory of this process's parts; the weights themselves where none is
            sharded. An optimizer over them is one over the weights, since it works element by element.
    """

    def __init__(self, weights: Sequence[torch.nn.Parameter]) -> None:
        self.weights = list(weights)
        self.parts = [torch.nn.Parameter(part_of(weight)) if isinstance(weight, DTensor) else weight
                      for weight in self.weights]

    def weight_of(self) -> dict[Tensor, torch.nn.Parameter]:
        """The weight of each part."""
        return dict(zip(self.parts, self.weights, strict=True))

    def collect(self, world: Any) -> None:
        """Sum the gradients of a step over processes, and give them to the parts. A missing one counts as zero."""
        for weight, part in zip(self.weights, self.parts, strict=True):
            if part is not weight:
                part.grad = torch.zeros_like(part) if weight.grad is None else part_of(weight.grad)
                weight.grad = None
                if getattr(weight, "summed_over_tensor", False):
                    torch.distributed.all_reduce(part.grad, group=world.mesh.group("tensor"))
        if world.mesh is None:
            world.sum_gradients(self.parts)

    def norm(self, world: Any) -> Tensor:
        """The norm of the whole gradient, the same on every process."""
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
    """(weights that are divided, weights in all, elements held here, elements in all, bytes held here)."""
    weights = list(module.parameters())
    parts = [part_of(weight) for weight in weights]
    return (sum(isinstance(weight, DTensor) for weight in weights), len(weights),
            sum(part.numel() for part in parts), sum(weight.numel() for weight in weights),
            sum(part.numel() * part.itemsize for part in parts))
