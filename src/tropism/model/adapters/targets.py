"""Which modules of a model get an adapter, and which learn whole."""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from tropism.errors import ModelError, UsageError
from tropism.model.options import LoraOptions

_KINDS = (torch.nn.Linear, Conv1D)

ON_EMBEDDING = ("which is not trained; name the embedding in modules_to_save, so that it learns whole, or merge the "
                "adapter into its base first")
"""What is said of an adapter on an embedding, whose matrices peft keeps apart from all others."""


def linear_names(module: Any) -> list[str]:
    """Names of the linear layers of a model, but for its head."""
    head = module.get_output_embeddings()
    return [name for name, layer in module.named_modules() if isinstance(layer, _KINDS) and layer is not head]


def new_config(module: Any, options: LoraOptions, base: str | None) -> Any:
    """peft's configuration of a fresh adapter for a model, whose weights are not looked at.

    Args:
        base: what its file will say that it belongs to; None for nothing.

    Raises:
        UsageError: for a name that no module has, or one that cannot have what is asked for.
    """
    from peft import LoraConfig  # slow to import, and most runs have no adapter

    rank = options.rank
    assert rank is not None
    whole = _whole_modules(module, options)
    targets = _targets(module, options, whole)
    linear = [layer for name, layer in module.named_modules() if _ends(name, targets)]
    return LoraConfig(
        r=rank, lora_alpha=options.alpha if options.alpha is not None else 2 * rank, target_modules=targets,
        lora_dropout=0.0, use_dora=options.dora, use_rslora=options.rslora, modules_to_save=whole or None,
        fan_in_fan_out=all(isinstance(layer, Conv1D) for layer in linear), task_type="CAUSAL_LM",
        base_model_name_or_path=base, ensure_weight_tying=bool(whole) and _tied_names(module, whole))


def check_ends(module: Any, config: Any, place: str) -> None:
    """Refuse an adapter on the head, whose weight is used as it is, so that it would never learn, or on an embedding.

    Args:
        config: peft's, of the adapter.
        place: what it is called in the error.

    Raises:
        ModelError: naming the module.
    """
    from peft.tuners.tuners_utils import check_target_module_exists  # slow to import, as above

    head = module.get_output_embeddings()
    for name, layer in module.named_modules():
        if not (layer is head or isinstance(layer, torch.nn.Embedding)) or not check_target_module_exists(config, name):
            continue
        if layer is head:
            raise ModelError(f"{place}: an adapter on the head ({name}), whose weight is used as it is: it would never "
                             "learn; merge the adapter into its base first")
        raise ModelError(f"{place}: an adapter on an embedding ({name}), {ON_EMBEDDING}")


def _targets(module: Any, options: LoraOptions, whole: Sequence[str]) -> list[str]:
    linear = linear_names(module)
    if options.targets is None:
        linear = [name for name in linear if not _within(name, whole)]
        if not linear:
            raise UsageError(f"lora.modules_to_save {options.modules_to_save}: names every linear layer, so that none "
                             "is left for an adapter; leave some out" if whole else
                             "lora.rank: the model has no linear layers beside its head for an adapter to stand on")
        found = sorted({name.rpartition(".")[2] for name in linear})
        chosen = set(linear)
        exact = all(name in chosen for name, _ in module.named_modules() if _ends(name, found))
        return found if exact else linear
    names = _split(options.targets)
    known = set(linear)
    head = module.get_output_embeddings()
    for wanted in names:
        matched = {name: layer for name, layer in module.named_modules() if _ends(name, [wanted])}
        if not matched:
            raise UsageError(f"lora.targets {wanted}: no module of the model has this name{_near(wanted, linear)}")
        for name, layer in matched.items():
            if layer is head:
                raise UsageError(f"lora.targets {wanted}: is the head, whose weight is used as it is; "
                                 f"--lora.modules-to-save {wanted} lets it learn whole")
            if name not in known:
                raise UsageError(f"lora.targets {wanted}: {name} is of kind {type(layer).__name__}, and adapters "
                                 f"stand on linear layers{_near(wanted, linear)}; --lora.modules-to-save lets it learn "
                                 "whole")
        if both := [name for name in matched if _within(name, whole)]:
            raise UsageError(f"lora.targets {wanted} and lora.modules_to_save both name {both[0]}; it has an adapter "
                             "or learns whole")
    return names


def _whole_modules(module: Any, options: LoraOptions) -> list[str]:
    """Names of the modules that learn whole. Of tied embeddings the one that holds the weight stands for both."""
    names = _split(options.modules_to_save)
    every = dict(module.named_modules())
    lists = (torch.nn.ModuleList, torch.nn.ModuleDict)
    for wanted in names:
        matched = [layer for name, layer in every.items() if _ends(name, [wanted])]
        if not matched or any(isinstance(layer, lists) or not any(True for _ in layer.parameters())
                              for layer in matched):
            holders = [name for name, layer in every.items()
                       if name and any(True for _ in layer.parameters(recurse=False))]
            raise UsageError(f"lora.modules_to_save {wanted}: no module of the model has this name and weights of its "
                             f"own{_near(wanted, holders)}")
    if not _tied_names(module, names):
        return names
    embedding = module.get_input_embeddings()
    own = next(name for name, layer in every.items() if layer is embedding).rpartition(".")[2]
    head = next(name for name, layer in every.items() if layer is module.get_output_embeddings())
    return [own, *(name for name in names if not _ends(head, [name]) and name != own)]


def _tied_names(module: Any, names: Sequence[str]) -> bool:
    """Whether names mean an embedding or a head that share their weight."""
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    if embedding is None or head is None or head.weight is not embedding.weight:
        return False
    return any(layer is embedding or layer is head for name, layer in module.named_modules() if _ends(name, names))


def _split(text: str | None) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in (text or "").split(",") if part.strip()))


def _ends(name: str, endings: Sequence[str]) -> bool:
    return any(name == ending or name.endswith(f".{ending}") for ending in endings)


def _within(name: str, endings: Sequence[str]) -> bool:
    """Whether a module, or one that it is a part of, has one of the names."""
    parts = name.split(".")
    return any(_ends(".".join(parts[:count]), endings) for count in range(1, len(parts) + 1))


def _near(wanted: str, names: Sequence[str]) -> str:
    kinds = sorted({name.rpartition(".")[2] for name in names})
    close = get_close_matches(wanted.rpartition(".")[2], kinds, n=3, cutoff=0.5)
    return f"; the nearest are {', '.join(close)}" if close else f"; there are {', '.join(kinds)}"
