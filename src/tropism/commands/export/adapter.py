"""Export adapters: alone, as peft loads them, or merged into their base model.

peft is imported where it is used: the import takes seconds.
"""

import json
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tropism.borders import read_object
from tropism.commands.export.output_directory import check_tensors, unreadable
from tropism.commands.export.read_run import ADAPTER_CONFIG, Chosen, ExportedRun
from tropism.commands.export.weights import CheckSpace, Weights, base_config, emptied, named, skeleton
from tropism.distributed.training_state import read_model
from tropism.errors import CheckpointError, ModelError, clause, first_line
from tropism.model import load, save
from tropism.model.adapters import files as adapter_files
from tropism.model.adapters import merge as adapter_merge
from tropism.model.adapters.parameters import NAME
from tropism.model.base_weights import base_hash
from tropism.model.language_model import Precision
from tropism.model.names import split_revision
from tropism.model.source import ModelSource
from tropism.model.tied_weights import ties

WEIGHTS = "adapter_model.safetensors"
_INNER = "base_model.model."
_MOVED = ". If the base was moved, pass --base DIR."


@dataclass
class Adapter:
    """An adapter as peft stores it.

    Args:
        config: peft's config.
        weights: by their names in `adapter_model.safetensors`.
        base: the model that it adapts.
        written: content of its `adapter_config.json`, if that is kept.
    """

    config: Any
    weights: Weights
    base: str
    written: dict[str, Any] | None = None


def read(run: ExportedRun, chosen: Chosen) -> Adapter:
    """The complete adapter of a result or a checkpoint.

    Raises:
        CheckpointError, ModelError: naming a weight that is missing, unexpected or of another shape.
    """
    return _of_result(run, chosen) if chosen.trainer is None else _of_checkpoint(run, chosen)


def _of_result(run: ExportedRun, chosen: Chosen) -> Adapter:
    config = _config_in(chosen.path)
    try:
        weights = load_file(chosen.path / WEIGHTS)
        written = read_object(chosen.path / ADAPTER_CONFIG)
    except (OSError, SafetensorError, ValueError) as error:
        raise ModelError(f"{chosen.path}: the adapter cannot be read: {error}") from error
    base = base_of(run, chosen)
    adapter = Adapter(config, weights, base, written)
    module = skeleton(base_config(run, base, _MOVED), run.trust_remote_code)
    _check_complete(_shell(module, adapter), weights, chosen.path)
    return adapter


def _of_checkpoint(run: ExportedRun, chosen: Chosen) -> Adapter:
    """Peft's weights from a checkpoint, which has them by their names in the inner model."""
    from peft import get_peft_model_state_dict

    stored = _with_plain_names(read_model(chosen.path / "state"))
    base = base_of(run, chosen)
    module = skeleton(base_config(run, base, _MOVED), run.trust_remote_code)
    adapter = Adapter(_config_of_checkpoint(run, chosen, stored, module), stored, base)
    ends = [f"{name}.modules_to_save.default.weight" for name in _ends_of(module)]
    shell = _shell(module, adapter)
    learned = {name: weight.shape for name, weight in shell.get_base_model().named_parameters() if weight.requires_grad}
    if adapter.config.ensure_weight_tying:  # then one copy of embedding and head was trained and stored, under one name
        stored |= {name: stored[other] for name, other in (ends, ends[::-1]) if other in stored and name in learned}
    _compare(learned, {name: weight.shape for name, weight in stored.items()}, chosen.path)
    with _quiet():
        adapter.weights = get_peft_model_state_dict(
            shell, {_INNER + name: weight for name, weight in stored.items()}, save_embedding_layers=False)
    _check_complete(shell, adapter.weights, chosen.path)
    return adapter


def _with_plain_names(stored: Weights) -> Weights:
    """Weights by their names under the default adapter name: a PeftModel from Python may use another one."""
    found = re.search(r"\.(?:lora_[AB]|modules_to_save)\.([^.]+)\.", " ".join(stored))
    name = found[1] if found else NAME
    return {re.sub(rf"(\.(?:lora_\w+|modules_to_save))\.{re.escape(name)}\.", rf"\1.{NAME}.", key): weight
            for key, weight in stored.items()}


