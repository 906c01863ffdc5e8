"""Processes beside one another: one owner of a run directory, several users of a store, and a directory that goes."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from integration.conftest import records, weights
from processes import fork_server
from tropism.cli.app import main
from tropism.errors import OutputError, OutputLockedError
from tropism.train import loop
from tropism.train.frozen.score_store import ScoreStore


def _slow(arguments: list[str], log: str) -> None:
    """A run whose steps take half a second more, and say so."""
    real = loop.train_step

    def step(*args: Any) -> Any:
        Path(log).write_text("step")
        time.sleep(0.5)
        return real(*args)

    loop.train_step = step
    sys.exit(main(arguments))


@pytest.fixture
def slow_run(tiny_model_dir: Path, pairs: Path, tmp_path: Path) -> Any:
    """A run of 40 slow steps in a process of its own, that has begun its first."""
    arguments = ["dpo", "--model", str(tiny_model_dir), "--data", str(pairs), "--output", str(tmp_path / "run1"),
                 "--store", str(tmp_path / "store"), "--batch-size", "8", "--max-steps", "40", "--samples", "0"]
    process = fork_server().Process(target=_slow, args=(arguments, str(tmp_path / "log")))
    process.start()
    while not (tmp_path / "log").exists():
        assert process.is_alive()
        time.sleep(0.02)
    yield process
    process.kill()
    process.join()


def test_two_runs_in_one_directory(slow_run: Any, train: Callable[..., Any], tmp_path: Path) -> None:
    """The second is refused and changes nothing, whether it begins or goes on; after a kill -9 it takes over."""
    owned = (tmp_path / "run1" / "lock").read_text()
    assert f"\npid={slow_run.pid}\n" in owned
    options = {"output": str(tmp_path / "run1"), "max_steps": 3, "learning_rate": 1e-6}
    with pytest.raises(OutputLockedError, match=f"is in use by process {slow_run.pid} on .* since "):
        train("dpo", resume="auto", **options)
    assert (tmp_path / "run1" / "lock").read_text() == owned
    slow_run.kill()
    slow_run.join()
    assert (tmp_path / "run1" / "lock").exists()
    result = train("dpo", resume="auto", **options)
    assert result.steps == 3
    assert not (tmp_path / "run1" / "lock").exists()


def test_a_signal_releases_the_lock(slow_run: Any, tmp_path: Path) -> None:
    """Also a run that is stopped in order, or fails, is nobody's afterwards."""
    slow_run.terminate()
    slow_run.join()
    assert slow_run.exitcode == 75
    assert not (tmp_path / "run1" / "lock").exists()


@pytest.mark.slow
def test_two_processes_build_one_store(tiny_model_dir: Path, pairs: Path, tmp_path: Path) -> None:
    """They write side by side, and each score is there whole: the runs equal one that was alone with its store."""
    def start(name: str, store: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tropism", "dpo", "--model", str(tiny_model_dir), "--data", str(pairs), "--output",
             str(tmp_path / name), "--store", str(tmp_path / store), "--batch-size", "8", "--max-steps", "4",
             "--microbatch-tokens", "64", "--samples", "0", "--learning-rate", "1e-3"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"})

    said = {name: process.communicate()[0] for name, process in [
        (name, start(name, "store")) for name in ("one", "two")]}
    alone = start("alone", "other")
    said["alone"] = alone.communicate()[0]
    assert all((tmp_path / name / "model").is_dir() for name in said), said
    reference, *others = (weights(tmp_path / name / "model") for name in ("alone", "one", "two"))
    assert all((other[name] == tensor).all() for other in others for name, tensor in reference.items())
    folder, = (tmp_path / "store").iterdir()
    store = ScoreStore(tmp_path / "store", folder.name, {})
    other, = (tmp_path / "other").iterdir()
    assert store.load() == ScoreStore(tmp_path / "other", other.name, {}).load()
    assert store.damaged == []
    assert {path.suffix for path in folder.iterdir()} == {".npz", ".json"}  # nothing half-written is left


def test_a_run_directory_that_vanishes(train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                       ) -> None:
    """The run stops with the file that it could not write, and makes no directory anew."""
    real = loop.train_step

    def step(engine: Any, work: Any) -> Any:
        if work.step == 2:
            shutil.rmtree(tmp_path / "run1")
        return real(engine, work)

    monkeypatch.setattr(loop, "train_step", step)
    with pytest.raises(OutputError, match=r"metrics\.jsonl: cannot be written: No such file or directory"):
        train("dpo", max_steps=4)
    assert not (tmp_path / "run1").exists()


def test_a_disk_that_fills_up_while_a_run_goes_on(train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch,
                                                  tmp_path: Path) -> None:
    """The run stops with what is needed and free; every line and file that is there is whole; with room it goes on."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if not shutil.which("mount") or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)],
                                                   check=False, capture_output=True).returncode:
        pytest.skip("no right to mount a small disk")
    real = loop.train_step

    def step(engine: Any, work: Any) -> Any:
        if work.step >= 6:  # a checkpoint may be in the middle of being written
            with suppress(OSError), (disk / "ballast").open("ab", buffering=0) as ballast:
                while ballast.write(bytes(4096)):
                    pass
        return real(engine, work)

    options = {"output": str(disk / "run"), "max_steps": 30, "save_every": 4, "keep": 1}
    try:
        monkeypatch.setattr(loop, "train_step", step)
        with pytest.raises(OutputError, match=r"No space left on device.*\d (bytes )?\w+ free"):
            train("dpo", **options)
        monkeypatch.undo()
        steps = [json.loads(line)["step"] for line in (disk / "run" / "metrics.jsonl").read_text().splitlines()]
        assert steps == list(range(1, len(steps) + 1))
        assert json.loads((disk / "run" / "manifest.json").read_text())["status"] in ("running", "failed")
        assert not (disk / "run" / "lock").exists()
        (disk / "ballast").unlink()
        resumed = train("dpo", **options, resume="auto")
        assert [line["step"] for line in records(resumed)] == list(range(1, 31))
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_an_error_is_not_hidden_by_a_manifest_that_cannot_be_written(train: Callable[..., Any],
                                                                     monkeypatch: pytest.MonkeyPatch,
                                                                     tmp_path: Path) -> None:
    """What went wrong first is what is told."""
    real = loop.train_step

    def step(engine: Any, work: Any) -> Any:
        if work.step == 2:
            shutil.rmtree(tmp_path / "run1")
            raise ValueError("the first error")
        return real(engine, work)

    monkeypatch.setattr(loop, "train_step", step)
    with pytest.raises(ValueError, match="the first error"):
        train("dpo", max_steps=4)


def test_the_lock_goes_with_the_run(train: Callable[..., Any]) -> None:
    result = train("dpo", max_steps=2)
    assert not (result.directory / "lock").exists()
    assert len(records(result)) == 2
