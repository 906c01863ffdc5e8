"""State of a model and its optimiser by fully qualified names, as torch.distributed.checkpoint writes and reads it.

Names do not depend on how tensors are sharded, so what one world wrote another can read. Only tensors go through
torch.distributed.checkpoint: what is no tensor is handed out beside them, as plain values.
"""

import errno
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)

from tropism.errors import CheckpointError, UsageError

Plain = dict[str, Any]

# Said at every save and load without a process group, which is what we ask for.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


@dataclass
class TrainingState:
    """Everything that an update reads and changes.

    Args:
        tensors: `model/NAME` and `optimizer/NAME/KEY`, sharing memory with the module and the optimiser.
        tied: second names of tensors that are there under another.
        groups: options of the optimiser's groups, with the names of their weights.
        values: state of the optimiser that is no tensor, by weight and key.
    """

    tensors: dict[str, Tensor]
    tied: dict[str, str]
    groups: list[Plain]
    values: dict[str, Plain] = field(default_factory=dict)

    @classmethod
    def of(cls, module: torch.nn.Module, optimizer: torch.optim.Optimizer, begun: bool = False) -> "TrainingState":
        """The state as it is.

        Args:
            begun: with what the optimiser makes at its first step, if it has not done that yet. It is made by a step
                with rate 0, so only where other weights and state are given to it afterwards.
        """
        if begun:
            get_optimizer_state_dict(module, optimizer)
        model, optim = get_model_state_dict(module), optimizer.state_dict()
        names = _names(module, optimizer)
        state = cls({}, {}, [{**group, "params": [names[index] for index in group["params"]]}
                             for group in optim["param_groups"]])
        seen: dict[tuple[int, torch.Size, Any], str] = {}
        for name, tensor in model.items():
            key = f"model/{name}"
            if type(tensor) in (Tensor, torch.nn.Parameter) and tensor.numel():
                place = (tensor.data_ptr(), tensor.shape, tensor.stride())
                if place in seen:
                    state.tied[key] = seen[place]
                    continue
                seen[place] = key
            state.tensors[key] = tensor
        for index, entry in optim["state"].items():
            for key, value in entry.items():
                if isinstance(value, Tensor):
                    state.tensors[f"optimizer/{names[index]}/{key}"] = value
                else:
                    state.values.setdefault(names[index], {})[key] = value
        return state

    def copied(self, into: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The tensors as they are now, on the CPU, where no later step changes them.

        Args:
            into: an earlier copy that nobody needs any more: fresh memory costs more than what is copied to it.
        """
        found = {}
        for name, tensor in self.tensors.items():
            place = into.get(name) if into else None
            if place is None or place.shape != tensor.shape or place.dtype != tensor.dtype:
                place = torch.empty(tensor.shape, dtype=tensor.dtype)
            found[name] = place.copy_(tensor.detach())
        return found

    def apply(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Give the state to a module and its optimiser; nothing may be missing or left over."""
        model: Plain = {}
        entries: dict[str, Plain] = {name: dict(values) for name, values in self.values.items()}
        everything = self.tensors | {name: self.tensors[other] for name, other in self.tied.items()}
        for name, tensor in everything.items():
            kind, _, rest = name.partition("/")
            if kind == "model":
                model[rest] = tensor
            else:
                weight, _, key = rest.rpartition("/")
                entries.setdefault(weight, {})[key] = tensor
        set_model_state_dict(module, model, options=StateDictOptions(strict=True))
        names = _names(module, optimizer)
        groups = [{**kept, "params": own["params"]}
                  for kept, own in zip(self.groups, optimizer.state_dict()["param_groups"], strict=True)]
        optimizer.load_state_dict({"param_groups": groups, "state": {
            index: entries[name] for index, name in enumerate(names) if name in entries}})


def _names(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of an optimiser's weights, by the numbers that its own state has for them."""
    own = {parameter: name for name, parameter in module.named_parameters()}
    return [own[parameter] for group in optimizer.param_groups for parameter in group["params"]]


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


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write tensors into a directory, by this process alone.

    Raises:
        OSError: if the disk refuses.
    """
    try:
        dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(path, sync_files=False), no_dist=True)
    except CheckpointException as error:
        raise _cause(error) from error


def read_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Read a directory into tensors, in place, by this process alone. Its metadata is a pickle: check it first.

    Raises:
        CheckpointError: naming what is missing, left over or of another size or type; nothing was changed then.
    """
    reader = dcp.FileSystemReader(path)
    try:
        stored = reader.read_metadata().state_dict_metadata
        for problem, names in (("is missing", tensors.keys() - stored.keys()),
                               ("is not part of this run", stored.keys() - tensors.keys())):
            if names:
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
    """Names in the module of the weights in a directory. Its metadata is a pickle: check it first.

    Raises:
        CheckpointError: if it cannot be read, or holds no weights.
    """
    return list(_of_model(dcp.FileSystemReader(path), path))


def _of_model(reader: dcp.FileSystemReader, path: Path) -> dict[str, Any]:
    """What is known of each weight of the model, by its name in the module."""
    try:
        stored = reader.read_metadata().state_dict_metadata
    except CheckpointException as error:
        raise CheckpointError(f"{path}: cannot be read: {_cause(error)}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    found = {name.removeprefix("model/"): entry for name, entry in stored.items() if name.startswith("model/")}
    if not found:
        raise CheckpointError(f"{path}: holds no weights of a model")
    return found


def read_model(path: Path) -> dict[str, Tensor]:
    """The weights in a directory by their names in the module, without the optimiser's state, on the CPU. Second
    names of tied weights are not among them. Its metadata is a pickle: check it first.

    Raises:
        CheckpointError: if it cannot be read, or holds no weights.
    """
    reader = dcp.FileSystemReader(path)
    tensors = {f"model/{name}": torch.empty(entry.size, dtype=entry.properties.dtype)
               for name, entry in _of_model(reader, path).items()}
    try:
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        raise CheckpointError(f"{path}: cannot be read: {_cause(error)}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    return {name.removeprefix("model/"): tensor for name, tensor in tensors.items()}


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
