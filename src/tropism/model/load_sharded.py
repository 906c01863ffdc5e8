"""A model that no process ever holds whole: built without memory, sharded, and filled part by part from its files."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import GenerationConfig
from transformers.utils import cached_file

from tropism.distributed.peers import Peers
from tropism.distributed.shard import Sharding, fill, region_of, shard
from tropism.distributed.tensor import divide
from tropism.distributed.world import World
from tropism.errors import ModelError, first_line
from tropism.model.adapters.parameters import base_name
from tropism.model.head.vocab_parallel import Divided
from tropism.model.language_model import Precision
from tropism.model.load import load_config, load_model, skeleton, weights_dtype
from tropism.model.source import ModelSource

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"

Read = Callable[[str, Tensor, tuple[slice, ...]], Tensor]
"""Gives the part of a weight: its name, the weight, and which part."""


def load_sharded(source: ModelSource, precision: Precision, world: World, how: Sharding, *,
                 trust_remote_code: bool = False, change: Callable[[Any], None] = lambda module: None) -> Any:
    """A causal model in evaluation mode, spread over processes. All of them call this together.

    Each process reads its parts from the safetensors files. Where the names in those files are not the model's own (or
    they are quantized, or a GGUF file, or an adapter is to be merged) the main process reads the model whole, into the
    host's memory, and hands the parts out.

    Args:
        change: called with the model before it has any memory; weights that are then in none of the files begin as 0.

    Raises:
        ModelError: where loading fails, or a weight is missing.
    """
    config = load_config(source, trust_remote_code=trust_remote_code)
    dtype = weights_dtype(precision)
    module = skeleton(config, dtype=dtype, trust_remote_code=trust_remote_code)
    names = _names(module)
    change(module)
    module.to(dtype=dtype).eval()  # buffers, which are real
    summed: list[str] = []
    if how.mesh.size("tensor") > 1:
        summed = divide(module, getattr(config.get_text_config(), "base_model_tp_plan", None) or {}, how.mesh)
        module.tropism_columns = Divided.of(len(module.get_output_embeddings().weight), Peers(how.mesh.group("tensor")))
    quantized = getattr(config, "quantization_config", None) is not None
    files = None if quantized else world.together(lambda: _files(source))
    apart = files is not None and names.keys() <= files.keys() | _tied(names)
    shard(module, layers_of(module), how)
    module._weight_conversions = []  # what was renamed on the way in, which transformers undoes on the way out
    read = _from_files(files, names) if files is not None and apart else _from_main(source, precision, world, module,
                                                                                    names, trust_remote_code)
    place = torch.device("cpu") if how.offload else world.device

    def fill_all() -> None:
        _fill(module, read, names, place)

    world.together(fill_all) if apart else fill_all()  # reading files waits for no other process
    for name in summed:
        module.get_parameter(name).summed_over_tensor = True
    for name, buffer in module.named_buffers():
        module.get_submodule(name.rpartition(".")[0])._buffers[name.rpartition(".")[2]] = buffer.to(world.device)
    if quantized:  # its weights are plain now
        del module.config.quantization_config
    module.generation_config = world.together(lambda: _generation(source, module))
    return module


def _fill(module: Any, read: Read, names: dict[str, set[str]], place: torch.device) -> None:
    """Weights and stored buffers from the files; what an adapter has besides begins as 0."""
    def known(name: str, weight: Tensor, region: tuple[slice, ...]) -> Tensor:
        known_as = base_name(name)
        if known_as not in names:
            return torch.zeros([part.stop - part.start for part in region], dtype=weight.dtype)
        return read(known_as, weight, region)

    fill(module, known, place)
    buffers = dict(module.named_buffers())
    for name, _ in _stored(module):
        if name in buffers:
            buffers[name].copy_(known(name, buffers[name], region_of(buffers[name])))


def layers_of(module: Any) -> list[torch.nn.Module]:
    """The decoder layers of a causal model."""
    names = set(getattr(module, "_no_split_modules", None) or ())
    found = [part for part in module.modules() if type(part).__name__ in names]
    if found:
        return found
    lists = [part for part in module.modules() if isinstance(part, torch.nn.ModuleList)]
    return list(max(lists, key=len, default=[]))


def _names(module: Any) -> dict[str, set[str]]:
    """The names that each weight and stored buffer has, by each of them: tied weights have several."""
    by_weight: dict[int, set[str]] = {}
    for name, tensor in _stored(module):
        by_weight.setdefault(id(tensor), set()).add(name)
    return {name: names for names in by_weight.values() for name in names}


def _stored(module: Any) -> Iterator[tuple[str, Tensor]]:
    transient = {f"{path}.{name}".lstrip(".") for path, part in module.named_modules()
                 for name in part._non_persistent_buffers_set}
    yield from module.named_parameters(remove_duplicate=False)
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name not in transient)


def _tied(names: dict[str, set[str]]) -> set[str]:
    """Names of weights that have another name too."""
    return {name for name, others in names.items() if len(others) > 1}


def _files(source: ModelSource) -> dict[str, str] | None:
    """The safetensors file of each weight by its name there; None where there is none."""
    if source.gguf_file or source.adapter:
        return None
    try:
        index = cached_file(source.name, _INDEX, _raise_exceptions_for_missing_entries=False)
        if index is not None:
            places: dict[str, str] = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
            files = {file: str(cached_file(source.name, file)) for file in sorted(set(places.values()))}
            return {name: files[file] for name, file in places.items()}
        single = cached_file(source.name, _SINGLE, _raise_exceptions_for_missing_entries=False)
        if single is None:
            return None
        with safe_open(single, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), str(single))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ModelError(f"{source.name}: the model could not be loaded: {first_line(error)}") from error


def _from_files(files: dict[str, str], names: dict[str, set[str]]) -> Read:
    """Read parts from the files, which are mapped into memory: of each only what is asked for is read."""
    opened: dict[str, Any] = {}

    def part_of(name: str, weight: Tensor, region: tuple[slice, ...]) -> Tensor:
        file = files[name]
        try:
            if file not in opened:
                opened[file] = safe_open(file, framework="pt")
            kept = opened[file].get_slice(name)
            if tuple(kept.get_shape()) == tuple(weight.shape):
                part: Tensor = kept[region] if region else opened[file].get_tensor(name)
                return part.clone()  # out of the file that is mapped, which may go or change
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file}: the model could not be loaded: {first_line(error)}") from error
        raise ModelError(f"{file}: {name} is {list(kept.get_shape())} there and {list(weight.shape)} in the model")

    def read(name: str, weight: Tensor, region: tuple[slice, ...]) -> Tensor:
        found = sorted(other for other in names[name] if other in files)
        if not found:
            raise ModelError(f"the weight {name} is in none of the model's files")
        part = part_of(found[0], weight, region)
        for other in found[1:]:
            if not torch.equal(part, part_of(other, weight, region)):
                raise ModelError(f"{files[other]}: {found[0]} and {other} differ there, and the model's config says "
                                 "that they are one weight; set tie_word_embeddings to false in it")
        return part

    return read


def _from_main(source: ModelSource, precision: Precision, world: World, module: Any, names: dict[str, set[str]],
               trust_remote_code: bool) -> Read:
    """Let the main process read the whole model, and hand out one weight after the other."""
    def load() -> dict[str, Tensor]:
        whole = load_model(source, precision, torch.device("cpu"), trust_remote_code=trust_remote_code)
        module._weight_conversions = getattr(whole, "_weight_conversions", [])
        if missing := names.keys() - whole.state_dict().keys():
            raise ModelError(f"{source.name}: the weight {min(missing)} is not in its files")
        return dict(whole.state_dict())

    values = world.on_main(load) or {}

    def read(name: str, weight: Tensor, region: tuple[slice, ...]) -> Tensor:
        whole = values[name].contiguous() if world.is_main else torch.empty(weight.shape, dtype=weight.dtype)
        world.broadcast_into([whole])
        return whole[region].clone()

    return read


def _generation(source: ModelSource, module: Any) -> Any:
    """The generation config that comes with a model, or what its config says."""
    try:
        return GenerationConfig.from_pretrained(source.name)
    except OSError:
        return module.generation_config

