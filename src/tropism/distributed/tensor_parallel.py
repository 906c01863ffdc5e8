"""Tensor parallelism: several processes compute each layer of a model together, by the plan that comes with the model.

Column-wise layers divide their outputs and row-wise layers their inputs, followed by a sum over processes. This divides
attention heads and the width of the MLP, while the hidden states between layers are complete on each process. The
vocabulary is divided too, in the embedding and in the head.
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

# torch warns whenever it gathers a weight that is divided along two axes, which is intended here.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

_STYLES: dict[str, Any] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
_SUMMED = "replicated_with_grad_allreduce"


def divide(module: Any, plan: Mapping[str, str], mesh: Mesh) -> list[str]:
    """Divide the layers of a causal model over the tensor axis, in place. Works on the meta device too.

    Args:
        module: a transformers causal model.
        plan: style by pattern of module names in the backbone, as in transformers.

    Returns:
        Names of replicated weights that each process uses for its own heads only. Their gradients must be summed.

    Raises:
        ModelError: if there is no plan, or it has an unsupported style.
        UsageError: if the number of heads is not divisible.
    """
    size, name = mesh.size("tensor"), type(module).__name__
    config = module.config.get_text_config()
    if not plan:
        raise ModelError(f"{name}: transformers has no tensor-parallel plan for this model. Remove --parallel.tensor.")
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, key, None) or size
        if heads % size:
            found = f"{heads} {key.removeprefix('num_').replace('_', ' ')}"
            raise UsageError(f"--parallel.tensor {size}: {name} has {found}, which is not divisible by {size}")
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
        raise ModelError(f"{name}: tensor parallelism does not support {path} (style {style!r} in its plan). Remove "
                         "--parallel.tensor.")
    _divide_vocabulary(module, axis)
    return summed


def _divide_vocabulary(module: Any, axis: Any) -> None:
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    tied = head.weight is embedding.weight
    if not isinstance(embedding, nn.Embedding):
        raise ModelError(f"{type(module).__name__}: tensor parallelism does not support its embedding. Remove "
                         "--parallel.tensor.")
    parallelize_module(embedding, axis, RowwiseParallel(input_layouts=Replicate()))
    parallelize_module(head, axis, ColwiseParallel(output_layouts=Replicate()))
    if tied:
        head.weight = embedding.weight
