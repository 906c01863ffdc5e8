"""Weights of a result or a checkpoint by their names in the model, and their rounding to another dtype."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM

from tropism.commands.export.read_run import ADAPTER_CONFIG, Chosen, ExportedRun
from tropism.distributed.training_state import read_model
from tropism.errors import CheckpointError, ModelError, UsageError, clause, count_of, did_you_mean, first_line
from tropism.model import load
from tropism.model.remote_code import code_refused
from tropism.model.source import ModelSource

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64,
          "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
"""Dtypes by the names that `--dtype` takes."""

Weights = dict[str, Tensor]
CheckSpace = Callable[[Weights], None]
"""Called with the weights, without their values, before any is read; may raise."""


def dtype_named(name: str) -> torch.dtype:
    """The dtype of a name.

    Raises:
        UsageError: if it is unsupported.
    """
    if name not in DTYPES:
        raise UsageError(f"--dtype {name}: unsupported. {did_you_mean(name, DTYPES)}")
    return DTYPES[name]


def skeleton(config: Any, trust_remote_code: bool = False) -> Any:
    """A model on the meta device, as training had it."""
    if hasattr(config, "quantization_config"):  # a GGUF file, whose weights were dequantized for training
        del config.quantization_config
    return load.skeleton(config, trust_remote_code=trust_remote_code)


def named(model: Any) -> Weights:
    """Every weight of a model by its names; tied ones are one object."""
    return dict(model.state_dict(keep_vars=True))


def config_of(run: ExportedRun, chosen: Chosen) -> Any:
    """The config of the trained model.

    Raises:
        ModelError: if no config was found.
    """
    for place in (chosen.path / "model", run.directory.model):
        if (place / "config.json").is_file() and not (place / ADAPTER_CONFIG).is_file():
            return load.load_config(ModelSource.of(str(place)), trust_remote_code=run.trust_remote_code)
    return base_config(run, run.base)


def base_config(run: ExportedRun, name: str, moved: str = "") -> Any:
    """The config of the model that a run started from.

    Args:
        moved: what to do if it was moved, for the error.

    Raises:
        ModelError: if it was not found.
    """
    try:
        return load.load_config(ModelSource.of(name), trust_remote_code=run.trust_remote_code)
    except ModelError as error:
        raise ModelError(f"{clause(error)}. The run started from this model, and its config is needed to export a "
                         f"checkpoint or an adapter{moved}") from error


def of_result(run: ExportedRun, chosen: Chosen, check_space: CheckSpace) -> tuple[Any, Weights]:
    """The model of RUN/model on the meta device, and its weights.

    Raises:
        ModelError: if it cannot be loaded, or a weight is missing or unexpected.
    """
    config = load.load_config(ModelSource.of(str(chosen.path)), trust_remote_code=run.trust_remote_code)
    check_space(named(skeleton(config, run.trust_remote_code)))
    try:
        with code_refused(str(chosen.path), run.trust_remote_code):
            model, report = AutoModelForCausalLM.from_pretrained(
                chosen.path, dtype="auto", output_loading_info=True, trust_remote_code=run.trust_remote_code)
    except (OSError, ValueError, ImportError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{chosen.path}: cannot be loaded: {first_line(error)}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if found := report.get(kind):
            raise ModelError(f"{chosen.path}: {kind.replace('_', ' ')}: {sorted(map(str, found))[0]}")
    return emptied(model)


def emptied(model: Any) -> tuple[Any, Weights]:
    """A model moved to the meta device, and its weights, which can then be freed one by one."""
    weights = dict(model.state_dict())
    return model.to("meta"), weights


def of_checkpoint(run: ExportedRun, chosen: Chosen, check_space: CheckSpace) -> tuple[Any, Weights]:
    """A model of the run's architecture on the meta device, and its weights from a checkpoint.

    Raises:
        CheckpointError: naming a weight that is missing, unexpected or of another shape.
        ModelError: if the config was not found.
    """
    model = skeleton(config_of(run, chosen), run.trust_remote_code)
    check_space(named(model))
    stored = read_model(chosen.path / "state")
    return model, filled(model, stored, chosen.path)


def filled(model: Any, stored: Weights, path: Path) -> Weights:
    """Stored weights by every name in the model; of tied weights one stored name is enough.

    Raises:
        CheckpointError: naming a weight that is missing, unexpected or of another shape.
    """
    wanted = model.state_dict(keep_vars=True)
    owners: dict[int, list[str]] = {}
    for name, tensor in wanted.items():
        owners.setdefault(id(tensor), []).append(name)
    found: Weights = {}
    for names in owners.values():
        there = [name for name in names if name in stored]
        if not there:
            raise CheckpointError(f"{path}: {names[0]} is missing")
        found |= {name: stored[name if name in stored else there[0]] for name in names}
    for name in stored.keys() - wanted.keys():
        raise CheckpointError(f"{path}: {name} is not part of the model {type(model).__name__}")
    for name, tensor in wanted.items():
        if found[name].shape != tensor.shape:
            raise CheckpointError(f"{path}: {name} has shape {list(found[name].shape)}, but {list(tensor.shape)} in "
                                  f"{type(model).__name__}")
    return {name: found[name] for name in wanted}


@dataclass
class Rounding:
    """How weights change when they are rounded to a dtype.

    Args:
        dtype: the new dtype.
        weights: number of weights.
        exact: weights that keep their value.
        zeroed: weights that become 0.
        largest: largest relative change of a weight that does not become 0.
    """

    dtype: torch.dtype
    weights: int = 0
    exact: int = 0
    zeroed: int = 0
    largest: float = 0.0

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        if self.exact == self.weights:
            return f"{name}: {'the' if self.weights == 1 else 'all'} {count_of(self.weights, 'weight')} unchanged"
        text = (f"{name}: {self.exact:,} of {count_of(self.weights, 'weight')} ({self.exact / self.weights:.1%}) "
                f"unchanged; the others change by at most {_percent(self.largest)}")
        return text + (f", and {self.zeroed:,} {'becomes' if self.zeroed == 1 else 'become'} 0" if self.zeroed else "")


def _percent(share: float) -> str:
    """A share that is not 0, however small it is."""
    return f"{share:.2%}" if share >= 1e-3 else f"{100 * share:.2g}%"


def rounded(weights: Weights, dtype: torch.dtype) -> tuple[Weights, Rounding]:
    """Weights in another dtype; tied ones stay one tensor. They are taken out of `weights`, so that memory comes free.

    Raises:
        ModelError: if one is not finite, or too large for the dtype.
    """
    order, rounding = list(weights), Rounding(dtype)
    shared: dict[tuple[int, torch.Size], list[str]] = {}
    for name, tensor in weights.items():
        shared.setdefault((tensor.data_ptr(), tensor.shape), []).append(name)
    found: Weights = {}
    for names in shared.values():
        one = _round(names[0], weights[names[0]].detach().cpu(), rounding)
        for name in names:
            found[name] = one
            del weights[name]
    return {name: found[name] for name in order}, rounding


def _round(name: str, tensor: Tensor, rounding: Rounding) -> Tensor:
    """One tensor in the dtype; what that changes is counted."""
    if not tensor.is_floating_point():
        return tensor
    if bool(torch.isnan(tensor).any()):
        raise ModelError(f"{name} contains NaN. The model is not exported.")
    found = tensor.to(rounding.dtype)
    if bool((torch.isinf(found) & ~torch.isinf(tensor)).any()):
        most = torch.finfo(rounding.dtype).max
        raise ModelError(f"{name} contains {float(tensor.abs().max()):.3g}, but the largest value of "
                         f"{str(rounding.dtype).removeprefix('torch.')} is {most:.5g}. Use --dtype bf16, which has the "
                         "range of float32.")
    rounding.weights += tensor.numel()
    back = found.to(tensor.dtype)
    moved = back != tensor
    rounding.exact += tensor.numel() - int(moved.sum())
    if bool(moved.any()):
        before, after = tensor[moved], back[moved]
        rounding.zeroed += int((after == 0).sum())
        share = ((after - before) / before).abs()[after != 0]
        rounding.largest = max(rounding.largest, float(share.max()) if share.numel() else 0.0)
    return found
