"""An adapter in the weights of its base: merged by peft, and held against what the two said before.

peft is imported when it is needed: it takes seconds, and most runs have no adapter.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from tropism.errors import ModelError, first_line
from tropism.model.adapters.files import CONFIG, read_values, weights_file
from tropism.model.adapters.parameters import adapter_name
from tropism.model.adapters.peft_module import check_trainable, inner
from tropism.model.adapters.peft_settings import check_known, check_served

_TOLERANCE = 1e-3
"""Of logits, as a share of the largest one: merging in float32 costs 1e-6; a wrong merge is far above."""

_FAILURES = (OSError, ValueError, RuntimeError, KeyError, AttributeError, TypeError, SafetensorError)


def merged(module: Any, path: Path) -> Any:
    """A model with the adapter of a directory, of any kind that peft merges, in its weights.

    Raises:
        ModelError: if it does not fit, or says something else once it is merged.
    """
    from peft import PeftModel

    check_known(read_values(path), path / CONFIG)
    weights_file(path)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            wrapped = PeftModel.from_pretrained(module, str(path))
            if left := wrapped.load_adapter(str(path), wrapped.active_adapter).unexpected_keys:
                raise ModelError(f"{path}: does not fit the model: {min(left)} belongs to no module of it")
    except _FAILURES as error:
        raise ModelError(f"{path}: the adapter could not be merged: {first_line(error)}") from error
    if missing := [str(entry.message) for entry in said if "missing adapter keys" in str(entry.message)]:
        raise ModelError(f"{path}: does not fit the model: {first_line(Exception(missing[0]))}")
    return folded(wrapped.eval(), str(path), "it cannot stand for a model by its name")


def folded(model: Any, place: str, instead: str) -> Any:
    """The plain model that a PeftModel becomes when its adapter is merged; the PeftModel is used up.

    Where the adapter changes one end of a model with a tied head, the head gets a weight of its own.

    Args:
        model: in evaluation mode, with weights that are not quantized.
        place: what it is called in an error.
        instead: what to do where it cannot be merged.

    Raises:
        ModelError: if peft cannot merge it, or the result does not say the same.
    """
    return _compared(model, place, instead, lambda: model.merge_and_unload(safe_merge=True))


def unwrap(module: Any, merge: bool = True) -> Any:
    """The plain causal model in a module that was trained with an adapter: it saves and loads as it did before.

    It is the same object, changed in place, with all its weights learning again; of a PeftModel the model in it. One
    without an adapter is given back as it is.

    Args:
        module: after training.
        merge: the adapter into the weights; else it is taken away, and with it what modules learned whole.

    Raises:
        ModelError: for an adapter that is not served, is switched off or was merged already, or cannot be merged.
    """
    place = "the module"
    model = inner(module, place)
    if (name := adapter_name(model)) is None:
        return model
    if getattr(model, "is_quantized", False):
        raise ModelError(f"{place} holds quantized weights, as no plain model does; load its base in full precision, "
                         "and the adapter on it")
    check_served(model.peft_config[name], place)
    check_trainable(model, place)
    training = model.training
    taken = _Taken(model, model.peft_config)
    try:
        plain = _compared(model.eval(), place, "save it alone", taken.out) if merge else taken.out(merge=False)
    except ModelError:
        taken.put_back()
        raise
    finally:
        model.train(training)
    return plain.requires_grad_(True)


class _Taken:
    """The layers that an adapter put into a model, while they are taken out.

    Args:
        model: in which they are.
        config: what peft knows of its adapters.
    """

    def __init__(self, model: Any, config: Any) -> None:
        self.model, self.config, self.tied = model, config, _tied(model)
        self.layers: list[tuple[Any, str, Any]] = []
        self.learn = {name for name, weight in model.named_parameters() if weight.requires_grad}

    def out(self, merge: bool = True) -> Any:
        """The model with the modules of its base, with what the adapter says in their weights or without."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        for key, layer in list(self.model.named_modules()):
            whole = hasattr(layer, "modules_to_save")
            if not isinstance(layer, BaseTunerLayer) and not whole:
                continue
            place, _, name = key.rpartition(".")
            if merge and not whole:
                layer.merge(safe_merge=True)
            plain = layer.get_base_layer() if not whole else (
                next(iter(layer.modules_to_save.values())) if merge else layer.original_module)
            self.layers.append((self.model.get_submodule(place), name, layer))
            setattr(*self.layers[-1][:2], plain)
        del self.model.peft_config
        return self.model

    def put_back(self) -> None:
        """The model as it was, up to rounding."""
        for parent, name, layer in self.layers:
            if getattr(layer, "merged", False):
                layer.unmerge()
            setattr(parent, name, layer)
        self.model.peft_config = self.config
        if self.tied and not _tied(self.model):
            ends = self.model.get_output_embeddings(), self.model.get_input_embeddings()
            _innermost(ends[0]).weight = _innermost(ends[1]).weight
            _say(self.model, True)
        for name, weight in self.model.named_parameters():
            weight.requires_grad_(name in self.learn)


def _compared(model: Any, place: str, instead: str, merge: Callable[[], Any]) -> Any:
    """What a model with an adapter becomes by merging, if it says the same."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    was_tied = _tied(base)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tied ends, which are looked after here
            before = _logits(model)
            if was_tied and _touches_an_end(base):
                _untie(base)
            plain = merge().eval()
            after = _logits(plain)
        apart = float((after - before).abs().max() / before.abs().max().clamp(min=1e-30))
        # In fewer bits the merged weights are rounded once more.
        tolerance = max(_TOLERANCE, 8 * torch.finfo(before.dtype).eps)
        if not apart <= tolerance:
            raise ModelError(f"{place}: the merged model differs from the adapter's own by {apart:.1e} of its largest "
                             f"logit: this adapter cannot be merged; {instead}")
        if was_tied:
            _settle(plain)
    except _FAILURES as error:
        raise ModelError(f"{place}: the adapter could not be merged: {first_line(error)}; {instead}") from error
    return plain


@torch.no_grad()
def _logits(model: Any) -> Tensor:
    ids = torch.arange(16, device=model.device)[None] % model.config.get_text_config().vocab_size
    found: Tensor = model(input_ids=ids, use_cache=False).logits
    return found


def _innermost(end: Any) -> Any:
    """The module that holds the base's own weight, below what an adapter puts around it."""
    while (below := end._modules.get("base_layer", end._modules.get("original_module"))) is not None:
        end = below
    return end


def _tied(model: Any) -> bool:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and _innermost(head).weight.data_ptr() == _innermost(embedding).weight.data_ptr()


def _touches_an_end(model: Any) -> bool:
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return any(_innermost(end) is not end for end in ends)


def _untie(model: Any) -> None:
    """Give the head a weight of its own, so that what is merged into one end does not change the other."""
    head = _innermost(model.get_output_embeddings())
    head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    _say(model, False)


def _settle(plain: Any) -> None:
    """Let a model that was tied be so again if its ends are still the same, and say so or not."""
    head, embedding = plain.get_output_embeddings(), plain.get_input_embeddings()
    if same := torch.equal(head.weight, embedding.weight):
        head.weight = embedding.weight
    _say(plain, same)


def _say(model: Any, tied: bool) -> None:
    model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = tied
