"""Inputs that must be refused: each is made in an empty directory, and gives the options that name it.

Every one of them ends a run before its first step with exit code 1 or 2 and one message, soon and in bounded memory.
"""

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from hostile_data import DATA, YAMLS, sparse
from hostile_values import ADAPTERS, CONFIGS, JSON_TEXTS, NESTED, TOKENIZER_CONFIGS, TOKENIZERS

Make = Callable[[Path], list[str]]
"""Makes the input in an empty directory and returns options of `tropism sft`, all but `--output`."""

_ROW = {"prompt": "p ", "completion": "a"}


def hostile_inputs(model: Path) -> Iterator[tuple[str, str, Make]]:
    """Name, kind (config, tokenizer, weights, adapter, yaml, data) and maker of each hostile input.

    Args:
        model: a directory with a small Llama of two layers and its tokenizer, in one safetensors file.
    """
    for name, text in JSON_TEXTS.items():
        for file, kind in (("config.json", "config"), ("tokenizer.json", "tokenizer"), ("adapter_config.json",
                           "adapter"), ("model.safetensors.index.json", "weights")):
            yield f"{file}: {name}", kind, partial(_with_text, model, file, text)
        if name not in ("object of nothing",):
            yield f"tokenizer_config.json: {name}", "tokenizer", partial(_with_text, model, "tokenizer_config.json",
                                                                         text)
    for name, changes in CONFIGS.items():
        yield name, "config", partial(_with_values, model, "config.json", changes)
    for name, change in TOKENIZERS.items():
        yield name, "tokenizer", partial(_with_tokenizer, model, change)
    for name, changes in TOKENIZER_CONFIGS.items():
        yield name, "tokenizer", partial(_with_values, model, "tokenizer_config.json", changes)
    for name, changes in ADAPTERS.items():
        yield name, "adapter", partial(_with_adapter, model, changes)
    for kind, makers in (("weights", WEIGHTS), ("config", SPECIAL_FILES), ("adapter", ADAPTER_FILES)):
        for name, damage in makers.items():
            yield name, kind, partial(_damaged_model, model, damage, kind == "adapter")
    for name, text in YAMLS.items():
        yield name, "yaml", partial(_with_yaml, model, text)
    for name, (file, write) in DATA.items():
        yield name, "data", partial(_with_data, model, file, write)


# --- makers -----------------------------------------------------------------------------------------------------------


def good_data(folder: Path) -> Path:
    """A data file with nothing wrong."""
    path = folder / "good.jsonl"
    path.write_text((json.dumps(_ROW) + "\n") * 4)
    return path


def copied(model: Path, folder: Path) -> Path:
    """A copy of the model that may be damaged."""
    shutil.copytree(model, folder / "model")
    return folder / "model"


def _options(folder: Path, model: Path, *more: str) -> list[str]:
    return ["--model", str(model), "--data", str(good_data(folder)), *more]


def adapter_of(folder: Path, base: Path, changes: dict[str, Any] | None = None) -> Path:
    """An adapter of rank 4 on two modules of the model, with changes to its config."""
    path, rank = folder / "adapter", 4
    path.mkdir()
    size = json.loads((base / "config.json").read_text())["hidden_size"]
    weights = {}
    for layer in range(2):
        for module in ("q_proj", "v_proj"):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights |= {f"{name}.lora_A.weight": torch.ones(rank, size), f"{name}.lora_B.weight":
                        torch.zeros(size, rank)}
    save_file(weights, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 8, "lora_dropout": 0.0,
              "bias": "none", "target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": str(base)}
    (path / "adapter_config.json").write_text(json.dumps(config | (changes or {})))
    return path


def _with_text(model: Path, file: str, text: bytes, folder: Path) -> list[str]:
    path = copied(model, folder)
    if file == "adapter_config.json":
        adapter = adapter_of(folder, path)
        (adapter / file).write_bytes(text)
        return _options(folder, path, "--lora.adapter", str(adapter))
    if file.endswith(".index.json"):
        (path / "model.safetensors").unlink()
    (path / file).write_bytes(text)
    return _options(folder, path)


def _with_values(model: Path, file: str, changes: dict[str, Any], folder: Path) -> list[str]:
    path = copied(model, folder)
    if "chat_template" in changes:
        (path / "chat_template.jinja").unlink(missing_ok=True)
    values = json.loads((path / file).read_text())
    (path / file).write_text(json.dumps(values | changes))
    return _options(folder, path)


def _with_tokenizer(model: Path, change: Callable[[Any], Any], folder: Path) -> list[str]:
    path = copied(model, folder)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    change(tokenizer)
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return _options(folder, path)


def _with_adapter(model: Path, changes: dict[str, Any], folder: Path) -> list[str]:
    path = copied(model, folder)
    return _options(folder, path, "--lora.adapter", str(adapter_of(folder, path, changes)))


