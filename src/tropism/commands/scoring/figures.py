"""Metrics of scored rows: the evaluation record of training, and per-token figures."""

import math

import torch

from tropism.commands.scoring.own_run import plain_method
from tropism.commands.scoring.scores import Scores
from tropism.losses.scored import Scored
from tropism.observe.metrics import BASELINES
from tropism.train.evaluation.evaluator import summarize


def figures(scores: Scores, beta: float | None = None) -> dict[str, float]:
    """Metrics by the keys that `docs/evaluate.md` explains.

    Args:
        beta: factor between a log-ratio and a reward, in place of the one in use. The losses of a run are then omitted.
    """
    scored, members = scores.scored, scores.units.members
    found: dict[str, float] = {"logps/all": float(scored.logps[members[:, :2]].mean())}
    for name, side in _sides(scores).items():
        found |= _per_token(name, scored.take(side), scores.has_kl)
    if scores.is_own and beta is None:
        return found | dict(scores.record)
    if scores.view == "single":
        return found
    method = scores.method if beta is None else plain_method(scores.view, beta)
    metrics = summarize(scores.rows, method, scored, scores.noise(method))
    wanted = ("logps/", "rewards/") if scores.has_reference else ("logps/",)
    found |= {key: value for key, value in metrics.items() if key.startswith(wanted)}
    return found | {key: value for key, value in scores.record.items() if key.startswith(BASELINES)}


def _sides(scores: Scores) -> dict[str, torch.Tensor]:
    """Indices of all completions, and of the chosen and the rejected ones if there are any."""
    units = scores.units
    sides = {"": units.members[:, :2].flatten()}
    if scores.view == "paired":
        sides |= {"/chosen": units.members[:, 0], "/rejected": units.members[:, 1]}
    elif units.desirable is not None:
        sides |= {"/chosen": units.members[units.desirable, 0], "/rejected": units.members[~units.desirable, 0]}
    return {name: side for name, side in sides.items() if len(side)}


def _per_token(name: str, side: Scored, has_kl: bool) -> dict[str, float]:
    tokens = int(side.lengths.sum())
    found = {f"perplexity{name}": math.exp(min(-float(side.logps.sum()) / tokens, 700.0))}
    if has_kl and side.divergence is not None:
        found[f"kl/token{name}"] = float(side.divergence.sum()) / tokens
    return found
