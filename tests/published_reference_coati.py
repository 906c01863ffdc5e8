"""coati's published KTO training in plain torch: padded forward passes, autograd, and nothing of Tropism."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def logps_of(model: Any, batch: dict[str, Tensor], prefix: str = "") -> Tensor:
    """`[n]` summed log-probs of the supervised tokens of padded rows."""
    ids, mask = batch[f"{prefix}input_ids"], batch[f"{prefix}loss_mask"]
    logits = model(input_ids=ids, attention_mask=batch[f"{prefix}attention_mask"].long()).logits
    each = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    return (each * mask[:, 1:]).sum(1)


def micro_batch_loss(policy: Any, reference: Any, batch: dict[str, Tensor], beta: float, desirable: float,
                     undesirable: float) -> tuple[Tensor, dict[str, float]]:
    """The mean loss of a micro-batch, and what the trainer logs of it: z0 from the batch's own mismatched rows."""
    with torch.no_grad():
        point = (logps_of(policy, batch, "kl_") - logps_of(reference, batch, "kl_")).mean().clamp(min=0)
        base = logps_of(reference, batch)
    ratios = logps_of(policy, batch) - base
    good = batch["label"].bool()
    losses = torch.where(good, desirable * (1 - torch.sigmoid(beta * (ratios - point))),
                         undesirable * (1 - torch.sigmoid(beta * (point - ratios))))
    rewards = beta * ratios.detach()
    chosen, rejected = (float(rewards[side].mean()) for side in (good, ~good))  # NaN for an absent class
    return losses.mean(), {"loss": float(losses.detach().mean()), "chosen_rewards": chosen,
                           "rejected_rewards": rejected, "margin": chosen - rejected}


def train(policy: Any, reference: Any, optimizer: Any, scheduler: Any, loader: Iterable[Any], *, epochs: int,
          accumulation: int, beta: float = 0.1, desirable: float = 1.0, undesirable: float = 1.0,
          max_norm: float = 0.0) -> list[dict[str, float]]:
    """Train as published; returns what was logged at each update. Gradients of micro-batches are summed, not averaged,
    and those of an epoch's leftover micro-batches stay until the first update of the next one."""
    logged: list[dict[str, float]] = []
    done = 0
    for _ in range(epochs):
        window: list[dict[str, float]] = []
        for batch in loader:
            loss, figures = micro_batch_loss(policy, reference, batch, beta, desirable, undesirable)
            loss.backward()
            window.append(figures)
            done += 1
            if done % accumulation == 0:
                if max_norm > 0:
                    torch.nn.utils.clip_grad_norm_(policy.parameters(), max_norm)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                logged.append({name: sum(one[name] for one in window) / len(window) for name in window[0]})
                logged[-1]["lr"] = optimizer.param_groups[0]["lr"]
                window = []
    return logged


@torch.no_grad()
def evaluate(policy: Any, reference: Any, loader: Iterable[Any], **settings: float) -> dict[str, float]:
    """Means over the batches of a loader."""
    found = [micro_batch_loss(policy, reference, batch, **settings)[1] for batch in loader]
    return {name: sum(one[name] for one in found) / len(found) for name in found[0]}
