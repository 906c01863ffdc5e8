"""What processes that torchrun started together say once, and how a run that was stopped is not started again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tropism.cli.app import main
from tropism.observe.torchrun_notes import follows_stop, note_stop, say_once


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Be a process of an attempt, in the directory that torchrun makes for it."""
    def be(count: int, rank: int = 0) -> None:
        directory = tmp_path / "none_x" / f"attempt_{count}" / str(rank)
        directory.mkdir(parents=True, exist_ok=True)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(count))
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(directory / "error.json"))

    return be


def test_the_same_sentence_is_said_once_and_no_other_is_lost(attempt) -> None:
    """X1: by whichever process comes first; again by the one that said it, and when torchrun has started them again."""
    said: list[tuple[int, int, str]] = []
    for count, rank, text in ((0, 1, "a\nb"), (0, 0, "a\nb"), (0, 0, "b"), (0, 1, "a"), (0, 2, "b"), (1, 0, "b"),
                              (1, 0, "b"), (1, 1, "b")):
        attempt(count, rank)
        say_once(text, lambda text, who=(count, rank): said.append((*who, text)))
    assert said == [(0, 1, "a\nb"), (0, 0, "b"), (0, 1, "a"), (1, 0, "b"), (1, 0, "b")]


def test_without_a_directory_everything_is_said(attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    for file in ("", "/nowhere/attempt_0/0/error.json", "/dev/null"):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", file)
        say_once("a", said.append)
        say_once("a", said.append)
    assert said == ["a"] * 6


def test_each_console_hears_it(attempt, tmp_path: Path) -> None:
    """Ranks whose errors go to files of their own, as by torchrun's --redirects, say theirs there."""
    attempt(0)
    code = "from tropism.cli.app import main; import sys; sys.exit(main(['kto', '--bta', '1']))"
    found = []
    for name in ("one", "two"):
        with (tmp_path / name).open("w") as file:
            assert subprocess.run([sys.executable, "-c", code], stderr=file, env=os.environ).returncode == 2
        found.append((tmp_path / name).read_text())
    assert found[0] == found[1]
    assert "--bta" in found[0]


def test_a_run_that_was_stopped_is_not_begun_again(attempt, capsys: pytest.CaptureFixture[str]) -> None:
    """C1: torchrun's --max-restarts takes a stop for a failure; a rank that was killed is started again."""
    attempt(0)
    note_stop()
    assert not follows_stop()
    attempt(1)
    assert main(["store", "list"]) == 75
    assert "run torchrun again" in capsys.readouterr().err
    attempt(2)
    assert main(["store", "list"]) == 75  # and so on until torchrun gives up
    attempt(3)
    assert follows_stop()
    attempt(4)
    assert not follows_stop()
