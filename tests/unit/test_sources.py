"""Rows from files of each kind, with the place of each, and what is said of a file that cannot be read."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tropism.data.rows import RawRow
from tropism.data.sources import read
from tropism.errors import DataError

ROWS = [{"prompt": "café \u2028 ", "completion": "a\nb", "label": True},
        {"prompt": "q", "completion": "", "label": False}]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str | bytes], Path]:
    def put(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return put


def refused(source: Any) -> str:
    with pytest.raises(DataError) as caught:
        list(read(source))
    return str(caught.value)


def as_jsonl(rows: list[dict[str, Any]], end: str = "\n") -> str:
    return end.join(json.dumps(row, ensure_ascii=False) for row in rows)


@pytest.mark.parametrize("name", ["d.jsonl", "d.ndjson", "d.json", "D.JSONL"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_lines_of_json(write, name: str, end: str, bom: bytes) -> None:
    """H3: JSONL under any of its names, with either line end, blank lines and a byte order mark."""
    found = list(read(write(name, bom + as_jsonl(ROWS, end).encode())))
    assert [raw.record for raw in found] == ROWS
    assert [raw.place for raw in found] == [f"{name}:1", f"{name}:{3 if end == chr(10) * 2 else 2}"]


@pytest.mark.parametrize("wrap", [lambda rows: rows, lambda rows: {"data": rows}, lambda rows: {"v": 1, "data": rows}])
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf \n"])
def test_json_document(write, wrap: Callable, indent: int | None, bom: bytes) -> None:
    """H3: an array of rows, or rows under `data`, on one line or many."""
    found = list(read(write("d.json", bom + json.dumps(wrap(ROWS), indent=indent).encode())))
    assert found == [RawRow("d.json:row 1", ROWS[0]), RawRow("d.json:row 2", ROWS[1])]


def test_a_single_line_called_json(write) -> None:
    """H3: one row is a file of one row; a column called `data` does not make it a document."""
    assert list(read(write("d.json", as_jsonl(ROWS[:1])))) == [RawRow("d.json:1", ROWS[0])]
    rows = [{"data": [1], "prompt": "p"}, {"data": [2], "prompt": "q"}]
    assert [raw.record for raw in read(write("d.json", as_jsonl(rows)))] == rows


def test_bad_lines_are_named(write) -> None:
    """H3: file, line and column of what cannot be read; rows before it were readable."""
    path = write("d.jsonl", as_jsonl(ROWS) + '\n\n{"prompt": "x",}\n')
    rows = read(path)
    assert [next(rows).place, next(rows).place] == ["d.jsonl:1", "d.jsonl:2"]
    assert refused(path).startswith("d.jsonl:4: not valid JSON: ")
    assert refused(write("d.jsonl", '{"a": 1}\n[1, 2]\n')) == (
        "d.jsonl:2: a row must be an object with named fields, not list")
    assert refused(write("d.jsonl", b'{"a": 1}\n{"a": "caf\xe9"}\n')).startswith("d.jsonl:2: not UTF-8")
    assert refused(write("d.json", '[{"a": 1}, 5]')) == (
        "d.json:row 2: a row must be an object with named fields, not int")
    assert "expected an array of rows" in refused(write("d.json", '{"a": 1,\n"b": 2}'))
    assert refused(write("d.json", "[1, ")).startswith("d.json: not valid JSON")


def test_files_that_are_not_there_or_of_no_kind(write, tmp_path: Path) -> None:
    """H3: the path, and the kinds that are known."""
    assert refused(tmp_path / "none.jsonl") == f"{tmp_path / 'none.jsonl'}: no such file"
    assert refused(tmp_path) == f"{tmp_path}: is a directory; name a file in it"
    assert refused(str(write("d.txt", "x"))).endswith(
        "unknown kind of file '.txt'; known are .jsonl, .ndjson, .json, .parquet, .csv")


@pytest.mark.parametrize("name", ["d.jsonl", "d.csv"])
def test_empty_files_have_no_rows(write, name: str) -> None:
    """D3: whoever asks for rows says what is wrong; reading alone finds none."""
    assert list(read(write(name, ""))) == []
    assert list(read(write(name, b"\xef\xbb\xbf"))) == []


def test_rows_given_in_python() -> None:
    """H3: an iterable of dicts, numbered from 1; anything else in it is named."""
    assert list(read(iter(ROWS))) == [RawRow("row 1", ROWS[0]), RawRow("row 2", ROWS[1])]
    assert refused([{"a": 1}, "x"]) == "row 2: a row must be an object with named fields, not str"


def test_csv(write) -> None:
    """H3: quoted commas and line ends, blank lines, a byte order mark; each row's first line is its place."""
    path = write("d.csv", '\ufeffprompt,completion,label\n"a, b","one\n\ntwo",true\n\nq,"say ""hi""",0\nr,s\n')
    assert list(read(path)) == [
        RawRow("d.csv:2", {"prompt": "a, b", "completion": "one\n\ntwo", "label": "true"}),
        RawRow("d.csv:6", {"prompt": "q", "completion": 'say "hi"', "label": "0"}),
        RawRow("d.csv:7", {"prompt": "r", "completion": "s"}),  # absent, not null
    ]


def test_csv_faults(write) -> None:
    """H3: a line with an unquoted comma or quote is named, not shifted into the wrong columns."""
    assert refused(write("d.csv", "prompt,label\na,1\nb,c,1\n")) == (
        "d.csv:3: more fields than the header has; is a comma unquoted?")
    assert refused(write("d.csv", 'prompt,label\n"a"b,1\n')).startswith("d.csv:2: not readable as CSV")
    assert refused(write("d.csv", b"prompt,label\ncaf\xe9,1\n")).startswith("d.csv: not UTF-8")


def test_csv_cells(write) -> None:
    """H3: a cell that spells messages is messages; other brackets stay text; a long cell is read."""
    messages = [{"role": "user", "content": "Hi, you"}]
    path = write("d.csv", "")
    with path.open("w", newline="") as lines:
        csv.writer(lines).writerows([
            ["prompt", "completion"], [json.dumps(messages), "[{not json}]"], ["x" * 200_000, "[1]"]])
    records = [raw.record for raw in read(path)]
    assert records[0] == {"prompt": messages, "completion": "[{not json}]"}
    assert records[1] == {"prompt": "x" * 200_000, "completion": "[1]"}


def test_parquet(tmp_path: Path, write) -> None:
    """T4: keys that the format adds inside nested objects are not the user's; a null of a row's own stays."""
    rows = [
        {"prompt": "a", "completion": None, "tools": [{"name": "f", "args": {"room": "hall"}}]},
        {"prompt": "b", "completion": "c", "tools": [{"name": "g", "args": {"unit": "m"}}]},
        {"prompt": "d", "completion": "e", "tools": None},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    found = list(read(tmp_path / "d.parquet"))
    assert [raw.record for raw in found] == rows
    assert [raw.place for raw in found] == [f"d.parquet:row {number}" for number in (1, 2, 3)]
    assert refused(write("bad.parquet", b"PAR1 not really")).startswith("bad.parquet: not readable as Parquet")


def test_parquet_places_go_on_over_batches(tmp_path: Path) -> None:
    """H3: row numbers count through the file."""
    pyarrow.parquet.write_table(pyarrow.table({"n": list(range(2500))}), tmp_path / "d.parquet", row_group_size=700)
    found = list(read(tmp_path / "d.parquet"))
    assert [raw.record["n"] for raw in found] == list(range(2500))
    assert found[-1].place == "d.parquet:row 2500"
