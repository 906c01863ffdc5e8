"""From a source to rows: what was seen is said, pairs that are split are mixed, and parts keep their own formats."""

import json
from pathlib import Path
from typing import Any

import pytest

from tropism.data.formats.options import FormatOptions
from tropism.data.read_rows import read_rows, view_of_source
from tropism.data.tokenization.render import Renderer
from tropism.data.tokenization.truncate import Limits
from tropism.errors import DataError


@pytest.fixture
def renderer(fixture_tokenizer) -> Renderer:
    return Renderer(fixture_tokenizer, Limits(200))


def pairs(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"p{n}", "chosen": f"a{n}", "rejected": f"b{n}"} for n in range(count)]


def put(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def test_the_sentence(renderer: Renderer) -> None:
    audit = read_rows(pairs(2), renderer, "paired")
    assert audit.format == "read as trl (prompt, chosen, rejected); override with --format and --columns"


def test_split_pairs_are_mixed(renderer: Renderer) -> None:
    """K4: in file order no class comes in runs of more than two, and either class opens a pair."""
    audit = read_rows(pairs(5), renderer, "unpaired")
    assert [row.desirable for row in audit.rows] == [True, False, False, True] * 2 + [True, False]
    assert [row.id for row in audit.rows][:4] == ["row 1", "row 1#2", "row 2#2", "row 2"]
    assert audit.labels() == {"desirable": 5, "undesirable": 5}
    assert (audit.read, audit.summary()) == (5, "5 read, 10 kept")
    assert [row.id for row in read_rows(pairs(5), renderer, "unpaired", workers=3).rows] == [
        row.id for row in audit.rows]


def test_parts_have_formats_of_their_own(renderer: Renderer, tmp_path: Path) -> None:
    """A mixture of data sets is read file by file; renaming asks for a column in one of them."""
    one = put(tmp_path / "one.jsonl", [{"prompt": "p", "completion": "a", "label": True}])
    two = put(tmp_path / "two.jsonl", [{"input": "p", "output": "b", "label": 0}])
    audit = read_rows(f"{one},{two}:2", renderer, "unpaired")
    assert [(row.place, row.desirable) for row in audit.rows] == [
        ("one.jsonl:1", True), ("two.jsonl:1", False), ("two.jsonl:1", False)]
    assert [sentence.split(";")[0] for sentence in audit.format.split("; read")] == [
        "read as trl (prompt, completion, label)", " as openrlhf (input, output, label)"]
    three = put(tmp_path / "three.jsonl", [{"question": "p", "completion": "c", "label": False}])
    audit = read_rows(f"{one},{three}", renderer, "unpaired", options=FormatOptions(columns="prompt=question"))
    assert len(audit.rows) == 2
    with pytest.raises(DataError, match=r"column 'quest' .* not found in any row.*: .*, question"):
        read_rows(f"{one},{three}", renderer, "unpaired", options=FormatOptions(columns="prompt=quest"))
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError, match=r"empty\.jsonl: no rows"):
        read_rows(f"{one},{tmp_path}/empty.jsonl", renderer, "unpaired")


def test_pairs_by_prompt_over_files(renderer: Renderer, tmp_path: Path) -> None:
    """Completions of a prompt find each other wherever they are; what finds none is listed."""
    one = put(tmp_path / "one.jsonl", [{"prompt": "p", "completion": "a", "label": True}])
    two = put(tmp_path / "two.jsonl", [{"prompt": "p", "completion": "b", "label": False},
                                       {"prompt": "q", "completion": "c", "label": False}])
    options = FormatOptions(pair_by_prompt=True)
    assert view_of_source(f"{one},{two}", options) == "paired"
    audit = read_rows(f"{one},{two}", renderer, "paired", options=options)
    assert audit.summary() == "3 read, 1 kept: 1 unpaired"
    assert len(audit.rows[0].completions) == 2
    assert audit.rows[0].desirable is None
    with pytest.raises(DataError, match=r"two\.jsonl:2: unpaired: no desirable completion"):
        read_rows(f"{one},{two}", renderer, "paired", options=options, strict=True)
