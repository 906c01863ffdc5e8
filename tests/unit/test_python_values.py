"""Rows from Python whose values were made by numpy, torch, pandas or pyarrow; stand-ins where a library is optional."""

from collections import namedtuple
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pydantic import ValidationError

from helpers import tree
from tropism.config import KTOOptions
from tropism.data.dataloaders.rows import rows_of_batch
from tropism.data.formats.options import FormatOptions
from tropism.data.formats.recognize import recognize
from tropism.data.formats.rows_from_records import rows_of_record
from tropism.data.rows import Dropped, Row, View
from tropism.data.rows_from_trees import rows_of_trees
from tropism.data.sources.python_values import plain
from tropism.data.sources.resolve import resolve_source
from tropism.errors import DataError
from tropism.trainers import make_options


class Missing:
    """As `pandas.NA`: it has no truth value."""

    def __bool__(self) -> bool:
        raise TypeError("boolean value of NA is ambiguous")

    def __eq__(self, other: object) -> Any:
        return self

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return "<NA>"


class Series:
    """As a row of pandas."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def to_dict(self) -> dict[str, Any]:
        return self.values


class DataFrame:
    """As a table of pandas: iterating over it gives the names of its columns."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self.values = columns
        self.columns = list(columns)

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(next(iter(self.values.values())))

    def itertuples(self, index: bool = True, name: str | None = "Pandas") -> Iterator[Any]:
        assert (index, name) == (False, None)
        yield from zip(*self.values.values(), strict=True)


def rows_of(source: Any, view: View = "unpaired", **options: Any) -> list[Row | Dropped]:
    """The rows of a source from Python."""
    (part,) = resolve_source(source)
    records = list(part.read())
    reading = recognize(records, view, "data", FormatOptions(**options))
    return [row for record in records for row in rows_of_record(record, reading)]


def labels_of(values: list[Any], **record: Any) -> list[bool | None]:
    rows = rows_of([{"prompt": "p", "completion": "c", "label": value, **record} for value in values])
    assert all(isinstance(row, Row) for row in rows)
    return [row.desirable for row in rows if isinstance(row, Row)]


MAKERS = [np.bool_, np.int8, np.uint8, np.int32, np.int64, np.uint64, np.float16, np.float32, np.float64, np.array,
          lambda value: np.array(value, dtype=object), lambda value: np.array(float(value)), torch.tensor,
          lambda value: torch.tensor(int(value)), lambda value: torch.tensor(value, dtype=torch.bfloat16),
          lambda value: torch.tensor(float(value), requires_grad=True), pa.scalar, lambda value: pa.scalar(int(value)),
          lambda value: pa.scalar(float(value)), lambda value: np.str_(str(value))]


@pytest.mark.parametrize("number", range(len(MAKERS)))
def test_labels(number: int) -> None:
    """K3: scalars of any dtype are labels, and the rows hold Python's own values."""
    make = MAKERS[number]
    found = labels_of([make(True), make(False)])
    assert found == [True, False]
    assert {type(label) for label in found} == {bool}
    kept, dropped = rows_of([{"prompt": "p", "completion": "c", "label": make(value)} for value in (True, False)],
                            "single")
    assert isinstance(kept, Row)
    assert isinstance(dropped, Dropped)  # an undesirable completion is not imitated
    assert dropped.detail.startswith("label is false")
    if not isinstance(make(True), str):
        trees = [(tree([1], [2]), [make(value)]) for value in (1, 0)]
        assert [row.desirable for row in rows_of_trees(trees, "unpaired")] == [True, False]


@pytest.mark.parametrize(("value", "shown"), [
    (np.float64("nan"), "nan"), (torch.tensor(float("nan")), "nan"), (Missing(), "<NA>"), (pa.scalar(None), "None"),
    (pa.scalar(None, pa.bool_()), "None"), (np.int64(2), "2"), (np.float32(0.5), "0.5"), (torch.tensor(-1), "-1"),
    (np.array([1]), r"\[1\]"), (np.array([True]), r"\[True\]"), (torch.tensor([[1]]), r"\[\[1\]\]"),
    (np.array([]), r"\[\]"), (np.datetime64("NaT"), ".*NaT.*"), (1.0, "1.0")])
def test_what_is_no_label(value: Any, shown: str) -> None:
    """K3: missing values, other numbers and arrays, also of one element, stop with the row; 1.0 is a rating."""
    rows = [{"prompt": "p", "completion": "c", "label": label} for label in (np.bool_(True), value)]
    with pytest.raises(DataError, match=rf"^row 2: label {shown} is not a boolean"):
        rows_of(rows)
    if shown != "1.0":
        with pytest.raises(DataError, match=r"^tree 2: label .* is not True or False"):
            rows_of_trees([(tree([1], [2]), [True]), (tree([1], [2]), [value])], "unpaired")


