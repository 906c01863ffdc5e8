"""State of a model and its optimizer by fully qualified names, written and read by torch.distributed.checkpoint.

Names do not depend on sharding, so a checkpoint can be read with another number of processes. Only tensors go through
torch.distributed.checkpoint. Other values are returned separately, as plain data.
"""

import errno
import os
import warnings
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor

from tropism.distributed.checkpoint_metadata import MetadataReader, read_metadata
from tropism.distributed.mesh import Mesh
from tropism.distributed.shard import Owned, block_shape, like, part_of
from tropism.distributed.world import World
from tropism.errors import CheckpointError, UsageError, first_line, not_only_tensors

Plain = dict[str, Any]

SCALES = "_scales"
"""End of the name of optimizer state with a scale for each block of a weight; see `block_shape`."""

# torch warns at every save and load without a process group, which is intended here.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


@dataclass
class TrainingState:
    """Everything that an update reads and writes.

    Args:
        tensors: `model/NAME` and `optimizer/NAME/KEY`, sharing memory with the module and the optimizer.
        tied: second names of tied tensors, with the first.
        groups: options of the optimizer's parameter groups, with the names of their weights.
        values: optimizer state that is not a tensor, by weight and key.
        partial: only trainable weights are included; the frozen ones come from another source.
    """

    tensors: dict[str, Tensor]
    tied: dict[str, str]
    groups: list[Plain]
    values: dict[str, Plain] = field(default_factory=dict)
    partial: bool = False

    @classmethod
    def of(cls, module: torch.nn.Module, optimizer: torch.optim.Optimizer, owned: Owned | None = None,
           begun: bool = False, only: Collection[str] | None = None) -> "TrainingState":
        """The current state. Sharded weights are DTensors of this process's parts.

        Args:
            owned: the optimizer's view of the module's weights, if it does not hold the weights themselves.
            only: names of the weights to include; None for all.
            begun: include the state that the optimizer creates at its first step. A step with learning rate 0 creates
                it, so use this only if `apply` replaces weights and state afterwards.
        """
        if begun:
            _begin(optimizer)
        model, optim = _weights(module, only), optimizer.state_dict()
        names = _names(module, optimizer, owned)
        weights = dict(module.named_parameters(remove_duplicate=False))
        state = cls({}, {}, [{**group, "params": [names[index] for index in group["params"]]}
                             for group in optim["param_groups"]], partial=only is not None)
        seen: dict[Any, str] = {}
        for name, tensor in model.items():
            key = f"model/{name}"
            if isinstance(tensor, DTensor) or (type(tensor) in (Tensor, torch.nn.Parameter) and tensor.numel()):
                # A process may hold nothing of a weight, and all must find the same ones tied.
                place: Any = (id(weights.get(name)) if isinstance(tensor, DTensor)
                              else (tensor.data_ptr(), tensor.shape, tensor.stride()))
                if place in seen:
                    state.tied[key] = seen[place]
                    continue
                seen[place] = key
            state.tensors[key] = tensor
        for index, entry in optim["state"].items():
            for key, value in entry.items():
                if isinstance(value, Tensor):
                    state.tensors[f"optimizer/{names[index]}/{key}"] = _as_sharded(value, key, weights[names[index]])
                else:
                    state.values.setdefault(names[index], {})[key] = value
        return state

    def copied(self, into: Mapping[str, Tensor] | None = None, mesh: Mesh | None = None) -> dict[str, Tensor]:
        """A copy of the tensors on the CPU, in pinned memory if they are on a GPU.

        Args:
            into: an earlier copy to overwrite: allocating memory costs more than copying.
            mesh: over which they are sharded, if any.
        """
        found: dict[str, Tensor] = {}
        for name, tensor in self.tensors.items():
            part = part_of(tensor.detach())
            place = part_of(into[name]) if into and name in into else None
            if place is None or place.shape != part.shape or place.dtype != part.dtype:
                place = _host_memory(part)
            place.copy_(part, non_blocking=True)
            on_host = mesh.on_host(tensor.device_mesh) if mesh and isinstance(tensor, DTensor) else None
            found[name] = like(place, tensor, on_host)
        if any(tensor.is_cuda for tensor in self.tensors.values()):
            torch.cuda.synchronize()
        return found

    def apply(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer,
              owned: Owned | None = None) -> None:
        """Load the state into a module and its optimizer. Names must match exactly."""
        model: Plain = {}
        entries: dict[str, Plain] = {name: dict(values) for name, values in self.values.items()}
        everything = self.tensors | {name: self.tensors[other] for name, other in self.tied.items()}
        for name, tensor in everything.items():
            kind, _, rest = name.partition("/")
            if kind == "model":
                model[rest] = tensor
            else:
                weight, _, key = rest.rpartition("/")
                entries.setdefault(weight, {})[key] = part_of(tensor)
        if self.partial:
            own = _weights(module, model)
            for name, tensor in model.items():
                own[name].copy_(tensor)
        else:
            set_model_state_dict(module, model, options=StateDictOptions(strict=True))
        names = _names(module, optimizer, owned)
        groups = [{**kept, "params": own["params"]}
                  for kept, own in zip(self.groups, optimizer.state_dict()["param_groups"], strict=True)]
        optimizer.load_state_dict({"param_groups": groups, "state": {
            index: entries[name] for index, name in enumerate(names) if name in entries}})


