"""G1: a checkpoint of someone else runs no code: its metadata is a pickle, and is read as data."""

import functools
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from tropism.distributed import checkpoint_metadata
from tropism.distributed.checkpoint_metadata import MetadataReader, read_metadata
from tropism.distributed.training_state import model_names, read_model, read_tensors, write_tensors
from tropism.errors import CheckpointError

TENSORS = {"model/a": torch.arange(12.0).reshape(3, 4), "model/b": torch.ones(5, dtype=torch.bfloat16),
           "model/none": torch.zeros(0, 3), "optimizer/a/step": torch.tensor(3.0)}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "state"
    path.mkdir()
    write_tensors(dict(TENSORS), path)
    return path


def replace(path: Path, content: bytes | Metadata) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(content) if isinstance(content, Metadata) else content)


def made(path: Path) -> Metadata:
    """What torch itself reads."""
    found: Metadata = pickle.loads((path / ".metadata").read_bytes())
    return found


def refused(path: Path) -> str:
    """The sentence of each way to read the directory."""
    said = set()
    for read in (model_names, read_model, lambda place: read_tensors(dict(TENSORS), place)):
        with pytest.raises(CheckpointError) as error:
            read(path)  # type: ignore[operator]
        said.add(str(error.value))
    assert len(said) == 1
    return said.pop()


def test_what_torch_wrote_is_read_as_torch_reads_it(written: Path) -> None:
    found, torchs = read_metadata(written), made(written)
    assert found.state_dict_metadata == torchs.state_dict_metadata
    assert found.storage_data == torchs.storage_data
    assert all(torch.equal(tensor, TENSORS[f"model/{name}"]) for name, tensor in read_model(written).items())


@pytest.mark.parametrize("protocol", range(2, 6))
def test_parts_of_many_processes_and_any_protocol(protocol: int, tmp_path: Path) -> None:
    parts = [ChunkStorageMetadata(torch.Size([2 * k, 0]), torch.Size([2, 3])) for k in range(4)]
    wanted = Metadata({"model/w": TensorStorageMetadata(TensorProperties(torch.float16), torch.Size([8, 3]), parts)},
                      {"model/w": ("model/w",)},
                      {MetadataIndex("model/w", part.offsets, k): _StorageInfo(f"__{k}_0.distcp", 2**33, 12)
                       for k, part in enumerate(parts)}, StorageMeta(Path("/x"), "id", None, ["a"]), "1")
    (tmp_path / ".metadata").write_bytes(pickle.dumps(wanted, protocol))
    found = read_metadata(tmp_path)
    assert found.state_dict_metadata == wanted.state_dict_metadata
    assert found.storage_data == wanted.storage_data


