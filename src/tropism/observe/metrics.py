"""The registry of metrics, and their sums, which stay on the device until they are read."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Metric:
    """One key of `metrics.jsonl`.

    Args:
        key: its name; `loss/*` stands for all names below `loss/`.
        unit: of its value; empty for a plain number.
        per: what the mean is taken over; empty for a value that is not a mean.
        meaning: what it measures.
        better: which way an evaluation improves; empty if neither way does.
    """

    key: str
    unit: str
    per: str
    meaning: str
    better: Literal["", "lower", "higher"] = ""


OtherNames = Mapping[str, Mapping[str, str | Callable[[Mapping[str, float]], float | None]]]
"""For `train` and `eval` records, further names of metrics: each with the key of ours, or with a function of the
record."""


def renamed(record: Mapping[str, float], names: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a record under further names, except those that it does not have.

    Args:
        names: of one kind of record in `OtherNames`.
    """
    found = {name: record.get(source) if isinstance(source, str) else source(record) for name, source in names.items()}
    return {name: value for name, value in found.items() if value is not None}


BASELINES = "baselines/"
"""Prefix of the metrics of the initial policy that every evaluation repeats."""

_INTERVAL = "end of its 95% confidence interval"

METRICS: dict[str, Metric] = {metric.key: metric for metric in (
    Metric("loss", "nats", "unit", "minimized value: mean loss per completion (KTO), pair (DPO) or token (SFT), or the "
           "weighted sum of the terms. Train records include `router_aux`", "lower"),
    Metric("loss/*", "nats", "unit or token", "each term by its name, before its weight, if there are several",
           "lower"),
    Metric("kd/ce", "nats", "token", "cross-entropy of the completions under the student (KD)", "lower"),
    Metric("kd/divergence", "nats", "token", "divergence of the student from the teacher, including T^2", "lower"),
    Metric("perplexity", "", "token", "exp of the cross-entropy per supervised token (SFT, KD)", "lower"),
    Metric("rewards/chosen", "nats", "completion", "mean reward of chosen or desirable completions: beta x log-ratio, "
           "or beta x log-prob for a loss without a reference", "higher"),
    Metric("rewards/rejected", "nats", "completion", "mean reward of rejected or undesirable completions", "lower"),
    Metric("rewards/margins", "nats", "pair or class", "chosen minus rejected reward; for KTO of the class means",
           "higher"),
    Metric("rewards/accuracies", "share", "pair", "share of pairs with a margin above 0; a margin of 0 counts one half",
           "higher"),
    Metric("rewards/accuracies_low", "share", "prompt", f"lower {_INTERVAL}", "higher"),
    Metric("rewards/accuracies_high", "share", "prompt", f"upper {_INTERVAL}", "higher"),
    Metric("rewards/auc", "share", "completion", "probability that a desirable reward exceeds an undesirable one",
           "higher"),
    Metric("rewards/auc_low", "share", "prompt", f"lower {_INTERVAL}", "higher"),
    Metric("rewards/auc_high", "share", "prompt", f"upper {_INTERVAL}", "higher"),
    Metric("logps/chosen", "nats", "completion", "mean log-prob of chosen or desirable completions", "higher"),
    Metric("logps/rejected", "nats", "completion", "mean log-prob of rejected or undesirable completions", "lower"),
    Metric("saturated", "share", "unit", "share of units on a flat part of the loss, which teach nothing: the "
           "derivative is below a thousandth of the largest"),
    Metric("kl", "nats", "step", "reference point of KTO: `kl/raw`, but at least 0"),
    Metric("kl/raw", "nats", "unit", "mean log-ratio of the mismatched completions of the step"),
    Metric("kl/stderr", "nats", "mismatched pair", "standard error of `kl/raw`"),
    Metric("router_aux", "", "step", "load-balancing loss of mixture-of-experts routers, before its weight, in train "
           "records. Even routing gives the number of experts per token"),
    Metric(f"{BASELINES}logps", "share", "", "AUC or accuracy with the initial policy's summed log-prob as the score"),
    Metric(f"{BASELINES}logps_per_token", "share", "", "AUC or accuracy with its log-prob per token as the score"),
    Metric(f"{BASELINES}length", "share", "", "AUC or accuracy with the length of the completion as the score"),
    Metric("skipped", "steps", "", "non-finite steps that were skipped (`--on-nonfinite skip`) and are not part of the "
           "means; absent if there are none"),
    Metric("grad_norm", "nats", "step", "global norm of the gradient before clipping"),
    Metric("learning_rate", "", "step", "learning rate of the step"),
    Metric("epoch", "epochs", "", "passes over the training data so far"),
    Metric("examples", "units", "", "units trained on so far"),
    Metric("tokens", "tokens", "", "prompt and completion tokens so far, as if each row were computed alone"),
    Metric("tokens/computed", "tokens", "", "tokens packed so far, including the reference point and the forward pass "
           "before the step of `bco`, `aot`, `aot_unpaired` and `--router-aux-weight`"),
    Metric("tokens_per_second", "tokens/s", "", "tokens of this record divided by its time"),
    Metric("step_time", "s", "step", "wall time of an optimizer step"),
    Metric("memory/peak_gib", "GiB", "", "peak GPU memory since step 1; on a CPU, peak resident memory of the process"),
    Metric("compile/recompiles", "", "", "graphs of compiled layers that were compiled again after the start; only if "
           "layers are compiled"),
)}
"""The registry of metrics. `docs/run-directory.md` is generated from it."""


