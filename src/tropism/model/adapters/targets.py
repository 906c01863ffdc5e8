"""Choose the modules that get an adapter, and those that are trained in full (`modules_to_save`)."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from tropism.borders import border
from tropism.errors import ModelError, UsageError, did_you_mean
from tropism.model.options import LoraOptions

_KINDS = (torch.nn.Linear, Conv1D)
_OF_MODELS = "transformers.models."
"""Where subclasses of linear layers return more than a product, such as the router of Llama 4."""

ON_EMBEDDING = ("which is unsupported. Use modules_to_save to train the embedding in full, or merge the adapter into "
                "its base first.")
"""End of the error about an adapter on an embedding, whose matrices peft keeps separately from all others."""


def linear_names(module: Any) -> list[str]:
    """Names of the linear layers of a model, except its head."""
    head = module.get_output_embeddings()
    return [name for name, layer in module.named_modules() if isinstance(layer, _KINDS) and layer is not head
            and not type(layer).__module__.startswith(_OF_MODELS)]


_EMBEDDING_OF_PEFT = "embed_tokens"
"""The only name of an embedding for which peft looks for the head that is tied to it."""


def new_config(module: Any, options: LoraOptions, base: str | None) -> Any:
    """peft's configuration of a new adapter for a model. The model needs no weights.

    Args:
        base: the base model to name in the adapter's file; None for none.

    Raises:
        UsageError: for a name that matches no module, a module that cannot be adapted or trained in full, or a rank
            above the sizes of all layers.
    """
    from peft import LoraConfig  # slow to import, and most runs have no adapter

    rank = options.rank
    assert rank is not None
    full = _full_modules(module, options)
    targets = _targets(module, options, full)
    linear = [layer for name, layer in module.named_modules() if _ends(name, targets)]
    largest = max((min(sides) for layer in linear if (sides := _sides(layer))), default=rank)
    if rank > largest:
        raise UsageError(f"--lora.rank {rank:,} exceeds the smaller side of every layer that it adapts, where more "
                         f"rank has no effect. Use {largest:,} or less.")
    return LoraConfig(
        r=rank, lora_alpha=options.alpha if options.alpha is not None else 2 * rank, target_modules=targets,
        lora_dropout=0.0, use_dora=options.dora, use_rslora=options.rslora, modules_to_save=full or None,
        fan_in_fan_out=all(isinstance(layer, Conv1D) for layer in linear), task_type="CAUSAL_LM",
        base_model_name_or_path=base, ensure_weight_tying=bool(full) and _names_tied(module, full))


def check_ends(module: Any, config: Any, place: str) -> None:
    """Reject an adapter on an embedding, or on the head, whose weight is used directly: it would never be trained.

    Args:
        config: peft's configuration of the adapter.
        place: the adapter's name in the error.

    Raises:
        ModelError: with the module.
    """
    from peft.tuners.tuners_utils import check_target_module_exists  # slow to import, as above

    head = module.get_output_embeddings()
    for name, layer in module.named_modules():
        with border(f"{place}: target_modules is invalid"):
            targeted = check_target_module_exists(config, name)
        if not targeted or not (layer is head or isinstance(layer, torch.nn.Embedding)):
            continue
        if layer is head:
            raise ModelError(f"{place}: has an adapter on the head ({name}), which is unsupported: the head's weight "
                             "is used directly, so the adapter would never be trained. Merge it into its base first.")
        raise ModelError(f"{place}: has an adapter on an embedding ({name}), {ON_EMBEDDING}")


def check_rank(module: Any, config: Any) -> None:
    """Reject an adapter that is larger than the model without any use of its rank, and modules to save of which the
    model has none, before peft allocates them.

    Args:
        config: peft's configuration of the adapter.

    Raises:
        ModelError: with the largest rank that makes sense, or the name of the module.
    """
    from peft.tuners.tuners_utils import check_target_module_exists  # slow to import, as above

    with border("the adapter does not match the model"):
        targets = {name: layer for name, layer in module.named_modules() if check_target_module_exists(config, name)}
    sides = [(max(sides), min(sides)) for layer in targets.values() if (sides := _sides(layer))]
    rank = max(config.r, *(config.rank_pattern or {}).values(), 1)
    if sides and rank > max(sides)[0]:
        size = rank * sum(map(sum, sides))
        own = sum(weight.numel() for weight in module.parameters())
        if size > own:
            raise ModelError(f"the adapter's rank {rank:,} is too large: it makes {size:,} weights for a model of "
                             f"{own:,}. Use --lora.rank {max(side for _, side in sides):,} or less.")
    wanted = tuple(config.modules_to_save or ())
    # As peft matches: ends of names, of which the model need not have all, since lists are shared between models.
    if wanted and not any(name.endswith(wanted) for name, _ in module.named_modules()):
        raise ModelError(f"the adapter does not match the model: modules_to_save names {', '.join(wanted)}, which the "
                         "model does not have")


def _sides(layer: Any) -> tuple[int, ...]:
    """Input and output size of a layer that can have an adapter; nothing for others."""
    if hasattr(layer, "in_features"):  # the weight of a quantized one has another shape
        return layer.in_features, layer.out_features
    return tuple(layer.weight.shape) if isinstance(layer, Conv1D) else ()


def _used_directly(module: Any) -> set[str]:
    """Names of linear layers of Mamba whose weights are used without calling the layer: an adapter would not act.

    Kernels take the weight of the last projection, and models multiply with that of the time step.
    """
    mixers = [name for name, part in module.named_modules() if hasattr(part, "A_log") and hasattr(part, "D")]
    return {f"{name}.{layer}" for name in mixers for layer in ("out_proj", "dt_proj")}


def _targets(module: Any, options: LoraOptions, full: Sequence[str]) -> list[str]:
    linear = linear_names(module)
    if options.targets is None:
        direct = _used_directly(module)
        linear = [name for name in linear if not _within(name, full) and name not in direct]
        if not linear:
            raise UsageError(f"--lora.modules-to-save {options.modules_to_save} names every linear layer, so none is "
                             "left for an adapter. List fewer." if full else
                             "--lora.rank: the model has no linear layers to adapt except its head")
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
            raise UsageError(f"--lora.targets {wanted}: module not found in the model. {_suggest(wanted, linear)}")
        for name, layer in matched.items():
            if layer is head:
                raise UsageError(f"--lora.targets {wanted} is the head, which cannot have an adapter. Use "
                                 f"--lora.modules-to-save {wanted} to train it in full.")
            if name in _used_directly(module):
                raise UsageError(f"--lora.targets {wanted}: {name} cannot have an adapter, because Mamba uses its "
                                 "weight without calling the layer. Remove it.")
            if name not in known:
                raise UsageError(f"--lora.targets {wanted}: {name} is of type {type(layer).__name__}, but only linear "
                                 "layers can have an adapter. To train the module in full, use "
                                 f"--lora.modules-to-save. {_suggest(wanted, linear)}")
        if both := [name for name in matched if _within(name, full)]:
            raise UsageError(f"--lora.targets {wanted} and --lora.modules-to-save both name {both[0]}. Remove it from "
                             "one of them.")
    return names


def _full_modules(module: Any, options: LoraOptions) -> list[str]:
    """Names of the modules that are trained in full. If head and embedding are tied, both are, as one table: the
    embedding represents both where peft knows its name, and else both are named."""
    names = _split(options.modules_to_save)
    every = dict(module.named_modules())
    lists = (torch.nn.ModuleList, torch.nn.ModuleDict)
    for wanted in names:
        matched = [layer for name, layer in every.items() if _ends(name, [wanted])]
        if not matched or any(isinstance(layer, lists) or not any(True for _ in layer.parameters())
                              for layer in matched):
            holders = [name for name, layer in every.items()
                       if name and any(True for _ in layer.parameters(recurse=False))]
            raise UsageError(f"--lora.modules-to-save {wanted}: module with weights not found in the model. "
                             f"{_suggest(wanted, holders)}")
    if not _names_tied(module, names):
        return names
    embedding = module.get_input_embeddings()
    own = next(name for name, layer in every.items() if layer is embedding).rpartition(".")[2]
    head = next(name for name, layer in every.items() if layer is module.get_output_embeddings())
    ends = [own] if own == _EMBEDDING_OF_PEFT else [own, head.rpartition(".")[2]]
    return [*ends, *(name for name in names if not _ends(head, [name]) and name != own)]


def _names_tied(module: Any, names: Sequence[str]) -> bool:
    """Whether names match the embedding or the head of a model where these are tied."""
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    if embedding is None or head is None or head.weight is not embedding.weight:
        return False
    return any(layer is embedding or layer is head for name, layer in module.named_modules() if _ends(name, names))


def _split(text: str | None) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in (text or "").split(",") if part.strip()))


def _ends(name: str, endings: Sequence[str]) -> bool:
    return any(name == ending or name.endswith(f".{ending}") for ending in endings)


def _within(name: str, endings: Sequence[str]) -> bool:
    """Whether a module, or a module that contains it, has one of the names."""
    parts = name.split(".")
    return any(_ends(".".join(parts[:count]), endings) for count in range(1, len(parts) + 1))


def _suggest(wanted: str, names: Sequence[str]) -> str:
    return did_you_mean(wanted.rpartition(".")[2], sorted({name.rpartition(".")[2] for name in names}))
