"""The table of metrics, and their sums, kept on the device until read."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Metric:
    """One key of `metrics.jsonl`: its unit, the divisor of its mean, and its meaning."""

    key: str
    unit: str
    per: str
    meaning: str
    better: Literal["", "lower", "higher"] = ""
    """Direction of improvement; empty if there is none."""


METRICS: dict[str, Metric] = {metric.key: metric for metric in (
    Metric("loss", "nats", "unit", "what is minimized: mean loss of a completion (KTO), a pair (DPO) or a token (SFT)",
           "lower"),
    Metric("loss/*", "nats", "unit or token", "each loss by its name, before its weight, where there are several",
           "lower"),
    Metric("kd/ce", "nats", "token", "cross-entropy of the completions under the student", "lower"),
    Metric("kd/divergence", "nats", "token", "divergence of the student from the teacher", "lower"),
    Metric("perplexity", "", "token", "exp of the cross-entropy per supervised token (SFT, KD)", "lower"),
    Metric("rewards/chosen", "nats", "completion", "mean reward of chosen or desirable completions: beta x log-ratio, "
           "or for a loss without a reference beta x log-prob", "higher"),
    Metric("rewards/rejected", "nats", "completion", "the same for rejected or undesirable ones", "lower"),
    Metric("rewards/margins", "nats", "pair or class", "chosen minus rejected reward; KTO: of the class means",
           "higher"),
    Metric("rewards/accuracies", "share", "pair", "pairs with a margin above 0; a margin of 0 counts one half",
           "higher"),
    Metric("rewards/accuracies_low", "share", "prompt", "lower end of its 95% interval", "higher"),
    Metric("rewards/accuracies_high", "share", "prompt", "upper end of its 95% interval", "higher"),
    Metric("rewards/auc", "share", "completion", "how often a desirable reward exceeds an undesirable one", "higher"),
    Metric("rewards/auc_low", "share", "prompt", "lower end of its 95% interval", "higher"),
    Metric("rewards/auc_high", "share", "prompt", "upper end of its 95% interval", "higher"),
    Metric("logps/chosen", "nats", "completion", "mean log-prob of chosen or desirable completions", "higher"),
    Metric("logps/rejected", "nats", "completion", "the same for rejected or undesirable ones", "lower"),
    Metric("saturated", "share", "unit", "units with almost no gradient: the derivative of their loss is below a "
           "thousandth of the largest"),
    Metric("kl", "nats", "step", "KTO's reference point: kl/raw, but at least 0"),
    Metric("kl/raw", "nats", "unit", "mean log-ratio of the mismatched completions of the step"),
    Metric("kl/stderr", "nats", "mismatched pair", "standard error of kl/raw"),
    Metric("router_aux", "", "step", "load-balancing loss of the routers, before its weight; part of `loss`. Even "
           "routing gives the experts per token"),
    Metric("baselines/logps", "share", "", "AUC or accuracy of the initial policy's summed log-prob as the score"),
    Metric("baselines/logps_per_token", "share", "", "the same for its log-prob per token"),
    Metric("baselines/length", "share", "", "the same for the completion's length alone"),
    Metric("skipped", "steps", "", "non-finite steps of this record, which changed nothing (--on-nonfinite skip); "
           "absent if there are none"),
    Metric("grad_norm", "nats", "step", "global norm of the gradient before clipping"),
    Metric("learning_rate", "", "step", "learning rate of the step"),
    Metric("epoch", "epochs", "", "passes over the training data so far"),
    Metric("examples", "units", "", "units trained on so far"),
    Metric("tokens", "tokens", "", "prompt + completion tokens so far, as if each row were computed separately"),
    Metric("tokens/computed", "tokens", "", "tokens computed so far, including those for the reference point"),
    Metric("tokens_per_second", "tokens/s", "", "tokens of this record divided by its time"),
    Metric("step_time", "s", "step", "wall time of a step"),
    Metric("memory/peak_gib", "GiB", "", "peak GPU memory; on a CPU, peak resident memory of the process"),
)}


def direction(key: str) -> Literal["", "lower", "higher"]:
    """Direction in which a metric improves; empty if there is none, or for an unknown metric."""
    metric = METRICS.get(key) or METRICS.get(f"{key.split('/')[0]}/*")
    return metric.better if metric else ""


BOOKKEEPING = frozenset(("learning_rate", "epoch", "examples", "tokens", "tokens/computed", "tokens_per_second",
                         "step_time", "memory/peak_gib"))
"""Keys for progress and speed, as opposed to results."""


class Tally:
    """Sums and counts by key, kept on the device. Reading all takes one copy, so that steps do not wait."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, pairs: Mapping[str, tuple[Tensor, Tensor | int]]) -> None:
        """Add (sum, count) pairs."""
        for key, (total, count) in pairs.items():
            total = total.detach().double()
            # Filled on the device: a copy of a host number would wait for everything queued before it.
            counted = count.double() if isinstance(count, Tensor) else torch.full_like(total, count)
            pair = torch.stack((total, counted))
            self._sums[key] = self._sums[key] + pair if key in self._sums else pair

    def stacked(self, keys: Iterable[str], device: torch.device) -> Tensor:
        """`[keys, 2]` sums and counts in float64; zeros for a key that this process has not seen."""
        zero = torch.zeros(2, dtype=torch.float64, device=device)
        return torch.stack([self._sums.get(key, zero) for key in keys])


def means(keys: Iterable[str], totals: Tensor) -> dict[str, float]:
    """Mean of each key. Keys with count 0 are omitted."""
    rows: list[list[float]] = totals.tolist()
    return {key: total / count for key, (total, count) in zip(keys, rows, strict=True) if count}
