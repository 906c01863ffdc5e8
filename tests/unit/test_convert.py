"""Conversions: the new file is read without options as the same rows, and what it does not have is said."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tropism.commands.convert import ConversionReport, convert
from tropism.config import ConvertOptions
from tropism.data.formats import View, recognize, rows_of_record, view_of
from tropism.data.formats.fields import is_blank
from tropism.data.rows import Dropped, Row
from tropism.data.sources.resolve import read
from tropism.errors import DataError, OutputError, UsageError
from unit import test_formats_known as known
from unit.test_formats_known import CHAT, FROM_VALUE, MARKED, RATED, SCORED, TREE, ULTRA, answer, user

KINDS = (".jsonl", ".jsonl.gz", ".parquet")
VIEWS: dict[str, View] = {"unpaired": "unpaired", "paired": "paired", "single": "single", "messages": "single"}
LABELED = [{"id": number, "prompt": f"p{number % 2}", "completion": f" c{number}\r\n", "label": number < 2}
            for number in range(4)]


def rows_of(source: Any, view: View) -> list[Row]:
    """Rows of a source, read without options; none may be left out."""
    records = list(read(source))
    reading = recognize(records, view, "f")
    rows = [row for record in records for row in rows_of_record(record, reading)]
    assert not [row for row in rows if isinstance(row, Dropped)]
    return rows


def content(row: Row) -> tuple[Any, ...]:
    return row.prompt, row.completions, row.desirable, row.tools


def converted(data: Any, output: Path, to: str, **options: Any) -> ConversionReport:
    return convert(data, ConvertOptions(to=to, output=str(output), **options))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def made(tmp_path: Path, records: list[dict[str, Any]], to: str, **options: Any) -> list[dict[str, Any]]:
    """The records of a conversion to JSONL."""
    output = tmp_path / "made.jsonl"
    output.unlink(missing_ok=True)
    converted(records, output, to, **options)
    return lines(output)


def said(account: ConversionReport) -> str:
    return "\n".join(account.lines())


# --- the same rows ---------------------------------------------------------------------------------------------------

EXAMPLES = known.test_formats.pytestmark[0].args[1]


@pytest.mark.parametrize("to", VIEWS)
@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_every_format(tmp_path: Path, number: int, to: str) -> None:
    """Each made example of each format, in each shape and kind of file, is read again as the rows it was."""
    name, _, record, _ = EXAMPLES[number]
    record = {**record, "id": "x"}
    try:
        name, before = known.read(VIEWS[to], record)
    except DataError:
        pairs = to in ("single", "messages") and view_of(known.raw(record)) == "paired"
        if not pairs:
            with pytest.raises(DataError):
                converted([record], tmp_path / "a.jsonl", to)
            assert not list(tmp_path.iterdir())
            return
        before = [row for row in known.read("unpaired", record)[1] if isinstance(row, Row) and row.desirable][:1]
    before = [row for row in before if isinstance(row, Row)]
    if not before:
        with pytest.raises(DataError, match="no row left to write"):
            converted([record], tmp_path / "a.jsonl", to)
        return
    for kind in (".jsonl", ".parquet"):
        output = tmp_path / f"a{kind}"
        account = converted([record], output, to)
        assert account.formats[0].startswith(f"read as {name} ")
        assert view_of(list(read(output))) == VIEWS[to]
        after = rows_of(output, VIEWS[to])
        assert [row.id for row in after] == [row.id for row in before]
        if to == "messages":
            assert [(*row.prompt, *row.completions[0]) for row in after] == [
                (*_chat(row.prompt, "user"), *_chat(row.completions[0], "assistant")) for row in before]
        else:
            assert [row.desirable if to == "unpaired" else None for row in before] == [row.desirable for row in after]
            assert [(row.prompt, row.completions, row.tools) for row in after] == [
                (row.prompt, row.completions, row.tools) for row in before]


def _chat(part: Any, role: str) -> tuple[Any, ...]:
    return ({"role": role, "content": part},) if isinstance(part, str) else part


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda text: not text.startswith("[{"))
SAID = TEXT.filter(lambda text: not is_blank(text))
TEXTS = st.fixed_dictionaries({"prompt": TEXT, "chosen": SAID, "rejected": SAID}).filter(
    lambda row: row["chosen"] != row["rejected"])


def turn(role: str, text: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"role": st.just(role), "content": text}, optional={"name": TEXT})


TURNS = st.lists(st.one_of(turn("user", TEXT), turn("assistant", TEXT), turn("system", TEXT)), max_size=3)
REPLY = st.tuples(TURNS, turn("assistant", SAID)).map(lambda parts: [*parts[0], parts[1]])
CHATS = st.fixed_dictionaries({"prompt": TURNS, "chosen": REPLY, "rejected": REPLY},
                              optional={"tools": st.lists(st.dictionaries(TEXT, TEXT, max_size=2), max_size=2)})


@pytest.mark.parametrize("kind", [*KINDS, ".csv"])
@settings(max_examples=30)
@given(rows=st.lists(TEXTS, min_size=1, max_size=4))
def test_text_stays_what_it_is(tmp_path_factory: pytest.TempPathFactory, kind: str, rows: list[Any]) -> None:
    """Byte for byte, in every kind of file."""
    output = tmp_path_factory.mktemp("texts") / f"a{kind}"
    converted(rows, output, "paired")
    found = rows_of(output, "paired")
    assert [dict(zip(("prompt", "chosen", "rejected"), (row.prompt, *row.completions), strict=True))
            for row in found] == rows


@settings(max_examples=30)
@given(rows=st.lists(CHATS, min_size=1, max_size=4))
def test_chats_stay_what_they_are(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    """Also where a reply repeats its prompt, has other keys, or tools."""
    directory = tmp_path_factory.mktemp("chats")
    for to in ("paired", "unpaired"):
        records = [record for record in rows if to == "paired" or len(_rows(record)) == 2]
        before = [row for record in records for row in _rows(record, to)]
        if before:
            converted(records, directory / f"{to}.jsonl", to)
            after = rows_of(directory / f"{to}.jsonl", VIEWS[to])
            assert sorted(map(str, map(content, after))) == sorted(map(str, map(content, before)))


def _rows(record: dict[str, Any], view: Any = "unpaired") -> list[Row]:
    return [row for row in known.read(view, record)[1] if isinstance(row, Row)]


@settings(max_examples=30)
@given(rows=st.lists(TEXTS, min_size=1, max_size=6))
def test_pairs_come_back(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    """Split and paired by prompt, pairs are those that they were, though several may have one prompt."""
    directory = tmp_path_factory.mktemp("pairs")
    converted(rows, directory / "a.jsonl", "unpaired")
    converted(directory / "a.jsonl", directory / "b.jsonl", "paired", pair_by_prompt=True)
    assert sorted(lines(directory / "b.jsonl"), key=str) == sorted(
        [dict(sorted(row.items(), key=lambda item: ("prompt", "chosen", "rejected").index(item[0])))
         for row in rows], key=str)


def test_tools_and_calls(tmp_path: Path) -> None:
    """Tools go with their row; a call keeps its arguments, also where they differ from row to row."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"x": {"default": None}}}}]
    chats = [{"tools": tools if number else None, "messages": [
        user("p"), {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]},
        {"role": "tool", "content": "1"}, answer("a")]} for number, arguments in enumerate(({"x": 1}, {"y": 2}))]
    for kind in KINDS:
        for to in ("single", "messages"):
            converted(chats, tmp_path / f"{to}{kind}", to)
            assert list(map(content, rows_of(tmp_path / f"{to}{kind}", "single"))) == list(
                map(content, rows_of(chats, "single")))


