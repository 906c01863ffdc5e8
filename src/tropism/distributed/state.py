"""State of a model and its optimizer by fully qualified names, as torch.distributed.checkpoint writes and reads it.

Names do not depend on how tensors are sharded, so what one world wrote another can read. Only tensors go through
torch.distributed.checkpoint: what is no tensor is handed out beside them, as plain values.
"""

import errno
import os
import warnings
from collections.abc import Collection, Iterable, Mapping
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

from tropism.distributed.mesh import Mesh
from tropism.distributed.shard import Owned, like, part_of
from tropism.distributed.world import World
from tropism.errors import CheckpointError, UsageError

Plain = dict[str, Any]

# Said at every save and load without a process group, which is what we ask for.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


@dataclass
class TrainingState:
    """Everything that an update reads and changes.

    Args:
        tensors: `model/NAME` and `optimizer/NAME/KEY`, sharing memory with the module and the optimizer.
        tied: second names of tensors that are there under another.
        groups: options of the optimizer's groups, with the names of their weights.
        values: state of the optimizer that is no tensor, by weight and key.
        partial: only some of the module's weights are here; the others do not learn, and have another source.
    """

    tensors: dict[str, Tensor]
    tied: dict[str, str]
    groups: list[Plain]
    values: dict[str, Plain] = field(default_factory=dict)
    partial: bool = False

    @classmethod
    def of(cls, module: torch.nn.Module, optimizer: torch.optim.Optimizer, owned: Owned | None = None,
           begun: bool = False, only: Collection[str] | None = None) -> "TrainingState":
        """The state as it is; of sharded weights as DTensors of this process's parts.

        Args:
            owned: what the optimizer holds of the module's weights, if it does not hold them themselves.
            only: names of the weights that are kept; None for all.
            begun: with what the optimizer makes at its first step, if it has not done that yet. It is made by a step
                with rate 0, so only where other weights and state are given to it afterwards.
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
                    whole = weights[names[index]]
                    fits = value.shape == part_of(whole).shape  # not a count of steps
                    state.tensors[f"optimizer/{names[index]}/{key}"] = like(value, whole) if fits else value
                else:
                    state.values.setdefault(names[index], {})[key] = value
        return state

    def copied(self, into: Mapping[str, Tensor] | None = None, mesh: Mesh | None = None) -> dict[str, Tensor]:
        """The tensors as they are now, on the CPU, where no later step changes them.

        Args:
            into: an earlier copy that nobody needs any more: fresh memory costs more than what is copied to it.
            mesh: over which they are sharded, if they are.
        """
        found: dict[str, Tensor] = {}
        for name, tensor in self.tensors.items():
            part = part_of(tensor.detach())
            place = part_of(into[name]) if into and name in into else None
            if place is None or place.shape != part.shape or place.dtype != part.dtype:
                place = torch.empty(part.shape, dtype=part.dtype)
            place.copy_(part)
            on_host = mesh.on_host(tensor.device_mesh) if mesh and isinstance(tensor, DTensor) else None
            found[name] = like(place, tensor, on_host)
        return found

    def apply(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer,
              owned: Owned | None = None) -> None:
        """Give the state to a module and its optimizer; nothing may be missing or left over."""
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


def _weights(module: torch.nn.Module, only: Collection[str] | None) -> Plain:
    """A module's state, or those of its parameters that are wanted: of a quantized module there is more in its state
    than has a place in it."""
    if only is None:
        return get_model_state_dict(module)
    return {name: weight.detach() for name, weight in module.named_parameters(remove_duplicate=False) if name in only}


def _names(module: torch.nn.Module, optimizer: torch.optim.Optimizer, owned: Owned | None) -> list[str]:
    """The names of an optimizer's weights, by the numbers that its own state has for them."""
    own = {parameter: name for name, parameter in module.named_parameters()}
    weight_of = owned.weight_of() if owned else {}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [own[weight_of.get(parameter, parameter)] for parameter in parameters]


