"""Runs that faults happen to, and the figures of what happened."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.chaos.faults import Fault, call, operations
from integration.conftest import assert_same_metrics, weights

FIGURES: Counter[str] = Counter()


@pytest.fixture
def figures() -> Counter[str]:
    """Counts what was done; shown after the last test."""
    return FIGURES


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of xdist sends its figures."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["figures"] = dict(FIGURES)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """The figures of a worker arrive."""
    FIGURES.update(getattr(node, "workeroutput", {}).get("figures", {}))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Show the figures."""
    for name, count in sorted(FIGURES.items()):
        terminalreporter.write_line(f"{count:6} {name}")


@pytest.fixture
def arguments(tiny_model_dir: Path, feedback: Path) -> Callable[..., list[object]]:
    """Arguments of a short KTO run that has everything: reference pass, evaluations, checkpoints, export."""

    def of(output: Path, **changes: object) -> list[object]:
        settings = {"model": tiny_model_dir, "data": feedback, "output": output, "store": output.parent / "store",
                    "batch-size": 8, "max-steps": 6, "learning-rate": 1e-3, "samples": 1, "eval-fraction": 0.2,
                    "eval-every": 2, "log-every": 2, "save-every": 2, "keep": 2, "resume": "auto", **changes}
        return ["kto", *(f"--{name}={value}" for name, value in settings.items())]

    return of


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the run that nothing happens to."""
    return tmp_path_factory.mktemp("straight")


def undisturbed(place: Path, arguments: Callable[..., list[object]]) -> tuple[Path, int]:
    """The run that nothing happens to, and the number of its file operations. Made once for a place."""
    run, log = place / "run", place / "log"
    if not run.exists():
        assert call(arguments(run), Fault(below=(str(run), str(place / "store")), log=str(log))) == 0
    return run, operations(log)


def lines(output: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def assert_same(ours: Path, theirs: Path) -> None:
    """Metrics, samples and weights to the bit, and nothing left beside them."""
    assert_same_metrics(lines(ours), lines(theirs), 0.0, 0.0)
    one, other = weights(ours / "model"), weights(theirs / "model")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert (ours / "samples.jsonl").read_text() == (theirs / "samples.jsonl").read_text()
    assert names(ours) == names(theirs)


def names(directory: Path) -> list[str]:
    """Files of a run, without those of a checkpoint's inside."""
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
