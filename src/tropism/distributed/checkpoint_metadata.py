"""Reads the metadata of torch.distributed.checkpoint, which is a pickle, as data: nothing in it is imported or called.

pickle imports and calls what a file names, so a file made by someone else runs their code. Here an interpreter of the
few opcodes that such metadata consists of builds plain containers and `_Record`s. The names of classes are compared
with the known ones and never looked up. What was read is then checked and given to torch's own classes.
"""

import io
import math
import pickletools
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from tropism.errors import CheckpointError, first_line

MOST_BYTES = 2**29
"""Largest metadata that is read. 2,100 tensors on 64 processes need 20 MB."""

_FILE = ".metadata"
_HERE = "torch.distributed.checkpoint.metadata."
_RECORDS = {_HERE + name for name in ("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
                                      "MetadataIndex", "StorageMeta")} | {
    "torch.distributed.checkpoint.filesystem._StorageInfo"}
_PATHS = {f"{module}.{kind}Path" for module in ("pathlib", "pathlib._local")
          for kind in ("Posix", "Windows", "PurePosix", "PureWindows", "")}
_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "torch.Size": lambda arguments: tuple(*arguments),
    "torch.serialization._get_layout": lambda arguments: None,  # all tensors of a checkpoint are strided
    _HERE + "_MEM_FORMAT_ENCODING": lambda arguments: None,
    **dict.fromkeys(_PATHS, lambda arguments: None)}
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_PUSHED = {"BININT", "BININT1", "BININT2", "LONG1", "LONG4", "INT", "LONG", "SHORT_BINUNICODE", "BINUNICODE",
           "BINUNICODE8", "UNICODE"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}


class _Named(str):
    """The name of a class or function in a pickle."""

    __slots__ = ()


@dataclass(eq=False, slots=True)
class _Record:
    """An object in a pickle: its class by name, and its state."""

    kind: str
    state: Any = None


class _NotMetadata(Exception):
    """The file contains something that metadata does not."""


class MetadataReader(FileSystemReader):
    """Reads a directory that `torch.distributed.checkpoint` wrote, without pickle.

    Args:
        path: of the directory.

    Raises:
        CheckpointError: from `read_metadata`, if it cannot be read, or is not that of a checkpoint of tensors.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._place = path
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata, read once, with every tensor within the files of the directory."""
        if self._metadata is None:
            try:
                found = read_metadata(self._place)
            except OSError as error:
                raise CheckpointError(f"{self._place / _FILE}: cannot be read: {error.strerror or error}") from error
            _check_files(found, self._place)
            found.storage_meta = StorageMeta(load_id=self.load_id)
            self._metadata = found
        return self._metadata


def read_metadata(path: Path) -> Metadata:
    """The metadata of a checkpoint's directory. The files that it names may be missing.

    Raises:
        CheckpointError: if it contains anything but tensors and their places.
        OSError: if it cannot be read.
    """
    file = path / _FILE
    with file.open("rb") as stream:
        content = stream.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise CheckpointError(f"{file}: more than {MOST_BYTES:,} bytes: not the metadata of a checkpoint")
    try:
        return _metadata(_interpret(content))
    except _NotMetadata as error:
        raise CheckpointError(f"{file}: contains {error}, which the metadata of a checkpoint never contains. Nothing "
                              "in the file was run. Do not use this checkpoint.") from None
    except Exception as error:  # bytes of any kind may end in any error
        raise CheckpointError(f"{file}: not the metadata of a checkpoint: {first_line(error)}") from error