@pytest.mark.parametrize("labels", [
    np.array([True, False]), np.array([1.0, 0.0]), np.array([1, 0], dtype=object), torch.tensor([1, 0]),
    torch.tensor([True, False]), pa.array([True, False]), (np.uint8(1), torch.tensor(0))])
def test_labels_of_a_tree(labels: Any) -> None:
    """K3: one array for all completions of a tree."""
    assert [row.desirable for row in rows_of_trees([(tree([1], [2], [3]), labels)], "unpaired")] == [True, False]


@pytest.mark.parametrize("labels", [True, 1, torch.tensor(True), np.bool_(True)])
def test_one_label_is_no_list_of_labels(labels: Any) -> None:
    with pytest.raises(DataError, match="tree 1: labels must be a list with one label per completion, not "):
        rows_of_trees([(tree([1], [2]), labels)], "unpaired")


def test_other_fields() -> None:
    """Texts, ids, messages, tools and scores."""
    row, other = rows_of([
        {"id": np.int64(7), "prompt": np.str_("p"), "completion": np.array("c"), "label": True},
        {"id": torch.tensor(8), "label": True,
         "completion": [{"role": np.str_("assistant"), "content": pa.scalar("c")}],
         "prompt": np.array([{"role": "user", "content": "p"}], dtype=object),
         "tools": np.array([{"name": "f", "strict": np.bool_(True)}], dtype=object)}])
    assert isinstance(row, Row)
    assert isinstance(other, Row)
    assert (row.id, row.prompt, row.completions) == ("7", "p", ("c",))
    assert {type(text) for text in (row.prompt, *row.completions)} == {str}
    assert (other.id, other.prompt) == ("8", ({"role": "user", "content": "p"},))
    assert other.completions == (({"role": "assistant", "content": "c"},),)
    assert other.tools == ({"name": "f", "strict": True},)


@pytest.mark.parametrize("missing", [float("nan"), np.float32("nan"), Missing(), np.datetime64("NaT")])
def test_a_missing_id(missing: Any) -> None:
    """It would be the id of every row without one."""
    good = {"prompt": "p", "completion": "c", "label": True}
    with pytest.raises(DataError, match=r"^row 2: id .* is a missing value. Set an id in every row"):
        rows_of([{**good, "id": 1}, {**good, "id": missing}])
    named, unnamed = rows_of([{**good, "id": "nan"}, {**good, "id": pa.scalar(None)}])
    assert (named.id, unnamed.id) == ("nan", "row 2")  # type: ignore[union-attr]


@pytest.mark.parametrize("make", [np.float32, np.int64, np.array, torch.tensor, pa.scalar])
def test_ratings_and_scores(make: Any) -> None:
    """K3: a scalar is a rating, and a missing one stops with the row."""
    rows = [{"prompt": "p", "completion": "c", "rating": make(value)} for value in (5, 1)]
    assert [row.desirable for row in rows_of(rows, label_threshold=make(3) if make is not pa.scalar else 3)
            if isinstance(row, Row)] == [True, False]
    listed = {"prompt": "p", "responses": np.array(["a", "b"]), "scores": np.array([1.0, 2.0])}
    assert [row.completions for row in rows_of([listed], "paired") if isinstance(row, Row)] == [("b", "a")]
    with pytest.raises(DataError, match=r"^row 1: rating nan is not a number"):
        rows_of([{**rows[0], "rating": np.float64("nan")}], label_threshold=3)


@pytest.mark.parametrize("value", [float("nan"), np.float64("nan"), float("inf")])
def test_a_threshold_is_a_number(value: float) -> None:
    """K3: nothing reaches NaN, so every completion would be undesirable."""
    with pytest.raises(ValidationError, match="finite"):
        FormatOptions(label_threshold=value)


def test_marks_of_messages() -> None:
    """K3: a chat with marks on single messages."""
    chat = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "c", "label": np.bool_(False)}]
    assert [row.desirable for row in rows_of([{"messages": chat}]) if isinstance(row, Row)] == [False]


