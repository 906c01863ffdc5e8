"""Marks on messages that say whether to train on them: every spelling is respected, and none reaches the template."""

import json
from pathlib import Path
from typing import Any

import pytest

from helpers import build_tokenizer, said
from tropism.commands.convert import convert
from tropism.config import ConvertOptions
from tropism.data.audit.audit import Audit
from tropism.data.formats import recognize, rows_of_record
from tropism.data.formats.fields import message
from tropism.data.formats.options import FormatOptions
from tropism.data.read_rows import read_rows
from tropism.data.rows import Dropped, EncodedRow, RawRow, Reason, Row
from tropism.data.tokenization import turns
from tropism.data.tokenization.render import Renderer
from tropism.data.tokenization.truncate import Limits
from tropism.errors import DataError

# Every value of a template's message that could change its text is shown by this one.
SHOWS_KEYS = ("{% for m in messages %}<|turn|>{{ m.role }}"
              "{% for key in m if key not in ('role', 'content') %} {{ key }}{% endfor %}"
              "{{ '\n' + m.content }}<|end|>\n{% endfor %}"
              "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}")
FALSE: list[tuple[str, Any]] = [
    *((key, value) for key in ("weight", "loss", "train", "trainable", "training", "loss_mask", "step_loss_mask",
                               "loss_weight", "loss_scale") for value in (False, 0, 0.0, "false", "0")),
    *((key, value) for key in ("mask", "masked") for value in (True, 1, "True", "1.0"))]


def rows_of(*records: dict[str, Any], view: Any = "single", options: FormatOptions | None = None) -> list[Any]:
    raws = [RawRow(f"f:{number}", record) for number, record in enumerate(records, start=1)]
    reading = recognize(raws, view, "f", options)
    return [row for raw in raws for row in rows_of_record(raw, reading)]


def renderer(supervise: Any = "all") -> Renderer:
    return Renderer(build_tokenizer(chat_template=SHOWS_KEYS), Limits(10_000), supervise)


def encode(record: dict[str, Any], supervise: Any = "all", view: Any = "single") -> Any:
    (row,) = rows_of(record, view=view)
    return renderer(supervise).encode(row)


def learned(record: dict[str, Any], supervise: Any = "all", view: Any = "single", side: int = 0) -> list[str]:
    row = encode(record, supervise, view)
    assert isinstance(row, EncodedRow), row
    completion = row.completions[side]
    return renderer().text.supervised_text(row.prompt_ids.tolist(), completion.ids.tolist(),
                                           completion.loss_mask.tolist())


def chat(*marks: dict[str, Any], **others: Any) -> dict[str, Any]:
    """A conversation whose assistant turns say a, b, c, ..., with these marks."""
    return {"messages": [one for number, mark in enumerate(marks) for one in (
        said("user", f"u{number}"), said("assistant", chr(ord("a") + number)) | mark)], **others}


# --- whole turns ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "value"), FALSE)
def test_every_spelling_is_respected(key: str, value: Any) -> None:
    marked = chat({}, {key: value}, {})
    assert learned(marked) == ["a<|end|>", "c<|end|>"]
    plain, found = encode(chat({}, {}, {})), encode(marked)
    assert (found.prompt_ids.tolist(), found.completions[0].ids.tolist()) == (
        plain.prompt_ids.tolist(), plain.completions[0].ids.tolist())


@pytest.mark.parametrize("key", ["weight", "loss", "train", "trainable", "training", "loss_mask", "mask"])
def test_a_mark_that_changes_nothing_changes_nothing(key: str) -> None:
    value = key != "mask"
    plain = encode(chat({}, {}))
    for other in (value, None):
        found = encode(chat({key: other}, {key: other}))
        assert (found.prompt_ids.tolist(), found.completions[0].key) == (
            plain.prompt_ids.tolist(), plain.completions[0].key)


@pytest.mark.parametrize(("marks", "wanted"), [
    ([{"loss": False}, {}], ["b<|end|>"]), ([{}, {"loss": False}], ["a<|end|>"]),
    ([{"loss": False}, {}, {"loss": False}, {}], ["b<|end|>", "d<|end|>"]),
    ([{}, {"loss": False}, {"loss": False}, {}], ["a<|end|>", "d<|end|>"])])
