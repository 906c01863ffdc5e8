"""The verdict on a run: whether its held-out rows show that it learned."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from tropism.errors import count_of
from tropism.observe.metrics import BASELINES

FEWEST_PROMPTS = 20
"""Held-out prompts below which an interval over resampled prompts is too narrow to judge by."""

STRETCH = 1.1
"""How much wider an interval is taken. Of 1,000 AUCs without an effect, intervals over 20 to 200 resampled prompts were
above 0.5 in up to 3.1%; stretched by a tenth in up to 2%."""

NO_ROWS = ("no rows were held out, so nothing shows whether the model learned. --eval-fraction 0.1 holds out a tenth "
           "of the prompts; --eval-data FILE names other rows, and eval_dataloader gives batches of them.")
_RANKINGS = {"rewards/auc": "reward AUC", "rewards/accuracies": "reward accuracy"}

Word = Literal["learned", "not shown", "got worse", "none"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the held-out rows say.

    Args:
        word: `learned`, `not shown` or `got worse`; `none` without held-out rows.
        why: the figures that it rests on.
    """

    word: Word
    why: str

    def __str__(self) -> str:
        return f"verdict: {self.word}: {self.why}"

    def to_json(self) -> dict[str, str]:
        """Plain values for the manifest."""
        return {"word": self.word, "why": self.why}

    @classmethod
    def read(cls, found: Any) -> "Verdict | None":
        """The verdict that `to_json` wrote; None if there is none."""
        if not isinstance(found, dict) or not isinstance(found.get("why"), str):
            return None
        word = next((word for word in get_args(Word) if word == found.get("word")), None)
        return None if word is None else cls(word, found["why"])


def judge_ranking(first: Mapping[str, float], last: Mapping[str, float], prompts: int) -> Verdict | None:
    """The verdict on rewards that rank completions or pairs; None for records without a ranking.

    Learned: the 95% interval of the last AUC or accuracy, stretched by a tenth, lies above 0.5, above its value before
    training, and above each baseline of the initial policy. Got worse: it lies below the value before training. Else
    not shown.

    Args:
        first, last: evaluation records, before training and at the end.
        prompts: that are held out.
    """
    key = next((key for key in _RANKINGS if key in last), None)
    if key is None:
        return None
    low, high = last.get(f"{key}_low"), last.get(f"{key}_high")
    if low is None or high is None or not all(map(math.isfinite, (last[key], low, high))):
        return Verdict("not shown", f"the {_RANKINGS[key]} is {last[key]:.3f}, without an interval.")
    figure = f"the {_RANKINGS[key]} is {last[key]:.3f} (95%: {low:.3f} to {high:.3f})"
    before = first.get(key, 0.5)
    bars = {"0.5": 0.5, "its value before training": before}
    bars |= {f"the baseline {name.removeprefix(BASELINES)}": value for name, value in last.items()
             if name.startswith(BASELINES)}
    highest = max(bars, key=lambda name: bars[name])
    if prompts < FEWEST_PROMPTS:
        return _too_few(prompts, figure)
    low, high = _stretched(last[key], low, high)
    if low > bars[highest]:
        return Verdict("learned", f"{figure}, above 0.5, its value before training and all baselines "
                                  f"(at most {bars[highest]:.3f}).")
    if high < before:
        return Verdict("got worse", f"{figure}, below its value before training ({before:.3f}).")
    value = "" if highest == "0.5" else f" ({bars[highest]:.3f})"
    return Verdict("not shown", f"{figure}, which is not clearly above {highest}{value}.")


def judge_improvement(what: str, value: float, low: float, high: float, prompts: int) -> Verdict:
    """The verdict on a mean whose improvement has a 95% interval: learned if it lies above 0, got worse if below, again
    stretched by a tenth.

    Args:
        what: the mean that should fall, in nats per token.
        value, low, high: by how much it fell.
        prompts: that are held out.
    """
    figure = f"{what} fell by {value:.4f} nats per token (95%: {low:.4f} to {high:.4f})"
    if prompts < FEWEST_PROMPTS:
        return _too_few(prompts, figure)
    least, most = _stretched(value, low, high)
    if least > 0:
        return Verdict("learned", f"{figure}.")
    if most < 0:
        return Verdict("got worse", f"{what} rose by {-value:.4f} nats per token (95%: {-high:.4f} to {-low:.4f}).")
    return Verdict("not shown", f"{figure}, which is not clearly above 0.")


def _stretched(value: float, low: float, high: float) -> tuple[float, float]:
    return value - STRETCH * (value - low), value + STRETCH * (high - value)


def _too_few(prompts: int, figure: str) -> Verdict:
    return Verdict("not shown", f"{count_of(prompts, 'held-out prompt')} cannot show it, at least {FEWEST_PROMPTS} "
                                f"can. {figure[0].upper()}{figure[1:]}.")