def _config_in(path: Path) -> Any:
    from peft import PeftConfig

    adapter_files.read_values(path)
    try:
        return PeftConfig.from_pretrained(str(path))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{path}: the adapter config cannot be read: {first_line(error)}") from error


def base_of(run: ExportedRun, chosen: Chosen) -> str:
    """The base model of a run's adapter: the one of --base, else the one that the adapter's config names, else the
    model that the run started from, which may have been an adapter or a module.

    Raises:
        ModelError: if none of them is known.
    """
    if run.other_base is not None:
        return run.other_base
    for config in _configs(run, chosen, run.base):
        if config.base_model_name_or_path:
            return adapter_files.with_revision(str(config.base_model_name_or_path), config.revision)
    if run.given:
        raise ModelError(f"{chosen.path}: the base model of this adapter ({run.base}) has no recorded path. Save it "
                         "without the adapter, and pass its directory: --base DIR")
    return run.base


def _configs(run: ExportedRun, chosen: Chosen, begun: str) -> Iterator[Any]:
    """The adapter's config from the checkpoint, the result, the manifest, and the adapter that the run started from.

    Args:
        begun: the model that the run started from; ignored if it is not an adapter.
    """
    from peft import PeftConfig

    for place in (chosen.path / "model", run.directory.model):
        if (place / ADAPTER_CONFIG).is_file():
            yield _config_in(place)
    if values := run.manifest.get("adapter_config"):
        try:
            yield PeftConfig.from_peft_type(**values)
        except (TypeError, ValueError) as error:
            raise ModelError(f"{run.path / 'manifest.json'}: its adapter config is incompatible with the installed "
                             f"peft: {clause(first_line(error))}. Export with the peft version of the run.") from error
    if (Path(begun).expanduser() / ADAPTER_CONFIG).is_file():
        yield _config_in(Path(begun).expanduser())


def _config_of_checkpoint(run: ExportedRun, chosen: Chosen, stored: Weights, module: Any) -> Any:
    """The first config that exists; else one that follows from the run's options and the names in the checkpoint.

    Args:
        module: the base, on the meta device.
    """
    from peft import LoraConfig

    lora = run.lora
    begun = str(lora.get("adapter") or run.base)
    if (found := next(_configs(run, chosen, begun), None)) is not None:
        return found
    if lora.get("rank") is None:
        raise CheckpointError(f"{chosen.path}: the adapter that the run started from ({begun}) was not found, and this "
                              "run's manifest does not hold its config. Restore that directory.")
    targets = sorted({name.partition(".lora_")[0] for name in stored if ".lora_" in name})
    whole = sorted({name.partition(".modules_to_save.")[0] for name in stored if ".modules_to_save." in name})
    kinds = {type(module.get_submodule(name)).__name__ for name in targets}
    tied = any(module.get_submodule(name) in (module.get_input_embeddings(), module.get_output_embeddings())
               for name in whole) and ties(module.config)
    return LoraConfig(r=lora["rank"], lora_alpha=lora.get("alpha") or 2 * lora["rank"], target_modules=targets,
                      use_dora=bool(lora.get("dora")), use_rslora=bool(lora.get("rslora")),
                      modules_to_save=whole or None, fan_in_fan_out=kinds == {"Conv1D"}, ensure_weight_tying=tied,
                      task_type="CAUSAL_LM")


def _shell(module: Any, adapter: Adapter) -> Any:
    """The base with the adapter, on the meta device: its names and shapes."""
    from peft import get_peft_model

    config = deepcopy(adapter.config)
    config.inference_mode = False  # else no weight requires a gradient, and the adapter's cannot be told apart
    try:
        with _quiet():
            return get_peft_model(module, config, low_cpu_mem_usage=True)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ModelError(f"the adapter does not match {adapter.base}: {first_line(error)}") from error


