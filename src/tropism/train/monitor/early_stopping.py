"""Early stopping: a run ends when a metric has not improved for some evaluations."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tropism.errors import UsageError, count_of
from tropism.methods import Method
from tropism.observe.metrics import direction, goal, is_known

DEFAULT_PATIENCE = 3
"""Evaluations in a row without improvement. With ten evaluations in a run, one or two are noise."""


@dataclass(frozen=True, slots=True)
class Rule:
    """When to stop.

    Args:
        metric: of the evaluation records, as `goal` takes it.
        patience: evaluations in a row without improvement that end the run.
        delta: smallest difference that counts as an improvement, in the metric's unit.
    """

    metric: str
    patience: int
    delta: float = 0.0


class EarlyStopping:
    """Watches the evaluations, including step 0, and decides when to stop.

    Args:
        rule: when to stop.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.metric, better = goal(rule.metric)
        self.higher = better == "higher"
        self.best: float | None = None
        self.best_step = 0
        self.without = 0

    def see(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Take an evaluation into account.

        Returns:
            Whether to stop now.

        Raises:
            UsageError: if the evaluation does not have the metric, as for an AUC of one class.
        """
        rule = self.rule
        if self.metric not in metrics:
            listed = sorted(key for key in metrics if direction(key) or not is_known(key))
            raise UsageError(f"--stop-metric {rule.metric} is not in the evaluation at step {step}. Its metrics: "
                             f"{', '.join(listed)}")
        value = metrics[self.metric]
        gain = 0.0 if self.best is None else (value - self.best if self.higher else self.best - value)
        if math.isfinite(value) and (self.best is None or gain > rule.delta):
            self.best, self.best_step, self.without = value, step, 0
        else:
            self.without += 1
        return self.over

    @property
    def over(self) -> bool:
        """Whether the run ends with the last evaluation that was seen."""
        return self.without >= self.rule.patience

    @property
    def reason(self) -> str:
        """Why the run ends, for the log and the manifest."""
        best = "none" if self.best is None else f"{self.best:.6g}"
        return (f"no improvement of {self.metric} in {count_of(self.without, 'evaluation')} "
                f"(best: {best} at step {self.best_step})")

    def state(self) -> dict[str, Any]:
        """What decides when to stop, as plain JSON."""
        return {"metric": self.rule.metric, "best": self.best, "best_step": self.best_step, "without": self.without}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`. The state of another metric is ignored."""
        if state.get("metric") != self.rule.metric:
            return
        self.best, self.best_step, self.without = state["best"], state["best_step"], state["without"]


def evaluation_keys(method: Method) -> tuple[str, ...]:
    """Metrics of a method's evaluations that can improve, if both classes are there."""
    keys = ["loss", *(term.key for term in method.terms)]
    if method.view == "single":
        keys += ["perplexity"] if any(term.row.name == "sft" for term in method.terms) else []
    else:
        score = "rewards/accuracies" if method.view == "paired" else "rewards/auc"
        keys += [score, f"{score}_low", f"{score}_high", "rewards/margins", "rewards/chosen", "rewards/rejected",
                 "logps/chosen", "logps/rejected"]
    return tuple(dict.fromkeys(key for key in keys if direction(key)))


def make_rule(metric: str | None, patience: int | None, delta: float | None, method: Method,
              has_evaluation: bool, has_evaluators: bool = False) -> Rule | None:
    """The checked rule that the options describe; None if there is none. The arguments are those of `check_evaluated`.

    Raises:
        UsageError: for a metric that the evaluations of this method do not have, without rows to evaluate, or for an
            option without effect.
    """
    if metric is None:
        for name, value in (("stop_patience", patience), ("stop_delta", delta)):
            if value is not None:
                raise UsageError(f"{_flag(name)} has no effect without --stop-metric")
        return None
    check_evaluated("stop_metric", metric, method, has_evaluation, has_evaluators)
    return Rule(metric, DEFAULT_PATIENCE if patience is None else patience, delta or 0.0)


def check_evaluated(option: str, metric: str, method: Method, has_evaluation: bool,
                    has_evaluators: bool = False) -> None:
    """Check that the evaluations have the metric of an option. The first one shows whether an evaluator returns it.

    Args:
        has_evaluation: rows are held out.
        has_evaluators: functions of the user add metrics.

    Raises:
        UsageError: with the known metrics, or with the options that provide rows to evaluate.
    """
    known = evaluation_keys(method)
    name, better = goal(metric)
    if metric not in known and not (has_evaluators and better and not is_known(name)):
        more = (". For a metric of an evaluator, say which way is better: "
                f"{metric}:max or {metric}:min" if has_evaluators and not is_known(name) else "")
        raise UsageError(f"{_flag(option)}: {metric!r} is not one of {', '.join(known)}{more}")
    if not has_evaluation:
        raise UsageError(f"{_flag(option)} {metric} requires rows to evaluate. Use --eval-fraction 0.1 to hold some "
                         "out, or --eval-data FILE.")


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"
