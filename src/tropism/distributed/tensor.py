"""Tensor parallel: the layers of a model computed by several processes together, by the model's own plan.

A column-wise layer has some of its outputs on each process and a row-wise layer some of its inputs, after which the
processes add up: so attention heads and the width of the MLP are divided, and what flows between layers is whole on
each of them. The vocabulary is divided too, in the embedding as in the head.
"""

import fnmatch
import logging
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tropism.distributed.mesh import Mesh
from tropism.errors import ModelError, UsageError

# Said wherever a weight that is divided along two axes is made whole, which is what we ask for.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

_STYLES: dict[str, Any] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
_SUMMED = "replicated_with_grad_allreduce"


def divide(module: Any, plan: Mapping[str, str], mesh: Mesh) -> list[str]:
    """Divide the layers of a causal model over the tensor axis, in place. It may be without memory still.

    Args:
        module: a transformers causal model.
        plan: style of each module by the pattern of its name in the backbone, as transformers has it.

    Returns:
        Names of weights that each process has whole and uses for its own heads alone: their gradients are to be summed.

    Raises:
        ModelError: if there is no plan, or a style of it is not served.
        UsageError: if heads cannot be divided.
    """
    size, name = mesh.size("tensor"), type(module).__name__
    config = module.config.get_text_config()
    if not plan:
        raise ModelError(f"{name} has no plan for tensor parallel; leave --parallel.tensor out")
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, key, None) or size
        if heads % size:
            found = f"{heads} {key.removeprefix('num_').replace('_', ' ')}"
            raise UsageError(f"parallel.tensor {size}: {name} has {found}, which cannot be divided by it")
    axis = mesh.device["tensor"]
    unserved: dict[str, str] = {}
    summed: list[str] = []
    for path, part in module.base_model.named_modules():
        style = next((style for pattern, style in plan.items() if fnmatch.fnmatchcase(path, pattern)), None)
        if style is None or part is module.get_input_embeddings():  # the vocabulary is divided below, in any plan
            continue
        if style in _STYLES and isinstance(part, nn.Linear):
            parallelize_module(part, axis, _STYLES[style]())
        elif style == _SUMMED:
            summed += [f"{module.base_model_prefix}.{path}.{weight}" for weight, _ in part.named_parameters()]
        else:
            unserved[style] = path
    if unserved:
        style, path = next(iter(unserved.items()))
        raise ModelError(f"{name}: tensor parallel is not served for {path} (style {style!r} of its plan); leave "
                         "--parallel.tensor out")
    _divide_vocabulary(module, axis)
    return summed


def _divide_vocabulary(module: Any, axis: Any) -> None:
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    tied = head.weight is embedding.weight
    if not isinstance(embedding, nn.Embedding):
        raise ModelError(f"{type(module).__name__}: tensor parallel is not served for its embedding")
    parallelize_module(embedding, axis, RowwiseParallel(input_layouts=Replicate()))
    parallelize_module(head, axis, ColwiseParallel(output_layouts=Replicate()))
    if tied:
        head.weight = embedding.weight