class Call:
    """Pickles as a call of a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.called = (function, arguments)

    def __reduce__(self) -> Any:
        return self.called


FUNCTIONS: list[tuple[Any, tuple[Any, ...]]] = [
    (os.system, ("touch MARKER",)), (os.execv, ("/bin/touch", ["touch", "MARKER"])), (eval, ("open('MARKER', 'w')",)),
    (exec, ("open('MARKER', 'w')",)), (open, ("MARKER", "w")), (getattr, ("x", "upper")),
    (functools.partial, (os.system, "touch MARKER")), (__import__, ("os",)), (shutil.copy, ("/etc/hosts", "MARKER")),
    (pickle.loads, (b"cos\nsystem\n(S'touch MARKER'\ntR.",)), (torch.load, ("x.pt", None, None)),
    (torch.storage._load_from_bytes, (b"",)), (torch.hub.load, ("a/b", "c")), (torch.empty, (2**40,)),
    (torch._utils._rebuild_tensor_v2, (None, 0, (), ())), (bytearray, (2**40,)), (type, ("x", (), {}))]


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("number", range(len(FUNCTIONS)))
def test_a_payload_is_refused_by_its_name(number: int, protocol: int, written: Path,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """In each protocol, alone and as a value of good metadata: nothing is imported and nothing is called."""
    monkeypatch.chdir(written)
    function, arguments = FUNCTIONS[number]
    payload = Call(function, *arguments)
    good = made(written)
    good.planner_data = {"x": [payload]}
    for content in (payload, [payload], {"a": (1, payload)}, good):
        data = pickle.dumps(content, protocol)
        replace(written, data)
        said = refused(written)
        assert str(written / ".metadata") in said
        if content is not good or protocol > 1:  # older protocols begin with copyreg._reconstructor
            name = re.search(r"contains [\w.]+\.(\w+), which the metadata of a checkpoint never contains. Nothing in",
                             said)
            assert name is not None, said
            assert name[1] in (function.__name__, "getattr")  # by which older protocols spell a dotted name
    assert not (written / "MARKER").exists()


def op(module: str, name: str) -> bytes:
    return b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name)) + b"\x93"


HERE = "torch.distributed.checkpoint.metadata"
RAW = {
    "dotted name": b"\x80\x04" + op("torch", "os.system") + b"\x8c\x01a\x85R.",
    "attribute of a known class": b"\x80\x04" + op(HERE, "Metadata.__init__.__globals__") + b".",
    "dotted module": b"\x80\x04" + op("torch.Size.__class__", "mro") + b".",
    "a submodule": b"\x80\x04" + op("torch", "serialization") + b".",
    "a tensor type": b"\x80\x04" + op("torch", "Tensor") + b")\x81.",
    "state of a class": b"\x80\x04" + op(HERE, "Metadata") + b"N}\x8c\x08__init__K\x01s\x86b.",
    "state of a function": b"\x80\x04" + op("torch", "Size") + b"}\x8c\x01aK\x01sb.",
    "state of a dict": b"\x80\x04}}\x8c\x01aK\x01sb.",
    "arguments": b"\x80\x04" + op(HERE, "Metadata") + b"K\x01\x85\x81.",
    "call of a record": b"\x80\x04" + op(HERE, "Metadata") + b")\x81)R.",
    "call of a number": b"\x80\x04K\x01)R.",
    "new object with names": b"\x80\x04" + op(HERE, "Metadata") + b")}\x92.",
    "extension code": b"\x80\x04\x82\x01.",
    "long extension code": b"\x80\x04\x84\xff\xff\xff\x7f.",
    "persistent id": b"\x80\x04\x8c\x01aQ.",
    "persistent id as text": b"Pa\n.",
    "instance": b"(S'touch MARKER'\nios\nsystem\n.",
    "object": b"(cos\nsystem\nS'touch MARKER'\no.",
    "buffer": b"\x80\x05\x97.",
    "large memo": b"\x80\x04Nr\xff\xff\xff\x7f.",
    "memo that is not there": b"\x80\x04h\x05.",
    "large frame": b"\x80\x04\x95" + b"\xff" * 7 + b"\x7f.",
    "large text": b"\x80\x04X\xff\xff\xff\x7fa.",
    "large bytes": b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7fa.",
    "empty": b"", "no end": b"\x80\x04N", "nothing on the stack": b"\x80\x04.", "no mark": b"\x80\x04e.",
    "a later protocol": b"\x80\xffN.", "text": b"hello", "zeros": bytes(64),
    "nested": b"\x80\x04" + b"]" * 20_000 + b"a" * 19_999 + b".",
    "marks": b"\x80\x04" + b"(" * 9_000 + b"l" * 9_000 + b".",
    "keys that take forever to hash": b"\x80\x04}K\x01" + b"2\x86" * 60 + b"Ns.",
    "a tuple that doubles": b"\x80\x04K\x01" + b"\x94h\x00\x86" + b"".join(
        b"\x94h" + bytes([k]) + b"\x86" for k in range(1, 60)) + b".",
    "a name that doubles": b"\x80\x04K\x01" + b"\x94h\x00\x86" + b"".join(
        b"\x94h" + bytes([k]) + b"\x86" for k in range(1, 60)) + b"\x8c\x01a\x93.",
    "escape codes": b"\x80\x04" + op("\x1b[2J", "x") + b".",
    "a set of them": b"\x80\x04(K\x01\x91."}


@pytest.mark.parametrize("name", RAW)
def test_bytes_that_torch_never_writes(name: str, written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each ends at once, in a sentence with the file. Nothing runs, and no class of torch is changed."""
    monkeypatch.chdir(written)
    before = dict(vars(Metadata))
    replace(written, RAW[name])
    said = refused(written)
    assert str(written / ".metadata") in said
    assert said.isprintable()
    assert not (written / "MARKER").exists()
    assert vars(Metadata) == before


