"""Each format in a file of each kind: known without options, and read as the same rows."""

from pathlib import Path
from typing import Any

import pytest

from format_examples import KINDS, MADE, write
from tropism.data.formats import FORMATS
from tropism.data.formats.options import FormatOptions
from tropism.data.read_rows import read_rows, view_of_source
from tropism.data.tokenization.render import Renderer
from tropism.data.tokenization.truncate import Limits

PAIRS = [(name, kind) for name, made in MADE.items() for kind in KINDS if made.flat or kind not in ("csv", "tsv")]


def test_each_format_is_there() -> None:
    assert list(MADE) == list(FORMATS)
    assert {kind for _, kind in PAIRS} == set(KINDS)


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_a_file_of_each_kind(name: str, kind: str, fixture_tokenizer: Any, tmp_path: Path) -> None:
    """H3: the format by its columns, rows, labels, places and ids as from a list of dicts."""
    made = MADE[name]
    path = write(tmp_path, "made", kind, made.records)
    options = FormatOptions(label_threshold=made.threshold)
    assert view_of_source(path, options) == made.view
    renderer = Renderer(fixture_tokenizer, Limits(1000))
    audit = read_rows(path, renderer, made.view, options=options)
    assert audit.format.startswith(f"read as {name} (")
    assert (audit.read, len(audit.rows), audit.dropped) == (len(made.records), made.kept, [])
    assert audit.labels() == ({} if made.desirable is None else {
        "desirable": made.desirable, "undesirable": made.kept - made.desirable})
    first = {"jsonl": ":1", "csv": ":2", "tsv": ":2"}.get(kind.split(".")[0], ":row 1")
    assert audit.rows[0].place == path.name + first
    given = read_rows(made.records, renderer, made.view, options=options)
    for one, other in zip(audit.rows, given.rows, strict=True):
        assert one.prompt_key == other.prompt_key
        assert [side.key for side in one.completions] == [side.key for side in other.completions]
        assert one.desirable == other.desirable
