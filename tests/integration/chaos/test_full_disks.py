"""C1: a full disk ends a run with a sentence; with room again it resumes to the same bytes."""

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from integration.chaos.conftest import assert_same, undisturbed
from integration.chaos.faults import Fault, call
from tropism.train.checkpoints import files as checkpoint

Arguments = Callable[..., list[object]]
KIB = 1024


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 16 MiB of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    made = shutil.which("mount") is not None and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(place)], capture_output=True, check=False)
    if not made or made.returncode:
        pytest.skip("no right to mount a small disk")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def _check(code: int | None, log: Path, run: Path) -> None:
    said = log.read_text()
    assert code == 1, said
    assert "Traceback" not in said
    assert re.search("No space left|not enough disk space", said), said
    assert len(said) < 6000
    for one in checkpoint.listed(run / "checkpoints"):
        checkpoint.verify(one.path)


def _filled(disk: Path, every: int, leave_kib: list[int], straight: Path, arguments: Arguments, figures: Counter[str],
            ) -> None:
    reference, total = undisturbed(straight, arguments)
    log, run, ballast = disk.parent / "log", disk / "run", disk / "ballast"
    for operation in range(1, total + 1, every):
        for leave in leave_kib:
            fault = Fault("fill", operation, (str(run), str(disk / "store")), "", 0, str(ballast), leave * KIB)
            code = call(arguments(run), fault, log)
            if code != 0:
                _check(code, log, run)
                figures["disks that filled up in a run"] += 1
            ballast.unlink()
            if code != 0:
                assert call(arguments(run), output=log) == 0, (operation, log.read_text())
            assert_same(run, reference)
            for path in disk.iterdir():
                shutil.rmtree(path)


@pytest.mark.slow
def test_a_disk_that_fills_up(disk: Path, straight: Path, arguments: Arguments, figures: Counter[str]) -> None:
    _, total = undisturbed(straight, arguments)
    _filled(disk, total // 2 - 1, [24], straight, arguments, figures)


@pytest.mark.slow
def test_disks_that_fill_up(disk: Path, straight: Path, arguments: Arguments, figures: Counter[str]) -> None:
    _filled(disk, 3, [0, 8, 200], straight, arguments, figures)
    assert figures["disks that filled up in a run"] >= 60


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "fail"])
def test_a_failure_at_every_operation(kind: str, tmp_path: Path, straight: Path, arguments: Arguments,
                                      figures: Counter[str]) -> None:
    """A disk that is full from one operation on, or fails at one: an error or a run that can do without, never a
    traceback; then the same run."""
    reference, total = undisturbed(straight, arguments)
    for operation in range(1, total + 1):
        place, log = tmp_path / f"{kind}{operation}", tmp_path / "log"
        place.mkdir()
        run = place / "run"
        code = call(arguments(run), Fault(kind, operation, (str(run), str(place / "store"))), log)
        said = log.read_text()
        assert code in (0, 1, 2), (operation, code, said)
        assert "Traceback" not in said, (operation, said)
        figures[f"operations that {'found a full disk' if kind == 'full' else 'failed'}"] += 1
        if code != 0:
            assert "tropism: " in said, (operation, said)
            assert call(arguments(run), output=log) == 0, (operation, said, log.read_text())
        for left in run.glob(".*"):  # what could not be removed when that failed is hidden, and no part of the run
            left.unlink()
        assert_same(run, reference)
        shutil.rmtree(place)
