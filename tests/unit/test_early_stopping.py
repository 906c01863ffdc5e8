"""Early stopping: when a run ends because its evaluations get no better."""

import json
from typing import Any

import pytest

from tropism.errors import UsageError
from tropism.methods import Method
from tropism.methods.build import build_method
from tropism.observe.metrics import METRICS, direction
from tropism.train.monitor.early_stopping import DEFAULT_PATIENCE, EarlyStopping, Rule, evaluation_keys, make_rule


def method(view: Any = "unpaired", loss: str = "kto") -> Method:
    return build_method(view, {"loss": loss}, [True, False])


def stops(rule: Rule, values: list[float]) -> int | None:
    """The evaluation, from 0, at which a run would end."""
    stopper = EarlyStopping(rule)
    return next((place for place, value in enumerate(values) if stopper.see(place, {rule.metric: value})), None)


@pytest.mark.parametrize(("rule", "values", "at"), [
    (Rule("rewards/auc", 2), [0.5, 0.6, 0.7, 0.8, 0.9], None),
    (Rule("rewards/auc", 2), [0.5, 0.7, 0.6, 0.65, 0.9], 3),
    (Rule("rewards/auc", 1), [0.5, 0.5], 1),  # equal is not better
    (Rule("loss", 2), [1.0, 0.9, 0.8, 0.85, 0.79, 0.8, 0.8], 6),  # lower is better
    (Rule("loss", 2, 0.1), [1.0, 0.95, 0.91, 0.5], 2),  # better by less than delta does not count
    (Rule("loss", 2, 0.1), [1.0, 0.95, 0.89, 0.85, 0.78, 0.7], None),  # measured from the best, so slow gains add up
    (Rule("loss", 2), [float("nan"), 1.0, float("nan"), float("nan")], 3),
    (Rule("rewards/auc", 3), [0.5, 0.4, 0.6, 0.4, 0.4, 0.6], 5),
])
def test_when_a_run_stops(rule: Rule, values: list[float], at: int | None) -> None:
    assert stops(rule, values) == at


@pytest.mark.parametrize("cut", range(6))
def test_a_resumed_run_stops_at_the_same_step(cut: int) -> None:
    """C1: the state goes through JSON."""
    values, rule = [0.5, 0.7, 0.6, 0.65, 0.66, 0.6], Rule("rewards/auc", 3)
    before = EarlyStopping(rule)
    for place, value in enumerate(values[:cut]):
        before.see(place, {"rewards/auc": value})
    after = EarlyStopping(rule)
    after.restore(json.loads(json.dumps(before.state())))
    found = [after.see(place, {"rewards/auc": value}) for place, value in enumerate(values) if place >= cut]
    assert [cut + place for place, now in enumerate(found) if now] == [step for step in (4, 5) if step >= cut]
    assert "(best: 0.7 at step 1)" in after.reason


def test_the_state_of_another_metric_says_nothing() -> None:
    """C1: a run that goes on with another metric begins anew, with another patience or delta it goes on counting."""
    before = EarlyStopping(Rule("loss", 3))
    for step, value in enumerate((4.0, 5.0, 6.0)):
        before.see(step, {"loss": value})
    other = EarlyStopping(Rule("rewards/auc", 3))
    other.restore(before.state())
    assert (other.best, other.without) == (None, 0)
    assert not other.see(3, {"rewards/auc": 0.5})
    assert other.best == 0.5
    shorter = EarlyStopping(Rule("loss", 2))
    shorter.restore(before.state())
    assert (shorter.best, shorter.over) == (4.0, True)


def test_the_reason_names_metric_step_value_and_patience() -> None:
    stopper = EarlyStopping(Rule("loss", 2))
    assert [stopper.see(step, {"loss": value}) for step, value in ((0, 1.0), (10, 0.5), (20, 0.6), (30, 0.7))] == [
        False, False, False, True]
    assert stopper.reason == "no improvement of loss in 2 evaluations (best: 0.5 at step 10)"


def test_an_unknown_metric_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError) as error:
        make_rule("rewards/accuracies", 2, None, method(), True)
    assert "'rewards/accuracies' is not one of loss, rewards/auc" in str(error.value)
    for name in ("kl", "learning_rate", "grad_norm", "saturated", "nonsense"):
        with pytest.raises(UsageError, match="is not one of"):
            make_rule(name, 2, None, method(), True)


def test_without_rows_to_evaluate_it_is_refused() -> None:
    with pytest.raises(UsageError, match="--eval-fraction"):
        make_rule("loss", 2, None, method(), False)


def test_options_that_would_do_nothing_are_refused() -> None:
    """L3."""
    for patience, delta, name in ((3, None, "--stop-patience"), (None, 0.1, "--stop-delta")):
        with pytest.raises(UsageError, match=f"{name} has no effect without --stop-metric"):
            make_rule(None, patience, delta, method(), True)
    assert make_rule(None, None, None, method(), False) is None
    assert make_rule("loss", None, None, method(), True) == Rule("loss", DEFAULT_PATIENCE, 0.0)
    assert make_rule("loss", 5, 0.01, method(), True) == Rule("loss", 5, 0.01)


def test_an_evaluation_without_the_metric_is_an_error() -> None:
    """K4: an AUC of one class does not exist; step 0 says so, before anything is trained."""
    with pytest.raises(UsageError, match=r"is not in the evaluation at step 0\. Its metrics: loss"):
        EarlyStopping(Rule("rewards/auc", 2)).see(0, {"loss": 0.5, "kl": 0.0})


@pytest.mark.parametrize(("view", "loss", "has", "has_not"), [
    ("unpaired", "kto", {"loss", "rewards/auc", "rewards/margins"}, {"rewards/accuracies", "perplexity"}),
    ("paired", "sigmoid", {"loss", "rewards/accuracies", "rewards/accuracies_low"}, {"rewards/auc", "loss/sigmoid"}),
    ("paired", "sigmoid,sft", {"loss", "loss/sigmoid", "loss/sft"}, {"perplexity"}),
    ("single", "sft", {"loss", "perplexity"}, {"rewards/margins"}),
])
def test_metrics_of_each_method(view: Any, loss: str, has: set[str], has_not: set[str]) -> None:
    known = set(evaluation_keys(method(view, loss)))
    assert has <= known
    assert not has_not & known


def test_directions_come_from_the_table() -> None:
    assert direction("loss/ipo") == "lower"
    assert direction("rewards/auc") == "higher"
    assert direction("no/such") == direction("kl") == ""
    assert {metric.better for metric in METRICS.values()} == {"", "lower", "higher"}
