"""NeMo-Aligner's published KTO training in plain torch, for one process: padded forward passes and autograd."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def logps_of(model: Any, ids: Tensor, labels: Tensor, average: bool) -> Tensor:
    """`[n]` log-probs of the labeled tokens of right-padded rows, summed or averaged; 0 for a row without labels."""
    each = model(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    mask = labels[:, 1:] > -1
    total = (each * mask).sum(1)
    return total / mask.sum(1).clamp(min=1) if average else total


def micro_batch_loss(policy: Any, reference: Any, batch: dict[str, Tensor], rows: slice, beta: float, average: bool,
                     desirable: float, undesirable: float) -> tuple[Tensor, Tensor, Tensor]:
    """The mean loss of some rows, their log-ratios `[n]` and those of their mismatched rows `[n]`.

    z0 is clamped in the micro-batch: an average over processes would follow."""
    def ratios(prefix: str, labels: str) -> Tensor:
        ids, marked = batch[prefix][rows], batch[labels][rows]
        with torch.no_grad():
            base = logps_of(reference, ids, marked, average)
        return logps_of(policy, ids, marked, average) - base

    own = ratios("samples", "sample_labels")
    other = ratios("kl_samples", "kl_sample_labels").detach()
    point = other.mean().clamp(min=0)
    losses = torch.where(batch["preference"][rows] == 1, desirable * (1 - torch.sigmoid(beta * (own - point))),
                         undesirable * (1 - torch.sigmoid(beta * (point - own))))
    return losses.mean(), own.detach(), other


def figures(policy: Any, reference: Any, batch: dict[str, Tensor], micro: int, *, backward: bool, beta: float = 0.2,
            average: bool = False, desirable: float = 1.0, undesirable: float = 1.0) -> dict[str, float]:
    """Forward (and backward) over a global batch in micro-batches; what the trainer logs of it."""
    count = len(batch["samples"])
    parts = [slice(start, start + micro) for start in range(0, count, micro)]
    losses, own, other = [], [], []
    for rows in parts:
        with torch.set_grad_enabled(backward):
            loss, ratios, kl = micro_batch_loss(policy, reference, batch, rows, beta, average, desirable, undesirable)
        if backward:
            (loss / len(parts)).backward()
        losses.append(float(loss.detach()))
        own.append(ratios)
        other.append(kl)
    rewards, good = torch.cat(own), batch["preference"] == 1
    chosen, rejected = (float(rewards[side].mean()) for side in (good, ~good))
    return {"loss": sum(losses) / len(losses), "kl": float(torch.cat(other).clamp(min=0).mean()),
            "rewards_chosen_mean": chosen, "rewards_rejected_mean": rejected,
            "rewards_all_mean": float(rewards.mean()), "rewards_all_std": float(rewards.std()),
            "rewards_margin": float(torch.tensor(chosen).nan_to_num() - torch.tensor(rejected).nan_to_num())}


def train(policy: Any, reference: Any, optimizer: Any, scheduler: Any, loader: Iterable[Any], *, epochs: int,
          micro: int, clip: float = 0.0, max_steps: int = -1, **settings: Any) -> list[dict[str, float]]:
    """Train as published; returns what was logged of each step."""
    logged: list[dict[str, float]] = []
    for _ in range(epochs):
        for batch in loader:
            if 0 <= max_steps <= len(logged):
                return logged
            optimizer.zero_grad()
            found = figures(policy, reference, batch, micro, backward=True, **settings)
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), clip if clip > 0 else float("inf"))
            found |= {"grad_norm": float(norm), "lr": optimizer.param_groups[0]["lr"]}
            optimizer.step()
            scheduler.step()
            logged.append(found)
    return logged
