"""Thousands of malformed files: a sentence with the place, or rows that keep every law. Never anything else."""

from pathlib import Path
from typing import Any

import pytest

from malformed_files import VIEWS, malformed, well_said
from tropism.data.read_rows import read_rows
from tropism.data.rows import Dropped, EncodedRow, Row
from tropism.data.tokenization.render import Renderer
from tropism.data.tokenization.truncate import Limits
from tropism.errors import TropismError

FILES = 2100
BATCH = 300


class Watched(Renderer):
    """A renderer that looks at each row that it lets through."""

    kept = 0

    def encode(self, row: Row) -> EncodedRow | Dropped:
        found = super().encode(row)
        if isinstance(found, EncodedRow):
            type(self).kept += 1
            self.look(row, found)
        return found

    def look(self, row: Row, found: EncodedRow) -> None:
        prompt = found.prompt_ids.tolist()
        assert prompt
        assert len({side.key for side in found.completions}) == len(found.completions)
        for answer, side in zip(row.completions, found.completions, strict=True):
            assert side.length >= 1
            assert len(prompt) + len(side.ids) <= self.limits.max_length
            texts = self.text.supervised_text(prompt, side.ids.tolist(), side.loss_mask.tolist())
            if found.notes & {"text_changed", "completion_cut"}:
                continue
            if isinstance(answer, str):
                assert texts == [answer if answer.endswith("<|eos|>") else answer + "<|eos|>"]
            else:
                assert texts == [(answer[-1].get("content") or "") + "<|end|>"]


@pytest.mark.some(3)
@pytest.mark.parametrize("first", range(0, FILES, BATCH))
def test_malformed_files(first: int, fixture_tokenizer: Any, tmp_path: Path) -> None:
    """H3, D1, M1: every error is one of ours and says file and line; every row that is kept can be trained on."""
    renderer, refused, before = Watched(fixture_tokenizer, Limits(600)), 0, Watched.kept
    for number in range(first, first + BATCH):
        name, whole = malformed(number)
        path = tmp_path / name
        path.write_bytes(whole)
        for view in VIEWS:
            said = ""
            try:
                audit = read_rows(path, renderer, view)  # type: ignore[arg-type]
            except TropismError as error:
                said = str(error)
            if said:
                refused += 1
                assert well_said(said, path), (number, view, said[:500])
            else:
                assert len(audit.rows) >= 1
                assert all(drop.place.startswith(f"{name}:") for drop in audit.dropped)
        path.unlink()
    assert refused > BATCH / 4  # else these files are not as malformed as they should be
    assert Watched.kept - before > BATCH / 4
