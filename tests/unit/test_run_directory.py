"""What a kill leaves in a directory in which no run has begun does not keep the next run out."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tropism.errors import OutputExistsError
from tropism.files import meant_by, write_whole
from tropism.observe.rundir import RunDirectory, free_name


def interrupted(patch: pytest.MonkeyPatch, write: Callable[[], None]) -> None:
    """Write as far as to the moment before the file gets its name."""
    def replace(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with patch.context() as context:
        context.setattr(Path, "replace", replace)
        context.setattr(Path, "unlink", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            write()


@pytest.mark.parametrize("name", ["config.yaml", "manifest.json", "audit.json"])
def test_a_file_that_was_not_renamed_is_taken_for_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                          ) -> None:
    """C1: whatever process wrote it."""
    run = RunDirectory(tmp_path)
    interrupted(monkeypatch, lambda: write_whole(tmp_path / name, b"half"))
    left, = tmp_path.iterdir()
    assert meant_by(left.name) == name
    (tmp_path / f".{name}.17.4").write_text("half")
    assert not run.holds_run
    run.refuse_if_used()
    run.create()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["notes.txt", ".notes.txt.17.4", ".config.yaml", ".config.yaml.new", "config.yaml.1",
                                  "scores.json.1.2", ".1.2", "..1.2"])
def test_anything_else_is_somebodys(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(OutputExistsError):
        RunDirectory(tmp_path).refuse_if_used()
    RunDirectory(tmp_path).create()
    assert (tmp_path / name).read_text() == "mine"


@pytest.mark.parametrize("name", [".", "..", "/", "b/.."])
def test_a_free_name_for_any_directory(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a")
    found = free_name(Path(name))
    assert not found.exists()
    assert found.name.endswith("-2")
