"""What stands in a run directory is looked at before it is opened. What is read after training is read before it."""

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tropism.commands.export.read_run import read_run
from tropism.commands.verify import verify
from tropism.errors import DataError, OutputError, OutputExistsError, TropismError
from tropism.observe.lock import BEGUN, GUARD, owned
from tropism.observe.log_files import check_log, disorder, read_log
from tropism.observe.manifest import read_manifest
from tropism.observe.rundir import GROWING, RunDirectory
from tropism.train.checkpoints.find import find
from tropism.train.result import first_and_last, result_of

FILES = (*GROWING, "config.yaml", "manifest.json", "audit.json", "checkpoints/best.json")
DIRECTORIES = ("model", "checkpoints", "logs", "checkpoints/step-00000004", "checkpoints/step-00000004.new")


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """Opening a pipe would wait for its other end."""
    signal.alarm(20)
    yield
    signal.alarm(0)


def bound(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.getcwd()
        os.chdir(path.parent)  # the name of a socket is short
        try:
            listener.bind(path.name)
        finally:
            os.chdir(here)


def linked(path: Path) -> None:
    target = path.parent / "theirs"
    target.write_text("theirs")
    path.symlink_to(target)


KINDS: dict[str, Callable[[Path], Any]] = {
    "a named pipe": os.mkfifo, "a symbolic link": linked, "a socket": bound,
    "a symbolic link to nothing": lambda path: path.symlink_to("nowhere"),
    "a symbolic link to a directory": lambda path: path.symlink_to(path.parent)}


def run_with(tmp_path: Path, name: str, make: Callable[[Path], Any]) -> RunDirectory:
    """A run that has one thing in the wrong place."""
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    for file in ("config.yaml", "manifest.json"):
        (run / file).write_text('{"fingerprints": {}}')
    place = run / name
    if place.is_dir():
        place.rmdir()
    place.unlink(missing_ok=True)
    make(place)
    return RunDirectory(run)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FILES + DIRECTORIES)
def test_what_is_no_file_or_directory_is_refused(tmp_path: Path, name: str, kind: str) -> None:
    """G2: by every reader, before it opens anything."""
    run = run_with(tmp_path, name, KINDS[kind])
    for read in (lambda: find(run, "auto"), lambda: verify(run.path), lambda: read_run(run.path)):
        with pytest.raises(TropismError) as error:
            read()
        assert error.value.exit_code == 2
        if not isinstance(error.value, OutputExistsError):
            assert name == "manifest.json"  # to which `export` says that there is none
    with pytest.raises(OutputExistsError, match=f"{name} is {kind.partition(' to ')[0]}, but a run needs a"):
        run.check_kinds()


@pytest.mark.parametrize("name", FILES)
def test_a_directory_in_the_place_of_a_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(OutputExistsError, match=f"{name} is a directory, but a run needs a regular file"):
        find(run_with(tmp_path, name, Path.mkdir), "auto")


@pytest.mark.parametrize("name", DIRECTORIES)
def test_a_file_in_the_place_of_a_directory(tmp_path: Path, name: str) -> None:
    with pytest.raises(OutputExistsError, match=f"{name} is a regular file, but a run needs a directory"):
        find(run_with(tmp_path, name, Path.touch), "auto")


@pytest.mark.parametrize("kind", [*KINDS, "a directory"])
@pytest.mark.parametrize("name", ["lock", GUARD, BEGUN])
def test_a_lock_that_is_no_file(tmp_path: Path, name: str, kind: str) -> None:
    (KINDS | {"a directory": Path.mkdir})[kind](tmp_path / name)
    sentence = rf"{name} is {kind.partition(' to ')[0]}, .* Remove it"
    with pytest.raises(OutputExistsError, match=sentence), owned(tmp_path):
        pass
    assert os.path.lexists(tmp_path / name)
    assert not (tmp_path / "theirs").exists() or (tmp_path / "theirs").read_text() == "theirs"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to make a device")
def test_a_device(tmp_path: Path) -> None:
    os.mknod(tmp_path / "lock", 0o600 | 0o020000, os.makedev(1, 3))
    with pytest.raises(OutputExistsError, match="lock is a device"), owned(tmp_path):
        pass


GOOD = {"step": 1, "split": "train", "loss": 0.5, "kl": None, "examples": 8}
DAMAGED: dict[str, tuple[bytes, str]] = {
    "cut": (b'{"step": 1, "spl', "not valid JSON"), "empty": (b"", "not valid JSON"),
    "zeros": (bytes(40), "not valid JSON"),
    "mark": (b"\xef\xbb\xbf" + json.dumps(GOOD).encode(), "not valid JSON"),
    "encoding": (b'{"step": 1, "split": "tr\xff"}', "not valid JSON"),
    "nan": (b'{"step": 1, "split": "train", "loss": NaN}', "NaN is not a JSON value"),
    "infinity": (b'{"step": 1, "split": "train", "loss": -Infinity}', "-Infinity is not"),
    "too large": (b'{"step": 1, "split": "train", "loss": 1e999}', "'loss' is not a number"),
    "digits": (b'{"step": 1, "split": "train", "loss": ' + b"9" * 5000 + b"}", "a number of 5000 digits"),
    "nested": (b"[" * 100_000, "not valid JSON"), "list": (b"[1]", "not a JSON object"), "text": (b'"x"', "not a JSON"),
    "no step": (b'{"split": "train"}', "'step' is not"), "true": (b'{"step": true, "split": "eval"}', "'step' is not"),
    "negative": (b'{"step": -1, "split": "eval"}', "'step' is not"),
    "half": (b'{"step": 1.5, "split": "eval"}', "'step' is not"),
    "no split": (b'{"step": 1}', "'split' is not train or"),
    "other split": (b'{"step": 1, "split": ["x"]}', "'split' is not train or"),
    "words": (b'{"step": 1, "split": "eval", "loss": "0.5"}', "'loss' is not a number"),
    "two": (json.dumps(GOOD).encode() * 2, "Extra data")}


