"""The parts of `tropism chat`: the file of feedback, and text that grows token by token."""

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from helpers import EXACT_KINDS, tokenizer_kinds
from hostile import as_an_ordinary_user
from tropism.commands.chat.feedback import Feedback
from tropism.commands.chat.speaker import _Stream
from tropism.errors import DataError, OutputError, UsageError

LABELED = '{"prompt": "a", "completion": "b", "label": true}\n'
PAIR = '{"prompt": "a", "chosen": "b", "rejected": "c"}\n'
KINDS = {name: PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|eos|>")
         for name, backend in tokenizer_kinds().items() if name in EXACT_KINDS}
TEXTS = st.text(st.sampled_from("the red kite\n <|>") | st.characters(exclude_categories=("Cs",)), max_size=30)


def streamed(tokenizer: PreTrainedTokenizerFast, prompt: list[int], ids: list[int], trimmed: bool = False) -> list[str]:
    """The parts in which a text is passed on; they are the text of the stream."""
    parts: list[str] = []
    stream = _Stream(tokenizer, [1], parts.append, trimmed)
    stream.put(torch.tensor([prompt]))
    for token in ids:
        stream.put(torch.tensor([token]))
    stream.end()
    assert "".join(parts) == stream.text
    return parts


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(before=TEXTS, text=TEXTS)
def test_the_parts_of_an_answer_are_its_text(kind: str, before: str, text: str) -> None:
    """Decoded behind the prompt, as a row is; no part ends inside a character."""
    tokenizer = KINDS[kind]
    prompt, ids = (tokenizer(one, add_special_tokens=False)["input_ids"] for one in (f"{before}:", text))

    near = prompt[-16:]
    parts = streamed(tokenizer, prompt, ids)
    assert "".join(parts) == tokenizer.decode(near + ids)[len(tokenizer.decode(near)):]
    assert "\ufffd" in text or not any("\ufffd" in part for part in parts)


def test_text_comes_as_soon_as_a_character_is_whole() -> None:
    tokenizer = KINDS["byte level"]
    emoji = tokenizer("\U0001f469")["input_ids"]
    assert len(emoji) == 4
    words = [one for word in ("the", " red") for one in tokenizer(word)["input_ids"]]
    parts = streamed(tokenizer, words, [*emoji, *words])
    assert parts[0] == "\U0001f469"
    assert "".join(parts) == "\U0001f469the red"
    assert streamed(tokenizer, words, emoji[:2]) == ["\ufffd"]  # a stop inside a character
    assert "".join(streamed(tokenizer, words, [*words[-2:], 1, *words])) == tokenizer.decode(words[-2:])


def test_a_row_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the disk before the call returns, and not there if the disk refuses."""
    file = tmp_path / "new" / "f.jsonl"
    feedback = Feedback.open(str(file), paired=False)
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    feedback.label([{"role": "user", "content": "caf\u00e9\n\u2028"}], "b", False)
    assert len(synced) == 1
    assert json.loads(file.read_text(encoding="utf-8")) == {
        "prompt": [{"role": "user", "content": "caf\u00e9\n\u2028"}],
        "completion": [{"role": "assistant", "content": "b"}], "label": False}
    before = file.read_bytes()

    def refuse(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OutputError, match="No space left"):
        feedback.label("a", "b", True)
    assert file.read_bytes() == before
    assert (feedback.rows, feedback.added) == (1, 1)


@pytest.mark.parametrize(("content", "paired", "wanted"), [
    (LABELED, True, r"f.jsonl:1: the file has labeled answers .* adds pairs .*omit --compare"),
    (PAIR, False, r"f.jsonl:1: the file has pairs .* adds labeled answers .*add --compare"),
    (LABELED + PAIR, False, "f.jsonl:2: the file has pairs"),
    (LABELED + "\n{", False, "f.jsonl:3: not valid JSON"),
    ("[" * 100_000, False, "f.jsonl:1: not valid JSON"),
    ('{"step": 1, "loss": 0.5}\n', False, "f.jsonl:1: this is no row of feedback"),
    ("[1]\n", True, "f.jsonl:1: this is no row of feedback"), ("\udcff\n", False, "f.jsonl:1: not valid JSON")])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: str, paired: bool, wanted: str) -> None:
    file = tmp_path / "f.jsonl"
    file.write_text(content, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(DataError, match=wanted):
        Feedback.open(str(file), paired)
    assert file.read_text(encoding="utf-8", errors="surrogateescape") == content


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").mkdir()
    os.mkfifo(tmp_path / "p.jsonl")
    (tmp_path / "r.jsonl").write_text(LABELED)
    (tmp_path / "r.jsonl").chmod(0o444)
    (tmp_path / "l.jsonl").symlink_to("l.jsonl")
    with as_an_ordinary_user():
        for name, wanted in (("d", "directory"), ("r", "denied"), ("l", "symbolic links"), ("p", "not a regular file")):
            with pytest.raises((OutputError, UsageError), match=rf"(?i){name}.jsonl.*{wanted}"):
                Feedback.open(str(tmp_path / f"{name}.jsonl"), paired=False)
    with pytest.raises(UsageError, match=r"ends in \.jsonl"):
        Feedback.open(str(tmp_path / "f.csv"), paired=False)
