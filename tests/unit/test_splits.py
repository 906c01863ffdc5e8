"""Directories with several splits: one is read, and the others are named."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from helpers import CASES
from tropism.data.sources.resolve import SplitChoice, resolve_source
from tropism.errors import DataError

Rows = Sequence[str]


def jsonl(path: Path, *names: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"prompt": name, "completion": "x"}) + "\n" for name in names))
    return path


def arrow(path: Path, *names: str) -> Path:
    import pyarrow

    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table({"prompt": list(names), "completion": ["x"] * len(names)})
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return path


def saved(path: Path, *names: str, files: Sequence[str] = ("data-00000-of-00001.arrow",), split: str | None = None,
          ) -> Path:
    """A directory as `save_to_disk` writes it, with a cache and an old shard beside the data."""
    for file in files:
        arrow(path / file, *(f"{name}" for name in names))
    arrow(path / "cache-1234567890abcdef.arrow", "cached")
    arrow(path / "data-00002-of-00003.arrow", "stale")
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": file} for file in files],
                                                 "_split": split}))
    (path / "dataset_info.json").write_text("{}")
    return path


def saved_dict(path: Path, **splits: Rows) -> Path:
    for name, rows in splits.items():
        saved(path / name, *rows)
    (path / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    return path


def card(path: Path, configs: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "README.md").write_text(f"---\nlicense: mit\n{configs}---\n# Data\n")
    return path


def read(source: Any, split: str | None = None, held_out: bool = False) -> tuple[list[str], str]:
    """The prompts that are read, and what is said about splits."""
    parts = resolve_source(source, split=SplitChoice(split, "--split", held_out))
    return [row.record["prompt"] for part in parts for row in part.read()], "; ".join(part.split for part in parts)


def test_a_saved_dict_gives_its_train_split(tmp_path: Path) -> None:
    saved_dict(tmp_path, train=("a", "b"), test=("c",), extra=("d",))
    assert read(tmp_path) == (["a", "b"], "split train (also there: test, extra; choose with --split)")
    assert read(tmp_path, "test")[0] == ["c"]
    assert read(tmp_path, held_out=True)[0] == ["c"]
    with pytest.raises(DataError, match=r"--split dev: no split of this name\. Splits: train, test, extra"):
        read(tmp_path, "dev")


def test_a_saved_dataset_gives_the_files_of_its_state(tmp_path: Path) -> None:
    assert read(saved(tmp_path / "one", "a")) == (["a"], "")
    two = saved(tmp_path / "two", "a", files=("data-00000-of-00002.arrow", "data-00001-of-00002.arrow"))
    assert read(two)[0] == ["a", "a"]
    assert read(saved(tmp_path / "named", "a", split="test"), "test")[0] == ["a"]
    with pytest.raises(DataError, match=r"--split test"):
        read(saved(tmp_path / "other", "a"), "test")


@pytest.mark.parametrize("name", ["../secret.arrow", "/etc/secret.arrow", "", "sub/../../secret.arrow"])
def test_a_state_does_not_lead_outside(tmp_path: Path, name: str) -> None:
    arrow(tmp_path / "secret.arrow", "secret")
    path = saved(tmp_path / "data", "a")
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(DataError, match=r"state\.json: (names .* not inside|'_data_files')"):
        read(path)


@pytest.mark.parametrize("content", ['{"_data_files": []}', '{"_data_files": 3}', '{"_data_files": [{}]}', "[]", "{",
                                     '{"_data_files": [{"filename": "data-9.arrow"}]}'])
def test_a_damaged_state_is_named(tmp_path: Path, content: str) -> None:
    path = saved(tmp_path / "data", "a")
    (path / "state.json").write_text(content)
    with pytest.raises(DataError, match=r"state\.json"):
        read(path)


@pytest.mark.parametrize("content", ['{"splits": []}', '{"splits": "train"}', '{"splits": ["../x"]}', "{}", "null",
                                     '{"splits": ["train", "gone"]}'])
def test_a_damaged_dict_is_named(tmp_path: Path, content: str) -> None:
    path = saved_dict(tmp_path / "data", train=("a",))
    (path / "dataset_dict.json").write_text(content)
    with pytest.raises(DataError, match=r"dataset_dict\.json|gone"):
        read(path)


def test_files_named_after_splits(tmp_path: Path) -> None:
    """As the hub reads them: words in the file's name, or in that of its directory."""
    for number, (train, test) in enumerate([
            ("train.jsonl", "test.jsonl"), ("data/train-00000-of-00001.jsonl", "data/validation-00000-of-00001.jsonl"),
            ("train/a.jsonl", "test/a.jsonl"), ("my_train_file.jsonl", "my_dev_file.jsonl"),
            ("training/x.jsonl", "eval/x.jsonl")]):
        path = tmp_path / str(number)
        jsonl(path / train, "a")
        jsonl(path / test, "b")
        rows, said = read(path)
        assert (rows, said.startswith("split train (also there: ")) == (["a"], True)
        assert read(path, held_out=True)[0] == ["b"]


