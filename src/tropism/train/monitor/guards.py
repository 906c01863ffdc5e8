"""Watchers over the records of a run. They say in words what goes wrong, and what to try; they change nothing.

Each guard speaks once, and again when what it speaks of has doubled since. Their state is plain JSON, so that a resumed
run says the same at the same steps.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tropism.methods import Method

WINDOW = 10
"""Records that are averaged: a single record is as noisy as its rows."""
ERRORS = 3.0
"""Standard errors by which two windows must differ: of a thousand pairs of equal windows a few do."""
AGAIN = 2.0
"""A guard speaks again when its figure has grown by this factor."""
ZEROS = 3
"""Records in a row with a gradient norm of exactly 0: one can be a step of one class, three are none."""
LARGE_MARGIN = 50.0
"""Reward margin in nats: sigmoid(50) is 1 in float64, so nothing is learned any more, and rounding of the log-probs
grows with them."""
FAR_REWARD = 5.0
"""beta x nats from the reference: sigmoid(5) is 0.993, where the utility of KTO and the loss of DPO are flat."""
FALLEN_NATS = 10.0
"""Fall of the chosen log-prob that is clear whatever the length: a completion has become e^10 times less likely."""
FALLEN_SHARE = 0.1
"""The same for short completions, as a share of the log-prob at the start; and per token, in nats."""
FALLEN_LEAST = 1.0
"""Nats below which no fall is spoken of."""
SATURATED_SHARE = 0.5
"""Share of units without a gradient: beyond it the effective batch is less than half of what was asked for."""
RISEN_SHARE = 0.2
"""Rise of the loss, as a share of its start."""

_KEPT = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "kl/raw", "saturated")


@dataclass(frozen=True, slots=True)
class Notice:
    """One sentence of a guard.

    Args:
        step: of the record that caused it.
        guard: which guard speaks.
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
    """What guards must know of a run.

    Args:
        view: `paired`, `unpaired` or `single`.
        losses: names of its losses.
        beta: what a log-ratio is multiplied with to be a reward; 0 without rewards.
        has_reference: rewards are log-ratios.
        per_token: rewards are means per token.
        from_start: the reference is the policy as it was before step 1, so that rewards begin at 0 for every row.
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
        """Rewards compare each row with itself before training, so that which rows a record has is no matter."""
        return self.has_reference and self.from_start

    @property
    def likelihood(self) -> str:
        """How a likelihood term is added, where there is none."""
        return "" if "sft" in self.losses or not self.losses else f"a likelihood term (`--loss {self.losses[0]},sft`), "


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
        """Look at a train record.

        Returns:
            What there is to say of it.
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
        """Everything that decides what is said next."""
        return {"first": {key: list(values) for key, values in self._first.items()},
                "last": {key: list(values) for key, values in self._last.items()},
                "seen": dict(self._seen), "zeros": self._zeros, "said": dict(self._said)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state()`."""
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
        """Mean of the last window, once there is a whole one."""
        values = self._last.get(key, [])
        return sum(values) / WINDOW if len(values) == WINDOW else None

    def start(self, key: str) -> float:
        """The first value: with the default reference rewards begin at exactly 0."""
        return self._first[key][0]

    def change(self, key: str, matched: bool = False) -> tuple[float, float, float] | None:
        """Value at the start, value now, and the standard error of their difference.

        Args:
            matched: the first value is no matter of chance; otherwise the first window is compared with a later one
                that does not overlap it.
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
"""How bad it is, on a scale that only the guard knows, and the sentence."""


def _gradient(guards: Guards, metrics: Mapping[str, float]) -> _Found:
    if guards.zeros < ZEROS:
        return None
    return guards.zeros, (
        f"the gradient has been exactly 0 for {guards.zeros} records in a row: nothing is learned. Is every example "
        "saturated (a smaller --beta), or does nothing trainable touch the loss?")


def _margin(guards: Guards, metrics: Mapping[str, float]) -> _Found:
    margin = metrics.get("rewards/margins", 0.0)
    if margin <= LARGE_MARGIN:
        return None
    return margin, (
        f"the mean reward margin is {margin:.0f} nats, above {LARGE_MARGIN:.0f}: the examples are long since told "
        "apart, and the policy only moves further from where it began. A lower --learning-rate, a smaller --beta or "
        "fewer steps; look for something trivial that separates the sides, such as length or an ending")


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
    other = "`--loss apo_zero`, " if subject.view == "paired" and "apo_zero" not in subject.losses else ""
    return fall, (
        f"{side} completions are {fall:.3g} nats{' per token' if per_token else ''} less likely than at the start "
        f"while margins grow ({margins[0]:+.3g} to {margins[1]:+.3g}): the policy unlearns both sides. "
        f"Try {subject.likelihood}{other}a higher --beta, or a lower --learning-rate")


def _distance(guards: Guards, metrics: Mapping[str, float]) -> _Found:
    """KTO's own estimate where there is one, else the mean size of the rewards of both classes."""
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
        f"the policy has gone far from where it started: {what} is up by {from_start * scale:.3g} nats{per}, times "
        f"beta {from_start:.3g}. Read some of its answers before trusting the metrics; a lower --learning-rate, a "
        "higher --beta or fewer steps keep it closer")


def _saturated(guards: Guards, metrics: Mapping[str, float]) -> _Found:
    share = guards.recent("saturated")
    if share is None or share <= SATURATED_SHARE:
        return None
    units = "pairs" if guards.subject.view == "paired" else "completions"
    return share, (
        f"{share:.0%} of the {units} have a flat loss and teach nothing any more. Stop here (fewer --epochs, or "
        "--stop-metric), or take a smaller --beta, with which examples saturate later")


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
        f"the loss {how} (mean of {WINDOW} records: {before:.4g} at first, {now:.4g} now). A lower --learning-rate, a "
        "longer warm-up (--warmup-ratio) or a smaller --max-grad-norm")


GUARDS: dict[str, Callable[[Guards, Mapping[str, float]], _Found]] = {
    "zero_gradient": _gradient, "large_margin": _margin, "chosen_falls": _chosen_falls, "far_from_reference": _distance,
    "saturated": _saturated, "loss_rises": _loss_rises}
"""Every guard by the name under which it is written down."""