def test_turns_at_any_place(marks: list[dict[str, Any]], wanted: list[str]) -> None:
    assert learned(chat(*marks)) == wanted


def test_first_turns_that_are_not_trained_on_belong_to_the_prompt() -> None:
    found, last = encode(chat({"train": False}, {})), encode(chat({}, {}), "last")
    assert found.prompt_ids.tolist() == last.prompt_ids.tolist()
    assert found.completions[0].key == last.completions[0].key


@pytest.mark.parametrize("supervise", ["last", "all"])
def test_nothing_to_learn_drops_the_row(supervise: str) -> None:
    """A row that may not be trained on is dropped with its true reason."""
    found = encode(chat({"weight": 0}, {"weight": 0}), supervise)
    assert isinstance(found, Dropped)
    assert (found.reason, found.detail) == (Reason.NO_SUPERVISED_TOKEN, "the completion is marked as not trained on")


def test_last_turn_that_is_not_trained_on() -> None:
    found = encode(chat({}, {"weight": 0}), "last")
    assert isinstance(found, Dropped)
    assert found.detail.endswith("To train on the other assistant messages, use --supervise all.")


def test_share_gpt_and_other_fields() -> None:
    talk = [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a", "loss": False},
            {"from": "human", "value": "v"}, {"from": "gpt", "value": "b", "weight": 1}]
    assert learned({"conversations": talk}) == ["b<|end|>"]
    record = {"prompt": [said("user", "u"), said("assistant", "a") | {"train": False}, said("user", "v")],
              "completion": said("assistant", "b")}
    assert learned(record) == ["b<|end|>"]
    assert isinstance(encode({"prompt": "p", "completion": said("assistant", "b") | {"train": False}}), Dropped)


@pytest.mark.parametrize("side", ["chosen", "rejected"])
@pytest.mark.parametrize("supervise", ["last", "all"])
def test_pairs_and_labels(side: str, supervise: str) -> None:
    """A side that may not be trained on leaves no pair, whatever its earlier turns say."""
    start = [said("user", "u"), said("assistant", "a"), said("user", "v")]
    ends = {"chosen": [said("assistant", "b")], "rejected": [said("assistant", "c")]}
    ends[side][0]["loss"] = False
    for record in ({"prompt": start, **ends}, {name: start + end for name, end in ends.items()}):
        found = encode(record, supervise, "paired")
        assert isinstance(found, Dropped)
        assert found.detail == f"the {side} side is marked as not trained on"
    labeled = {"prompt": start, "completion": ends[side], "label": True}
    assert isinstance(encode(labeled, supervise, "unpaired"), Dropped)


def test_marks_of_the_shared_turns_of_a_pair() -> None:
    sides = {name: [said("user", "u"), said("assistant", "a") | {"train": False}, said("user", "v"),
                    said("assistant", text)] for name, text in (("chosen", "b"), ("rejected", "c"))}
    sides["chosen"][3]["weight"] = 1
    assert [learned(sides, "all", "paired", side) for side in (0, 1)] == [["b<|end|>"], ["c<|end|>"]]
    sides["rejected"][1] = said("assistant", "a")  # the sides now differ from the first answer on
    assert [learned(sides, "all", "paired", side) for side in (0, 1)] == [["b<|end|>"], ["a<|end|>", "c<|end|>"]]