@pytest.mark.parametrize("arguments", [({"x": 1}, {"x": 1.5}), ({"x": 1}, {"x": "1"}), ({}, {}), ({"x": None},)])
def test_what_parquet_cannot_hold(tmp_path: Path, arguments: tuple[Any, ...]) -> None:
    """One column has one type: rather than change a call the conversion stops, and names the way out."""
    chats = [{"messages": [user("p"), {**answer("a"), "tool_calls": [{"function": {"name": "f", "arguments": one}}]}]}
             for one in arguments]
    with pytest.raises(DataError, match=r"Use \.jsonl"):
        converted(chats, tmp_path / "a.parquet", "messages")
    assert not list(tmp_path.iterdir())
    with pytest.raises(DataError, match="no common Parquet schema"):
        converted([{"prompt": "p", "completion": "a"}, {"messages": CHAT, "prompt": CHAT[:1], "completion": CHAT[1:]}],
                  tmp_path / "a.parquet", "single")


def test_csv(tmp_path: Path) -> None:
    """Plain text only; a row without id stays without."""
    records = [*LABELED, {"prompt": "", "completion": '"q", \n', "label": 0}]
    converted(records, tmp_path / "a.csv", "unpaired")
    assert (tmp_path / "a.csv").read_text().splitlines()[0] == '"prompt","completion","label","id"'
    after = rows_of(tmp_path / "a.csv", "unpaired")
    assert list(map(content, after)) == list(map(content, rows_of(records, "unpaired")))
    assert [row.id == row.place for row in after] == [False] * 4 + [True]
    with pytest.raises(DataError, match=r"^row 1: 'prompt' is messages, but CSV"):
        converted([{"prompt": CHAT[:1], "completion": CHAT[1]}], tmp_path / "b.csv", "single")
    converted([{"prompt": "p", "completion": '[{"role": "x"}]'}], tmp_path / "b.csv", "single")
    assert [row.completions for row in rows_of(tmp_path / "b.csv", "single")] == [('[{"role": "x"}]',)]
    with pytest.raises(UsageError, match="--to messages makes messages"):
        converted([{"messages": CHAT}], tmp_path / "c.csv", "messages")