def logged(tmp_path: Path, *lines: bytes) -> Path:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b"".join(line + b"\n" for line in lines))
    return file


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_line_is_named(tmp_path: Path, damage: str) -> None:
    """C2: by file and line, for the resume that would read it at its end and for a result that is read."""
    line, sentence = DAMAGED[damage]
    file = logged(tmp_path, json.dumps(GOOD).encode(), line, json.dumps(GOOD).encode())
    with pytest.raises(DataError, match=rf"metrics\.jsonl:2: .*{sentence}"):
        check_log(file)
    with pytest.raises(DataError, match=r"metrics\.jsonl:2: "):
        first_and_last(RunDirectory(tmp_path))
    with pytest.raises(OutputError, match=r"metrics\.jsonl:2: .*Correct or delete that line"):
        result_of(RunDirectory(tmp_path), {"steps": 1, "seconds": 1.0})
    assert disorder(file)[0].startswith("line 2: ")


def test_an_incomplete_last_line_is_none(tmp_path: Path) -> None:
    """C1: a kill can leave it. Within the size that a checkpoint knows there is none."""
    file = logged(tmp_path, json.dumps(GOOD).encode())
    size = file.stat().st_size
    with file.open("ab") as opened:
        opened.write(b'{"step": 2, "sp')
    assert [record for _, record in read_log(file)] == [GOOD]
    assert disorder(file) == []
    check_log(file, size)
    with pytest.raises(DataError, match=r"metrics\.jsonl:2: line is too long or incomplete"):
        check_log(file, size + 4)
    with pytest.raises(DataError, match=r"metrics\.jsonl:2: line is too long or incomplete"):
        check_log(file, 10 * size)


def test_a_line_without_an_end_is_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tropism.observe.log_files._LONGEST_BYTES", 100)
    with pytest.raises(DataError, match=":1: line is too long"):
        check_log(logged(tmp_path, b" " * 1000))


def records(*steps: Any) -> list[bytes]:
    """Train records by their steps; a negative one is an evaluation."""
    return [json.dumps({"step": abs(step), "split": "eval" if step <= 0 else "train"}).encode() for step in steps]


@pytest.mark.parametrize(("steps", "wrong"), [
    ((0, 1, 2, -2, 3), []), ((0, -2, 2, 3, -3), []), ((0, 3, 6, -6, 7, -7), []), ((), []),
    ((0, 1, 2, 2, 3), ["line 4: step 2 follows step 2"]), ((1, 3, 2, 4), ["line 3: step 2 follows step 3"]),
    ((1, 2, 1, 3, 2), ["line 3: step 1 follows step 2", "line 5: step 2 follows step 3"]),
    ((0, 1, 0), ["line 3: step 0 follows step 1"]), ((1, -1, -1), ["line 3: step 1 follows step 1"]),
    ((1, 2, -1, 3), ["line 3: step 1 follows step 2"])])
def test_steps_rise(tmp_path: Path, steps: tuple[int, ...], wrong: list[str]) -> None:
    """G5: two processes that write one file leave their steps out of order."""
    assert disorder(logged(tmp_path, *records(*steps))) == wrong


@pytest.mark.parametrize(("name", "steps", "wrong"), [
    ("notices.jsonl", (1, 1, 3), 0), ("notices.jsonl", (3, 1), 1), ("skipped.jsonl", (1, 1), 1),
    ("skipped.jsonl", (1, 2), 0)])
def test_the_other_files_are_in_order_too(tmp_path: Path, name: str, steps: tuple[int, ...], wrong: int) -> None:
    (tmp_path / name).write_text("".join(f'{{"step": {step}}}\n' for step in steps))
    assert len(disorder(tmp_path / name)) == wrong
    (tmp_path / "samples.jsonl").write_text('{"id": "a"}\n{\n')
    assert disorder(tmp_path / "samples.jsonl")[0].startswith("line 2: not valid JSON")


@pytest.mark.parametrize("content", [
    "", "{", "[]", "\0" * 100, '{"fingerprints": []}', '{"fingerprints": {"data": 1}}', '{"status": "done"}',
    '{"status": "done", "steps": "4", "seconds": 1}', '{"libraries": ["torch"]}', '{"resumed": {}}', "[" * 100_000,
    '{"planned_steps": true}', '{"policy": null}', '{"seconds": "1"}'])
def test_a_manifest_of_no_run(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match=r"invalid|JSON"):
        read_manifest(tmp_path / "manifest.json")
