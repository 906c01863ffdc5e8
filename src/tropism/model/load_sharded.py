"""Load a model in shards: build it on the meta device, shard it, and read each process's parts from the files."""

from collections.abc import Callable
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from tropism.borders import border
from tropism.distributed.shard import Sharding, fill, region_of, shard
from tropism.distributed.tensor_parallel import divide
from tropism.distributed.vocab_group import Peers
from tropism.distributed.world import World
from tropism.errors import ModelError
from tropism.model.adapters.parameters import base_name
from tropism.model.finite_weights import check_finite
from tropism.model.generation import read_generation
from tropism.model.head.vocab_parallel import Divided
from tropism.model.language_model import Precision
from tropism.model.load import load_config, load_model, skeleton, weights_dtype
from tropism.model.quantization import made_shardable
from tropism.model.source import ModelSource
from tropism.model.tied_weights import names_by_tensor, stored_tensors
from tropism.model.token_state import layers_of
from tropism.model.weights_check import check_layers, check_memory, check_stored

Read = Callable[[str, Tensor, tuple[slice, ...]], Tensor]
"""(name, weight, region) of a weight to the values of that region."""


def load_sharded(source: ModelSource, precision: Precision, world: World, sharding: Sharding, *,
                 trust_remote_code: bool = False, change: Callable[[Any], None] = lambda module: None) -> Any:
    """A causal model in evaluation mode, sharded over processes. All of them must call this together.

    Each process reads its parts from the safetensors files. The main process instead loads the full model into host
    memory and distributes the parts if the files are quantized or GGUF, name weights differently from the model, or an
    adapter must be merged.

    Args:
        change: called with the model while it is on the meta device. Weights that it adds start as 0.

    Raises:
        ModelError: if loading fails, or a weight is missing.
    """
    config = load_config(source, trust_remote_code=trust_remote_code)
    dtype = weights_dtype(precision)
    check_layers(config, source)
    module = skeleton(config, dtype=dtype, trust_remote_code=trust_remote_code)
    check_memory(module, source.name, dtype.itemsize, world.device if not sharding.offload else torch.device("cpu"),
                 world.size)
    check_stored(module, source)
    names = names_by_tensor(module)
    change(module)
    module.to(dtype=dtype).eval()  # for the buffers, which are real
    summed: list[str] = []
    if sharding.mesh.size("tensor") > 1:
        plan = getattr(config.get_text_config(), "base_model_tp_plan", None) or {}
        summed = divide(module, plan, sharding.mesh)
        group = Peers(sharding.mesh.group("tensor"))
        module.tropism_columns = Divided.of(len(module.get_output_embeddings().weight), group)
    quantized = getattr(config, "quantization_config", None) is not None
    files = None if quantized else world.together(source.weight_files)
    tied = {name for name, others in names.items() if len(others) > 1}
    direct = files is not None and names.keys() <= files.keys() | tied
    shard(module, layers_of(module), sharding)
    module._weight_conversions = []  # transformers renames weights back by these when it saves
    read = (_from_files(files, names) if files is not None and direct
            else _from_main(source, precision, world, module, names, trust_remote_code))
    device = torch.device("cpu") if sharding.offload else world.device

    def fill_all() -> None:
        _fill(module, read, names, device)

    world.together(fill_all) if direct else fill_all()  # reading files needs no other process
    world.together(lambda: check_finite(module.named_parameters(), source.name))
    for name in summed:
        module.get_parameter(name).summed_over_tensor = True
    for name, buffer in module.named_buffers():
        module.get_submodule(name.rpartition(".")[0])._buffers[name.rpartition(".")[2]] = buffer.to(world.device)
    if quantized:  # the weights are dequantized
        del module.config.quantization_config
    module.generation_config = world.together(
            lambda: read_generation(source.name, source.revision)[0]) or module.generation_config
    return module


def shard_quantized(module: Any, sharding: Sharding) -> None:
    """Shard a quantized model with its adapter, in place. Every process holds all of it until then, because weights are
    quantized as in one process: with scales that depend on all values of a weight.

    Raises:
        ModelError: for an adapter that needs complete weights.
    """
    with made_shardable(module):
        shard(module, layers_of(module), sharding)


def _fill(module: Any, read: Read, names: dict[str, set[str]], device: torch.device) -> None:
    """Fill weights and stored buffers from the files. Weights of an adapter start as 0."""
    def read_or_zero(name: str, weight: Tensor, region: tuple[slice, ...]) -> Tensor:
        original = base_name(name)
        if original not in names:
            return torch.zeros([part.stop - part.start for part in region], dtype=weight.dtype)
        return read(original, weight, region)

    fill(module, read_or_zero, device)
    buffers = dict(module.named_buffers())
    for name, _ in stored_tensors(module):
        if name in buffers:
            buffers[name].copy_(read_or_zero(name, buffers[name], region_of(buffers[name])))


def _from_files(files: dict[str, str], names: dict[str, set[str]]) -> Read:
    """Read parts from the memory-mapped files: only the requested regions are read."""
    opened: dict[str, Any] = {}

    def part_of(name: str, weight: Tensor, region: tuple[slice, ...]) -> Tensor:
        file = files[name]
        with border(f"{file}: the model could not be loaded"):
            if file not in opened:
                opened[file] = safe_open(file, framework="pt")
            kept = opened[file].get_slice(name)
            if tuple(kept.get_shape()) == tuple(weight.shape):
                part: Tensor = kept[region] if region else opened[file].get_tensor(name)
                return part.clone()  # a copy, since the mapped file may change or disappear
        raise ModelError(f"{file}: {name} is {list(kept.get_shape())}, but {list(weight.shape)} in the model")

    def read(name: str, weight: Tensor, region: tuple[slice, ...]) -> Tensor:
        found = sorted(other for other in names[name] if other in files)
        if not found:
            raise ModelError(f"weight {name} not found in the model's files")
        part = part_of(found[0], weight, region)
        for other in found[1:]:
            if not torch.equal(part, part_of(other, weight, region)):
                raise ModelError(f"{files[other]}: {found[0]} and {other} differ, but the model's config ties them. "
                                 "Set tie_word_embeddings to false in the config.")
        return part

    return read


def _from_main(source: ModelSource, precision: Precision, world: World, module: Any, names: dict[str, set[str]],
               trust_remote_code: bool) -> Read:
    """Let the main process load the full model and broadcast one weight at a time."""
    def load() -> dict[str, Tensor]:
        loaded = load_model(source, precision, torch.device("cpu"), trust_remote_code=trust_remote_code)
        module._weight_conversions = getattr(loaded, "_weight_conversions", [])
        if missing := names.keys() - loaded.state_dict().keys():
            raise ModelError(f"{source.name}: weight {min(missing)} not found in its files")
        return dict(loaded.state_dict())

    values = world.on_main(load) or {}

    def read(name: str, weight: Tensor, region: tuple[slice, ...]) -> Tensor:
        value = values[name].contiguous() if world.is_main else torch.empty(weight.shape, dtype=weight.dtype)
        world.broadcast_into([value])
        return value[region].clone()

    return read