@pytest.mark.parametrize("source", [
    pa.table({"prompt": ["p", "q"], "completion": ["c", "d"], "label": [True, False]}),
    pa.table({"prompt": ["p", "q"], "completion": ["c", "d"], "label": [1.0, 0.0]}),
    pa.record_batch({"prompt": ["p", "q"], "completion": ["c", "d"], "label": [1, 0]}),
    DataFrame({"prompt": ["p", "q"], "completion": ["c", "d"], "label": [1.0, 0.0]}),
    [Series({"prompt": name, "completion": "c", "label": np.float64(name == "p")}) for name in "pq"],
    [namedtuple("Pandas", "Index prompt completion label")(0, name, "c", np.bool_(name == "p")) for name in "pq"],
    [MappingProxyType({"prompt": name, "completion": "c", "label": name == "p"}) for name in "pq"],
    [pa.table({"prompt": [name], "completion": ["c"], "label": [name == "p"]}) for name in "pq"]])
def test_tables_and_their_rows(source: Any) -> None:
    """Tables of pyarrow and pandas, rows of either, and what `datasets` yields in its formats."""
    rows = [row for row in rows_of(source) if isinstance(row, Row)]
    assert [(row.prompt, row.desirable) for row in rows] == [("p", True), ("q", False)]


def test_a_table_is_read_as_its_file_is() -> None:
    """T4: keys that columns add to nested objects are removed."""
    tools = [[{"name": "f"}, {"other": 1}]]
    (row,) = rows_of(pa.table({"prompt": ["p"], "completion": ["c"], "label": [True], "tools": tools}))
    assert isinstance(row, Row)
    assert row.tools == ({"name": "f"}, {"other": 1})


@pytest.mark.parametrize("record", [1, "text", None, np.float64(1.0), np.array([1]), ["prompt"]])
def test_what_is_no_row(record: Any) -> None:
    with pytest.raises(DataError, match=r"^row 1: a row must be an object with named fields"):
        rows_of([record])


def test_a_row_that_contains_itself() -> None:
    """An error with the row, instead of a traceback."""
    record: dict[str, Any] = {"prompt": "p", "completion": "c", "label": True}
    record["prompt"] = [{"role": "user", "content": "p", "more": record}]
    with pytest.raises(DataError, match=r"^row 2: the record is nested too deeply"):
        rows_of([{"prompt": "p", "completion": "c", "label": True}, record])


@pytest.mark.parametrize("labels", [
    [np.int64(1), np.bool_(False)], [np.uint8(1), np.uint8(0)], [torch.tensor(1), torch.tensor(0)],
    [torch.tensor(True), torch.tensor(False)], [np.float32(1), 0], np.array([1, 0], np.uint8),
    np.array([True, False]), torch.tensor([1.0, 0.0], dtype=torch.bfloat16), torch.tensor([True, False])])
def test_labels_of_a_published_batch(labels: Any) -> None:
    """K3: tensors, arrays and lists of any scalars."""
    ids = np.array([[1, 2, 3], [1, 2, 4]])
    batch = (ids, np.ones_like(ids), labels, [np.int64(2), np.int64(2)])
    assert [row.desirable for row in rows_of_batch(batch, "unpaired", number=1).rows] == [True, False]


@pytest.mark.parametrize("value", [np.float64("nan"), torch.tensor(float("nan")), np.int64(3), None, Missing()])
def test_what_is_no_label_of_a_batch(value: Any) -> None:
    ids = np.array([[1, 2, 3], [1, 2, 4]])
    with pytest.raises(DataError, match=r"^batch 1 row 2: labels ((nan|3) is not 0 or 1|(None|<NA>) is not a number)"):
        rows_of_batch((ids, np.ones_like(ids), [1, value], [2, 2]), "unpaired", number=1)


def test_plain_values_stay() -> None:
    """Nothing else is changed."""
    when = np.datetime64("2020-01-01")
    for value in ("a", 1, 1.5, True, None, b"x", when, np.float64(2.0), {"a": [1, (2, "b")]}, object):
        assert plain(value) == value
        assert type(plain(value)) is type(value)


@pytest.mark.parametrize(("name", "value", "wanted"), [
    ("label_threshold", np.float32(0.5), 0.5), ("label_threshold", torch.tensor(4), 4.0),
    ("batch_size", np.int64(4), 4), ("shuffle", np.bool_(False), False), ("desirable_weight", np.float64(2.0), 2.0),
    ("epochs", torch.tensor(2), 2)])
def test_options(name: str, value: Any, wanted: Any) -> None:
    """Scalars are values of options too."""
    found = getattr(make_options(KTOOptions, {"model": "m", "data": "d", "output": "o", name: value}), name)
    assert (found, type(found)) == (wanted, type(wanted))
