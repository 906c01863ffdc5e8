"""Weights of rows: how they are read and kept, and that they scale the terms of every loss and nothing else."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import build_tokenizer, row
from tropism.commands.convert import convert
from tropism.config import ConvertOptions, SFTOptions
from tropism.data.audit.audit import Audit
from tropism.data.formats import View, pair_by_prompt, recognize, rows_of_record
from tropism.data.formats.options import FormatOptions
from tropism.data.read_rows import read_rows
from tropism.data.row_facts import facts_of
from tropism.data.rows import EncodedRow, RawRow, Row
from tropism.data.tokenization.render import Renderer
from tropism.data.tokenization.truncate import Limits
from tropism.errors import DataError, UsageError
from tropism.losses import Scored
from tropism.methods import LOSSES, StepInputs, Units
from tropism.methods.build import build_method, describe_method
from tropism.train.setup.data import check_row_weights, data_fingerprint, prepare_rows
from unit.test_methods import doubles

LABELED = {"prompt": "p", "completion": "c", "label": True}
PAIR = {"prompt": "p", "chosen": "c", "rejected": "d"}


def rows_of(*records: dict[str, Any], view: View = "unpaired", options: FormatOptions | None = None) -> list[Any]:
    raws = [RawRow(f"f:{number}", record) for number, record in enumerate(records, start=1)]
    reading = recognize(raws, view, "f", options)
    return [one for raw in raws for one in rows_of_record(raw, reading)]


def audited(tmp_path: Path, view: View, *records: dict[str, Any], **options: Any) -> Audit:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return read_rows(str(path), Renderer(build_tokenizer(), Limits(1000)), view, options=FormatOptions(**options),
                     cache=tmp_path / "cache")


# --- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", ["weight", "sample_weight", "loss_weight", "example_weight"])
@pytest.mark.parametrize(("value", "wanted"), [
    (0, 0.0), (2, 2.0), (0.25, 0.25), ("0.5", 0.5), ("1e-3", 1e-3), (None, None), ("", None)])
def test_weights_that_are_read(column: str, value: Any, wanted: float | None) -> None:
    (found,) = rows_of(LABELED | {column: value})
    assert found.weight == wanted


@pytest.mark.parametrize("value", [-1, -0.5, float("nan"), float("inf"), "heavy", "70 kg", "nan", True, [1.0], {},
                                   10**400])
def test_weights_that_are_refused(value: Any) -> None:
    """An odd weight stops the run with its place and the way to ignore the column."""
    with pytest.raises(DataError, match=r"^f:1: weight .* is not a weight.*--columns unused=weight$"):
        rows_of(LABELED | {"weight": value})


def test_two_columns_of_weights() -> None:
    with pytest.raises(DataError, match="'weight' and 'sample_weight' are both weights"):
        rows_of(LABELED | {"weight": 1, "sample_weight": 2})


def test_the_column_is_ignored_by_its_name(tmp_path: Path) -> None:
    """Data with another meaning of `weight` is read after the column is renamed."""
    found = audited(tmp_path, "unpaired", *(LABELED | {"weight": f"{kilos} kg"} for kilos in (60, 70)),
                    columns="unused=weight")
    assert not found.facts.weighted


def test_every_row_of_a_record_has_its_weight() -> None:
    assert [one.weight for one in rows_of(PAIR | {"weight": 3})] == [3.0, 3.0]
    messages = [{"role": "user", "content": "u"}, *({"role": "assistant", "content": text, "label": text == "a"}
                                                     for text in "ab")]
    assert [one.weight for one in rows_of({"messages": messages, "weight": 0.5})] == [0.5, 0.5]


def test_pairs_by_prompt() -> None:
    """A pair has the weight of its two rows, which must agree."""
    rows = rows_of(LABELED | {"weight": 2}, LABELED | {"completion": "d", "label": False, "weight": 2.0})
    (pair,) = pair_by_prompt(rows)
    assert isinstance(pair, Row)
    assert pair.weight == 2.0
    one = rows_of(LABELED | {"weight": 1}, LABELED | {"completion": "d", "label": False})
    assert isinstance(pair_by_prompt(one)[0], Row)
    odd = rows_of(LABELED | {"weight": 2}, LABELED | {"completion": "d", "label": False})
    with pytest.raises(DataError, match="f:2: the weight 1 differs from 2, the weight of f:1"):
        pair_by_prompt(odd)


# --- keeping ----------------------------------------------------------------------------------------------------------


def test_weights_in_the_table(tmp_path: Path) -> None:
    """Weights are not part of a cached block: rows of the same text may have others."""
    for factor in (1, 3):
        records = [LABELED | {"completion": f"c{number}", "weight": factor * number / 4} for number in range(1100)]
        found = audited(tmp_path, "unpaired", *records)
        assert [one.weight for one in found.rows] == [record["weight"] for record in records]
        assert found.facts.weight is not None
        assert found.facts.weight.tolist() == [record["weight"] for record in records]
        assert found.rows[5:7][1].weight == records[6]["weight"]
        assert data_fingerprint(found.rows) == data_fingerprint(list(found.rows))
    assert (tmp_path / "cache").exists()


def test_the_fingerprint_of_the_data(tmp_path: Path) -> None:
    plain, ones, heavy = (data_fingerprint(audited(tmp_path, "unpaired", LABELED | more).rows)
                          for more in ({}, {"weight": 1}, {"weight": 2}))
    assert plain == ones != heavy


def test_weights_are_said(tmp_path: Path) -> None:
    (text,) = [text for text in audited(tmp_path, "unpaired", *(
        LABELED | {"completion": f"c{weight}", "weight": weight} for weight in (0, 0.5, 2.5))).notices()
        if "weights" in text]
    assert "0 to 2.5, mean 1, 1 row with weight 0" in text
    assert "--columns unused=weight" in text
    assert not audited(tmp_path, "unpaired", LABELED | {"weight": 1}).facts.weighted


@pytest.mark.parametrize("to", ["unpaired", "single", "messages"])
@pytest.mark.parametrize("kind", [".jsonl", ".csv", ".parquet"])
def test_convert_keeps_weights(tmp_path: Path, to: Any, kind: str) -> None:
    if (to, kind) == ("messages", ".csv"):
        return
    source, target = tmp_path / "in.jsonl", tmp_path / f"out{kind}"
    records = [LABELED | {"completion": f"c{number}"} | more
               for number, more in enumerate(({"sample_weight": 0}, {"sample_weight": 2.5}, {}))]
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    report = convert(str(source), ConvertOptions(output=str(target), to=to))
    assert not report.columns
    assert report.changed["column sample_weight became weight"] == 2
    view: View = "unpaired" if to == "unpaired" else "single"
    found = read_rows(str(target), Renderer(build_tokenizer(), Limits(1000)), view)
    assert [one.weight for one in found.rows] == [0, 2.5, 1]


# --- the loss ---------------------------------------------------------------------------------------------------------


def scored(view: View, count: int) -> tuple[Scored, Tensor]:
    """Completions with different log-probs, ready for a gradient, and the members of `count` units."""
    width = 2 if view == "paired" else 1
    policy = (-10 - torch.arange(width * count, dtype=torch.float64) ** 1.5 % 7).requires_grad_()
    reference = -10 - torch.arange(width * count, dtype=torch.float64) ** 1.3 % 5
    lengths = 3 + torch.arange(width * count) % 4
    divergence = policy * policy / 50
    confidence = policy.detach() / 100
    return Scored(policy, reference, lengths, divergence, confidence), torch.arange(width * count).reshape(count, width)


def encoded(view: View, number: int, weight: float) -> EncodedRow:
    """The row of unit `number` of `scored`: its completions have as many tokens."""
    width = 2 if view == "paired" else 1
    lengths = [3 + (width * number + side) % 4 for side in range(width)]
    made = row([1], *([number + 2] * length for length in lengths), desirable=view == "unpaired" and number % 2 == 0
               if view == "unpaired" else None)
    object.__setattr__(made, "weight", weight)
    return made


def gradient(view: View, options: dict[str, Any], numbers: list[int], given: list[float]) -> tuple[float, list[float]]:
    """The loss of a step of some units with their weights, and its gradient by all log-probs."""
    method = build_method(view, options, [True, False], weighted=True)
    values, members = scored(view, 5)
    rows = [encoded(view, number, weight) for number, weight in zip(numbers, given, strict=True)]
    labels = torch.tensor([number % 2 == 0 for number in numbers]) if view == "unpaired" else None
    units = Units(members[numbers], labels, method.weights(rows))
    inputs = StepInputs(doubles(0.3)[0], doubles(0.1)[0])
    loss = method.total(method.losses(values, units, inputs), method.counts(rows))
    loss.backward()
    assert values.logps.grad is not None
    return float(loss.detach()), values.logps.grad.tolist()


EVERY: list[tuple[View, dict[str, Any]]] = [
    *((view, {"loss": name}) for view, table in LOSSES.items() for name, loss in table.items()
      if not loss.needs_teacher and not name.startswith("aot") and (view == "single" or name != "sft")),
    ("paired", {"loss": "sigmoid,sft", "wpo": True}), ("unpaired", {"loss": "kto,sft"}),
    ("single", {"loss": "sft", "teacher": "t", "kd_weight": 0.3}),
    ("paired", {"loss": "ipo", "teacher": "t", "kd_weight": 0.3})]
NAMES = [f"{view}-{'-'.join(map(str, options.values()))}" for view, options in EVERY]


@pytest.mark.parametrize(("view", "options"), EVERY, ids=NAMES)
def test_a_weight_of_two_is_the_row_twice(view: View, options: dict[str, Any]) -> None:
    """With the sum of the weights as the divisor, exactly; else up to the divisor. 0 is no row."""
    by_sum = options | {"weight_divisor": "sum"}
    assert gradient(view, by_sum, [0, 1, 2, 3], [1, 2, 0, 1]) == (
        pytest.approx(gradient(view, by_sum, [0, 1, 1, 3], [1, 1, 1, 1])[0], rel=1e-12),
        pytest.approx(gradient(view, by_sum, [0, 1, 1, 3], [1, 1, 1, 1])[1], rel=1e-12))


@pytest.mark.parametrize(("view", "options"), EVERY, ids=NAMES)
def test_the_divisor_is_the_count(view: View, options: dict[str, Any]) -> None:
    """loss = sum of w times term, over the count: linear in the weights, and the plain loss for weights of 1."""
    numbers = [0, 1, 2, 3]
    parts = [gradient(view, options, numbers, [float(number == one) for number in numbers]) for one in numbers]
    whole = gradient(view, options, numbers, [0.5, 2, 0, 3])
    assert whole[0] == pytest.approx(sum(w * part[0] for w, part in zip([0.5, 2, 0, 3], parts, strict=True)), rel=1e-12)
    method = build_method(view, options, [True, False])
    values, members = scored(view, 5)
    labels = torch.tensor([True, False, True, False]) if view == "unpaired" else None
    inputs = StepInputs(doubles(0.3)[0], doubles(0.1)[0])
    plain = method.total(method.losses(values, Units(members[:4], labels), inputs),
                         method.counts([encoded(view, number, 1.0) for number in numbers]))
    assert gradient(view, options, numbers, [1.0] * 4)[0] == float(plain.detach())


def test_a_method_without_weights_ignores_them() -> None:
    """Rows are weighted by the method, which is made from the training rows; `evaluate` weights nothing."""
    method = build_method("single", {"loss": "sft"}, [])
    assert method.weights([encoded("single", 0, 2.0)]) is None
    assert method.counts([encoded("single", 0, 2.0)]) == (3,)


def test_perplexity_of_weighted_rows() -> None:
    """The perplexity is a mean over weighted tokens under both divisors, though the loss is divided by the count."""
    for divisor in ("count", "sum"):
        method = build_method("single", {"loss": "sft", "weight_divisor": divisor}, [], weighted=True)
        values = Scored(doubles(-6, -8), doubles(0, 0), torch.tensor([3, 4]))
        rows = [encoded("single", number, weight) for number, weight in ((0, 0.5), (1, 2.0))]
        units = Units(torch.tensor([[0], [1]]), None, method.weights(rows))
        losses = method.losses(values, units, StepInputs())
        sums = method.metrics(values, units, losses, method.counts(rows), doubles(0, 0))
        assert sums.keys() == set(method.metric_keys)
        record = method.combine({key: float(total) / float(count) for key, (total, count) in sums.items()})
        tokens = 9.5 if divisor == "sum" else 7
        assert record == {"loss": pytest.approx((3 + 16) / tokens), "perplexity": pytest.approx(math.exp(19 / 9.5))}


def test_known_first_loss() -> None:
    for divisor, wanted in (("count", 2.5 * 0.5 / 2), ("sum", 0.5)):
        method = build_method("unpaired", {"loss": "kto", "weight_divisor": divisor}, [True, False], weighted=True)
        assert method.loss_at_start([True, False], doubles(0.5, 2.0)) == pytest.approx(wanted)


def test_saturation_is_that_of_the_term_without_its_weight() -> None:
    method = build_method("unpaired", {"loss": "kto"}, [True, False], weighted=True)
    values = Scored(doubles(-200, 0, 0, -200), doubles(0, 0, 0, 0), torch.ones(4, dtype=torch.int64))
    units = Units(torch.arange(4)[:, None], torch.tensor([True, True, True, True]), doubles(1000, 1000, 1e-5, 0))
    losses = method.losses(values, units, StepInputs(doubles(0)[0]))
    total, count = method.metrics(values, units, losses, (4,), doubles(0, 0, 0, 0))["saturated"]
    assert (float(total), count) == (1, 4)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["aot", "aot_unpaired", "aot,sft"])
def test_losses_that_rank_refuse_weights(loss: str) -> None:
    with pytest.raises(UsageError, match=r"the rows have weights, which are not defined for --loss aot"):
        build_method("paired", {"loss": loss}, [], weighted=True)
    build_method("paired", {"loss": loss}, [], weighted=False)


def test_a_divisor_without_weights() -> None:
    with pytest.raises(UsageError, match="--weight-divisor sum has no effect, because no row has a weight"):
        build_method("single", {"loss": "sft", "weight_divisor": "sum"}, [])
    assert "divided by the sum" in describe_method(build_method("single", {"loss": "sft", "weight_divisor": "sum"}, [],
                                                                weighted=True))


def test_weights_that_are_all_zero() -> None:
    options = SFTOptions(model="m", data="d", output="o")
    rows = [encoded("single", number, 0.0) for number in range(2)]
    data = prepare_rows(options, build_tokenizer(), [], "single", rows, [])
    with pytest.raises(DataError, match="the weight of every training row is 0"):
        check_row_weights(data)
    assert facts_of(rows).weighted