# --- what becomes of what --------------------------------------------------------------------------------------------


def test_formulas_in_csv(tmp_path: Path) -> None:
    """Training data stays as it is; that a spreadsheet would run a cell is counted and said. Numbers are none."""
    texts = ["=cmd|' /C calc'!A1", "+1+A1", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "-5", "+1.5e3", "-.5", "a=1",
             " =1", "'=1"]
    rows = [{"prompt": text, "completion": "c", "label": True, "=n": -1} for text in texts]
    for kind, count in ((".csv", 7), (".jsonl", 0)):  # six cells and a column's name
        account = converted(rows, tmp_path / f"a{kind}", "unpaired", keep_columns=True)
        assert [raw.record["prompt"] for raw in read(tmp_path / f"a{kind}")] == texts
        assert account.formulas == account.to_json()["formulas"] == count
        assert (f"  formulas ({count}): cells that begin with =" in said(account)) == bool(count)


def test_ids_are_those_of_the_source(tmp_path: Path) -> None:
    """Never a place: a row without an id has none in the file."""
    found = made(tmp_path, [{"id": 7, **SCORED}, SCORED], "unpaired")
    assert [row.get("id") for row in found] == ["7", "7#2", "7#3", None, None, None]
    assert ["id" in row for row in found] == [True] * 3 + [False] * 3


def test_pairs_are_mixed_as_training_mixes_them(tmp_path: Path) -> None:
    found = made(tmp_path, [{"prompt": f"p{n}", "chosen": "a", "rejected": "b"} for n in range(3)], "unpaired")
    assert [row["label"] for row in found] == [True, False, False, True, True, False]


def test_pairs_to_imitate(tmp_path: Path) -> None:
    """The chosen side, also of a pair whose rejected side is empty; the others are counted, not left out."""
    records = [{"prompt": "p", "chosen": "a", "rejected": "b"}, {"prompt": "q", "chosen": "c", "rejected": ""}]
    account = converted(records, tmp_path / "a.jsonl", "single", strict=True)
    assert lines(tmp_path / "a.jsonl") == [{"prompt": "p", "completion": "a"}, {"prompt": "q", "completion": "c"}]
    assert "the chosen side of each pair" in said(account)
    assert "not in the file (2): rejected sides" in said(account)


def test_labeled_completions_to_imitate(tmp_path: Path) -> None:
    account = converted(LABELED, tmp_path / "a.jsonl", "single")
    assert [row["id"] for row in lines(tmp_path / "a.jsonl")] == ["0", "1"]
    assert "dropped: 2 undesirable" in said(account)
    assert "row 3: undesirable: label is false" in said(account)
    assert "not in the file (2): labels" in said(account)
    assert "left behind" not in said(account)
    with pytest.raises(DataError, match=r"^row 3: undesirable: .* \(--strict\)$"):
        converted(LABELED, tmp_path / "b.jsonl", "single", strict=True)
    assert not (tmp_path / "b.jsonl").exists()


