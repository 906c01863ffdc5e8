"""Log-probs of padded rows, for the published methods that return them. Training does not use these."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from tropism.model.wrapped_module import model_inside


def forward(model: Any, ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Any]:
    """`[n, L, V]` logits, at least in float32, and the router loss of a mixture of experts; an empty list without one.

    Args:
        model: wrapped or not.
        ids, attention_mask: `[n, L]`, or `[n, 1, L]` as in the batches.
    """
    module = model_inside(model, "model")
    ids, attention_mask = (rows.reshape(len(rows), -1) for rows in (ids, attention_mask))
    out = module(input_ids=ids.to(module.device), attention_mask=attention_mask.to(module.device))
    aux = getattr(out, "aux_loss", None)
    return out.logits.to(torch.promote_types(out.logits.dtype, torch.float32)), [] if aux is None else aux


def batch_logps(logits: Tensor, ids: Tensor, attention_mask: Tensor,
                prompt_id_lens: Iterable[int]) -> tuple[Tensor, Tensor]:
    """`[n]` summed and mean log-probs of the tokens after each prompt, padded on the right.

    Args:
        logits: `[n, L, V]`.
        ids, attention_mask: `[n, L]` or `[n, 1, L]`.
        prompt_id_lens: tokens of each prompt.
    """
    ids, attention_mask = (rows.reshape(len(rows), -1).to(logits.device) for rows in (ids, attention_mask))
    lengths = torch.as_tensor(list(prompt_id_lens), device=logits.device)
    counts = attention_mask.bool() & (torch.arange(ids.shape[1], device=logits.device)
                                                        >= lengths[:, None])
    counts = counts[:, 1:]
    each = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2) * counts
    return each.sum(-1), each.sum(-1) / counts.sum(-1)
