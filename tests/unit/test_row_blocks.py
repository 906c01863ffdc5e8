"""Rows as columns: what goes in comes out, whether it lies in memory or in a file, and a damaged file is no file."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tropism.data import row_blocks
from tropism.data.row_blocks import Block, RowTable, TableBuilder
from tropism.data.row_facts import RowFacts, facts_of
from tropism.data.rows import Dropped, EncodedRow, Reason
from tropism.data.split import split_by_prompt
from tropism.data.tree import Completion, token_ids
from tropism.errors import UsageError
from tropism.train.setup.data import data_fingerprint

IDS = st.lists(st.integers(0, 50_000), min_size=1, max_size=6)


@st.composite
def completions(draw):
    ids = draw(IDS)
    mask = draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)).filter(any))
    return Completion(token_ids(ids), np.array(mask))


@st.composite
def rows(draw, sides: int, number: int = 0):
    if draw(st.integers(0, 5)) == 0:
        return Dropped(f"f:{number}", draw(st.sampled_from(list(Reason))), draw(st.sampled_from(["", "a\ud800b", "é"])))
    prompt = token_ids(draw(IDS))
    return EncodedRow(f"id{number}", f"f:{number}", prompt, tuple(draw(completions()) for _ in range(sides)), None,
                      draw(st.binary(min_size=16, max_size=16)),
                      frozenset(draw(st.lists(st.sampled_from(["prompt_cut", "eos_added", "text_changed"])))))


@st.composite
def blocks(draw):
    sides = draw(st.integers(1, 2))
    return [[draw(rows(sides, 10 * block + number)) for number in range(draw(st.integers(0, 6)))]
            for block in range(draw(st.integers(1, 3)))]


def content(row: EncodedRow) -> tuple:
    return (row.id, row.place, row.prompt_ids.tolist(), row.desirable, row.split_key, row.notes,
            [(side.ids.tolist(), side.loss_mask.tolist(), side.key) for side in row.completions])


def build(groups: list, label: bool | None = None, through: Path | None = None) -> RowTable:
    builder = TableBuilder()
    for number, group in enumerate(groups):
        block = Block.of(group, {7, number}, saw_messages=number == 1)
        if through is not None:
            block.write(through / f"{number}.arrow")
            block = Block.open(through / f"{number}.arrow")
            assert block is not None
        assert block.stop_ids == {7, number}
        assert block.saw_messages == (number == 1)
        builder.add(block, [getattr(row, "id", row.place) for row in group], [row.place for row in group],
                    [label] * len(group))
    return builder.table()


def assert_same_facts(ours: RowFacts, theirs: RowFacts) -> None:
    for name in ("prompt", "prompt_tokens", "completion", "tokens", "learned", "desirable", "split"):
        assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name
    assert ours.notes.keys() == theirs.notes.keys()
    assert all(np.array_equal(ours.notes[note], theirs.notes[note]) for note in ours.notes)


@given(blocks(), st.booleans())
def test_what_goes_in_comes_out(tmp_path_factory, groups, in_files):
    kept = [row for group in groups for row in group if isinstance(row, EncodedRow)]
    found = build(groups, through=tmp_path_factory.mktemp("blocks") if in_files else None)
    assert len(found) == len(kept)
    assert [content(row) for row in found] == [content(row) for row in kept]
    assert [content(found[number]) for number in range(-len(kept), 0)] == [content(row) for row in kept]
    assert [content(row) for row in found[1::2]] == [content(row) for row in kept[1::2]]
    assert_same_facts(found.facts, facts_of(kept))
    assert_same_facts(found[::-1].facts, facts_of(kept[::-1]))
    assert data_fingerprint(found) == data_fingerprint(kept)
    with pytest.raises(IndexError):
        found[len(kept)]


@given(blocks())
def test_a_row_that_was_left_out_says_why(groups):
    for group in groups:
        block = Block.of(group, set(), saw_messages=False)
        for number, row in enumerate(group):
            told = block.dropped(number, row.place)
            if isinstance(row, EncodedRow):
                assert told is None
            else:
                assert told is not None
                assert (told.place, told.reason) == (row.place, row.reason)
                assert told.detail == row.detail.encode("utf-8", "backslashreplace").decode()


@pytest.mark.parametrize("label", [True, False, None])
def test_labels_belong_to_the_place_and_not_to_the_block(label):
    row = EncodedRow("a", "f:1", token_ids([1]), (Completion.supervised([2]),), None, bytes(16))
    found = build([[row]], label)
    assert found[0].desirable is label
    assert found.facts.desirable.tolist() == [{True: 1, False: 0, None: -1}[label]]


@given(blocks(), st.floats(0.1, 0.9))
def test_a_table_is_split_as_a_list_is(groups, fraction):
    kept = [row for group in groups for row in group if isinstance(row, EncodedRow)]
    try:
        expected = split_by_prompt(kept, fraction) if kept else None
    except UsageError:  # one prompt
        expected = None
    if expected is None:
        return
    for ours, theirs in zip(split_by_prompt(build(groups), fraction), expected, strict=True):
        assert [content(row) for row in ours] == [content(row) for row in theirs]


def test_the_first_row_beyond_the_embedding_is_found():
    some = [EncodedRow(str(n), f"f:{n}", token_ids([n]), (Completion.supervised([n, 2 * n]),), None, bytes(16))
            for n in range(50)]
    found = build([some[:20], some[20:]])
    assert found.first_beyond(80).id == "40"
    assert found.first_beyond(99) is None
    assert found[:40].first_beyond(80) is None


def test_a_damaged_file_is_no_file(tmp_path):
    row = EncodedRow("a", "f:1", token_ids([1, 2, 3]), (Completion.supervised([2, 4]),), None, bytes(16))
    path = tmp_path / "block.arrow"
    Block.of([row] * 3, {4}, saw_messages=False).write(path)
    whole = path.read_bytes()
    assert [entry.name for entry in tmp_path.iterdir()] == ["block.arrow"]
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert Block.open(path) is None, place
        path.write_bytes(whole[:place])
        assert Block.open(path) is None, place
    path.unlink()
    assert Block.open(path) is None


def test_only_some_rows_stay_objects(monkeypatch):
    monkeypatch.setattr(row_blocks, "_KEPT_OBJECTS", 10)
    some = [EncodedRow(str(n), f"f:{n}", token_ids([n]), (Completion.supervised([n]),), None, bytes(16))
            for n in range(40)]
    found = build([some])
    assert [found[n].id for n in range(40)] == [row.id for row in found] == [str(n) for n in range(40)]
    assert len(found._objects) <= 10