def _damaged_model(model: Path, damage: Callable[[Path], Any], adapter: bool, folder: Path) -> list[str]:
    path = copied(model, folder)
    if adapter:
        place = adapter_of(folder, path)
        return ["--data", str(good_data(folder)), *(damage(place) or ["--model", str(place)])]
    return damage(path) or _options(folder, path)


def _with_yaml(model: Path, text: bytes, folder: Path) -> list[str]:
    (folder / "run.yaml").write_bytes(text)
    return [*_options(folder, model), "--config", str(folder / "run.yaml")]


def _with_data(model: Path, file: str, write: Callable[[Path], Any], folder: Path) -> list[str]:
    path = folder / file
    write(path)
    return ["--model", str(model), "--data", str(path)]


# --- weights ----------------------------------------------------------------------------------------------------------


def _changed_weights(change: Callable[[dict[str, torch.Tensor]], Any], path: Path) -> None:
    file = path / ("model.safetensors" if (path / "model.safetensors").exists() else "adapter_model.safetensors")
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


def _set(value: float, weights: dict[str, torch.Tensor]) -> None:
    weights[sorted(weights)[-1]].view(-1)[3] = value


def _header(header: bytes, length: int | None, path: Path) -> None:
    size = len(header) if length is None else length
    (path / "model.safetensors").write_bytes(struct.pack("<Q", size) + header + b"\x00" * 64)


def _index(content: Any, path: Path) -> None:
    (path / "model.safetensors").rename(path / "part.safetensors")
    if callable(content):
        content = content(load_file(path / "part.safetensors"))
    (path / "model.safetensors.index.json").write_text(json.dumps(content))


def _one(name: str, **entry: Any) -> bytes:
    return json.dumps({name: {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} | entry}).encode()


def _cut(file: str, share: float, path: Path) -> None:
    os.truncate(path / file, int((path / file).stat().st_size * share))


def _gguf(content: bytes, path: Path) -> list[str]:
    file = path / "model.gguf"
    file.write_bytes(content)
    return _options(path.parent, file)


def _gguf_head(tensors: int = 0, values: int = 0, version: int = 3, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, values) + rest