def _host_memory(part: Tensor) -> Tensor:
    """An empty tensor on the CPU for a copy of another one. From a GPU, copies to pinned memory are several times as
    fast. If the system refuses to pin more, the memory is ordinary."""
    if part.is_cuda:
        with suppress(RuntimeError):
            return torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
    return torch.empty(part.shape, dtype=part.dtype)


def _as_sharded(value: Tensor, key: str, weight: Tensor) -> Tensor:
    """Optimizer state of a part of a weight, as state of the weight."""
    part, blocks = part_of(weight), block_shape(weight.shape)
    if key.endswith(SCALES) and blocks is not None:
        return like(value.view(-1, blocks[1]), weight, shape=blocks)
    return like(value, weight) if value.shape == part.shape else value  # else a count of steps


def _weights(module: torch.nn.Module, only: Collection[str] | None) -> Plain:
    """A module's state, or only the named parameters: the state of a quantized module has entries that cannot be
    loaded."""
    if only is None:
        return get_model_state_dict(module)
    return {name: weight.detach() for name, weight in module.named_parameters(remove_duplicate=False) if name in only}


def _names(module: torch.nn.Module, optimizer: torch.optim.Optimizer, owned: Owned | None) -> list[str]:
    """The names of an optimizer's weights, in the order of its own state."""
    own = {parameter: name for name, parameter in module.named_parameters()}
    weight_of = owned.weight_of() if owned else {}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [own[weight_of.get(parameter, parameter)] for parameter in parameters]


def _begin(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer create the state of its first step, by a step with gradients and learning rate 0."""
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def check_plain(value: Any, what: str) -> None:
    """Check that a value can be stored as JSON and restored exactly.

    Raises:
        UsageError: with the owner of the value.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return
    if isinstance(value, list | tuple):
        for entry in value:
            check_plain(entry, what)
        return
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        for entry in value.values():
            check_plain(entry, what)
        return
    raise UsageError(f"{what} holds a {type(value).__name__}, which a checkpoint cannot store. Use numbers, text, "
                     "lists and dictionaries.")


def write_tensors(tensors: dict[str, Tensor], path: Path, world: World | None = None) -> None:
    """Write tensors into a directory.

    Args:
        world: processes that each write their parts, in a collective call; None for this process alone.

    Raises:
        OSError: if the disk refuses.
    """
    together = world is not None and world.size > 1
    try:
        dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(path, sync_files=False), no_dist=not together,
                 process_group=world.control if world else None)
        if world is None or world.is_main:
            _check_seen(path)
    except CheckpointException as error:
        raise _cause(error) from error


