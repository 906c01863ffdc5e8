"""OpenRLHF's published training in plain torch: padded forward passes, autograd, and nothing of Tropism.

A process of a run is one of several `loaders`, whose micro-batches of equal number form one of the run.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

Loss = Callable[[Any, Any, Sequence[Any]], Tensor]
"""Of the policy, the frozen model, and the micro-batches of all processes."""


def logps_of(model: Any, ids: Tensor, attention_mask: Tensor, lengths: Iterable[int]) -> tuple[Tensor, Tensor]:
    """`[n]` summed log-probs of the tokens after each prompt of right-padded rows, and their number."""
    ids, attention_mask = ids.reshape(len(ids), -1), attention_mask.reshape(len(ids), -1)
    each = model(input_ids=ids, attention_mask=attention_mask).logits[:, :-1].log_softmax(-1)
    counted = attention_mask.clone()
    for row, length in enumerate(lengths):
        counted[row, :length] = 0
    return (each.gather(2, ids[:, 1:, None]).squeeze(2) * counted[:, 1:]).sum(1), counted[:, 1:].sum(1)


def kto(beta: float = 0.01, desirable: float = 1.0, undesirable: float = 1.0) -> Loss:
    """z0: mean over the rows of a process, then over processes, then clamped."""
    def loss(policy: Any, reference: Any, batches: Sequence[Any]) -> Tensor:
        ratios = []
        for ids, mask, _, lengths in batches:
            with torch.no_grad():
                base = logps_of(reference, ids, mask, lengths)[0]
            ratios.append(logps_of(policy, ids, mask, lengths)[0] - base)
        halves = [len(ratio) // 2 for ratio in ratios]
        point = torch.stack([ratio[half:].detach().mean() for ratio, half in zip(ratios, halves, strict=True)])
        z0 = point.mean().clamp(min=0)
        means = []
        for (_, _, labels, _), ratio, half in zip(batches, ratios, halves, strict=True):
            good, own = torch.as_tensor(labels[:half]) == 1, ratio[:half]
            means.append(torch.where(good, desirable * (1 - torch.sigmoid(beta * (own - z0))),
                                     undesirable * (1 - torch.sigmoid(beta * (z0 - own)))).mean())
        return torch.stack(means).mean()

    return loss


def dpo(beta: float = 0.01, smoothing: float = 0.0, ipo: bool = False, nll: float = 0.0) -> Loss:
    def loss(policy: Any, reference: Any, batches: Sequence[Any]) -> Tensor:
        means = []
        for chosen, chosen_mask, rejected, rejected_mask, lengths in batches:
            sides = [(chosen, chosen_mask, lengths), (rejected, rejected_mask, lengths)]
            ours = [logps_of(policy, *side) for side in sides]
            with torch.no_grad():
                theirs = [logps_of(reference, *side)[0] for side in sides]
            h = (ours[0][0] - ours[1][0]) - (theirs[0] - theirs[1])
            preference = ((h - 1 / (2 * beta)) ** 2 if ipo else
                          -(1 - smoothing) * logsigmoid(beta * h) - smoothing * logsigmoid(-beta * h))
            means.append(preference.mean() - nll * (ours[0][0] / ours[0][1]).mean())
        return torch.stack(means).mean()

    return loss


def kd(coefficient: float = 0.4) -> Loss:
    """Each response from its first token to its last one: without the two positions that OpenRLHF adds."""
    def loss(policy: Any, teacher: Any, batches: Sequence[Any]) -> Tensor:
        means = []
        for ids, mask, early in batches:
            counted = (early[:, :-1] > 0) & (mask[:, 1:] > 0)  # the published mask is at the predicting token
            logq = policy(input_ids=ids, attention_mask=mask).logits[:, :-1].log_softmax(-1)
            with torch.no_grad():
                p = teacher(input_ids=ids, attention_mask=mask).logits[:, :-1].softmax(-1)
            ce = -logq.gather(2, ids[:, 1:, None]).squeeze(2)
            distil = -(p * logq).sum(-1)
            means.append((((1 - coefficient) * ce + coefficient * distil) * counted).sum() / counted.sum())
        return torch.stack(means).mean()

    return loss


def train(policy: Any, frozen: Any, optimizer: Any, scheduler: Any, loaders: Sequence[Any], loss: Loss, *, epochs: int,
          accumulation: int, max_norm: float = 0.0, skip: int = 0, most: int | None = None) -> list[float]:
    """Train as published: each micro-batch's mean is divided by the accumulation number; micro-batches that an epoch
    leaves over belong to the next update, and after the last epoch to none.

    Args:
        skip: updates that were done before.
        most: updates after which it ends.

    Returns:
        The learning rate of each update.
    """
    rates: list[float] = []
    done = 0
    for epoch in range(epochs):
        for loader in loaders:
            if hasattr(getattr(loader, "sampler", None), "set_epoch"):
                loader.sampler.set_epoch(epoch)
        for batches in zip(*loaders, strict=True):
            done += 1
            if done <= skip * accumulation or len(rates) == most:
                continue
            (loss(policy, frozen, batches) / accumulation).backward()
            if done % accumulation == 0:
                if max_norm > 0:
                    torch.nn.utils.clip_grad_norm_(policy.parameters(), max_norm)
                rates.append(optimizer.param_groups[0]["lr"])
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
    return rates


@torch.no_grad()
def evaluate(policy: Any, frozen: Any, loader: Iterable[Any], loss: Loss) -> float:
    """The mean of the micro-batches' losses."""
    found = [float(loss(policy, frozen, [batch])) for batch in loader]
    return sum(found) / len(found)