def _gguf_key(key: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value


_ARRAY, _STRING, _U32 = 9, 8, 4
WEIGHTS: dict[str, Callable[[Path], Any]] = {
    **{f"weights with {name}": partial(_changed_weights, partial(_set, value)) for name, value in (
        ("nan", float("nan")), ("inf", float("inf")), ("-inf", float("-inf")))},
    "no tensors": partial(_changed_weights, lambda weights: weights.clear()),
    "a tensor missing": partial(_changed_weights, lambda weights: weights.pop("model.norm.weight")),
    "a tensor of another shape": partial(_changed_weights, lambda weights: weights.update(
        {"model.norm.weight": torch.ones(3)})),
    "a tensor without elements": partial(_changed_weights, lambda weights: weights.update(
        {"model.norm.weight": torch.ones(0)})),
    "a tensor of integers": partial(_changed_weights, lambda weights: weights.update(
        {"model.norm.weight": torch.ones_like(weights["model.norm.weight"], dtype=torch.int8)})),
    "weights cut in half": partial(_cut, "model.safetensors", 0.5), "weights cut to 4 bytes":
    lambda path: os.truncate(path / "model.safetensors", 4), "weights empty": partial(_cut, "model.safetensors", 0),
    "header of 2^60 bytes": partial(_header, b"{}", 2**60), "header of 2^63 bytes": partial(_header, b"{}", 2**63),
    "header beyond the file": partial(_header, b"{}", 5000), "header no JSON": partial(_header, b"weights", None),
    "header nested": partial(_header, NESTED.encode(), None), "header empty": partial(_header, b"", 0),
    "header a list": partial(_header, b"[]", None), "dtype unknown": partial(_header, _one("a", dtype="F31"), None),
    "shape negative": partial(_header, _one("a", shape=[-4]), None),
    "shape of 2^62": partial(_header, _one("a", shape=[2**31, 2**31, 2**31]), None),
    "offsets beyond the file": partial(_header, _one("a", data_offsets=[0, 2**40], shape=[2**38]), None),
    "offsets backwards": partial(_header, _one("a", data_offsets=[16, 0]), None),
    "offsets overlap": partial(_header, _one("a")[:-1] + b"," + _one("b")[1:], None),
    "index without map": partial(_index, {"metadata": {}}), "index with a list": partial(_index, {"weight_map": ["a"]}),
    "index with text": partial(_index, {"weight_map": "a"}), "index with numbers":
    partial(_index, {"weight_map": {"a": 5}}), "index with null": partial(_index, {"weight_map": None}),
    "index of nothing": partial(_index, {"weight_map": {}}),
    "index with a missing file": partial(_index, lambda w: {"weight_map": dict.fromkeys(w, "gone.safetensors")}),
    "index outside": partial(_index, lambda w: {"weight_map": dict.fromkeys(w, "../../../../../etc/passwd")}),
    "index absolute": partial(_index, lambda w: {"weight_map": dict.fromkeys(w, "/etc/passwd")}),
    "index to a device": partial(_index, lambda w: {"weight_map": dict.fromkeys(w, "/dev/zero")}),
    "index to itself": partial(_index, lambda w: {"weight_map": dict.fromkeys(w, "model.safetensors.index.json")}),
    "index with nul": partial(_index, lambda w: {"weight_map": dict.fromkeys(w, "a\x00b")}),
    "index with a long name": partial(_index, lambda w: {"weight_map": dict.fromkeys(w, "a" * 5000)}),
    "index of other tensors": partial(_index, lambda w: {"weight_map": {"other": "part.safetensors"}}),
    "gguf empty": partial(_gguf, b""), "gguf cut": partial(_gguf, b"GGUF\x03\x00"),
    "gguf other magic": partial(_gguf, b"GGML" + b"\x00" * 60), "gguf other version":
    partial(_gguf, _gguf_head(version=77)), "gguf with nothing": partial(_gguf, _gguf_head()),
    "gguf of 2^60 tensors": partial(_gguf, _gguf_head(tensors=2**60)),
    "gguf of 2^60 values": partial(_gguf, _gguf_head(values=2**60)),
    "gguf with a long key": partial(_gguf, _gguf_head(values=1, rest=struct.pack("<Q", 2**60))),
    "gguf with a bad type": partial(_gguf, _gguf_head(values=1, rest=_gguf_key(b"a", 99, b"\x00" * 8))),
    "gguf with a long text": partial(_gguf, _gguf_head(values=1, rest=_gguf_key(
        b"a", _STRING, struct.pack("<Q", 2**62)))),
    "gguf with a long array": partial(_gguf, _gguf_head(values=1, rest=_gguf_key(
        b"a", _ARRAY, struct.pack("<IQ", _U32, 2**60)))),
    "gguf with a long array of texts": partial(_gguf, _gguf_head(values=1, rest=_gguf_key(
        b"a", _ARRAY, struct.pack("<IQ", _STRING, 2**40)))),
    "gguf of an unknown family": partial(_gguf, _gguf_head(values=1, rest=_gguf_key(
        b"general.architecture", _STRING, struct.pack("<Q", 7) + b"martian"))),
    "gguf with a number as family": partial(_gguf, _gguf_head(values=1, rest=_gguf_key(
        b"general.architecture", _U32, b"\x05\x00\x00\x00"))),
    "gguf of nested arrays": partial(_gguf, _gguf_head(values=1, rest=_gguf_key(
        b"a", _ARRAY, struct.pack("<IQ", _ARRAY, 1) * 5000)))}


# --- something else in the place of a file ----------------------------------------------------------------------------


def _replace(file: str, make: Callable[[Path], Any], path: Path) -> None:
    (path / file).unlink(missing_ok=True)
    make(path / file)


_ODD_FILES: dict[str, Callable[[Path], Any]] = {
    "directory": lambda place: place.mkdir(), "fifo": os.mkfifo, "device": lambda place: place.symlink_to("/dev/zero"),
    "loop": lambda place: place.symlink_to(place), "dangling link": lambda place: place.symlink_to("/nowhere/at/all"),
    "gigabyte": partial(sparse, 2**30)}
SPECIAL_FILES: dict[str, Callable[[Path], Any]] = {
    f"{file}: {name}": partial(_replace, file, make) for name, make in _ODD_FILES.items()
    for file in ("config.json", "tokenizer.json", "model.safetensors")}


def _names(base: str, path: Path) -> None:
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": base or str(path)}))


def _cycle(path: Path) -> None:
    other = path.with_name("other")
    shutil.copytree(path, other)
    _names(str(other), path)
    _names(str(path), other)


def _continued(damage: Callable[[Path], Any], path: Path) -> list[str]:
    damage(path)
    return ["--model", str(path.parent / "model"), "--lora.adapter", str(path)]


ADAPTER_FILES: dict[str, Callable[[Path], Any]] = {
    "base is itself": partial(_names, ""), "base is an adapter whose base is this one": _cycle,
    "base does not exist": partial(_names, "/nowhere/at/all"), "base is a device": partial(_names, "/dev/zero"),
    "base is the parent": partial(_names, ".."), "base with nul": partial(_names, "a\x00b"),
    **{f"adapter with {name}": partial(_continued, partial(_changed_weights, partial(_set, value)))
       for name, value in (("nan", float("nan")), ("inf", float("inf")))},
    "adapter cut": partial(_continued, partial(_cut, "adapter_model.safetensors", 0.5)),
    "adapter empty": partial(_continued, partial(_cut, "adapter_model.safetensors", 0)),
    "adapter without weights": partial(_continued, partial(_changed_weights, lambda weights: weights.clear())),
    **{f"{file}: {name}": partial(_continued, partial(_replace, file, make)) for name, make in _ODD_FILES.items()
       for file in ("adapter_config.json", "adapter_model.safetensors")}}
