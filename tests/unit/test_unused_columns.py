"""Columns that nothing reads are named, and those that look like a preference are warnings with a remedy."""

from typing import Any

import pytest

from helpers import build_tokenizer
from tropism.data.audit.audit import Audit
from tropism.data.audit.unused_columns import is_preference_like, name_columns
from tropism.data.formats.options import FormatOptions
from tropism.data.read_rows import read_rows
from tropism.data.rows import View
from tropism.data.tokenization.render import Renderer
from tropism.data.tokenization.truncate import Limits

SINGLE = {"prompt": "Name a tree.", "completion": "An oak."}
LABELED = {**SINGLE, "label": True}
PAIR = {"prompt": "Name a tree.", "chosen": "An oak.", "rejected": "A salmon."}
TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]


def audit_of(rows: list[dict[str, Any]], view: View, **options: Any) -> Audit:
    renderer = Renderer(build_tokenizer(), Limits(1000), plain_text=True)
    return read_rows(rows, renderer, view, options=FormatOptions(**options))


def unused_line(audit: Audit) -> list[str]:
    """The line of the log, if there is one."""
    return [line for line in audit.reading if line.startswith("columns not used: ")]


def warning(audit: Audit) -> str:
    return next((found.text for found in audit.findings() if found.name == "preference_unused"), "")


@pytest.mark.parametrize(("record", "view", "unused"), [
    (SINGLE, "single", []),
    ({**SINGLE, "notes": "x", "split": 1}, "single", ["notes", "split"]),
    ({**SINGLE, "id": 1, "source": "a", "annotator": "b"}, "single", []),
    ({**SINGLE, "empty": None}, "single", []),
    ({**SINGLE, "label": True}, "single", []),  # a false label drops the row
    ({**SINGLE, "label": "travel"}, "single", ["label"]),
    ({**SINGLE, "system": "Be brief.", "tools": "[]", "history": [["a", "b"]]}, "single", []),
    ({**SINGLE, "history": "long ago"}, "single", ["history"]),
    ({**LABELED, "rejected": "A car."}, "unpaired", ["rejected"]),
    ({**PAIR, "score_chosen": 4}, "paired", ["score_chosen"]),
    ({**PAIR, "margin": 4}, "unpaired", ["margin"]),
    ({"instruction": "a", "input": "b", "output": "c", "text": "abc"}, "single", ["text"]),
    ({"input": "b", "output": "c", "text": "abc"}, "single", ["text"]),
    ({"messages": TURNS, "prompt": "Hi"}, "single", ["prompt"]),
    ({"messages": '[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]', "x": 1}, "single",
     ["x"]),
    ({"history": "Hi", "human_ref_A": "a", "human_ref_B": "b", "labels": 1, "score_A": 2, "score_B": 1, "domain": "x"},
     "paired", ["domain"]),
    ({"prompt": "Hi", "response_1": "a", "response_2": "b", "preference_strength": 1, "split": "x"}, "paired",
     ["split"]),
    ({"prompt": "Hi", "responses": ["a", "b"], "scores": [1, 2], "models": ["x", "y"]}, "paired", ["models"]),
])
def test_columns_are_named(record: dict[str, Any], view: View, unused: list[str]) -> None:
    audit = audit_of([record, dict(record)], view)
    assert audit.columns_not_used == unused
    assert audit.to_json()["columns_not_used"] == unused
    assert unused_line(audit) == ([f"columns not used: {', '.join(unused)}"] if unused else [])


@pytest.mark.parametrize("name", [
    "preferred", "winner", "rating", "score", "rank", "feedback", "thumbs", "vote", "reward", "preference",
    "is_good", "isGood", "thumbs_up", "user_rating", "is_preferred", "upvotes", "human-feedback"])
def test_columns_that_look_like_a_preference(name: str) -> None:
    audit = audit_of([{**SINGLE, name: n % 2 == 0} for n in range(4)], "single")
    text = warning(audit)
    assert name in text
    assert f"`tropism kto --columns label={name}`" in text
    assert text in audit.notices()


@pytest.mark.parametrize("name", ["notes", "feedback_comment", "score_chosen", "rejected_rating", "topic", "model", "",
                                  "\u6587", "labelled_by", "goodness knows"])
def test_columns_that_do_not(name: str) -> None:
    assert not is_preference_like(name)


def test_remedies() -> None:
    """The remedy is that of the method and of the values."""
    assert "`tropism kto --columns rating=stars --label-threshold NUMBER`" in warning(
        audit_of([{**SINGLE, "stars": n} for n in range(4)], "single"))
    assert "`tropism kto --label-threshold NUMBER`" in warning(
        audit_of([{**SINGLE, "score": n / 4} for n in range(4)], "single"))
    assert "The labels are those of 'label'. To use another column, pass --columns label=preferred" in warning(
        audit_of([{**LABELED, "preferred": False}], "unpaired"))
    assert "The preferences are those of 'chosen' and 'rejected'" in warning(
        audit_of([{**PAIR, "winner": "b"}], "paired"))
    assert "To weight the rows, pass --columns weight=row_weight" in warning(
        audit_of([{**SINGLE, "row_weight": 0.5}], "single"))
    assert "--columns 'label=Quality Score'" in warning(audit_of([{**SINGLE, "Quality Score": True}], "single"))
    assert "the columns rank, vote look like a preference, but are not used" in warning(
        audit_of([{**PAIR, "rank": "b", "vote": 1}], "paired"))


def test_columns_that_are_used_are_no_warning() -> None:
    assert not warning(audit_of([{**SINGLE, "rating": n} for n in range(4)], "unpaired", label_threshold=2))
    renamed = [{**SINGLE, "preferred": True}, {**SINGLE, "preferred": False}]
    assert not warning(audit_of(renamed, "unpaired", columns="label=preferred"))
    assert unused_line(audit_of(renamed, "single", columns="unused=preferred")) == []


def test_column_that_appears_late() -> None:
    """A column of the last records counts, used or not."""
    audit = audit_of([SINGLE] * 30 + [{**SINGLE, "system": "Be brief.", "winner": "a"}], "single")
    assert audit.columns_not_used == ["winner"]


def test_odd_and_many_names() -> None:
    """The line stays short whatever the columns are called."""
    record: dict[Any, Any] = {**SINGLE, **{f"c{n}": n for n in range(3000)}, "x" * 500: 1, "\x1b[31mscore": 1, "": 2,
                              "list": [1], "nested": {"a": [float("nan")]}}
    audit = audit_of([record, dict(record)], "single")
    line, = unused_line(audit)
    assert line.startswith("columns not used: c0, c1")
    assert line.endswith("more")
    assert len(line) < 700
    assert len(audit.to_json()["columns_not_used"]) == 1000
    assert name_columns(["y" * 100]) == "y" * 40 + "..."