def test_a_truncated_file_and_random_damage(written: Path) -> None:
    """The result is metadata or a sentence; never another error."""
    content = (written / ".metadata").read_bytes()
    for length in range(0, len(content), 9):
        replace(written, content[:length])
        with pytest.raises(CheckpointError):
            read_metadata(written)
    generator = random.Random(0)
    for _ in range(200):
        damaged = bytearray(content)
        for _ in range(generator.randint(1, 4)):
            damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        replace(written, bytes(damaged))
        with suppress(CheckpointError):
            MetadataReader(written).read_metadata()


def _place(metadata: Metadata, name: str, **changes: Any) -> None:
    for index, info in metadata.storage_data.items():
        if index.fqn == name:
            metadata.storage_data[index] = _StorageInfo(**{**vars(info), **changes})


ODD: dict[str, tuple[Callable[[Metadata], None], str]] = {
    "outside": (lambda one: _place(one, "model/a", relative_path="../secret"), "not a file of the checkpoint"),
    "absolute": (lambda one: _place(one, "model/a", relative_path="/etc/passwd"), "not a file of the checkpoint"),
    "absent": (lambda one: _place(one, "model/a", relative_path="other"), "other: cannot be read: No such file"),
    "fifo": (lambda one: _place(one, "model/a", relative_path="fifo"), "fifo: not a regular file"),
    "link": (lambda one: _place(one, "model/a", relative_path="link"), "link: not a regular file"),
    "beyond the end": (lambda one: _place(one, "model/a", offset=2**40), "the metadata needs"),
    "negative": (lambda one: _place(one, "model/a", offset=-1), "not made of numbers"),
    "compressed": (lambda one: _place(one, "model/a", transform_descriptors=["stream.zstd"]), "is compressed"),
    "larger than its file": (lambda one: one.state_dict_metadata.update({"model/a": TensorStorageMetadata(
        TensorProperties(torch.float64), torch.Size([2**40]),
        [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2**40]))])}), "model/a is larger than the file"),
    "parts missing": (lambda one: one.state_dict_metadata["model/a"].chunks.clear(), "not the whole tensor"),
    "no place": (lambda one: one.storage_data.clear(), "has no place in a file"),
    "bytes": (lambda one: one.state_dict_metadata.update({"model/a": BytesStorageMetadata()}), "BytesStorageMetadata"),
    "a list": (lambda one: setattr(one, "state_dict_metadata", []), "a list where a dict belongs"),
    "no dtype": (lambda one: setattr(one.state_dict_metadata["model/a"], "properties", None), "a NoneType where"),
    "size of text": (lambda one: setattr(one.state_dict_metadata["model/a"], "size", ("1",)), "not made of numbers")}


@pytest.mark.parametrize("name", ODD)
def test_metadata_that_leads_elsewhere(name: str, written: Path) -> None:
    """Only regular files of the directory are read, and no tensor takes more memory than its file has bytes."""
    change, problem = ODD[name]
    os.mkfifo(written / "fifo")
    (written / "link").symlink_to("/dev/zero")
    one = made(written)
    change(one)
    replace(written, one)
    assert problem in refused(written)


def test_metadata_of_endless_size_is_not_read(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_metadata, "MOST_BYTES", 1000)
    assert "more than 1,000 bytes" in refused(written)


def test_a_payload_in_the_file_of_a_tensor_is_not_loaded(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reads these with weights_only. Its advice to load the file anyway is not repeated."""
    monkeypatch.chdir(written)
    torch.save(Call(os.system, "touch MARKER"), written / "__0_0.distcp")
    one, size = made(written), (written / "__0_0.distcp").stat().st_size
    for index in one.storage_data:
        one.storage_data[index] = _StorageInfo("__0_0.distcp", 0, size)
    replace(written, one)
    for read in (read_model, lambda place: read_tensors(dict(TENSORS), place)):
        with pytest.raises(CheckpointError) as error:
            read(written)  # type: ignore[operator]
        assert "contains more than tensors. Nothing in it was run." in str(error.value)
    assert not (written / "MARKER").exists()
