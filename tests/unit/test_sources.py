"""Rows from files of each kind, with the place of each, and what is said of a file that cannot be read."""

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest

from tropism.data.rows import RawRow
from tropism.data.sources.resolve import absolute, read, resolve_source
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
    assert refused(write("d.jsonl", '{"a": 1}\n{"a": \r\n{"a": 2}')).startswith("d.jsonl:2: not valid JSON: ")
    assert refused(write("d.jsonl", '{"a": 1}\n[1, 2]\n')) == (
        "d.jsonl:2: a row must be an object with named fields, not list")
    assert refused(write("d.jsonl", b'{"a": 1}\n{"a": "caf\xe9"}\n')).startswith("d.jsonl:2: not UTF-8")
    assert refused(write("d.json", '[{"a": 1}, 5]')) == (
        "d.json:row 2: a row must be an object with named fields, not int")
    assert "expected an array of rows" in refused(write("d.json", '{"a": 1,\n"b": 2}'))
    assert refused(write("d.json", "[1,\n")).startswith("d.json:2: not valid JSON")


def test_files_that_are_not_there_or_of_no_kind(write, tmp_path: Path) -> None:
    """H3: the path, and the kinds that are known."""
    assert refused(tmp_path / "none.jsonl") == f"{tmp_path / 'none.jsonl'}: file not found"
    assert refused(tmp_path).startswith(f"{tmp_path}: no data file in this directory. Known: .jsonl, .ndjson, .json, ")
    said = refused(str(write("d.txt", "x")))
    assert "unsupported file type '.txt'" in said
    assert ".jsonl, .ndjson, .json, .parquet, .arrow, .feather, .csv, .tsv" in said
    assert ".gz or .zst" in said
    assert refused("a.jsonl,,b.jsonl") == "a.jsonl,,b.jsonl: a name is missing between two commas"


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
        "d.csv:3: more fields than in the header. Quote fields that contain the separator.")
    assert refused(write("d.csv", 'prompt,label\n"a"b,1\n')).startswith("d.csv:2: not readable as CSV")
    assert refused(write("d.csv", b"prompt,label\na,1\ncaf\xe9,1\n")).startswith("d.csv:3: not UTF-8")


def test_csv_cells(write) -> None:
    """H3: a cell is text, whatever it spells (messages: see test_json_text); a long cell is read."""
    messages = json.dumps([{"role": "user", "content": "Hi, you"}])
    path = write("d.csv", "")
    with path.open("w", newline="") as lines:
        csv.writer(lines).writerows([
            ["prompt", "completion"], [messages, "[{not json}]"], ["x" * 200_000, "[1]"]])
    records = [raw.record for raw in read(path)]
    assert records[0] == {"prompt": messages, "completion": "[{not json}]"}
    assert records[1] == {"prompt": "x" * 200_000, "completion": "[1]"}


def test_json_that_no_reader_takes(write) -> None:
    """H3: nesting and numbers beyond what Python reads, in each kind of JSON, with their lines."""
    for text, sentence in (("[" * 100_000, "the JSON is nested too deeply"),
                           ('{"a": ' * 5000, "the JSON is nested too deeply"),
                           ("9" * 5000, "cannot be read: Exceeds the limit")):
        assert refused(write("d.jsonl", '{"a": 1}\n' + text)).startswith(f"d.jsonl:2: {sentence}")
        assert refused(write("d.json", '{"a": 1}\n' + text)).startswith(f"d.json:2: {sentence}")
        assert refused(write("d.json", "[" + text)).startswith(f"d.json:1: {sentence}")
    assert refused(write("d.json", b'[{"a": 1},\n\n{"a": "\xe9"}]')).startswith("d.json:3: not UTF-8")


def test_damaged_arrow(tmp_path: Path) -> None:
    """H3: bytes that point outside of the file are found before they are followed."""
    table = pyarrow.table({"prompt": ["some text"] * 50, "completion": [["a", "b"]] * 50})
    path = tmp_path / "d.arrow"
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    whole = sink.getvalue().to_pybytes()
    told = 0
    for place in range(0, len(whole) - 4, 37):
        path.write_bytes(whole[:place] + b"\xff\xff\xff\x7f" + whole[place + 4 :])
        try:
            list(read(path))
        except DataError as error:
            told += str(error).startswith("d.arrow: not readable as Arrow")
    assert told > 5


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


