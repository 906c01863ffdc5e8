"""One rule decides who owns a run directory, for any two owners; who lost it writes nothing more."""

import os
import shutil
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tropism.errors import OutputError, OutputExistsError, OutputLockedError
from tropism.observe import lock, owner
from tropism.observe.lock import owned
from tropism.observe.manifest import Manifest
from tropism.observe.owner import Owner
from tropism.observe.rundir import RunDirectory
from tropism.train.checkpoints.find import Origin
from tropism.train.checkpoints.resume import begin_again
from tropism.train.result import export_result
from unit.test_lock import be_silent, said_by, short_watch, write

__all__ = ["short_watch"]


@pytest.mark.parametrize("changes", [
    {"boot": "another"}, {"namespace": "pid:[1]"}, {"boot": ""}, {"namespace": ""}, {"host": "elsewhere"},
    {"boot": "another", "namespace": "pid:[1]", "host": "elsewhere"}])
@pytest.mark.parametrize("silent_s", [0, 120, 590])
def test_an_owner_that_cannot_be_seen_is_kept_while_it_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                             changes: dict[str, str], silent_s: int) -> None:
    """G5: whatever they share, also a name, and however recently this machine was booted."""
    monkeypatch.setattr(time, "monotonic", lambda: 60.0)  # seconds since then
    write(tmp_path, pid=str(2**22 + 1), **changes)
    be_silent(tmp_path, silent_s)
    before = (tmp_path / "lock").read_bytes()
    with pytest.raises(OutputLockedError, match="This machine cannot tell"), owned(tmp_path):
        pass
    assert (tmp_path / "lock").read_bytes() == before


@pytest.mark.parametrize("unknown", ["boot", "namespace"])
def test_a_system_that_does_not_tell_its_boot_proves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                             unknown: str) -> None:
    monkeypatch.setattr(owner, unknown, lambda: "")
    monkeypatch.setattr(lock, unknown, lambda: "")
    write(tmp_path, pid=str(2**22 + 1))
    with pytest.raises(OutputLockedError), owned(tmp_path):
        pass
    be_silent(tmp_path, 610)
    with owned(tmp_path):
        pass


def test_processes_of_another_container_are_not_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc may be that of the host, where this number is another process."""
    write(tmp_path, start="1")
    real = os.readlink
    monkeypatch.setattr(os, "readlink", lambda path, *rest, **named: (
        "17" if path == "/proc/self" else real(path, *rest, **named)))
    with pytest.raises(OutputLockedError, match="is in use by"), owned(tmp_path):
        pass


def test_a_clock_that_is_behind_makes_nobody_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On disks that take the time from each machine: an owner's heartbeats look old, but they come."""
    monkeypatch.setattr(lock, "_WATCH_S", 5.0)
    write(tmp_path, host="elsewhere")
    be_silent(tmp_path, 7000)
    beat = threading.Timer(0.3, be_silent, (tmp_path, 6999))
    beat.start()
    with pytest.raises(OutputLockedError, match="on elsewhere"), owned(tmp_path):
        pass
    beat.join()


def test_an_owner_beats_more_than_once_while_it_is_watched() -> None:
    assert lock._BEAT_S * 2 <= 10.0 <= lock._GUARD_S
    assert lock._BEAT_S * 20 < owner.SILENT_S


@pytest.mark.parametrize("pid", ["0", "-1", "99999999999999999999", "x"])
def test_an_impossible_number_is_no_traceback(tmp_path: Path, pid: str) -> None:
    write(tmp_path, pid=pid)
    try:
        with owned(tmp_path):
            pass
    except OutputLockedError:
        pass


WRITES: dict[str, Callable[[RunDirectory], Any]] = {
    "record": lambda run: run.append_record({"step": 1, "split": "train"}),
    "samples": lambda run: run.append_lines("samples.jsonl", [{"id": "a"}]),
    "line": lambda run: run.append_lines("notices.jsonl", [{"step": 1}]),
    "config": lambda run: run.write_config({"method": "kto"}),
    "json": lambda run: run.write_json("audit.json", {}),
    "manifest": lambda run: Manifest(run, {}),
    "truncate": lambda run: run.truncate({}),
    "resume": lambda run: begin_again(run, Origin({}, {})),
    "export": lambda run: export_result(Engine(), None, run.model, "float32", [], None, None),  # type: ignore[arg-type]
}