def _check_seen(path: Path) -> None:
    """Check that this process sees every file with a tensor.

    Raises:
        OSError: if one is not visible.
    """
    named = {entry.relative_path for entry in read_metadata(path).storage_data.values()}
    present = set(os.listdir(path))
    if missing := named - present:
        raise OSError(errno.ENOENT, f"{len(missing)} of {len(named)} files written by other processes are not visible "
                                    "to the main process. Use a directory on a disk that all machines share.")


def read_tensors(tensors: dict[str, Tensor], path: Path, whole: bool = True) -> None:
    """Read a directory into tensors, in place, on this process alone.

    Args:
        tensors: to fill. Of sharded ones, the parts of this process are read, however they were written.
        whole: fail if the directory holds further tensors.

    Raises:
        CheckpointError: with the name that is missing, unexpected or of another size or type. Nothing is modified.
    """
    reader = MetadataReader(path)
    stored: dict[str, TensorStorageMetadata] = reader.read_metadata().state_dict_metadata
    try:
        for problem, names in (("is missing", tensors.keys() - stored.keys()),
                               ("is not part of this run", stored.keys() - tensors.keys())):
            if names and (whole or problem == "is missing"):
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                raise CheckpointError(f"{path}: {min(names)}{more} {problem}")
        for name, tensor in tensors.items():
            entry = stored[name]
            kept = (tuple(entry.size), entry.properties.dtype)
            if kept != (tuple(tensor.shape), tensor.dtype):
                raise CheckpointError(f"{path}: {name} is {list(kept[0])} {kept[1]} in the checkpoint but "
                                      f"{list(tensor.shape)} {tensor.dtype} in this run")
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        raise CheckpointError(f"{path}: cannot be read: {_reason(_cause(error))}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


def _reason(error: Exception) -> str:
    """Why tensors cannot be read. torch reads them with `weights_only`."""
    if not_only_tensors(error):
        return "a file contains more than tensors. Nothing in it was run. Do not use this checkpoint."
    return first_line(error)


def model_names(path: Path) -> list[str]:
    """Module names of the weights in a directory, without the second names of tied ones.

    Raises:
        CheckpointError: if it cannot be read, or contains no weights.
    """
    stored = MetadataReader(path).read_metadata().state_dict_metadata
    found = [name.removeprefix("model/") for name in stored if name.startswith("model/")]
    if not found:
        raise CheckpointError(f"{path}: contains no model weights")
    return found


def read_model(path: Path) -> dict[str, Tensor]:
    """The weights in a directory by module name, on the CPU, without optimizer state.

    Raises:
        CheckpointError: as in `model_names`.
    """
    whole = read_whole([f"model/{name}" for name in model_names(path)], path)
    return {name.removeprefix("model/"): tensor for name, tensor in whole.items()}


def read_whole(names: Iterable[str], path: Path) -> dict[str, Tensor]:
    """Complete tensors of a directory by name, read on this process alone. Missing ones are omitted.

    Raises:
        CheckpointError: if it cannot be read.
    """
    stored: dict[str, TensorStorageMetadata] = MetadataReader(path).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name in names
               if (entry := stored.get(name)) is not None}
    read_tensors(tensors, path, whole=False)
    return tensors


def _cause(error: CheckpointException) -> Exception:
    """The cause of an error that is not an `Exception`; an error of the disk if there is one."""
    causes = [cause for cause, _ in error.failures.values()]
    for cause in causes:
        found: BaseException | None = cause
        while found is not None and not isinstance(found, OSError):
            found = found.__cause__ or found.__context__
        if found is not None:
            return found
        if "inline_container" in str(cause):  # torch reports a short write so
            return OSError(errno.EIO, "not all bytes were written")
    return next((cause for cause in causes if isinstance(cause, Exception)), RuntimeError(str(error)))
