"""The transformers model inside a module that wraps it: DDP, a compiled module, a booster's, or a class of the user."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from tropism.errors import ModelError, count_of

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_QUANTIZED = ("torch.ao.nn.quantized", "torch.nn.quantized")
_BY_NAME = "Pass the plain model, or pass it by name: under torchrun Tropism shards it."


def model_inside(module: Any, place: str) -> Any:
    """The transformers model, or PeftModel, that a module wraps; a model is returned unchanged.

    It is the only one among the submodules, at any depth. The wrapper's own `forward` is never called.

    Args:
        module: from the user. An object that is no module is accepted if it holds one under `.model` or `.module`.
        place: its name in an error.

    Raises:
        ModelError: if it holds no model or several, or weights beside those of the model, or if the weights are not
            all here: sharded, offloaded or on the meta device.
    """
    if sharding := next(filter(None, map(_sharding, _modules(module))), ""):
        raise ModelError(f"{place} is sharded by {sharding}. {_BY_NAME}")
    model = _find(module, place)
    if model is not module and isinstance(module, nn.Module):
        _check_nothing_else(module, model, place)
    _check_values(model, place)
    return model


@contextmanager
def uncompiled(models: Iterable[Any]) -> Iterator[None]:
    """Context in which models that were compiled in place, as a whole or by layer, run as they are written. Compiling
    their own forward takes minutes, and is used for one small check only."""
    compiled = [(part, part._compiled_call_impl) for model in models for part in model.modules()
                if getattr(part, "_compiled_call_impl", None) is not None]
    for part, _ in compiled:
        part._compiled_call_impl = None
    try:
        yield
    finally:
        for part, call in compiled:
            part._compiled_call_impl = call


def _find(module: Any, place: str) -> Any:
    """The only outermost model among the submodules, or else that under the attributes of wrappers."""
    found, seen = module, set()
    while id(found) not in seen:
        seen.add(id(found))
        models: dict[str, Any] = {}
        for name, part in found.named_modules() if isinstance(found, nn.Module) else ():
            if _is_model(part) and not any(outer == "" or name.startswith(f"{outer}.") for outer in models):
                models[name] = part
        if len(models) == 1:
            return next(iter(models.values()))
        if models:
            raise ModelError(f"{place} is a {type(module).__name__} that holds {len(models)} models: "
                             f"{', '.join(models)}. Pass one of them.")
        held = (getattr(found, name, None) for name in ("module", "model"))
        found = next((one for one in held if isinstance(one, nn.Module)), found)
    raise ModelError(f"{place} is a {type(module).__name__}, which holds no transformers model under .model or "
                     ".module. Pass a transformers model or its name.")


def _is_model(module: Any) -> bool:
    """Whether it is a transformers model or a PeftModel. Wrappers may hand on every attribute of what they wrap, so the
    type decides."""
    return isinstance(module, PreTrainedModel) or hasattr(type(module), "get_base_model")


def _modules(module: Any) -> Iterator[Any]:
    return module.modules() if isinstance(module, nn.Module) else iter(())


def _sharding(module: Any) -> str:
    """By what a module is sharded; empty if it is not."""
    if isinstance(module, FullyShardedDataParallel | FSDPModule):
        return "FSDP"
    for parameter in module.parameters(recurse=False):
        if isinstance(parameter, DTensor):
            return "tensor parallelism"
        if hasattr(parameter, "ds_id"):  # set by DeepSpeed's partitioning of parameters
            return "DeepSpeed ZeRO-3"
    return ""


def _check_nothing_else(module: nn.Module, model: nn.Module, place: str) -> None:
    own = {id(parameter) for parameter in model.parameters()}
    others = [name for name, parameter in module.named_parameters() if id(parameter) not in own]
    if others:
        raise ModelError(f"{place} is a {type(module).__name__} with {count_of(len(others), 'weight')} outside its "
                         f"{type(model).__name__} (first: {others[0]}), which would not be trained. Pass the "
                         f"{type(model).__name__} in it.")


def _check_values(model: Any, place: str) -> None:
    """Check that the model predicts tokens, and that every weight is here as a whole, as a number that can learn."""
    if getattr(model, "is_quantized", False) or any(type(part).__module__.startswith(_QUANTIZED)
                                                    for part in model.modules()):
        raise ModelError(f"{place} has quantized weights, which would be expanded to float32. Pass the model by name. "
                         "The policy is quantized with lora.quantize.")
    if model.get_output_embeddings() is None:
        raise ModelError(f"{place} is a {type(model).__name__}, which has no output head over the vocabulary. Load it "
                         "with AutoModelForCausalLM.")
    devices = sorted({str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()})
    if len(devices) > 1:
        raise ModelError(f"{place} is spread over several devices ({', '.join(devices)}) by device_map. Load it "
                         "without device_map.")
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ModelError(f"{place} has weights on the meta device, which hold no values (first: {name}). Load it "
                             "with from_pretrained.")
        if parameter.dtype not in _DTYPES:
            raise ModelError(f"{place} has weights of type {str(parameter.dtype).removeprefix('torch.')} (first: "
                             f"{name}), which cannot be trained. Load it with weights in float32 or bfloat16.")
        if not parameter.untyped_storage().size():
            raise ModelError(f"{place} has weights without values (first: {name}): they were moved elsewhere, as "
                             f"ZeRO-3 and Gemini do. {_BY_NAME}")