def test_text_to_chats(tmp_path: Path) -> None:
    """A chat is what was asked for; that text becomes one is said, and marks that would be verdicts go."""
    records = [{"prompt": "p", "completion": " a"}, {"prompt": "", "completion": "b"},
               {"prompt": [user("p"), {**answer("x"), "thumbs": "up"}], "completion": [answer("y"), answer("z")]}]
    account = converted(records, tmp_path / "a.jsonl", "messages")
    assert lines(tmp_path / "a.jsonl") == [{"messages": [user("p"), answer(" a")]}, {"messages": [answer("b")]}, {
        "messages": [user("p"), answer("x"), answer("y"), answer("z")]}]
    assert "changed (2): plain text" in said(account)
    assert "changed (1): a completion of several messages" in said(account)
    assert "not in the file (1): labels of single messages" in said(account)


def test_all_turns(tmp_path: Path) -> None:
    """A row for each answer, with what stands before it; what is judged answer by answer is not taken apart."""
    chat = [{"role": "system", "content": "s"}, user("p"), answer("a"), user("q"), answer("b")]
    found = made(tmp_path, [{"id": "x", "messages": chat}], "single", turns="all")
    assert [(row["id"], len(row["prompt"]), row["completion"]) for row in found] == [
        ("x", 2, [answer("a")]), ("x#2", 4, [answer("b")])]
    assert made(tmp_path, [{"messages": chat}], "messages", turns="all") == [{"messages": chat[:3]}, {"messages": chat}]
    assert made(tmp_path, [{"conversations": FROM_VALUE * 2}], "single", turns="all")[1]["prompt"] == [*CHAT, user("p")]
    assert len(made(tmp_path, [{"prompt": "p", "completion": "a"}], "single", turns="all")) == 1
    for record in (MARKED, {"messages": chat, "label": True}, TREE):
        with pytest.raises(DataError, match="--turns all needs conversations"):
            made(tmp_path, [record], "single", turns="all")
    with pytest.raises(UsageError, match="--turns has no effect with --to paired"):
        ConvertOptions(to="paired", output="o.jsonl", turns="all")


def test_ratings_and_scores(tmp_path: Path) -> None:
    account = converted(RATED, tmp_path / "a.jsonl", "unpaired", label_threshold=3, keep_columns=True)
    assert [(row["label"], row["rating"]) for row in lines(tmp_path / "a.jsonl")] == [
        (True, 5), (False, "2"), (True, 3)]
    assert "changed (3): ratings of 3 or more" in said(account)
    assert "dropped: 1 missing_field" in said(account)
    account = converted([ULTRA, TREE], tmp_path / "b.jsonl", "paired", format="ultrafeedback")
    assert "not in the file (1): scores and other notes on completions" in said(account)
    assert [row["label"] for row in made(tmp_path, [SCORED], "unpaired", label_threshold=4)] == [False, True, False]
    with pytest.raises(DataError, match="--label-threshold NUMBER"):
        made(tmp_path, RATED, "unpaired")


def test_columns(tmp_path: Path) -> None:
    """Those that are left behind are named; taken along, none changes how the file is read."""
    records = [{"prompt": "p", "completion": "a", "source": "s", "question": "q", "score": float("nan"), "empty": None},
               {"prompt": "p", "completion": "b", "messages": [answer("c")], "chosen": "c",
                "source_question": 1}]
    text = said(converted(records, tmp_path / "a.jsonl", "single"))
    assert ("dropped columns: source (1 record), question (1 record), score (1 record), messages (1 record), "
            "chosen (1 record), source_question (1 record); --keep-columns") in text
    account = converted(records, tmp_path / "b.jsonl", "single", keep_columns=True)
    assert "kept columns: source (1 record), question as source_question (1 record)" in said(account)
    assert lines(tmp_path / "b.jsonl") == [
        {"prompt": "p", "completion": "a", "source": "s", "source_question": "q", "score": None},
        {"prompt": "p", "completion": "b", "source_messages": records[1]["messages"], "source_chosen": "c",
         "source_question": 1}]
    assert list(map(content, rows_of(tmp_path / "b.jsonl", "single"))) == list(map(content, rows_of(records, "single")))
    assert view_of(list(read(tmp_path / "b.jsonl"))) == "single"
    request = {**known.REQUEST, "input": {**known.REQUEST["input"], "parallel_tool_calls": True}}
    assert "input.parallel_tool_calls (1 record)" in said(converted([request], tmp_path / "c.jsonl", "paired"))