# --- other kinds, packed files ---------------------------------------------------------------------------------------


def test_tsv(write) -> None:
    """H3: commas and quotes as in CSV, with tabs between the fields."""
    path = write("d.tsv", 'prompt\tcompletion\na, b\t"c\td"\n')
    assert list(read(path)) == [RawRow("d.tsv:2", {"prompt": "a, b", "completion": "c\td"})]


@pytest.mark.parametrize("form", ["file", "stream", "feather"])
def test_arrow(tmp_path: Path, form: str) -> None:
    """T4: the same as Parquet, in both of Arrow's forms."""
    rows = [{"prompt": "a", "tools": [{"name": "f", "args": {"room": "hall"}}], "note": None},
            {"prompt": "b", "tools": [{"name": "g", "args": {"unit": "m"}}], "note": "n"}]
    table = pyarrow.Table.from_pylist(rows)
    path = tmp_path / ("d.feather" if form == "feather" else "d.arrow")
    if form == "feather":
        pyarrow.feather.write_feather(table, str(path))
    else:
        new = pyarrow.ipc.new_file if form == "file" else pyarrow.ipc.new_stream
        with pyarrow.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
            writer.write_table(table)
    assert list(read(path)) == [RawRow(f"{path.name}:row {number}", row) for number, row in enumerate(rows, start=1)]
    path.write_bytes(b"ARROW1 not really")
    assert refused(path).startswith(f"{path.name}: not readable as Arrow")


def pack(path: Path, content: bytes, packing: str) -> Path:
    packed = path.with_name(path.name + packing)
    if packing == ".gz":
        packed.write_bytes(gzip.compress(content))
    else:
        with pyarrow.output_stream(str(packed), compression="zstd") as stream:
            stream.write(content)
    return packed


@pytest.mark.parametrize("packing", [".gz", ".zst"])
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "arrow"])
def test_packed_files(tmp_path: Path, kind: str, packing: str) -> None:
    """H3: the same rows, and the same lines as their places, as the file inside."""
    path = tmp_path / f"d.{kind}"
    rows = [{"prompt": "p", "completion": "a"}, {"prompt": "q", "completion": "b"}]
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif kind == "arrow":
        pyarrow.feather.write_feather(pyarrow.Table.from_pylist(rows), str(path), compression="uncompressed")
    elif kind == "csv":
        path.write_text("prompt,completion\np,a\nq,b\n")
    else:
        path.write_text(as_jsonl(rows) if kind == "jsonl" else json.dumps(rows))
    found = list(read(pack(path, path.read_bytes(), packing)))
    assert [raw.record for raw in found] == rows
    assert [raw.place.replace(packing, "") for raw in found] == [raw.place for raw in read(path)]


@pytest.mark.parametrize("packing", [".gz", ".zst"])
def test_packed_files_that_are_broken(tmp_path: Path, packing: str) -> None:
    """H3: not packed at all, or cut off."""
    path = tmp_path / f"d.jsonl{packing}"
    path.write_bytes(b'{"a": 1}\n')
    assert "cannot be read" in refused(path)
    whole = pack(tmp_path / "e.jsonl", json.dumps({"a": list(range(5000))}).encode(), packing)
    whole.write_bytes(whole.read_bytes()[:-200])
    assert refused(whole).startswith(f"{whole}: cannot be read") or "not valid JSON" in refused(whole)


# --- directories, mixtures, the hub ----------------------------------------------------------------------------------


