"""NeMo-Aligner's batches of KTO rows."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

_UNSUPERVISED = -100


def kto_custom_collate(batch: Sequence[Mapping[str, Any]], eos_id: int, reset_position_ids: bool = False,
                       reset_attention_mask: bool = False, eod_mask_loss: bool = False) -> dict[str, Tensor]:
    """Collate rows as NeMo-Aligner's function of this name does. The mismatched row of each prompt has the response of
    the next row, and the last one that of the first.

    Args:
        batch: S rows with `prompt_tokens`, `response_tokens`, `sample_labels` (1-d tensors), `sample_length` and
            `preference` (1 for chosen).
        eos_id: the token that pads.
        reset_position_ids: start positions again after each EOS.
        reset_attention_mask: hide what is before an EOS from what is after it.
        eod_mask_loss: without effect on the result, as in NeMo-Aligner.

    Returns:
        `samples`, `kl_samples`, `sample_labels`, `kl_sample_labels` and `position_ids` `[S, L]`, `sample_length` and
        `preference` `[S]`, `attention_mask` `[S, 1, L, L]`, True where attention is masked. Tropism reads the tokens
        and labels only.
    """
    prompts, responses = ([torch.as_tensor(row[f"{name}_tokens"]) for row in batch] for name in ("prompt", "response"))
    tokens, labels = [], []
    for prompt, response, row in zip(prompts, responses, batch, strict=True):
        tokens.append(torch.cat((prompt, response)))
        labels.append(torch.as_tensor(row["sample_labels"]))
    for prompt, response in zip(prompts, responses[1:] + responses[:1], strict=True):
        tokens.append(torch.cat((prompt, response)))
        labels.append(torch.cat((torch.full_like(prompt, _UNSUPERVISED), response)))
    width = max(map(len, tokens + labels))  # labels of an overlong row may be longer than its tokens
    ids, marked = (pad_sequence([*parts, parts[0].new_zeros(width)], batch_first=True, padding_value=value)[:-1]
                   for parts, value in ((tokens, eos_id), (labels, _UNSUPERVISED)))
    count = len(batch)
    mask, positions = _masks(ids[:count], eos_id, reset_position_ids, reset_attention_mask)
    return {"samples": ids[:count], "kl_samples": ids[count:], "sample_labels": marked[:count],
            "kl_sample_labels": marked[count:], "attention_mask": mask, "position_ids": positions,
            "sample_length": torch.tensor([int(row["sample_length"]) for row in batch]),
            "preference": torch.tensor([int(row["preference"]) for row in batch])}


def _masks(ids: Tensor, eos_id: int, reset_positions: bool, reset_mask: bool) -> tuple[Tensor, Tensor]:
    """The causal mask `[S, 1, L, L]`, True where attention is masked, and the positions `[S, L]`."""
    count, width = ids.shape
    places = torch.arange(width)
    masked = places[None, :] > places[:, None]
    ends = (ids == eos_id).long()
    document = ends.cumsum(1) - ends  # an EOS belongs to the text that it ends
    mask = masked.expand(count, 1, width, width).clone()
    if reset_mask:
        mask |= (document[:, None, :, None] != document[:, None, None, :])
    positions = places.expand(count, width).clone()
    if reset_positions:
        starts = torch.where(torch.nn.functional.pad(ends, (1, -1)).bool(), positions, torch.zeros_like(positions))
        positions = positions - starts.cummax(1).values
    return mask, positions