def _check_complete(shell: Any, weights: Weights, path: Path) -> None:
    from peft import get_peft_model_state_dict

    with _quiet():
        needed, possible = ({name: weight.shape for name, weight in get_peft_model_state_dict(
            shell, save_embedding_layers=embeddings).items()} for embeddings in (False, True))
    sizes = {name: weight.shape for name, weight in weights.items()}
    _compare(needed | {name: possible[name] for name in possible.keys() & sizes.keys()}, sizes, path)


def _compare(wanted: dict[str, torch.Size], there: dict[str, torch.Size], path: Path) -> None:
    for problem, names in (("is missing", wanted.keys() - there.keys()),
                           ("is not part of the adapter", there.keys() - wanted.keys())):
        if names:
            raise CheckpointError(f"{path}: {min(names)} {problem}")
    for name, size in wanted.items():
        if there[name] != size:
            raise CheckpointError(f"{path}: {name} has shape {list(there[name])}, but {list(size)} in the adapter")


def write(adapter: Adapter, weights: Weights, path: Path, dtype: torch.dtype) -> None:
    """Write an adapter as peft does, and read it back.

    Args:
        weights: the adapter's, in the dtype.

    Raises:
        OutputError: if it does not read back as it was written.
    """
    first = {weight.data_ptr(): name for name, weight in reversed(weights.items())}
    save_file({name: weight.contiguous() if first[weight.data_ptr()] == name else weight.clone()  # tied
               for name, weight in weights.items()}, path / WEIGHTS, metadata={"format": "pt"})
    if adapter.written is None:
        adapter.config.inference_mode = True
        adapter_files.name_base(adapter.config, adapter.base)
        adapter_files.write_config(adapter.config, path)
    else:
        name, revision = split_revision(adapter.base)
        content = {**adapter.written, "base_model_name_or_path": name, "revision": revision}
        (path / ADAPTER_CONFIG).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    save.match_permissions(path / ADAPTER_CONFIG)
    check_tensors([path / WEIGHTS], dtype)
    there = load_file(path / WEIGHTS)
    wrong = [name for name in there.keys() | weights.keys()
             if name not in there or name not in weights or not torch.equal(there[name], weights[name])]
    if wrong:
        raise unreadable(f"{min(wrong)} has different values")


def merged(run: ExportedRun, adapter: Adapter, precision: Precision, check_space: CheckSpace) -> tuple[Any, Weights]:
    """The base with the adapter merged, on the meta device, and its weights.

    Args:
        precision: `fp32` or `fp64`, of loading and merging.

    Raises:
        ModelError: if the base is not found, its weights changed since training, or the merged model computes
            something else.
    """
    from peft import get_peft_model, set_peft_model_state_dict

    check_space(named(skeleton(base_config(run, adapter.base, _MOVED), run.trust_remote_code)))
    base = load.load_model(ModelSource.of(adapter.base), precision, torch.device("cpu"),
                           trust_remote_code=run.trust_remote_code)
    known = run.manifest.get("base_weights")
    if known is not None and base_hash(base) != known:
        raise ModelError(f"{adapter.base}: its weights changed since the adapter was trained on them, so merging would "
                         "give another model. Restore them, or pass the directory that has them: --base DIR")
    with _quiet():
        model = get_peft_model(base, deepcopy(adapter.config), autocast_adapter_dtype=False).to(base.dtype).eval()
        strange = set_peft_model_state_dict(model, adapter.weights).unexpected_keys
    if strange:
        raise ModelError(f"the adapter does not match {adapter.base}: {strange[0]} is not part of it")
    return emptied(adapter_merge.folded(model, str(run.path), "export it alone"))


def _ends_of(model: Any) -> list[str]:
    """Names of the embedding and the head."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return [name for name, module in model.named_modules() if any(module is end for end in ends)]


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide peft's warnings about what is handled here: tied embeddings, and embeddings that are saved."""
    with warnings.catch_warnings():
        for kind in (UserWarning, FutureWarning):  # the latter for how peft calls transformers
            warnings.simplefilter("ignore", kind)
        yield