def direction(key: str) -> Literal["", "lower", "higher"]:
    """Which way a metric of an evaluation improves; empty if neither way does, or for an unknown metric."""
    metric = METRICS.get(key) or METRICS.get(f"{key.split('/')[0]}/*")
    return metric.better if metric else ""


_MODES: dict[str, Literal["lower", "higher"]] = {"max": "higher", "min": "lower"}


def is_known(key: str) -> bool:
    """Whether a metric is one of ours, and not of an evaluator."""
    return key in METRICS or f"{key.split('/')[0]}/*" in METRICS or key.startswith(BASELINES)


def goal(text: str) -> tuple[str, Literal["", "lower", "higher"]]:
    """The metric that an option names, and which way it improves. One of an evaluator is `NAME:max` or `NAME:min`."""
    name, _, mode = text.rpartition(":")
    return (name, _MODES[mode]) if name and mode in _MODES else (text, direction(text))


BOOKKEEPING = frozenset(("learning_rate", "epoch", "examples", "tokens", "tokens/computed", "tokens_per_second",
                         "step_time", "memory/peak_gib", "compile/recompiles", "train/lr", "train/global_step",
                         "eval/global_step"))
"""Keys about the progress and speed of a run, not about what it learned."""


class Tally:
    """Sums and counts by key, kept on the device. Reading them is one copy, and no step waits for it."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, pairs: Mapping[str, tuple[Tensor, Tensor | int]]) -> None:
        """Add (sum, count) pairs."""
        for key, (total, count) in pairs.items():
            total = total.detach().double()
            # Filled on the device: copying a number from the host would wait for all queued work.
            counted = count.double() if isinstance(count, Tensor) else torch.full_like(total, count)
            pair = torch.stack((total, counted))
            self._sums[key] = self._sums[key] + pair if key in self._sums else pair

    def stacked(self, keys: Iterable[str], device: torch.device) -> Tensor:
        """`[keys, 2]` sums and counts in float64; zeros for a key that this process has not seen."""
        zero = torch.zeros(2, dtype=torch.float64, device=device)
        return torch.stack([self._sums.get(key, zero) for key in keys])


def means(keys: Iterable[str], totals: Tensor) -> dict[str, float]:
    """Mean of each key. A key with count 0 is absent."""
    rows: list[list[float]] = totals.tolist()
    return {key: total / count for key, (total, count) in zip(keys, rows, strict=True) if count}