def _interpret(content: bytes) -> Any:
    """The object in a pickle, made of plain containers and records."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def popped_to_mark() -> list[Any]:
        place = marks.pop()
        items = stack[place:]
        del stack[place:]
        return items

    argument: Any
    for opcode, argument, _ in pickletools.genops(io.BytesIO(content)):
        name = opcode.name
        if name in _PUSHED:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(memo[argument])
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            memo[argument] = stack[-1]
        elif name == "MARK":
            marks.append(len(stack))
        elif name in ("GLOBAL", "INST"):
            stack.append(_known(argument.replace(" ", ".")))
        elif name == "STACK_GLOBAL":
            inside, module = stack.pop(), stack.pop()
            stack.append(_known(f"{_expect(module, str)}.{_expect(inside, str)}"))
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            stack[-int(name[-1]):] = [tuple(stack[-int(name[-1]):])]
        elif name in ("TUPLE", "LIST", "DICT"):
            items = popped_to_mark()
            stack.append(tuple(items) if name == "TUPLE" else items if name == "LIST" else _filled({}, items))
        elif name in ("EMPTY_LIST", "EMPTY_DICT"):
            stack.append([] if name == "EMPTY_LIST" else {})
        elif name in ("APPEND", "APPENDS"):
            items = [stack.pop()] if name == "APPEND" else popped_to_mark()
            _expect(stack[-1], list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = [stack.pop(), stack.pop()][::-1] if name == "SETITEM" else popped_to_mark()
            _filled(_expect(stack[-1], dict), items)
        elif name in ("NEWOBJ", "REDUCE"):
            arguments, called = stack.pop(), stack.pop()
            stack.append(_made(called, arguments))
        elif name == "BUILD":
            state = stack.pop()
            _expect(stack[-1], _Record).state = state
        elif name == "STOP":
            return stack.pop()
        elif name not in ("PROTO", "FRAME"):
            raise _NotMetadata(f"the pickle opcode {name}")
    raise ValueError("no end")


def _known(name: str) -> _Named | torch.dtype:
    """A class or function that metadata may name.

    Raises:
        _NotMetadata: for any other name.
    """
    if name in _DTYPES:
        return _DTYPES[name]
    if name in _RECORDS or name in _FUNCTIONS:
        return _Named(name)
    raise _NotMetadata(name[:200] if name.isprintable() else ascii(name[:200]))


def _made(called: Any, arguments: Any) -> Any:
    """What a class or function gives for its arguments."""
    if not isinstance(called, _Named) or not isinstance(arguments, tuple):
        raise _NotMetadata(f"a call of a {type(called).__name__}")
    if called in _FUNCTIONS:
        return _FUNCTIONS[called](arguments)
    if arguments:
        raise _NotMetadata(f"{called} with arguments")
    return _Record(called)


def _filled(mapping: dict[Any, Any], items: list[Any]) -> dict[Any, Any]:
    """A mapping with items added, whose keys are text or records: hashing nested tuples may take forever."""
    for key, value in zip(items[::2], items[1::2], strict=True):
        if type(key) not in (str, _Record):
            raise _NotMetadata(f"a {type(key).__name__} as a key")
        mapping[key] = value
    return mapping


def _expect(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"a {type(value).__name__} where a {kind.__name__.strip('_').lower()} belongs")
    return value


def _metadata(read: Any) -> Metadata:
    """torch's metadata from what was read.

    Raises:
        ValueError: naming what is missing or odd.
    """
    state = _state(read, "Metadata")
    tensors = {_expect(name, str): _tensor(name, entry)
               for name, entry in _expect(state["state_dict_metadata"], dict).items()}
    places = {}
    for key, entry in _expect(state["storage_data"], dict).items():
        index = _state(key, "MetadataIndex")
        offset, number = index.get("offset"), index.get("index")
        places[MetadataIndex(_expect(index["fqn"], str), None if offset is None else _sizes(offset),
                             None if number is None else _expect(number, int))] = _storage(entry)
    for name, tensor in tensors.items():
        for chunk in tensor.chunks:
            if MetadataIndex(name, chunk.offsets) not in places:
                raise ValueError(f"{name} has no place in a file")
    return Metadata(tensors, None, places)


def _state(read: Any, kind: str) -> dict[str, Any]:
    record = _expect(read, _Record)
    if record.kind.rpartition(".")[2] != kind:
        raise ValueError(f"a {record.kind} where a {kind} belongs")
    return dict(_expect(record.state, dict))


def _sizes(value: Any) -> torch.Size:
    if type(value) is not tuple or any(type(size) is not int or not 0 <= size < 2**63 for size in value):
        raise ValueError("a size that is not made of numbers")
    return torch.Size(value)


def _tensor(name: str, entry: Any) -> TensorStorageMetadata:
    """One tensor, whose parts have as many elements as the whole."""
    state = _state(entry, "TensorStorageMetadata")
    properties = _expect(state["properties"], _Record)
    if not properties.kind.endswith(".TensorProperties"):
        raise ValueError(f"{name} has no dtype")
    dtype, size = _expect(properties.state[0], torch.dtype), _sizes(state["size"])
    parts = [_state(part, "ChunkStorageMetadata") for part in _expect(state["chunks"], list)]
    chunks = [ChunkStorageMetadata(_sizes(part["offsets"]), _sizes(part["sizes"])) for part in parts]
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
        raise ValueError(f"the parts of {name} are not the whole tensor")
    return TensorStorageMetadata(TensorProperties(dtype), size, chunks)


def _storage(entry: Any) -> _StorageInfo:
    """The place of a part: a range of bytes in a file of the directory."""
    state = _state(entry, "_StorageInfo")
    name, offset, length = _expect(state["relative_path"], str), state["offset"], state["length"]
    if name in ("", ".", "..") or not set(name).isdisjoint("/\\\0"):
        raise ValueError(f"{name!r} is not a file of the checkpoint")
    if state.get("transform_descriptors"):
        raise ValueError(f"{name} is compressed")
    _sizes((offset, length))
    return _StorageInfo(name, offset, length)


def _check_files(metadata: Metadata, path: Path) -> None:
    """Check that each part of a tensor lies within a file of the directory, so that its size is bounded.

    Raises:
        CheckpointError: naming the tensor or the file.
    """
    sizes: dict[str, int] = {}
    for place in metadata.storage_data.values():
        file = path / place.relative_path
        if place.relative_path not in sizes:
            try:
                found = file.lstat()
            except OSError as error:
                raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error
            if not stat.S_ISREG(found.st_mode):
                raise CheckpointError(f"{file}: not a regular file")
            sizes[place.relative_path] = found.st_size
        if place.offset + place.length > sizes[place.relative_path]:
            raise CheckpointError(f"{file}: has {sizes[place.relative_path]:,} bytes, but the metadata needs "
                                  f"{place.offset + place.length:,}")
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        for chunk in tensor.chunks:
            needed = math.prod(chunk.sizes) * tensor.properties.dtype.itemsize
            if needed > metadata.storage_data[MetadataIndex(name, chunk.offsets)].length:
                raise CheckpointError(f"{path / _FILE}: {name} is larger than the file that holds it")