def test_a_directory(write, tmp_path: Path) -> None:
    """H3: data files by name, below it too; hidden ones and descriptions are none."""
    for name in ("b.jsonl", "a.jsonl", "sub/c.jsonl", ".cache/d.jsonl", "dataset_info.json", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(name, json.dumps({"from": name}))
    assert [raw.place for raw in read(tmp_path)] == ["a.jsonl:1", "b.jsonl:1", "sub/c.jsonl:1"]
    assert [part.name for part in resolve_source(tmp_path)] == [tmp_path.name]


def test_several_files_and_weights(write, tmp_path: Path) -> None:
    """Each is a part of its own; a fraction is the same rows every time, and a larger one has all of a smaller."""
    a, b = write("a.jsonl", as_jsonl([{"n": n} for n in range(200)])), write("b.jsonl", as_jsonl(ROWS))
    parts = resolve_source(f"{a}, {b}:2")
    assert [(part.name, part.weight) for part in parts] == [("a.jsonl", 1), ("b.jsonl", 2)]
    assert [raw.place for raw in parts[1].read()] == ["b.jsonl:1", "b.jsonl:2"] * 2
    shares = {weight: [raw.record["n"] for raw in read(f"{a}:{weight}")] for weight in ("0.25", "0.5", ".5", "1.5")}
    assert 60 < len(shares["0.5"]) < 140
    assert shares["0.5"] == sorted(shares["0.5"]) == shares[".5"]
    assert set(shares["0.25"]) < set(shares["0.5"])
    assert shares["1.5"] == list(range(200)) + shares["0.5"]
    assert refused(f"{a}:0") == f"{a}:0: a weight of 0 uses no rows. Remove this part."
    assert refused(f"{a},{tmp_path}/none.csv") == f"{tmp_path}/none.csv: file not found"


def test_the_same_source_from_elsewhere(write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `config.yaml` holds is read from any directory."""
    write("a.jsonl", as_jsonl(ROWS))
    monkeypatch.chdir(tmp_path)
    assert absolute("a.jsonl") == f"{tmp_path}/a.jsonl"
    assert absolute("a.jsonl:0.5, owner/data:2,.") == f"{tmp_path}/a.jsonl:0.5,owner/data:2,{tmp_path}"


def test_names_with_commas_and_colons(write) -> None:
    """What exists is a file, whatever its name looks like."""
    assert len(list(read(str(write("a,b.jsonl", as_jsonl(ROWS)))))) == 2
    path = write("c.jsonl", as_jsonl(ROWS))
    odd = path.rename(path.with_name("c.jsonl:2"))
    assert "unsupported file type" in refused(str(odd))


def test_places_of_files_that_share_a_name(write, tmp_path: Path) -> None:
    """A place names one row."""
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        write(f"{folder}/d.jsonl", as_jsonl(ROWS))
    places = [raw.place for raw in read(f"{tmp_path}/x/d.jsonl,{tmp_path}/y/d.jsonl")]
    assert places == [f"{tmp_path}/{folder}/d.jsonl:{line}" for folder in "xy" for line in (1, 2)]
    places = [raw.place for raw in read(f"{tmp_path}/x,{tmp_path}/y")]
    assert places == [f"{folder}/d.jsonl:{line}" for folder in "xy" for line in (1, 2)]


def test_a_dataset_of_the_hub(write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its training files where it has such; without a network a sentence, and no traceback."""
    import huggingface_hub

    asked = []

    def fetch(name: str, repo_type: str, allow_patterns: list[str], revision: str | None) -> str:
        asked.append((name, repo_type))
        assert "*.parquet" in allow_patterns
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert "has no data file" in refused("someone/some-data")
    write("test.jsonl", as_jsonl(ROWS))
    assert [raw.place for raw in read("someone/some-data")] == ["test.jsonl:1", "test.jsonl:2"]
    write("train.jsonl", as_jsonl(ROWS[:1]))
    assert [raw.place for raw in read("someone/some-data:2")] == ["train.jsonl:1"] * 2
    assert asked == [("someone/some-data", "dataset")] * 3

    def offline(*args: Any, **kwargs: Any) -> str:
        raise ConnectionError("no\nroute")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    assert refused("someone/some-data") == (
        "someone/some-data: file not found, and the dataset could not be downloaded from the Hub (ConnectionError: "
        "no route). Check the name, log in, or download the files and give their directory.")
    assert refused("someone/data.jsonl") == "someone/data.jsonl: file not found"
