"""Words of labels: what they mean is decided by all values of a file, or by the user, and never guessed."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tropism.commands.convert import convert
from tropism.config import ConvertOptions, KTOOptions
from tropism.data import read_rows as reading
from tropism.data.formats.options import FormatOptions
from tropism.data.read_rows import read_rows, view_of_source
from tropism.data.rows import Reason
from tropism.data.tokenization.render import Renderer
from tropism.data.tokenization.truncate import Limits
from tropism.errors import DataError
from unit.test_formats_known import answer, read, refused, short, user


@pytest.fixture
def renderer(fixture_tokenizer) -> Renderer:
    return Renderer(fixture_tokenizer, Limits(200))


def labeled(*labels: Any, name: str = "label") -> list[dict[str, Any]]:
    return [{"prompt": "p", "completion": f"a{number}", name: label} for number, label in enumerate(labels)]


def labels_of(*labels: Any, **options: Any) -> list[Any]:
    return [short(row)[-1] for row in read("unpaired", *labeled(*labels), **options)[1]]


PAIRS = [
    ("up", "down"), ("yes", "no"), ("Y", "n"), ("good", "bad"), ("👍", "👎"), ("👍🏽", "👎🏿"), ("👍\ufe0f", "👎"),
    (1, -1), ("1", "-1"), ("+1", "-1"), (1.0, 0.0), ("1.0", "0.0"), (1.0, -0.0), (1.0, -1.0),
    (np.float64(1), np.float64(-1)),
    ("like", "dislike"), ("positive", "negative"), ("thumbs_up", "thumbs_down"), ("Thumbs Up", "THUMBS-DOWN"),
    (":thumbsup:", ":thumbsdown:"), (":+1:", ":-1:"), ("accepted", "rejected"), ("accept", "reject"),
    ("chosen", "rejected"), ("correct", "incorrect"), ("upvote", "downvote"), ("helpful", "not helpful"),
    ("Helpful", "not_helpful"), ("true", "f"), ("T", "F"), ("t", "f"), (" up ", "Down\n"), ("1", "\u22121"),
    (True, 0), ("true", False), ("pass", "fail"), ("✅", "❌")]


@pytest.mark.parametrize(("yes", "no"), PAIRS)
def test_pairs(yes: Any, no: Any) -> None:
    """K3: both sides of a pair appear, in any order; as a mark of a message, and for imitation."""
    assert labels_of(yes, no, yes) == [True, False, True]
    assert labels_of(no, yes) == [False, True]
    if not isinstance(yes, float):
        chats = [{"messages": [user("p"), {**answer("a"), "thumbs": label}]} for label in (yes, no)]
        assert [short(row)[-1] for row in read("unpaired", *chats)[1]] == [True, False]
    assert [short(row)[-1] for row in read("single", *labeled(yes, no, yes))[1]] == ["a0", Reason.UNDESIRABLE, "a2"]
    for record in ({"conversations": [user("p"), answer("a")]}, {"instruction": "p", "output": "a"}):
        rows = [{**record, "kto_tag": label} for label in (yes, no)]
        assert [short(row)[-1] for row in read("unpaired", *rows)[1]] == [True, False]


@pytest.mark.parametrize("values", [
    *([side, side] for side in ("up", "No", "👎🏿", -1, "-1", 1.0, 0.0, "1.0", "thumbs_up", "t", "chosen", "rejected")),
    ["up", "down", "meh"], ["up", "yes"], ["up", "down", "good"], [1, 0, -1], [1, 2], [1, -1, 2], [1.0, 0.5], [5, 1],
    ["up", "down", None], ["up", "down", ""], ["up", "down", float("nan")], ["up", "down", ["up"]], [True, 1.0],
    ["up", "down", {}], ["true", "yes"], ["maybe"]])
def test_what_stops(values: list[Any]) -> None:
    """K3: one side alone, a third word and a missing label."""
    said = refused("unpaired", *labeled(*values))
    assert said.startswith("f:")
    assert "is not a boolean" in said
    assert "--labels" in said
    chats = [{"messages": [user("p"), {**answer("a"), "thumbs": label}]} for label in values]
    if all(isinstance(value, str) and value for value in values) and values != ["maybe"]:
        assert "--labels" in refused("unpaired", *chats)


def test_what_the_errors_say() -> None:
    """The place, the value, the rows of each value, and the option."""
    assert refused("unpaired", *labeled("up", "up", "down", "meh", "meh")) == (
        "f:4: label 'meh' is not a boolean. Values: 'up' (2 rows), 'meh' (2 rows), 'down' (1 row). Use true/false or "
        "0/1, or say what each value means, as in --labels up=true,meh=drop,down=false.")
    assert refused("unpaired", *labeled("up", "up")) == (
        "f:1: label 'up' is not a boolean, and its opposite does not occur. Values: 'up' (2 rows). Use true/false or "
        "0/1, or say what each value means, as in --labels up=true.")
    said = refused("unpaired", *labeled("up", "down", None, None))
    assert said.startswith("f:3: label None is not a boolean. Values: None (2 rows), 'up' (1 row), 'down' (1 row).")
    assert said.endswith("--labels null=drop,up=true,down=false.")
    assert refused("unpaired", *labeled("so, so", "up!")).endswith("""--labels '{"so, so": "true", "up!": "false"}'.""")
    assert refused("unpaired", *labeled("so so", "up")).endswith("--labels 'so so=false,up=true'.")
    said = refused("unpaired", *labeled(*range(5)))
    assert "For ratings, use --columns rating=label --label-threshold NUMBER" in said
    many = refused("unpaired", *labeled(*(f"w{number}" for number in range(40))))
    assert "and 28 more values" in many


def test_imitation_ignores_a_column_that_is_no_label() -> None:
    """A column of topics, of grades or of one word of text is not a label, but a whole column of one side is."""
    for labels in (["sports", "news"], [0, 1, 2], ["up", "left"], [None, None], [{"a": 1}, "up"]):
        assert [short(row)[-1] for row in read("single", *labeled(*labels))[1]] == [
            f"a{number}" for number in range(len(labels))]
    assert [short(row)[-1] for row in read("single", *labeled("down", None, "down"))[1]] == [
        Reason.UNDESIRABLE, "a1", Reason.UNDESIRABLE]


# --- --labels --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("labels", "values", "found"), [
    ("up=true,down=false", ["up", "Down "], [True, False]), ("A=true,B=false", ["a", "B", "A"], [True, False, True]),
    ("up=true,down=false,meh=drop", ["up", "meh"], [True, Reason.NO_LABEL]), ("up=true", ["up", "up"], [True, True]),
    ("🎉=true,💩=false", ["💩", "🎉"], [False, True]), ("5=true,4=true,1=false", [5, "4", 1.0], [True, True, False]),
    ("so so=false,well done=true", ["so_so", "Well  done"], [False, True]),
    ("yes=false,no=true", ["yes", "no"], [False, True]),
    ("up=true,null=drop", ["up", None, "", float("nan")], [True, *[Reason.NO_LABEL] * 3]),
    ("up=true,null=false", ["up", None], [True, False]), ("a=b=true,c=false", ["a=b", "c"], [True, False]),
    ('{"yes, please": true, "no": false, "?": "drop"}', ["yes, please", "no", "?"], [True, False, Reason.NO_LABEL]),
    ({"up": True, "down": False}, ["up", "down"], [True, False]), ({1: True, -1: False}, [1, "-1"], [True, False]),
    ({"yes, please": True, "no": False, "meh": None}, ["yes, please", "meh"], [True, Reason.NO_LABEL]),
    ({True: True, False: False}, ["yes", "no", "true", "off"], [True, False, True, False]),
    ({None: "drop", "up": 1}, [None, "up"], [Reason.NO_LABEL, True]), (["up=true", "down=false"], ["up"], [True]),
    ("up = TRUE , down = no", ["up", "down"], [True, False]),
    ("true=true,false=false,1.0=true", [1, True], [True, True])])
def test_words_of_the_user(labels: Any, values: list[Any], found: list[Any]) -> None:
    """Any words, from the command line, YAML or Python; only they are valid then."""
    assert labels_of(*values, labels=labels) == found
    assert "f:1: label 'other' is not a boolean" in refused("unpaired", *labeled("other"), labels=labels)
    assert FormatOptions(**FormatOptions(labels=labels).dump()).words == FormatOptions(labels=labels).words


@pytest.mark.parametrize("labels", ["up", "up=maybe", "=true", "up=true,", "up=true,UP=false", "{", "{1}", "[1]", "",
                                    "1=true,1.0=false"])
def test_invalid_words(labels: str) -> None:
    with pytest.raises(ValueError, match=r"WORD=true|two meanings|not valid JSON"):
        FormatOptions(labels=labels)


def test_words_of_the_user_as_marks() -> None:
    """Marks of messages take the same words."""
    chats = [{"messages": [user("p"), {**answer("a"), "feedback": word}]} for word in ("spot on", "way off", "meh")]
    assert "no row has the columns" in refused("unpaired", *chats)
    assert [short(row)[-1] for row in read("unpaired", *chats, labels="spot on=true,way off=false,meh=drop")[1]] == [
        True, False, Reason.NO_LABEL]


def test_words_without_a_label() -> None:
    """L3: an accepted option changes something."""
    pair = {"prompt": "p", "chosen": "a", "rejected": "b"}
    assert "--labels has no effect on trl" in refused("paired", pair, labels="up=true")
    rated = {"prompt": "p", "completion": "a", "rating": 5}
    assert "--labels has no effect on rating" in refused("unpaired", rated, labels="up=true", label_threshold=2)


def test_names_of_the_column() -> None:
    """A table with other names is refused with the option that reads it, and that works together with words."""
    rows = [{"question": "p", "answer": "a", "feedback": word} for word in ("👍", "👎")]
    for view in ("unpaired", "single"):
        assert refused(view, *rows).endswith(
            "The values of 'feedback' are labels: use --columns prompt=question,completion=answer,label=feedback")
    columns = "prompt=question,completion=answer,label=feedback"
    assert [short(row)[-1] for row in read("unpaired", *rows, columns=columns)[1]] == [True, False]
    assert refused("unpaired", *labeled("up", "down", name="vote")).endswith("use --columns label=vote")
    assert refused("unpaired", *labeled("up", "down", name="rating")).endswith("use --columns label=rating")
    chats = [{"messages": [user("p"), answer("a")], "thumb": word} for word in ("up", "down")]
    assert refused("unpaired", *chats).endswith("use --columns label=thumb")
    spaced = [{"prompt": "p", "completion": "a", "user vote": word} for word in ("up", "down")]
    assert refused("unpaired", *spaced).endswith('use --columns "label=user vote"')
    assert "are labels" not in refused("unpaired", *labeled("blue", "red", name="color"))


# --- the whole file --------------------------------------------------------------------------------------------------


def put(path: Path, *labels: Any) -> Path:
    path.write_text("\n".join(map(json.dumps, labeled(*labels))))
    return path


def test_words_after_the_first_records(tmp_path: Path, renderer: Renderer, monkeypatch) -> None:
    """A file that is sorted by its labels is read; a new word stops with its place and the counts so far."""
    monkeypatch.setattr(reading, "_HEAD", 3)
    audit = read_rows(put(tmp_path / "a.jsonl", *["up"] * 4, "down"), renderer, "unpaired")
    assert audit.reading[1] == "labels: up is desirable (4 rows), down is undesirable (1 row)"
    assert audit.labels() == {"desirable": 4, "undesirable": 1}
    with pytest.raises(DataError, match=r"^b.jsonl:5: label 'meh' .*'up' \(3 rows\), 'down' \(1 row\), 'meh' \(1 row"):
        read_rows(put(tmp_path / "b.jsonl", "up", "up", "down", "up", "meh", "up"), renderer, "unpaired")
    with pytest.raises(DataError, match=r"^c.jsonl:1: label 'up' .*opposite does not occur. Values: 'up' \(5 rows\)"):
        read_rows(put(tmp_path / "c.jsonl", *["up"] * 5), renderer, "unpaired")
    audit = read_rows(put(tmp_path / "d.jsonl", *[1] * 4, -1), renderer, "unpaired")
    assert audit.labels() == {"desirable": 4, "undesirable": 1}
    with pytest.raises(DataError, match=r"^e.jsonl:6: label -1 "):
        read_rows(put(tmp_path / "e.jsonl", *[1] * 4, 0, -1), renderer, "unpaired")
    assert read_rows(put(tmp_path / "f.jsonl", *[True] * 5), renderer, "unpaired").reading[1:] == []


def test_parts_have_words_of_their_own(tmp_path: Path, renderer: Renderer) -> None:
    one, two = put(tmp_path / "a.jsonl", "up", "down"), put(tmp_path / "b.jsonl", True, False)
    audit = read_rows(f"{one},{two}", renderer, "unpaired")
    assert [row.desirable for row in audit.rows] == [True, False, True, False]
    assert audit.label_words == "labels: up is desirable (1 row), down is undesirable (1 row)"


def test_csv_and_conversion(tmp_path: Path) -> None:
    """Text of CSV cells, and the new file has true and false."""
    with (tmp_path / "a.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["prompt", "completion", "label"], ["p", "a", "1.0"], ["p", "b", "0.0"]])
    report = convert(str(tmp_path / "a.csv"), ConvertOptions(to="unpaired", output=str(tmp_path / "b.jsonl")))
    assert "labels: 1.0 is desirable (1 row), 0.0 is undesirable (1 row)" in report.formats
    assert [json.loads(line)["label"] for line in (tmp_path / "b.jsonl").read_text().splitlines()] == [True, False]
    assert view_of_source(str(tmp_path / "a.csv")) == "unpaired"


def test_options_of_a_run(tmp_path: Path) -> None:
    """Python takes a mapping; what a run writes down is read again."""
    options = KTOOptions(model="m", data="d", output=str(tmp_path), labels={"up": True, "down": False})
    assert options.words == {"up": True, "down": False}
    written = {name: value for name, value in options.dump().items() if name != "method"}
    assert KTOOptions(**written).words == options.words
