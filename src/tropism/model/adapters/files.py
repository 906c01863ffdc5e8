"""Read and write adapter directories in peft's format."""

import json
import shlex
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tropism.borders import border, read_object
from tropism.distributed.shard import give
from tropism.errors import ModelError, not_only_tensors
from tropism.model.adapters.create import allocate, make_structure
from tropism.model.adapters.parameters import NAME, adapter_name, adapter_weight_names
from tropism.model.adapters.peft_settings import check_known, check_served, check_values
from tropism.model.finite_weights import check_finite
from tropism.model.names import split_revision

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
GGUF_BASE = "No server loads an adapter on a GGUF file: `tropism export RUN --to DIR --merge` writes a plain model"
"""Said of adapters that were trained on a GGUF file. Ends without a full stop."""
_PREFIX = "base_model.model."


def base_of(path: Path) -> str:
    """The base model that an adapter's config names.

    Raises:
        ModelError: if it names none, or this version of peft does not know all of its settings.
    """
    values = read_values(path)
    check_known(values, path / CONFIG)
    base, revision = values.get("base_model_name_or_path"), values.get("revision")
    if not isinstance(base, str) or not base:
        raise ModelError(f"{path}: the adapter does not name its base model. {base_advice(path)}")
    return with_revision(base, revision if isinstance(revision, str) else None)


def with_revision(base: str, revision: str | None) -> str:
    """The name of a base, with the revision that an adapter's config names if it is on the Hub."""
    return f"{base}@{revision}" if revision and not Path(base).exists() else base


def name_base(config: Any, base: str | None) -> None:
    """Write the name of the base, perhaps with a revision, into an adapter's config. The same base keeps its
    revision."""
    name, revision = (None, None) if base is None else split_revision(base)
    if revision or name != config.base_model_name_or_path:
        config.revision = revision
    config.base_model_name_or_path = name


def base_advice(path: Path) -> str:
    """What to do if the base of an adapter is not where its config says. The files of a run must not be edited."""
    to_train = f"To train it further, use --model BASE --lora.adapter {shlex.quote(str(path))}"
    if path.name == "model" and (path.parent / "manifest.json").is_file():
        return (f"To name its base, use `tropism export {shlex.quote(str(path.parent))} --to DIR --base BASE`. "
                f"{to_train}")
    return f"To name its base, set base_model_name_or_path in {path / CONFIG}. {to_train}"


