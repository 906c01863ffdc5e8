"""Guards: checks on the train records of a run. A notice says what goes wrong and what to try. Guards change nothing.

A guard warns once, and again when its figure has doubled. The state of the guards is plain JSON, so that a resumed run
gives the same notices at the same steps.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tropism.methods import Method

WINDOW = 10
"""Records in an average. A single record is too noisy."""
ERRORS = 3.0
"""Standard errors by which two windows must differ. Chance alone gives that in a few of a thousand pairs."""
AGAIN = 2.0
"""A guard warns again when its figure has grown by this factor."""
ZEROS = 3
"""Records in a row with a gradient norm of exactly 0. One can be chance (a step with a single class), three are not."""
LARGE_MARGIN = 50.0
"""Reward margin in nats. sigmoid(50) is 1 in float64, so the gradient is 0."""
FAR_REWARD = 5.0
"""beta x nats from the reference. sigmoid(5) is 0.993, where the utility of KTO and the loss of DPO are flat."""
FALLEN_NATS = 10.0
"""Fall of the chosen log-prob that counts at any length: a completion has become e^10 times less likely."""
FALLEN_SHARE = 0.1
"""The same for short completions, as a share of the log-prob at the start; and per token, in nats."""
FALLEN_LEAST = 1.0
"""Smallest fall that counts, in nats."""
SATURATED_SHARE = 0.5
"""Share of units without a gradient. Above it the effective batch is less than half of `--batch-size`."""
RISEN_SHARE = 0.2
"""Rise of the loss, as a share of its start."""

_KEPT = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "kl/raw", "saturated")


@dataclass(frozen=True, slots=True)
class Notice:
    """A notice of a guard.

    Args:
        step: of the record that caused it.
        guard: name of the guard.
        text: what is wrong, with figures, and what to try.
    """

    step: int
    guard: str
    text: str

    def to_json(self) -> dict[str, Any]:
        """A line of `notices.jsonl`."""
        return {"step": self.step, "guard": self.guard, "text": self.text}


@dataclass(frozen=True, slots=True)
class Subject:
    """The properties of a run that the guards use.

    Args:
        view: `paired`, `unpaired` or `single`.
        losses: names of its losses.
        beta: reward per nat of log-ratio; 0 without rewards.
        has_reference: rewards are log-ratios.
        per_token: rewards are means per token.
        from_start: the reference is the policy before step 1, so every reward starts at 0.
    """

    view: str
    losses: tuple[str, ...]
    beta: float = 0.0
    has_reference: bool = False
    per_token: bool = False
    from_start: bool = True

    @classmethod
    def of(cls, method: Method, reference: str | None = None) -> "Subject":
        """The subject of a run of this method.

        Args:
            reference: the option of that name.
        """
        first = method.preference
        reward = (first.row.reward or "") if first else ""
        return cls(method.view, tuple(term.row.name for term in method.terms), method.beta,
                   reward.endswith("logratio"), reward.startswith("mean"), reference in (None, "live"))

    @property
    def matched(self) -> bool:
        """Whether rewards compare each row with itself before training, so that records of different rows compare."""
        return self.has_reference and self.from_start

    @property
    def likelihood(self) -> str:
        """The remedy of adding a likelihood term; empty if there is one."""
        return "" if "sft" in self.losses or not self.losses else f"a likelihood term (--loss {self.losses[0]},sft), "


class Guards:
    """All guards of a run.

    Args:
        subject: what is trained.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._first: dict[str, list[float]] = {}
        self._last: dict[str, list[float]] = {}
        self._seen: dict[str, int] = {}
        self._zeros = 0
        self._said: dict[str, float] = {}

    def see(self, step: int, metrics: Mapping[str, float]) -> list[Notice]:
        """Check a train record.

        Returns:
            New notices.
        """
        for key in _KEPT:
            if key in metrics and math.isfinite(metrics[key]):
                self._keep(key, metrics[key])
        if "grad_norm" in metrics:
            self._zeros = self._zeros + 1 if metrics["grad_norm"] == 0 else 0
        notices = []
        for name, guard in GUARDS.items():
            found = guard(self, metrics)
            if found is not None and (name not in self._said or found[0] >= AGAIN * self._said[name]):
                self._said[name] = found[0]
                notices.append(Notice(step, name, f"step {step}: {found[1]}"))
        return notices

    def state(self) -> dict[str, Any]:
        """Everything that later notices depend on."""
        return {"first": {key: list(values) for key, values in self._first.items()},
                "last": {key: list(values) for key, values in self._last.items()},
                "seen": dict(self._seen), "zeros": self._zeros, "said": dict(self._said)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`."""
        self._first = {key: list(values) for key, values in state["first"].items()}
        self._last = {key: list(values) for key, values in state["last"].items()}
        self._seen, self._said = dict(state["seen"]), dict(state["said"])
        self._zeros = int(state["zeros"])

    def _keep(self, key: str, value: float) -> None:
        first, last = self._first.setdefault(key, []), self._last.setdefault(key, [])
        if len(first) < WINDOW:
            first.append(value)
        last.append(value)
        del last[:-WINDOW]
        self._seen[key] = self._seen.get(key, 0) + 1

    def recent(self, key: str) -> float | None:
        """Mean of the last window; None until it is full."""
        values = self._last.get(key, [])
        return sum(values) / WINDOW if len(values) == WINDOW else None

    def start(self, key: str) -> float:
        """The first value. With the default reference rewards start at exactly 0."""
        return self._first[key][0]

    def change(self, key: str, matched: bool = False) -> tuple[float, float, float] | None:
        """Value at the start, value now, and the standard error of their difference.

        Args:
            matched: compare with the first value, which is exact; otherwise with the first window, once the last one
                does not overlap it.
        """
        now = self.recent(key)
        if now is None or (not matched and self._seen[key] < 2 * WINDOW):
            return None
        variance = _variance(self._last[key]) / WINDOW
        if matched:
            return self.start(key), now, math.sqrt(variance)
        return (sum(self._first[key]) / WINDOW, now, math.sqrt(variance + _variance(self._first[key]) / WINDOW))

    @property
    def zeros(self) -> int:
        """Records in a row with a gradient norm of 0."""
        return self._zeros


def _variance(values: list[float]) -> float:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / (len(values) - 1)


_Found = tuple[float, str] | None
"""A figure that grows with the problem, and the sentence."""


def _gradient(guards: Guards, metrics: Mapping[str, float]) -> _Found:
    if guards.zeros < ZEROS:
        return None
    return guards.zeros, (
        f"the gradient norm has been exactly 0 for {guards.zeros} records in a row, so the policy learns nothing. If "
        "all examples are saturated, use a lower --beta. Otherwise check which weights are trainable.")


def _margin(guards: Guards, metrics: Mapping[str, float]) -> _Found:
    margin = metrics.get("rewards/margins", 0.0)
    if margin <= LARGE_MARGIN:
        return None
    return margin, (
        f"the mean reward margin is {margin:.0f} nats, above {LARGE_MARGIN:.0f}: the examples are fully separated, and "
        "more training only moves the policy away from its start. Use a lower --learning-rate, a lower --beta or fewer "
        "steps. Check the data for a trivial difference between the sides, such as length or the last token.")


def _chosen_falls(guards: Guards, metrics: Mapping[str, float]) -> _Found:
    """The likelihood of the preferred side falls while the margin grows (Pal et al. 2024, arXiv:2402.13228;
    Razin et al. 2024, arXiv:2410.08847)."""
    subject = guards.subject
    margins = guards.change("rewards/margins", subject.matched)
    found = guards.change("rewards/chosen" if subject.has_reference else "logps/chosen", subject.matched)
    if margins is None or found is None or subject.view == "single":
        return None
    scale = subject.beta if subject.has_reference else 1.0
    fall, error = (found[0] - found[1]) / scale, found[2] / scale
    per_token = subject.has_reference and subject.per_token
    at_start = abs(guards.start("logps/chosen")) if "logps/chosen" in guards._first else math.inf
    clear = FALLEN_SHARE if per_token else max(FALLEN_LEAST, min(FALLEN_NATS, FALLEN_SHARE * at_start))
    if fall <= max(clear, ERRORS * error) or margins[1] - margins[0] <= ERRORS * margins[2]:
        return None
    side = "chosen" if subject.view == "paired" else "desirable"
    other = "--loss apo_zero, " if subject.view == "paired" and "apo_zero" not in subject.losses else ""
    return fall, (
        f"{side} completions are {fall:.3g} nats{' per token' if per_token else ''} less likely than at the start, "
        f"while margins grew from {margins[0]:+.3g} to {margins[1]:+.3g}: the policy makes both sides less likely. "
        f"Try {subject.likelihood}{other}a higher --beta, or a lower --learning-rate.")


def _distance(guards: Guards, metrics: Mapping[str, float]) -> _Found:
    """KTO's own estimate of the KL if there is one, else the mean size of the rewards of both sides."""
    subject = guards.subject
    if not subject.has_reference:
        return None
    scale = 1 / subject.beta
    if (kl := guards.change("kl/raw", subject.matched)) is not None:
        from_start, what = subject.beta * (kl[1] - kl[0]), "KL from the reference (kl/raw)"
    else:
        sides = [guards.change(f"rewards/{side}", subject.matched) for side in ("chosen", "rejected")]
        known = [abs(side[1] - side[0]) for side in sides if side is not None]
        if len(known) < 2:
            return None
        from_start, what = sum(known) / 2, "mean |log-ratio| to the reference"
    if from_start <= FAR_REWARD:
        return None
    per = " per token" if subject.per_token else ""
    return from_start, (
        f"the policy is far from its start: {what} rose by {from_start * scale:.3g} nats{per} (times beta: "
        f"{from_start:.3g}). Read some completions before you trust the metrics. To stay closer, use a lower "
        "--learning-rate, a higher --beta or fewer steps.")


def _saturated(guards: Guards, metrics: Mapping[str, float]) -> _Found:
    share = guards.recent("saturated")
    if share is None or share <= SATURATED_SHARE:
        return None
    units = "pairs" if guards.subject.view == "paired" else "completions"
    return share, (
        f"{share:.0%} of the {units} are saturated: their loss is flat, and they no longer change the policy. Train "
        "for fewer --epochs, stop early with --stop-metric, or use a lower --beta, which saturates later.")


def _loss_rises(guards: Guards, metrics: Mapping[str, float]) -> _Found:
    found = guards.change("loss")
    if found is None:
        return None
    before, now, error = found
    rise, scale = now - before, abs(before)
    if rise <= max(RISEN_SHARE * scale, ERRORS * error):
        return None
    how = f"has diverged to {now / before:.1f} times its start" if before > 0 and now > 2 * before else "is rising"
    return rise, (
        f"the loss {how} (mean of {WINDOW} records: {before:.4g} at the start, {now:.4g} now). Use a lower "
        "--learning-rate, a longer warm-up (--warmup-ratio) or a lower --max-grad-norm.")


GUARDS: dict[str, Callable[[Guards, Mapping[str, float]], _Found]] = {
    "zero_gradient": _gradient, "large_margin": _margin, "chosen_falls": _chosen_falls, "far_from_reference": _distance,
    "saturated": _saturated, "loss_rises": _loss_rises}
"""Every guard by its name in `notices.jsonl`."""
