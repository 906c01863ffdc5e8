"""Hostile models, tokenizers, adapters, YAML and data: one sentence, soon and in bounded memory."""

import resource
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hostile_inputs import hostile_inputs
from tropism.cli.app import main

SLOWEST_S = 30
SHARE = {"config": 7, "tokenizer": 5, "weights": 5, "adapter": 5, "yaml": 4, "data": 3}
"""One in so many of each kind is tried by default, the others with `-m slow`."""
_NAMED: dict[str, list[str]] = {}
for _name, _kind, _ in hostile_inputs(Path("model")):
    _NAMED.setdefault(_kind, []).append(_name)


@contextmanager
def alarm(seconds: int) -> Iterator[None]:
    """Ends a block that hangs."""
    def ring(*_: Any) -> None:
        raise TimeoutError(f"not refused within {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def refused(options: list[str], output: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one message with which a command is refused."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with alarm(SLOWEST_S):
        code = main(["sft", *options, "--output", str(output), "--max-steps", "1", "--samples", "0"])
    said = capsys.readouterr().err
    assert code in (1, 2), said
    assert said.startswith("tropism: ")
    assert said.count("\n") == 1
    assert len(said) < 2000
    assert "Traceback" not in said
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 3 * 2**20  # KiB
    return said


def test_there_are_enough() -> None:
    assert sum(map(len, _NAMED.values())) >= 400
    assert all(len(set(names)) == len(names) for names in _NAMED.values())
    assert set(_NAMED) == set(SHARE)


def run_all(kind: str, chosen: set[str], model: Path, path: Path, capsys: pytest.CaptureFixture[str],
            figures: Counter[str]) -> None:
    for number, (name, of_kind, make) in enumerate(hostile_inputs(model)):
        if of_kind == kind and name in chosen:
            folder = path / str(number)
            folder.mkdir()
            try:
                refused(make(folder), folder / "run", capsys)
            except AssertionError as error:
                raise AssertionError(f"{kind}: {name}: {error}") from error
            figures[f"hostile inputs ({kind})"] += 1


@pytest.mark.parametrize("kind", SHARE)
def test_hostile_inputs(kind: str, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                        figures: Counter[str]) -> None:
    """G2: a share of every kind. Bombs, which take seconds, are left to the full pass."""
    names = [name for name in _NAMED[kind] if "bomb" not in name and "gigabyte" not in name]
    run_all(kind, set(names[:: SHARE[kind]]), tiny_model_dir, tmp_path, capsys, figures)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SHARE)
def test_every_hostile_input(kind: str, tiny_model_dir: Path, tmp_path: Path,
                             capsys: pytest.CaptureFixture[str], figures: Counter[str]) -> None:
    """G2: all of them."""
    run_all(kind, set(_NAMED[kind]), tiny_model_dir, tmp_path, capsys, figures)