def _begin(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer make the state that it makes at its first step, by a step that changes nothing: its gradients
    and its rate are 0."""
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
    """Stop where a value could not be written down and read back as it is.

    Raises:
        UsageError: saying what it belongs to.
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
    raise UsageError(f"{what} holds a {type(value).__name__}, which a checkpoint cannot keep (numbers, text and lists "
                     "it can)")


def write_tensors(tensors: dict[str, Tensor], path: Path, world: World | None = None) -> None:
    """Write tensors into a directory, by this process alone.

    Args:
        world: the processes that write together, each its parts; all of them call this.

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
    """Every file that holds a tensor is where this process sees it.

    Raises:
        OSError: if one is not.
    """
    named = {entry.relative_path for entry in dcp.FileSystemReader(path).read_metadata().storage_data.values()}
    present = set(os.listdir(path))
    if missing := named - present:
        raise OSError(errno.ENOENT, f"{len(missing)} of {len(named)} files that other processes wrote are not to be "
                                    "seen here; it must lie on a disk that all of them see")


def read_tensors(tensors: dict[str, Tensor], path: Path, whole: bool = True) -> None:
    """Read a directory into tensors, in place, by this process alone. Its metadata is a pickle: check it first.

    Args:
        tensors: of sharded ones the parts that this process holds are read, whatever world wrote them.
        whole: everything that is there is to be read.

    Raises:
        CheckpointError: naming what is missing, left over or of another size or type; nothing was changed then.
    """
    reader = dcp.FileSystemReader(path)
    try:
        stored = reader.read_metadata().state_dict_metadata
        for problem, names in (("is missing", tensors.keys() - stored.keys()),
                               ("is not part of this run", stored.keys() - tensors.keys())):
            if names and (whole or problem == "is missing"):
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                raise CheckpointError(f"{path}: {min(names)}{more} {problem}")
        for name, tensor in tensors.items():
            entry = stored[name]
            kept = (tuple(entry.size), entry.properties.dtype)
            if kept != (tuple(tensor.shape), tensor.dtype):
                raise CheckpointError(f"{path}: {name} is {list(kept[0])} {kept[1]} there and {list(tensor.shape)} "
                                      f"{tensor.dtype} in this run")
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        raise CheckpointError(f"{path}: cannot be read: {_cause(error)}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


def model_names(path: Path) -> list[str]:
    """Names in the module of the weights in a directory; second names of tied ones are not among them. Its metadata is
    a pickle: check it first.

    Raises:
        CheckpointError: if it cannot be read, or holds no weights.
    """
    try:
        stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    except CheckpointException as error:
        raise CheckpointError(f"{path}: cannot be read: {_cause(error)}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    found = [name.removeprefix("model/") for name in stored if name.startswith("model/")]
    if not found:
        raise CheckpointError(f"{path}: holds no weights of a model")
    return found


def read_model(path: Path) -> dict[str, Tensor]:
    """The weights in a directory by their names in the module, without the optimizer's state, on the CPU.

    Raises:
        CheckpointError: as `model_names` says.
    """
    whole = read_whole([f"model/{name}" for name in model_names(path)], path)
    return {name.removeprefix("model/"): tensor for name, tensor in whole.items()}


def read_whole(names: Iterable[str], path: Path) -> dict[str, Tensor]:
    """Whole tensors of a directory by their names, by this process alone. Those that are not there are left out.

    Raises:
        CheckpointError: if it cannot be read.
    """
    stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name in names
               if isinstance(entry := stored.get(name), TensorStorageMetadata)}
    read_tensors(tensors, path, whole=False)
    return tensors


def _cause(error: CheckpointException) -> Exception:
    """The error behind one that is not even an `Exception`; one of the disk where there is one."""
    causes = [cause for cause, _ in error.failures.values()]
    for cause in causes:
        found: BaseException | None = cause
        while found is not None and not isinstance(found, OSError):
            found = found.__cause__ or found.__context__
        if found is not None:
            return found
        if "inline_container" in str(cause):  # torch's writer counts its bytes, and misses some
            return OSError(errno.EIO, "not all bytes were taken")
    return next((cause for cause in causes if isinstance(cause, Exception)), RuntimeError(str(error)))