def test_renamed_columns(tmp_path: Path) -> None:
    records = [{"prompt": "old", "question": "p", "answer": "a"}]
    account = converted(records, tmp_path / "a.jsonl", "single", columns="prompt=question,completion=answer")
    assert lines(tmp_path / "a.jsonl") == [{"prompt": "p", "completion": "a"}]
    assert "not in the file (1): column prompt, replaced" in said(account)
    with pytest.raises(DataError, match=r"column 'quest' of --columns not found in any row\. Columns found: prompt"):
        made(tmp_path, records, "single", columns="prompt=quest")


def test_the_way_out_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Use --to single or --to messages\.$"):
        made(tmp_path, [{"prompt": "p", "completion": "a"}], "unpaired")
    with pytest.raises(DataError, match="with --pair-by-prompt"):
        made(tmp_path, LABELED, "paired")


# --- files -----------------------------------------------------------------------------------------------------------


def test_mixtures(tmp_path: Path) -> None:
    """Each part has its own format and weight; the head by which it is known is not all of it."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in LABELED))
    (tmp_path / "b.jsonl").write_text(json.dumps(known.HH))
    account = converted(f"{tmp_path}/a.jsonl:2,{tmp_path}/b.jsonl", tmp_path / "o.jsonl", "unpaired")
    assert (account.read, account.written, len(account.formats)) == (9, 10, 2)
    account = converted(f"{tmp_path}/a.jsonl", tmp_path / "p.jsonl", "paired", pair_by_prompt=True)
    assert [row["id"] for row in lines(tmp_path / "p.jsonl")] == ["0", "1"]
    assert "not in the file (2): id and columns" in said(account)


def test_more_records_than_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tropism.commands.convert.source.PEEKED", 2)
    records = [{"q": f"p{number}", "chosen": f"a{number}", "rejected": f"b{number}"} for number in range(7)]
    converted(iter(records), tmp_path / "a.jsonl", "paired", columns="prompt=q")
    assert [row["prompt"] for row in lines(tmp_path / "a.jsonl")] == [record["q"] for record in records]


def test_nothing_half_written_is_left(tmp_path: Path) -> None:
    """A fault in the last row, or a file that is there already: nothing is changed."""
    for kind in (*KINDS, ".csv"):
        output = tmp_path / f"a{kind}"
        with pytest.raises(DataError, match="row 5: label 'good'"):
            converted([*LABELED, {**LABELED[0], "label": "good"}], output, "unpaired")
        assert not list(tmp_path.iterdir())
        output.write_text("mine")
        with pytest.raises(UsageError, match="already exists"):
            converted(LABELED, output, "unpaired")
        assert output.read_text() == "mine"
        output.unlink()
    with pytest.raises(UsageError, match=r"unsupported.*\.jsonl, \.jsonl\.gz, \.parquet or \.csv"):
        converted(LABELED, tmp_path / "a.json", "unpaired")
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        converted(LABELED, tmp_path / "file" / "a.jsonl", "unpaired")


def test_the_same_rows_are_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.jsonl.gz", "b.jsonl.gz"):
        converted(LABELED, tmp_path / name, "unpaired")
    one = (tmp_path / "a.jsonl.gz").read_bytes()
    assert one == (tmp_path / "b.jsonl.gz").read_bytes()
    assert b"a.jsonl" not in one
    assert len(gzip.decompress(one).splitlines()) == 4


def test_every_option_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "convert.md").read_text(encoding="utf-8")
    assert not [name for name in ConvertOptions.model_fields if f"`{name}`" not in text]