@pytest.mark.parametrize(("marks", "role", "named"), [
    ({"weight": 0.5}, "assistant", "'weight' of a message of 'messages' is 0.5"),
    ({"weight": -1}, "assistant", "is -1"), ({"weight": 2}, "assistant", "is 2"),
    ({"loss": "maybe"}, "user", "'maybe'"),
    ({"loss": float("nan")}, "assistant", "is nan"), ({"loss_mask": [0, 1]}, "assistant", r"is \[0, 1\]"),
    ({"loss": ""}, "assistant", "is ''"), ({"mask": {}}, "assistant", "is {}"),
    ({"weight": 1, "loss": False}, "assistant", "'weight' and 'loss' of a message of 'messages' contradict"),
    ({"mask": True, "train": True}, "assistant", "contradict"),
    ({"train_detail": "0-3"}, "assistant", "must be a list of spans, not str"),
    ({"train_detail": [3]}, "assistant", "has the span 3. A span needs"),
    ({"train_detail": [{"begin_offset": 0, "end_offset": 0}]}, "assistant", "needs 'begin_offset'"),
    ({"train_detail": [{"begin_offset": 0, "end_offset": 4, "train": True}]}, "assistant", "characters 0 to 3"),
    ({"train_detail": [{"begin_offset": 2, "end_offset": 1, "train": True}]}, "assistant", "the span 2 to 1"),
    ({"train_detail": [{"begin_offset": -1, "end_offset": 1, "train": True}]}, "assistant", "the span -1 to 1"),
    ({"training_detail": [{"begin_offset": 0, "end_offset": 1, "train": "x"}]}, "assistant", "'train' is 'x'"),
    ({"train_detail": [{"begin_offset": 0, "end_offset": 1, "train": True},
                       {"begin_offset": 1, "end_offset": 2, "train": False}]}, "assistant", "overlaps an earlier"),
    ({"train_detail": [{"begin_offset": 0, "end_offset": 10**400, "train": True}]}, "assistant", "characters 0 to 3"),
    *(({"train_detail": [{"begin_offset": odd, "end_offset": 3, "train": True}]}, "assistant", "A span needs")
      for odd in (True, 0.5, "0", None, float("nan"), float("inf"))),
])
def test_invalid_marks(marks: dict[str, Any], role: str, named: str) -> None:
    with pytest.raises(DataError, match=named) as caught:
        message({"role": role, "content": "text", **marks}, "messages", "f.jsonl:7")
    assert str(caught.value).startswith("f.jsonl:7: ")


@pytest.mark.parametrize("speaker", ["Assistant", "gpt", " model "])
def test_a_masked_speaker(speaker: str) -> None:
    """NeMo's chats name the speaker that is not trained on: the user as a rule."""
    talk = [{"from": "User", "value": "u"}, {"from": "Assistant", "value": "a"}]
    assert learned({"conversations": talk, "mask": "User"}) == ["a<|end|>"]
    with pytest.raises(DataError, match=r"f:1: mask .* excludes the assistant's messages.*--columns unused=mask"):
        encode({"conversations": talk, "mask": speaker})


# --- parts of turns ---------------------------------------------------------------------------------------------------


def spans(*given: tuple[int, int, bool]) -> list[dict[str, Any]]:
    return [{"begin_offset": begin, "end_offset": end, "train": train} for begin, end, train in given]


@pytest.mark.parametrize(("detail", "wanted"), [
    (spans((0, 6, False), (7, 13, True)), ["an oak.<|end|>"]), (spans((7, 8, True)), ["an"]),
    (spans((0, 13, True)), ["Sorry, an oak.<|end|>"]), (spans((0, 4, True), (10, 12, True)), ["Sorry", "oak"]),
    (spans((7, 13, "true"), (0, 6, 0)), ["an oak.<|end|>"]), (spans((7.0, 8.0, 1.0)), ["an"])])  # type: ignore[arg-type]
def test_spans_of_characters(detail: list[dict[str, Any]], wanted: list[str]) -> None:
    """Offsets include the end; characters outside of trained spans are context; the terminator goes with the last."""
    for key in ("train_detail", "training_detail"):
        for supervise in ("last", "all"):
            record = {"messages": [said("user", "u"), said("assistant", "Sorry, an oak.") | {key: detail}]}
            assert learned(record, supervise) == wanted


@pytest.mark.parametrize("marks", [
    {"train_detail": spans((0, 0, False))}, {"train_detail": []},
    {"train": False, "train_detail": spans((0, 0, True))}])
def test_spans_that_leave_nothing(marks: dict[str, Any]) -> None:
    assert learned(chat({}, marks)) == ["a<|end|>"]
    assert isinstance(encode(chat(marks)), Dropped)


def test_spans_with_a_spelled_control_token() -> None:
    record = {"messages": [said("user", "u"), said("assistant", "x<|end|>yz") | {"train_detail": spans((8, 9, True))}]}
    assert learned(record) == ["yz<|end|>"]


