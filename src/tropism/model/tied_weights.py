"""Tied weights: a head that shares its weight with the input embedding, and tensors with several names."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def base_layer(layer: Any) -> Any:
    """The module with the base's own weight, inside the layers that an adapter puts around it."""
    while (inner := layer._modules.get("base_layer", layer._modules.get("original_module"))) is not None:
        layer = inner
    return layer


def is_tied(model: Any) -> bool:
    """Whether head and embedding of a causal model share one weight."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None:
        return False
    one, other = base_layer(head).weight, base_layer(embedding).weight
    return one is other or (not one.is_meta and bool(one.data_ptr() == other.data_ptr()))  # on meta all are 0


def ties(config: Any) -> bool:
    """Whether a config ties head and embedding."""
    return bool(getattr(config.get_text_config(), "tie_word_embeddings", False))


def adapts_tied(model: Any) -> bool:
    """Whether an adapter changes the head or the embedding."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return any(base_layer(end) is not end for end in ends)


def untie(model: Any) -> None:
    """Give the head its own weight, so that merging into one of the two does not change the other."""
    head = base_layer(model.get_output_embeddings())
    head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    set_config(model, False)


def tie(model: Any) -> None:
    """Let the head share the embedding's weight."""
    base_layer(model.get_output_embeddings()).weight = base_layer(model.get_input_embeddings()).weight
    set_config(model, True)


def tie_if_equal(model: Any) -> None:
    """Tie head and embedding if their weights are equal; else record in the config that they are not tied."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if torch.equal(head.weight, embedding.weight):
        tie(model)
    else:
        set_config(model, False)


def set_config(model: Any, tied: bool) -> None:
    """Record in a model's config whether head and embedding are tied."""
    model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = tied


def stored_tensors(module: Any) -> Iterator[tuple[str, Tensor]]:
    """Parameters, under each of their names, and buffers that belong to the state dict."""
    transient = {f"{path}.{name}".lstrip(".") for path, part in module.named_modules()
                 for name in part._non_persistent_buffers_set}
    yield from module.named_parameters(remove_duplicate=False)
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name not in transient)


def names_by_tensor(module: Any) -> dict[str, set[str]]:
    """For each name of a stored tensor, all names of that tensor: tied weights have several."""
    by_tensor: dict[int, set[str]] = {}
    for name, tensor in stored_tensors(module):
        by_tensor.setdefault(id(tensor), set()).add(name)
    return {name: names for names in by_tensor.values() for name in names}