class Engine:
    """As much of an engine as an export looks at before it writes."""

    def __init__(self) -> None:
        from tropism.distributed import World

        self.world, self.model = World(0, 1, None), self  # type: ignore[arg-type]
        self.module = None


def snapshot(place: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def taken(run: Path) -> None:
    text = (run / "lock").read_text().replace(f"pid={os.getpid()}\n", "pid=17\n")
    (run / "lock").unlink()
    (run / "lock").write_text(text)


def replaced(run: Path) -> None:
    run.rename(run.with_name("moved"))
    run.mkdir()
    shutil.copy(run.with_name("moved") / "lock", run)


def linked(run: Path) -> None:
    run.rename(run.with_name("moved"))
    run.with_name("other").mkdir()
    run.symlink_to(run.with_name("other"))


LOSSES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "taken over": (taken, rf"no longer owns .*run: process 17 on {socket.gethostname()} since .* took it over"),
    "lock removed": (lambda run: (run / "lock").unlink(), "no longer owns .*its lock was removed"),
    "deleted": (shutil.rmtree, "No such file or directory.*was deleted, renamed or replaced during the run"),
    "renamed": (lambda run: run.rename(run.with_name("moved")),
                "renamed or replaced during the run. It is .*moved now.*Resume with: tropism resume .*moved$"),
    "replaced": (replaced, "was deleted, renamed or replaced during the run. It is .*moved now"),
    "a file instead": (lambda run: (shutil.rmtree(run), run.write_text("mine")), "deleted, renamed or replaced"),
    "a link instead": (linked, "was deleted, renamed or replaced during the run. It is .*moved now")}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("write", WRITES)
def test_who_lost_a_directory_writes_nothing(tmp_path: Path, loss: str, write: str) -> None:
    """G5: the next write of any kind is an error that says what happened, and makes no directory anew."""
    run = tmp_path / "run"
    run.mkdir()
    lose, sentence = LOSSES[loss]
    with owned(run):
        for name, change in WRITES.items():
            if name in ("record", "samples", "config", "json"):
                change(RunDirectory(run))
        lose(run)
        before = snapshot(tmp_path)
        with pytest.raises(OutputError, match=sentence):
            WRITES[write](RunDirectory(run))
    assert {name: content for name, content in before.items() if not name.endswith("moved/lock")} == {
        name: content for name, content in snapshot(tmp_path).items() if not name.endswith("moved/lock")}
    assert lock._claims == {}


def test_an_owner_writes_through_a_link(tmp_path: Path) -> None:
    """RUN may be a link to a directory on another disk."""
    (tmp_path / "disk").mkdir()
    run = RunDirectory(tmp_path / "run")
    run.path.symlink_to(tmp_path / "disk")
    run.refuse_if_used()
    with owned(run.path):
        run.create()
        run.check_kinds()
        run.append_record({"step": 1, "split": "train"})
        with pytest.raises(OutputLockedError), owned(tmp_path / "disk"):
            pass
    assert (tmp_path / "disk" / "metrics.jsonl").exists()


def test_heartbeats_leave_the_record_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_BEAT_S", 0.01)
    with owned(tmp_path):
        time.sleep(0.1)
        RunDirectory(tmp_path).append_record({"step": 1, "split": "train"})


def test_an_interrupt_while_a_lock_is_signed_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record without its owner would keep everybody out."""
    def interrupted(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(lock, "_sign", interrupted)
    with pytest.raises(KeyboardInterrupt), owned(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("make", "sentence"), [
    (lambda path: path.symlink_to("nowhere"), "is a symbolic link to nowhere, which does not exist"),
    (lambda path: path.symlink_to(path), "is a symbolic link to .*, which does not exist"),
    (lambda path: path.write_text("mine"), "exists and is not a directory"),
    (os.mkfifo, "exists and is not a directory")])
def test_an_output_that_is_no_directory(tmp_path: Path, make: Callable[[Path], Any], sentence: str) -> None:
    make(tmp_path / "run")
    with pytest.raises(OutputExistsError, match=sentence):
        RunDirectory(tmp_path / "run").refuse_if_used()


def test_the_record_names_this_process(tmp_path: Path) -> None:
    with owned(tmp_path):
        found = Owner.of(lock._lease(tmp_path / "lock"))
        assert found is not None
        assert found.visible
        assert found.runs
        assert said_by(tmp_path)["boot"] == owner.boot()