def read_config(path: Path) -> Any:
    """peft's configuration of an adapter that can be trained further.

    Raises:
        ModelError: with the setting that is unsupported.
    """
    values = read_values(path)
    kind = str(values.get("peft_type"))
    if kind != "LORA":
        raise ModelError(f"{path}: adapters of type {kind} are unsupported: Tropism trains LORA")
    from peft import LoraConfig  # slow to import, and most runs have no adapter

    with border(f"{path / CONFIG}: the config could not be read"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = LoraConfig.from_pretrained(str(path))
    check_known(values, path / CONFIG)
    check_served(config, str(path))
    config.lora_dropout = 0.0  # Tropism trains without dropout
    return config


def load_adapter(module: Any, config: Any, path: Path, dtype: torch.dtype) -> None:
    """Load the adapter of a directory into a model, in place.

    Args:
        config: from `read_config`.
        dtype: of its weights in memory.

    Raises:
        ModelError: if it does not fit the model, with the name of a weight.
    """
    make_structure(module, config)
    allocate(module, dtype)
    load_values(module, path)


def load_values(module: Any, path: Path) -> None:
    """Overwrite the weights of an adapter in a model with those of a directory.

    Raises:
        ModelError: if a weight is missing, superfluous, or of another shape; nothing is changed then.
    """
    found = read_weights(path)
    wanted = _by_file_names(module, dict(module.named_parameters(remove_duplicate=False)))
    for problem, names in (("is missing", wanted.keys() - found.keys()),
                           ("belongs to no module of the model", found.keys() - wanted.keys())):
        if names:
            raise ModelError(f"{path}: the adapter does not match the model: {min(names)} {problem}")
    for name, tensor in found.items():
        if tensor.shape != wanted[name].shape:
            raise ModelError(f"{path}: the adapter does not match the model: {name} is {list(tensor.shape)}, but "
                             f"{list(wanted[name].shape)} in the model")
    for name, tensor in found.items():
        give(wanted[name], tensor)


def read_weights(path: Path) -> dict[str, Tensor]:
    """The weights of an adapter, by their names in the file without peft's prefix.

    Raises:
        ModelError: if they cannot be read.
    """
    file = weights_file(path)
    with border(f"{file}: the weights could not be read"):
        try:
            state = (load_file(file) if file.name == WEIGHTS else
                     torch.load(file, map_location="cpu", weights_only=True))
        except Exception as error:
            if not_only_tensors(error):
                raise ModelError(f"{file}: not a pickle of tensors alone. Nothing in it was run. Use an adapter with "
                                 f"{WEIGHTS}.") from None
            raise
        if not (isinstance(state, dict) and all(isinstance(name, str) and isinstance(tensor, Tensor)
                                                for name, tensor in state.items())):
            raise ModelError(f"{file}: not a file of weights by name")
    check_finite(state.items(), str(file))
    return {name.removeprefix(_PREFIX): tensor for name, tensor in state.items()}


def save(module: Any, path: Path, dtype: torch.dtype, weights: Mapping[str, Tensor] | None = None) -> None:
    """Write the adapter of a model into an existing directory, in peft's format.

    Args:
        dtype: of the file.
        weights: weights of the adapter, by their names in the model, to write instead of the model's own.
    """
    name = adapter_name(module)
    assert name is not None
    own = dict(module.named_parameters(remove_duplicate=False)) if weights is None else weights
    kept: dict[int, Tensor] = {}  # tied weights are written under each of their names
    state = {}
    for key, tensor in _by_file_names(module, own).items():
        copied = tensor.detach().to("cpu", dtype)
        if copied.data_ptr() in kept or copied.data_ptr() == tensor.data_ptr():
            copied = copied.clone()
        kept[copied.data_ptr()] = copied
        state[_PREFIX + key] = copied.contiguous()
    save_file(state, path / WEIGHTS, metadata={"format": "pt"})
    config = module.peft_config[name]
    mode, config.inference_mode = config.inference_mode, True  # as in peft's own files
    try:
        write_config(config, path)
    finally:
        config.inference_mode = mode


def write_config(config: Any, path: Path) -> None:
    """Write peft's configuration of an adapter; equal ones as equal files, although peft's sets have no order."""
    (path / CONFIG).write_text(json.dumps(values_of(config), indent=2, sort_keys=True) + "\n", encoding="utf-8")


def values_of(config: Any) -> dict[str, Any]:
    """The content of an adapter's config file, with sets as sorted lists."""
    with tempfile.TemporaryDirectory() as place:
        config.save_pretrained(place)
        written = read_values(Path(place))
    for name in ("target_modules", "exclude_modules", "modules_to_save"):
        if isinstance(getattr(config, name, None), set):
            written[name] = sorted(written[name])
    return written


def _by_file_names(module: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of an adapter, by their names in a file without the prefix."""
    name = adapter_name(module) or NAME
    found = {}
    for key in adapter_weight_names(module) or ():
        short = key.replace(f".modules_to_save.{name}.", ".").replace(f".lora_magnitude_vector.{name}.weight",
                                                                      ".lora_magnitude_vector")
        found[".".join(part for part in short.split(".") if part != name)] = weights[key]
    return found


def weights_file(path: Path) -> Path:
    """The file of an adapter's weights.

    Raises:
        ModelError: if it does not exist, since peft would look for it on the hub.
    """
    for name in (WEIGHTS, "adapter_model.bin"):
        if (path / name).is_file():
            return path / name
    raise ModelError(f"{path / WEIGHTS}: file not found: the directory has an adapter's config but no weights")


def read_values(path: Path) -> dict[str, Any]:
    """Content of the config file of an adapter of any type.

    Raises:
        ModelError: if it cannot be read, or a setting has an invalid value.
    """
    values = read_object(path / CONFIG)
    check_values(values, path / CONFIG)
    return values