PIECES: list[bytes] = [b"Hel", b"lo", b" wor", b"ld", "\U0001f333".encode()[:2], "\U0001f333".encode()[2:], b"!\n"]


def pieces(ids: list[int]) -> str:
    return b"".join(PIECES[number] for number in ids).decode(errors="replace")


@pytest.mark.parametrize(("span", "wanted", "ends"), [
    ((0, 4), [1, 1, 0, 0, 0, 0, 0], False), ((1, 4), [0, 1, 0, 0, 0, 0, 0], False),
    ((6, 10), [0, 0, 1, 1, 0, 0, 0], False),  # the space at the border does not count
    ((7, 10), [0, 0, 0, 1, 0, 0, 0], False), ((11, 12), [0, 0, 0, 0, 1, 1, 1], True),
    ((12, 12), [0, 0, 0, 0, 0, 0, 1], True)])
def test_tokens_at_the_border_of_a_span(span: tuple[int, int], wanted: list[int], ends: bool) -> None:
    """A token with a character that is not trained on is not learned. A character in two tokens needs both."""
    content = "Hello world\U0001f333!\n"
    marked = message(said("assistant", content) | {"train_detail": spans((*span, True))}, "messages", "f:1")
    assert turns.learned(marked, list(range(7)), pieces, "f:1") == ([bool(one) for one in wanted], ends)


def test_spans_of_a_text_that_the_template_changes() -> None:
    marked = message(said("assistant", " Hello") | {"train_detail": spans((1, 5, True))}, "messages", "f:1")
    assert turns.learned(marked, [0, 1], pieces, "f:1") == ([True, True], True)  # trimmed
    with pytest.raises(DataError, match="f:1: the chat template or the tokenizer changes the text"):
        turns.learned(marked, [2, 3], pieces, "f:1")


# --- what is said -----------------------------------------------------------------------------------------------------


def audited(tmp_path: Path, supervise: str, *records: dict[str, Any]) -> Audit:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return read_rows(str(path), renderer(supervise), "single")


def test_marks_without_effect_are_said(tmp_path: Path) -> None:
    names = {finding.name for finding in audited(tmp_path, "last", chat({"weight": 1}, {"weight": 1})).findings()}
    assert "earlier_marked" in names
    assert "others_marked" not in names
    user = {"messages": [said("user", "u") | {"train": True}, said("assistant", "a")]}
    texts = audited(tmp_path, "all", user, chat({"weight": 1}, {"weight": 0})).notices()
    assert any("is not the assistant's" in text and "1 row" in text for text in texts)
    assert not any("--supervise last" in text for text in texts)
    quiet = {"messages": [said("user", "u") | {"train": False}, said("assistant", "a") | {"train": True}]}
    assert not [name for name in audited(tmp_path, "last", quiet).rows[0].notes if "marked" in name]


def test_no_row_left(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no row is left to train on.*no_supervised_token.*marked as not trained on"):
        audited(tmp_path, "last", chat({"weight": 0}))


# --- convert ----------------------------------------------------------------------------------------------------------


def converted(tmp_path: Path, *records: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    target.unlink(missing_ok=True)
    convert(str(source), ConvertOptions(output=str(target), **options))
    return [json.loads(line) for line in target.read_text().splitlines()]


@pytest.mark.parametrize("to", ["messages", "single"])
def test_convert_keeps_marks(tmp_path: Path, to: Any) -> None:
    record = chat({"loss": 0}, {"weight": "1"}, {"training_detail": spans((0, 0, True))})
    (found,) = converted(tmp_path, record, to=to)
    (row,), (again,) = rows_of(record), rows_of(found)
    assert isinstance(row, Row)
    assert (row.prompt, row.completions) == (again.prompt, again.completions)
    assert [one.get("train") for one in row.prompt if one["role"] == "assistant"] == [False, True]


def test_convert_to_a_row_for_each_turn(tmp_path: Path) -> None:
    """A turn that is not trained on becomes context only; a conversation of such turns is dropped."""
    rows = converted(tmp_path, chat({}, {"loss": False}, {}), chat({"loss": False}), to="single", turns="all")
    assert [row["completion"][0]["content"] for row in rows] == ["a", "c"]
    assert [len(row["prompt"]) for row in rows] == [1, 5]
