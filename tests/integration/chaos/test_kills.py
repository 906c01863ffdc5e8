"""C1: killed at any file operation, and resumed: the run that nothing happened to, to the bit.

The default suite tries a few operations of each; `make test-chaos` tries every one.
"""

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from integration.chaos.conftest import assert_same, undisturbed
from integration.chaos.faults import Fault, call, operations
from tropism.train.checkpoints import files as checkpoint

Arguments = Callable[..., list[object]]


def _kill_and_resume(place: Path, arguments: Arguments, kind: str, steps: list[int], straight: Path) -> int:
    """Kill one run at these operations of its attempts, one after the other, and let the last attempt end."""
    run = place / "run"
    below = (str(run), str(place / "store"))
    kills = 0
    for operation in steps:
        code = call(arguments(run), Fault(kind, operation, below))
        assert code in (0, -9), (kind, steps, operation)
        kills += code == -9
        for one in checkpoint.listed(run / "checkpoints"):
            checkpoint.verify(one.path)
    log = place / "log"
    assert call(arguments(run), output=log) == 0, (kind, steps, log.read_text())
    assert_same(run, straight)
    assert call(["verify", run], output=log) == 0, (kind, steps, log.read_text())
    shutil.rmtree(place)
    return kills


def _sweep(every: int, tmp_path: Path, straight: Path, arguments: Arguments, figures: Counter[str]) -> None:
    reference, total = undisturbed(straight, arguments)
    for kind in ("kill", "kill soon"):
        for first in range(1, total + 1, 3 * every):
            attempt = tmp_path / f"{kind}-{first}".replace(" ", "-")
            attempt.mkdir()
            # the second and third attempt are killed a little further into what they resume
            chosen = [first, max(1, (first + every) // 2), 1 + (first + 2 * every) % max(total // 3, 1)]
            figures["kills of a training run"] += _kill_and_resume(attempt, arguments, kind, chosen, reference)


def test_kills_at_some_operations(tmp_path: Path, straight: Path, arguments: Arguments, figures: Counter[str]) -> None:
    _, total = undisturbed(straight, arguments)
    _sweep(max(1, total // 2), tmp_path, straight, arguments, figures)


@pytest.mark.slow
def test_kills_at_every_operation(tmp_path: Path, straight: Path, arguments: Arguments, figures: Counter[str]) -> None:
    _sweep(1, tmp_path, straight, arguments, figures)
    assert figures["kills of a training run"] >= 200


@pytest.mark.slow
@pytest.mark.parametrize("command", ["export", "convert", "evaluate"])
def test_kills_of_other_commands(command: str, tmp_path: Path, straight: Path, arguments: Arguments, feedback: Path,
                                 figures: Counter[str]) -> None:
    """A killed command leaves its whole output or none of that name; the next attempt succeeds."""
    run, _ = undisturbed(straight, arguments)
    out = tmp_path / "out"
    given: dict[str, list[object]] = {
        "export": ["export", run, "--to", out / "model"],
        "convert": ["convert", feedback, "--to", "unpaired", "--output", out / "data.jsonl"],
        "evaluate": ["evaluate", run, "--data", feedback, "--json", out / "figures.json"]}
    out.mkdir()
    log = tmp_path / "log"
    assert call(given[command], Fault(below=(str(out),), log=str(log))) == 0
    total, whole = operations(log), {path.relative_to(out): path.read_bytes() for path in _files(out)}
    for operation in range(1, total + 1):
        for kind in ("kill", "kill soon"):
            shutil.rmtree(out)
            out.mkdir()
            code = call(given[command], Fault(kind, operation, (str(out),)))
            figures[f"kills of {command}"] += code == -9
            seen = [path for path in _files(out) if path.relative_to(out) in whole]
            if code == -9 and command != "export":
                assert all(path.read_bytes() for path in seen)
            if not seen:
                assert call(given[command], output=log) == 0, (operation, log.read_text())
            assert {path.relative_to(out) for path in _files(out) if not path.name.startswith(".")} >= whole.keys()


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())
