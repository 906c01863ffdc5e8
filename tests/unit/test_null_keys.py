"""Null keys that table libraries add to objects are removed, and those that a user wrote are kept."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tropism.data.sources.resolve import read

CALLS = [{"f": {"name": "lamp", "args": {"room": "hall"}}},
         {"f": {"name": "weather", "args": {"city": "Rome", "days": 2}}}]
ROWS = [{"prompt": "p", "note": None, "calls": [call], "tools": [{"name": "f", "properties": call["f"]["args"]}]}
        for call in CALLS]
FILLED = pa.Table.from_pylist(ROWS).to_pylist()


def records(source: Any) -> list[dict[str, Any]]:
    return [raw.record for raw in read(source)]


def arrays(value: Any) -> Any:
    """A value as pandas has it: arrays where users have lists, and floats in a column with nulls."""
    if isinstance(value, list):
        found = np.empty(len(value), dtype=object)
        found[:] = [arrays(entry) for entry in value]
        return found
    if isinstance(value, dict):
        return {key: arrays(entry) for key, entry in value.items()}
    return float(value) if isinstance(value, int) else value


class Dataset:
    """Iterates over its rows, as a dataset of the library does."""

    __module__ = "datasets.arrow_dataset"

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


class Own(Dataset):
    """A class of a user."""

    __module__ = "own"


class Polars:
    """The part of a table of polars that is used."""

    def to_arrow(self) -> pa.Table:
        return pa.Table.from_pylist(ROWS)

    def iter_rows(self) -> Any:
        raise AssertionError


class Frame:
    """The part of a table of pandas that is used."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows, self.columns = rows, list(rows[0])

    def itertuples(self, *, index: bool, name: None) -> Any:
        return (tuple(row.values()) for row in self.rows)


@pytest.mark.parametrize("source", [
    ROWS, tuple(ROWS), FILLED, tuple(FILLED), Dataset(FILLED), Own(FILLED), pa.Table.from_pylist(ROWS), Polars(),
    Frame(FILLED), [{**row, "calls": arrays(row["calls"]), "tools": arrays(row["tools"])} for row in FILLED],
    Frame([{**row, "calls": arrays(row["calls"]), "tools": arrays(row["tools"])} for row in FILLED]),
    [pa.Table.from_pylist(FILLED).slice(number, 1) for number in range(2)]])
def test_the_keys_are_the_users(source: Any) -> None:
    """T4: whatever the rows went through; columns of the record keep their nulls, and integers are integers."""
    assert FILLED != ROWS
    assert records(source) == ROWS
    assert json.dumps(records(source)) == json.dumps(ROWS)


def test_arrays_in_a_stream() -> None:
    rows = [{**row, "calls": arrays(row["calls"]), "tools": arrays(row["tools"])} for row in FILLED[:1]]
    assert records(iter(rows)) == ROWS[:1]


SCHEMA = {"type": "object", "properties": {"room": {"type": "string"}, "level": {"type": "integer", "default": None}}}


@pytest.mark.parametrize("rows", [
    [{"tools": [{"parameters": SCHEMA}]}], [{"tools": [{"parameters": SCHEMA}]}] * 3,
    [{"messages": [{"role": "user", "content": "p"}, {"role": "assistant", "content": None, "tool_calls": [
        {"name": "f", "arguments": {"a": value, "b": 1}}]}]} for value in (None, 2)],
    [{"calls": [{"a": None}]}], [{"calls": [{"a": None}, {"b": 1}]}, {"calls": [{"a": 1, "b": None}]}],
    [{"x": {"a": None, "b": 1}, "y": {"a": None}}, {"x": {"a": None, "b": 2}, "y": {"a": None}}]])
def test_what_a_user_wrote_is_kept(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    """A null that no table explains: other objects have other keys, or none has a value. Files of JSON keep all."""
    assert records(rows) == rows
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert records(path) == rows
    path.write_text("\n".join(map(json.dumps, FILLED)))
    assert records(path) == FILLED
    assert records(iter(rows)) == rows


class Json:
    """The type of `datasets` for objects of any keys."""


class List:
    """The type of `datasets` for lists."""

    def __init__(self, feature: Any) -> None:
        self.feature = feature


def test_objects_of_any_keys_are_the_users() -> None:
    """T4: `datasets` keeps what its type Json holds, and fills the objects around it."""
    source = Dataset([{"calls": [{"id": None, "args": {"a": None}}], "tools": [[{"default": None}], None],
                       "old": [{"x": None, "y": {"a": None}}]}])
    source.features = {"calls": List({"id": "string", "args": Json()}), "tools": Json(),  # type: ignore[attr-defined]
                       "old": [{"y": Json()}]}
    assert records(source) == [{"calls": [{"args": {"a": None}}], "tools": [[{"default": None}], None],
                                "old": [{"y": {"a": None}}]}]


def test_fractions_stay() -> None:
    rows = [{"x": arrays([{"a": 2.5, "b": "s"}])}, {"x": arrays([{"a": 2.0, "b": None}])}, {"x": arrays([{"a": None}])}]
    assert json.dumps(records(rows)) == json.dumps([{"x": [{"a": 2.5, "b": "s"}]}, {"x": [{"a": 2.0}]}, {"x": [{}]}])
    assert json.dumps(records([{"x": arrays([{"a": 2.0}])}])) == '[{"x": [{"a": 2.0}]}]'
