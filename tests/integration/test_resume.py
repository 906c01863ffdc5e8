"""Stopping and going on: the same run as one that was never stopped, to the bit."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.conftest import NOT_RESULTS, weights
from tropism.api import run
from tropism.cli import main
from tropism.config import METHODS
from tropism.errors import CheckpointError, StoppedEarly

Start = Callable[..., Any]
STEPS = 7
TIMES = NOT_RESULTS - {"tokens/computed"}


@pytest.fixture(scope="module")
def teacher_dir(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    """The tiny model with other weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = tmp_path_factory.mktemp("teacher")
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.3)
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, pairs: Path) -> Path:
    """Completions to imitate."""
    path = tmp_path_factory.mktemp("data") / "answers.jsonl"
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    path.write_text("".join(json.dumps({"prompt": row["prompt"], "completion": row["chosen"]}) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def settings(tiny_model_dir: Path, feedback: Path, pairs: Path, answers: Path, teacher_dir: Path,
             tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Options of a short run that has everything: evaluations, windows of three steps, AdamW."""
    store = tmp_path_factory.mktemp("store")
    cases: dict[str, dict[str, Any]] = {
        "sft": {"data": answers}, "dpo": {"data": pairs}, "kto": {"data": feedback},
        "bco": {"data": feedback, "loss": "bco"}, "kd": {"data": answers, "teacher": teacher_dir},
        "top_k": {"data": answers, "teacher": teacher_dir, "top_k": 8}}

    def of(case: str, output: Path, **changes: Any) -> dict[str, Any]:
        chosen = {"model": tiny_model_dir, "output": output, "batch_size": 8, "max_steps": STEPS, "log_every": 3,
                  "eval_fraction": 0.2, "eval_every": 2, "learning_rate": 1e-3, "samples": 1, **cases[case], **changes}
        if case != "sft":
            chosen.setdefault("store", store)
        return {key: str(value) if isinstance(value, Path) else value for key, value in chosen.items()}

    return of


def method_of(case: str) -> str:
    return {"bco": "kto", "top_k": "kd"}.get(case, case)


@pytest.fixture(scope="module")
def start(settings: Callable[..., dict[str, Any]]) -> Start:
    """Run a case into a directory."""
    return lambda case, output, **changes: run(METHODS[method_of(case)](**settings(case, output, **changes)))


@pytest.fixture(scope="module")
def straight(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The same run, never stopped; made once."""
    made: dict[str, Path] = {}

    def of(case: str, **changes: Any) -> Path:
        key = repr((case, sorted(changes.items())))
        if key not in made:
            made[key] = start(case, tmp_path_factory.mktemp("straight") / case, **changes).directory
        return made[key]

    return of


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Send this process a signal while it does a step."""
    import tropism.train.loop as loop

    real = loop.train_step

    def arm(step: int, number: int = signal.SIGTERM) -> None:
        def watched(engine: Any, work: Any) -> Any:
            if work.step == step:
                os.kill(os.getpid(), number)
            return real(engine, work)

        monkeypatch.setattr(loop, "train_step", watched)

    return arm


def lines(directory: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMES} for line in found]


def assert_same_run(ours: Path, theirs: Path) -> None:
    """Weights, metrics and samples, to the bit; times and memory left out."""
    assert lines(ours) == lines(theirs)
    one, other = weights(ours / "model"), weights(theirs / "model")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert (ours / "samples.jsonl").read_text() == (theirs / "samples.jsonl").read_text()


def manifest(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "manifest.json").read_text())


@pytest.mark.parametrize("case", ["sft", "dpo", "kto", "bco", "kd", "top_k"])
def test_stopping_anywhere_and_going_on_is_the_straight_run(case: str, start: Start, straight: Callable[..., Path],
                                                            stop_after: Callable[..., None], tmp_path: Path) -> None:
    """C1, R2: after every step in turn, within one run that is stopped again and again."""
    wanted, output = straight(case), tmp_path / "run"
    for step in range(1, STEPS + 1):
        stop_after(step)
        with pytest.raises(StoppedEarly, match=f"it got SIGTERM. Go on with: tropism resume {output}"):
            start(case, output, resume="auto")
        assert manifest(output)["status"] == "stopped"
        assert lines(output)[-1]["split"] == "eval"
    stop_after(0)
    start(case, output, resume="auto")
    assert_same_run(output, wanted)
    found = manifest(output)
    assert [sitting["step"] for sitting in found["resumed"]] == list(range(1, STEPS + 1))
    assert found["status"] == "done"
    assert found["reference" if case in ("dpo", "kto", "bco") else "policy"] == manifest(wanted)[
        "reference" if case in ("dpo", "kto", "bco") else "policy"]
