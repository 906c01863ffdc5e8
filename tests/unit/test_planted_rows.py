"""Rendered rows in a store that others can write to: planted ones are noticed, damaged ones rendered again."""

import os
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from helpers import CHATML, build_tokenizer
from tropism import store
from tropism.data.read_rows import read_rows
from tropism.data.row_blocks import Block
from tropism.data.tokenization import encode
from tropism.data.tokenization.render import Renderer
from tropism.data.tokenization.truncate import Limits
from tropism.errors import DataError

BLOCK_ROWS = 40


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(encode, "BLOCK_ROWS", BLOCK_ROWS)
    yield
    store.release()


def records(word: str = "oak", count: int = 3 * BLOCK_ROWS) -> list[dict[str, Any]]:
    return [{"prompt": [{"role": "user", "content": f"{word} {n}?"}],
             "completion": [{"role": "assistant", "content": "elm " * (n % 5)}], "label": n % 3 == 0}
            for n in range(count)]


def read(root: Path, rows: list[dict[str, Any]]) -> list[list[int]]:
    renderer = Renderer(build_tokenizer(chat_template=CHATML), Limits(64))
    return [row.prompt_ids.tolist() for row in read_rows(rows, renderer, "unpaired", cache=root / "rows").rows]


def files(root: Path) -> list[Path]:
    return sorted(root.glob("rows/*/*.arrow"))


def rewrite(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change columns of a block and write it under a right checksum, as anybody can."""
    block = Block.open(file)
    assert block is not None
    columns = {field.name: block.batch.column(field.name) for field in block.batch.schema}
    change(columns)
    Block(pa.record_batch(list(columns.values()), schema=block.batch.schema)).write(file)


def other_ids(columns: dict[str, Any]) -> None:
    ids = columns["ids"]
    columns["ids"] = pa.LargeListArray.from_arrays(ids.offsets, pa.array(ids.values.to_numpy() ^ 1, pa.int32()))


def other_mask(columns: dict[str, Any]) -> None:
    learned = columns["learned"]
    columns["learned"] = pa.LargeListArray.from_arrays(
        learned.offsets, pa.array(1 - learned.values.to_numpy(), pa.uint8()))


def dropped(columns: dict[str, Any]) -> None:
    columns["sides"] = pa.array([0] * BLOCK_ROWS, pa.uint8())
    columns["reason"] = pa.array(["empty_prompt"] * BLOCK_ROWS)
    columns["detail"] = pa.array(["what"] * BLOCK_ROWS)


@pytest.mark.parametrize("change", [other_ids, other_mask, dropped])
def test_planted_rows_stop_the_run(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """With the file, the row and the remedy, in whichever block they are."""
    root = tmp_path / "a store"
    read(root, records())
    for file in files(root):
        content = file.read_bytes()
        rewrite(file, change)
        with pytest.raises(DataError) as caught:
            read(root, records())
        assert str(caught.value).startswith(f"{file}: row ")
        assert str(caught.value).endswith(f"tropism store clean --store {shlex.quote(str(root))}")
        file.write_bytes(content)
    assert read(root, records()) == read(tmp_path / "fresh", records())


def test_a_copy_of_another_block_is_not_taken(tmp_path: Path) -> None:
    """The checksum covers the names of the file and its directory: other rows, or another renderer's, are damage."""
    read(tmp_path, records("ash"))
    foreign = files(tmp_path)
    wanted = read(tmp_path / "fresh", records())
    read(tmp_path, records())
    for file, other in zip((file for file in files(tmp_path) if file not in foreign), foreign, strict=True):
        file.write_bytes(other.read_bytes())
        assert Block.open(file) is None
    assert read(tmp_path, records()) == wanted
    moved = tmp_path / "rows" / ("f" * 32) / foreign[0].name
    moved.parent.mkdir()
    moved.write_bytes(foreign[0].read_bytes())
    assert Block.open(moved) is None


def negative(columns: dict[str, Any]) -> None:
    ids = columns["ids"]
    columns["ids"] = pa.LargeListArray.from_arrays(ids.offsets, pa.array(-ids.values.to_numpy(), pa.int32()))


def too_long(columns: dict[str, Any]) -> None:
    columns["prompt_tokens"] = pa.array([10**6] * BLOCK_ROWS, pa.int32())


def three_sides(columns: dict[str, Any]) -> None:
    columns["sides"] = pa.array([3] * BLOCK_ROWS, pa.uint8())


def no_values(columns: dict[str, Any]) -> None:
    columns["split_key"] = pa.array([None] * BLOCK_ROWS, pa.binary(16))


def other_masks(columns: dict[str, Any]) -> None:
    learned = columns["learned"]
    columns["learned"] = pa.LargeListArray.from_arrays(
        learned.offsets, pa.array(learned.values.to_numpy() + 7, pa.uint8()))


@pytest.mark.parametrize("change", [negative, too_long, three_sides, no_values, other_masks])
def test_columns_that_fit_no_row_are_damage(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """They are rendered again, and nothing reads them."""
    wanted = read(tmp_path, records())
    for file in files(tmp_path):
        rewrite(file, change)
        assert Block.open(file) is None
    assert read(tmp_path, records()) == wanted
    assert all(Block.open(file) is not None for file in files(tmp_path))


def test_a_block_with_other_metadata_or_columns_is_damage(tmp_path: Path) -> None:
    read(tmp_path, records())
    file = files(tmp_path)[0]
    block = Block.open(file)
    assert block is not None
    for batch in (block.batch.replace_schema_metadata({"tropism": "[" * 99999}),
                  block.batch.replace_schema_metadata({}),
                  block.batch.replace_schema_metadata({"tropism": '{"stop_ids": ["x"], "saw_messages": 1}'}),
                  block.batch.select(["ids"]).replace_schema_metadata(block.batch.schema.metadata),
                  block.batch.slice(0, 0).replace_schema_metadata({})):
        fake = object.__new__(Block)
        fake.batch = batch
        fake.write(file)
        assert Block.open(file) is None


def test_a_pipe_in_place_of_a_block_is_passed_by(tmp_path: Path) -> None:
    wanted = read(tmp_path, records())
    for file in files(tmp_path):
        file.unlink()
        os.mkfifo(file)
    assert read(tmp_path, records()) == wanted


def test_blocks_that_are_evicted_while_they_are_read_are_rendered_again(tmp_path: Path,
                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = read(tmp_path, records())
    real = Block.open.__func__  # type: ignore[attr-defined]
    gone = []

    def late(path: Path) -> Block | None:
        if not gone:
            gone.append(path)
            for file in files(tmp_path):
                file.unlink()
        return real(Block, path)

    monkeypatch.setattr(Block, "open", late)
    assert read(tmp_path, records()) == wanted
    assert gone


def test_a_read_block_counts_as_used_and_needed(tmp_path: Path) -> None:
    read(tmp_path, records())
    other = read(tmp_path, records("ash"))
    store.release()
    for file in files(tmp_path):
        os.utime(file, (1000, 1000))
    assert read(tmp_path, records("ash")) == other
    assert store.tidy(tmp_path, 1).files == 2
    assert len(files(tmp_path)) == 2
