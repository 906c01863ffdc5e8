"""Metrics of scored rows, with the rules of the evaluation during training."""

import math

import torch

from tropism.commands.scoring.scores import Scores
from tropism.losses.scored import Scored
from tropism.methods.build import build_method
from tropism.train.evaluation.evaluator import baselines, summarize

_LOSSES = {"paired": "sigmoid", "unpaired": "kto"}  # any loss whose reward is beta x log-ratio


def figures(scores: Scores, beta: float) -> dict[str, float]:
    """Metrics by the keys that `docs/evaluate.md` explains.

    Args:
        beta: factor between a log-ratio and a reward.
    """
    scored, rows = scores.scored, scores.rows
    found: dict[str, float] = {"logps/all": float(scored.logps.mean())}
    for name, side in _sides(scores).items():
        found |= _per_token(name, scored.take(torch.tensor(side)))
    if scores.view == "single":
        return found
    labels = [row.desirable for row in rows]
    method = build_method(scores.view, {"loss": _LOSSES[scores.view], "beta": beta}, labels)
    metrics = summarize(rows, method, scored, scores.noise(beta))
    wanted = ("logps/", "rewards/") if scores.has_reference else ("logps/",)
    found |= {key: value for key, value in metrics.items() if key.startswith(wanted)}
    return found | baselines(rows, scored)


def _sides(scores: Scores) -> dict[str, list[int]]:
    """Indices of all completions, and of the chosen and the rejected ones if there are any."""
    sides: dict[str, list[int]] = {"": [], "/chosen": [], "/rejected": []}
    for row in scores.rows:
        for number in range(len(row.completions)):
            index = len(sides[""])
            sides[""].append(index)
            if scores.view != "single":
                chosen = number == 0 if scores.view == "paired" else row.desirable
                sides["/chosen" if chosen else "/rejected"].append(index)
    return {name: side for name, side in sides.items() if side}


def _per_token(name: str, side: Scored) -> dict[str, float]:
    tokens = int(side.lengths.sum())
    found = {f"perplexity{name}": math.exp(min(-float(side.logps.sum()) / tokens, 700.0))}
    if side.divergence is not None:
        found[f"kl/token{name}"] = float(side.divergence.sum()) / tokens
    return found