def test_other_files_of_a_directory_stay(tmp_path: Path) -> None:
    """A directory of the user's own: all files but the held-out ones. A clone: what the names say."""
    jsonl(tmp_path / "a.jsonl", "a")
    jsonl(tmp_path / "b.jsonl", "b")
    assert read(tmp_path) == (["a", "b"], "")
    jsonl(tmp_path / "test.jsonl", "c")
    assert read(tmp_path) == (["a", "b"], "split train (also there: test; choose with --split)")
    jsonl(tmp_path / "train.jsonl", "t")
    (tmp_path / ".gitattributes").write_text("")
    assert read(tmp_path)[0] == ["t"]


def test_without_a_train_split(tmp_path: Path) -> None:
    jsonl(tmp_path / "one" / "test.jsonl", "a")
    assert read(tmp_path / "one") == (["a"], "")
    jsonl(tmp_path / "two" / "test.jsonl", "a")
    jsonl(tmp_path / "two" / "dev.jsonl", "b")
    with pytest.raises(DataError, match=r"no split is called train\. Choose one with --split\. Splits: "):
        read(tmp_path / "two")


def test_latest_or_contested_is_no_split(tmp_path: Path) -> None:
    """Words, not letters: latest.jsonl is no test split."""
    jsonl(tmp_path / "latest.jsonl", "a")
    jsonl(tmp_path / "trained_by_us.jsonl", "b")
    jsonl(tmp_path / "devices.jsonl", "c")
    assert sorted(read(tmp_path)[0]) == ["a", "b", "c"]


CONFIGS = """configs:
- config_name: default
  data_files:
  - split: train
    path: data/part-*.jsonl
  - split: test
    path: ["held/*.jsonl", "held_more.jsonl"]
- config_name: other
  data_files: others/all.jsonl
"""


def test_a_card_names_the_files(tmp_path: Path) -> None:
    path = card(tmp_path, CONFIGS)
    jsonl(path / "data" / "part-1.jsonl", "a")
    jsonl(path / "data" / "part-2.jsonl", "b")
    jsonl(path / "data" / "draft.jsonl", "unused")
    jsonl(path / "held" / "x.jsonl", "c")
    jsonl(path / "held_more.jsonl", "d")
    jsonl(path / "others" / "all.jsonl", "e")
    rows, said = read(path)
    assert rows == ["a", "b"]
    assert said == ("split train (also there: test; choose with --split) of configuration default (also there: other; "
                    "choose with --split CONFIGURATION/train)")
    assert read(path, "test")[0] == ["c", "d"]
    assert read(path, "other/train")[0] == ["e"]
    with pytest.raises(DataError, match=r"no split of this name"):
        read(path, "other/test")


@pytest.mark.parametrize(("configs", "split", "rows"), [
    ("configs:\n- config_name: x\n  data_files: a.jsonl\n- config_name: y\n  data_files: b.jsonl\n  default: true\n",
     None, ["b"]),
    ("configs:\n- config_name: x\n  data_files: a.jsonl\n- config_name: y\n  data_files: b.jsonl\n", "x", ["a"]),
    ("configs:\n- data_files:\n    train: [a.jsonl, b.jsonl]\n    test: c.jsonl\n", None, ["a", "b"]),
    ("configs:\n- config_name: x\n  data_dir: sub\n", None, ["s"]),
    ("configs:\n- config_name: x\n  data_files: '**/*.jsonl'\n", None, ["a", "b", "c", "s"]),
    ("configs:\n- data_files:\n    train: a.jsonl\n    test: 'x/*'\n", None, ["a"]),  # only train was downloaded
    ("configs:\n- config_name: x\n  data_files: '**'\n", None, ["a", "b", "c", "s"]),
    ("configs:\n- config_name: x\n  data_files: 'sub/**'\n", None, ["s"]),
])
def test_forms_of_cards(tmp_path: Path, configs: str, split: str | None, rows: list[str]) -> None:
    path = card(tmp_path, configs)
    for name in ("a", "b", "c"):
        jsonl(path / f"{name}.jsonl", name)
    jsonl(path / "sub" / "s.jsonl", "s")
    assert read(path, split)[0] == rows


