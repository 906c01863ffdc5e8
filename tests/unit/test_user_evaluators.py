"""What an evaluator may return, what is taken back from it, and which changes of weights are seen."""

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from tropism.cli.arguments import spelled_out
from tropism.errors import TropismError
from tropism.observe.metrics import direction, goal, is_known
from tropism.observe.track import _markdown
from tropism.train.evaluation.lent_model import _checksum, fingerprints
from tropism.train.evaluation.user_evaluators import evaluator_name, figures_of, load_evaluators


def test_numbers_of_any_kind() -> None:
    found, missing = figures_of({"a": 1, "b/c.d-e@5": np.float32(0.5), "t": torch.tensor(2.0), "f": Fraction(1, 4),
                                 "yes": True, "n": float("nan"), "i": np.int64(3), "inf": float("inf")})
    assert {name: found[name] for name in ("a", "b/c.d-e@5", "t", "f", "yes", "i")} == {
        "a": 1.0, "b/c.d-e@5": 0.5, "t": 2.0, "f": 0.25, "yes": 1.0, "i": 3.0}
    assert all(type(value) is float for value in found.values())
    assert missing == ["n", "inf"]


@pytest.mark.parametrize(("returned", "said"), [
    (None, "None"), ([("a", 1)], "list"), (0.5, "float"), ({"a": "1"}, "value of a"), ({"a": None}, "None"),
    ({"a": torch.zeros(2)}, "Tensor"), ({"a": 1j}, "complex"), ({"a": 10**400}, "too large"), ({1: 1}, "'1'"),
    ({"": 1}, "valid name"), ({"a b": 1}, "valid name"), ({"a\nb": 1}, "valid name"), ({"a:max": 1}, "valid name"),
    ({"x" * 101: 1}, "valid name"), ({"loss": 1}, "belongs to"), ({"loss/mine": 1}, "belongs to"),
    ({"step": 1}, "belongs to"), ({"split": 1}, "belongs to"), ({"rewards/auc_low": 1}, "belongs to"),
    ({"baselines/mine": 1}, "belongs to"), ({"taken": 1}, "another evaluator"),
    (dict.fromkeys(map(str, range(1001)), 1), "1,001 metrics"), ({"a": Decimal("1")}, "Decimal")])
def test_what_is_refused(returned: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        figures_of(returned, {"taken"})


def test_a_metric_says_which_way_is_better() -> None:
    assert goal("accuracy:max") == ("accuracy", "higher")
    assert goal("a/b:min") == ("a/b", "lower")
    assert goal("loss") == ("loss", direction("loss"))
    assert goal("accuracy:most") == ("accuracy:most", "")
    assert goal(":max") == (":max", "")
    assert is_known("loss")
    assert is_known("loss/kto")
    assert not is_known("accuracy")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.uint8])
def test_every_single_change_of_a_weight_is_seen(dtype: torch.dtype) -> None:
    weight = torch.randn(5, 7).mul(50).abs().to(dtype)
    before = _checksum(weight)
    for place in range(35):
        changed = weight.clone()
        changed.view(-1)[place] += 1
        assert _checksum(changed) != before
    swapped = weight.clone()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert _checksum(swapped) != before
    assert _checksum(weight.t()) != before
    assert _checksum(weight.t().t()) == before


def test_a_replaced_weight_is_seen() -> None:
    module = torch.nn.Linear(2, 2)
    before = fingerprints(module)
    module.weight = torch.nn.Parameter(module.weight.detach().clone())
    assert fingerprints(module)["weight"] != before["weight"]
    assert fingerprints(module)["bias"] == before["bias"]


def test_a_repeated_option_is_a_list() -> None:
    tokens = ["kto", "--evaluator", "a:b", "--epochs", "2", "--evaluator=c:d"]
    assert spelled_out(tokens) == ["kto", "--epochs", "2", "--evaluator=a:b,c:d"]
    assert spelled_out(["kto", "--evaluator", "a:b"]) == ["kto", "--evaluator", "a:b"]


def test_names_of_functions() -> None:
    assert evaluator_name(test_names_of_functions).endswith("test_user_evaluators:test_names_of_functions")
    assert load_evaluators(None, []) == load_evaluators("none", []) == {}
    assert list(load_evaluators("statistics:fmean.__call__", [lambda model, tokenizer, rows: {}])) == [
        "statistics:fmean.__call__"]
    with pytest.raises(TropismError, match="cannot be called with three arguments"):
        load_evaluators("x:f", [lambda model: {}])


def test_a_table_holds_no_markup() -> None:
    text = _markdown(("a", "b"), [("1", "x | y\n`z` <script>")])
    assert text.splitlines()[2] == "| `1` | `x \u00a6 y 'z' <script>` |"
