"""Merge an adapter into the weights of its base, with peft, and check that the logits stay the same.

peft is imported inside functions: it takes seconds, and most runs have no adapter.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tropism.borders import border
from tropism.errors import ModelError, first_line
from tropism.model.adapters.files import CONFIG, read_values, read_weights
from tropism.model.adapters.parameters import adapter_name
from tropism.model.adapters.peft_module import check_trainable, inner
from tropism.model.adapters.peft_settings import check_known, check_served
from tropism.model.finite_weights import check_finite
from tropism.model.tied_weights import adapts_tied, is_tied, tie, tie_if_equal, untie

_TOLERANCE = 1e-3
"""Largest change of a logit, as a share of the largest one. Merging in float32 costs 1e-6; a wrong merge far more."""


def merged(module: Any, path: Path) -> Any:
    """Merge the adapter of a directory, of any kind that peft can merge, into a model.

    Raises:
        ModelError: if it does not fit the model, or if merging changes the logits.
    """
    from peft import PeftModel

    check_known(read_values(path), path / CONFIG)
    read_weights(path)  # raises for a file that peft must not read
    with border(f"{path}: the adapter cannot be merged"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapped = PeftModel.from_pretrained(module, str(path))
        if left := wrapped.load_adapter(str(path), wrapped.active_adapter).unexpected_keys:
            raise ModelError(f"{path}: the adapter does not match the model: {min(left)} belongs to no module")
    name = wrapped.active_adapter
    check_finite(((key, weight) for key, weight in wrapped.named_parameters() if name in key.split(".")), str(path))
    if missing := [str(entry.message) for entry in caught if "missing adapter keys" in str(entry.message)]:
        raise ModelError(f"{path}: the adapter does not match the model: {first_line(Exception(missing[0]))}")
    return folded(wrapped.eval(), str(path), "Name its base instead, or merge it with peft")


def folded(model: Any, place: str, instead: str) -> Any:
    """Merge the adapter of a PeftModel and return the plain model. The PeftModel cannot be used afterwards.

    If the adapter changes the head or the embedding of a model where these are tied, the head gets its own weight.

    Args:
        model: in evaluation mode, with weights that are not quantized.
        place: its name in an error.
        instead: what to do if it cannot be merged.

    Raises:
        ModelError: if peft cannot merge it, or if merging changes the logits.
    """
    return _merge_checked(model, place, instead, lambda: model.merge_and_unload(safe_merge=True))


def unwrap(module: Any, merge: bool = True) -> Any:
    """Return the plain causal model in a module that was trained with an adapter.

    It saves and loads as before training. The model is changed in place, and all its weights require gradients again.
    Of a PeftModel, the model inside is returned. A model without an adapter is returned unchanged.

    Args:
        module: after training.
        merge: merge the adapter into the weights; else discard it, together with fully trained modules.

    Raises:
        ModelError: for an adapter that is unsupported, switched off, already merged, or cannot be merged.
    """
    place = "the module"
    model = inner(module, place)
    if (name := adapter_name(model)) is None:
        return model
    if getattr(model, "is_quantized", False):
        raise ModelError(f"{place} holds quantized weights, which cannot be merged. Load its base in full precision "
                         "and put the adapter on that.")
    check_served(model.peft_config[name], place)
    check_trainable(model, place)
    training = model.training
    layers = _AdapterLayers(model, model.peft_config)
    try:
        plain = (_merge_checked(model.eval(), place, "Save the adapter instead", layers.remove) if merge
                 else layers.remove(merge=False))
    except ModelError:
        layers.restore()
        raise
    finally:
        model.train(training)
    return plain.requires_grad_(True)


class _AdapterLayers:
    """The layers that an adapter put into a model, which can be removed and restored.

    Args:
        model: the model that has them.
        config: peft's configuration of its adapters.
    """

    def __init__(self, model: Any, config: Any) -> None:
        self.model, self.config, self.tied = model, config, is_tied(model)
        self.layers: list[tuple[Any, str, Any]] = []
        self.trainable = {name for name, weight in model.named_parameters() if weight.requires_grad}

    def remove(self, merge: bool = True) -> Any:
        """The model with plain modules, with the adapter merged into their weights or discarded."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        for key, layer in list(self.model.named_modules()):
            trained_fully = hasattr(layer, "modules_to_save")
            if not isinstance(layer, BaseTunerLayer) and not trained_fully:
                continue
            place, _, name = key.rpartition(".")
            if merge and not trained_fully:
                layer.merge(safe_merge=True)
            plain = layer.get_base_layer() if not trained_fully else (
                next(iter(layer.modules_to_save.values())) if merge else layer.original_module)
            self.layers.append((self.model.get_submodule(place), name, layer))
            setattr(*self.layers[-1][:2], plain)
        del self.model.peft_config
        return self.model

    def restore(self) -> None:
        """Restore the model to what it was, up to rounding."""
        for parent, name, layer in self.layers:
            if getattr(layer, "merged", False):
                layer.unmerge()
            setattr(parent, name, layer)
        self.model.peft_config = self.config
        if self.tied and not is_tied(self.model):
            tie(self.model)
        for name, weight in self.model.named_parameters():
            weight.requires_grad_(name in self.trainable)


def _merge_checked(model: Any, place: str, instead: str, merge: Callable[[], Any]) -> Any:
    """Merge, and return the plain model if its logits are the same as before."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    was_tied = is_tied(base)
    with border(f"{place}: the adapter cannot be merged", advice=f"{instead}."):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about tied weights, which are handled here
            before = _logits(model)
            if was_tied and adapts_tied(base):
                untie(base)
            plain = merge().eval()
            after = _logits(plain)
        apart = float((after - before).abs().max() / before.abs().max().clamp(min=1e-30))
        # Weights of lower precision are rounded once more by merging.
        tolerance = max(_TOLERANCE, 8 * torch.finfo(before.dtype).eps)
        if not apart <= tolerance:
            raise ModelError(f"{place}: the adapter cannot be merged: the logits change by {apart:.1e} of the largest "
                             f"one. {instead}.")
        if was_tied:
            tie_if_equal(plain)
    return plain


@torch.no_grad()
def _logits(model: Any) -> Tensor:
    ids = torch.arange(16, device=model.device)[None] % model.config.get_text_config().vocab_size
    found: Tensor = model(input_ids=ids, use_cache=False).logits
    return found