@pytest.mark.parametrize(("configs", "message"), [
    ("configs:\n- config_name: x\n  data_files: a.jsonl\n- config_name: y\n  data_files: b.jsonl\n",
     r"several configurations.*--split CONFIGURATION/train.*x, y"),
    ("configs:\n- data_files: ../secret.jsonl\n", r"README\.md: names '\.\./secret\.jsonl'"),
    ("configs:\n- data_files: /etc/*.jsonl\n", r"README\.md: names '/etc"),
    ("configs:\n- data_dir: ../..\n", r"README\.md: names '\.\./\.\.'"),
    ("configs:\n- data_files: gone.jsonl\n", r"no data file .* matches 'gone\.jsonl'.* split train"),
    ("configs:\n- data_files: [a.jsonl, gone.jsonl]\n", r"no data file .* matches 'gone\.jsonl'.* split train"),
    ("configs:\n- data_files:\n    train: 'x/*'\n    test: a.jsonl\n", r"no data file .* matches 'x/\*'.* split train"),
    ("configs:\n- data_files: [3]\n", r"not names"),
    ("configs:\n- data_files: {train: {a: b}}\n", r"not names"),
    ("configs: [\n", r"README\.md: not valid YAML"),
    ("configs: &a [*a]\n", r"README\.md"),
])
def test_what_is_wrong_with_a_card(tmp_path: Path, configs: str, message: str) -> None:
    jsonl(tmp_path / "secret.jsonl", "secret")
    path = card(tmp_path / "data", configs)
    jsonl(path / "a.jsonl", "a")
    with pytest.raises(DataError, match=message):
        read(path)


@pytest.mark.parametrize("text", ["", "# no front matter\n", "---\nlicense: mit\n---\n", "---\nconfigs: yes\n---\n",
                                  "---\nconfigs:\n- 3\n---\n", "---\nunfinished\n"])
def test_a_card_without_files_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "README.md").write_text(text)
    jsonl(tmp_path / "a.jsonl", "a")
    assert read(tmp_path) == (["a"], "")


def test_a_dict_of_splits_from_python() -> None:
    """Such as a DatasetDict, which is a dict."""
    given = {name: [{"prompt": name, "completion": "x"}] for name in ("train", "test")}
    assert read(given) == (["train"], "split train (also there: test; choose with --split)")
    assert read(given, "test")[0] == ["test"]
    for other in ({}, {"prompt": "a", "completion": "b"}):
        with pytest.raises(DataError, match="a mapping, but not one of splits"):
            read(other)


def test_a_split_without_splits_is_refused(tmp_path: Path) -> None:
    for source in (jsonl(tmp_path / "a.jsonl", "a"), [{"prompt": "a"}]):
        with pytest.raises(DataError, match=r"--split test: the data has no splits"):
            read(source, "test")


def test_the_case_of_a_saved_dict() -> None:
    rows, said = read(CASES / "saved_dict")
    assert said == "split train (also there: test; choose with --split)"
    assert set(rows).isdisjoint(read(CASES / "saved_dict", "test")[0])


def test_files_that_metadata_names_are_read_or_refused(tmp_path: Path) -> None:
    """No file that is named is left out silently: hidden, linked and unknown ones."""
    state = saved_dict(tmp_path / "d", train=["a"], test=["t"]) / "train/state.json"

    def name(*files: str) -> None:
        state.write_text(json.dumps({"_data_files": [{"filename": file} for file in files]}))

    jsonl(state.parent / ".hidden.jsonl", "h")
    name("data-00000-of-00001.arrow", ".hidden.jsonl")
    assert read(tmp_path / "d")[0] == ["a", "h"]
    state.with_name("x.txt").write_text("x")
    name("data-00000-of-00001.arrow", "x.txt")
    with pytest.raises(DataError, match=r"x\.txt: unsupported file type"):
        read(tmp_path / "d")
    (tmp_path / "d/test").rename(tmp_path / "moved")
    (tmp_path / "d/test").symlink_to(tmp_path / "moved")
    assert read(tmp_path / "d", "test")[0] == ["t"]


def test_saved_data_below_a_directory(tmp_path: Path) -> None:
    """The files of each are those of its own state."""
    saved(tmp_path / "jan", "a")
    saved(tmp_path / "feb", "b")
    assert read(tmp_path)[0] == ["b", "a"]


def test_files_of_the_users_own_that_look_like_metadata(tmp_path: Path) -> None:
    """A state of another program and names that begin like those of caches."""
    jsonl(tmp_path / "a.jsonl", "a")
    (tmp_path / "state.json").write_text('{"step": 1}')
    arrow(tmp_path / "cached_answers.arrow", "b")
    arrow(tmp_path / "tmpfeedback.arrow", "c")
    assert read(tmp_path)[0] == ["a", "b", "c"]


def test_odd_pattern_and_option_of_cards(tmp_path: Path) -> None:
    """A pattern that matches no name is refused; errors name the option that the user has."""
    jsonl(card(tmp_path / "dot", "configs:\n- config_name: default\n  data_files: .\n") / "a.jsonl", "a")
    with pytest.raises(DataError, match="not a pattern of files"):
        read(tmp_path / "dot")
    several = card(tmp_path / "two", "configs:\n- config_name: en\n  data_files: a.jsonl\n"
                                     "- config_name: de\n  data_files: a.jsonl\n")
    jsonl(several / "a.jsonl", "a")
    with pytest.raises(DataError, match="--eval-split CONFIGURATION/train"):
        resolve_source(str(several), split=SplitChoice(None, "--eval-split", held_out=True))
