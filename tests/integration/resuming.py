"""Short runs that are stopped and go on: what the tests of it share."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.conftest import NOT_RESULTS, weights
from tropism.config import METHODS
from tropism.runner import run
from tropism.train import loop

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
def during(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Do something before a step; without arguments, nothing any more."""
    real = loop.train_step

    def arm(step: int = 0, action: Callable[[], Any] = lambda: os.kill(os.getpid(), signal.SIGTERM)) -> None:
        def watched(engine: Any, work: Any) -> Any:
            if work.step == step:
                action()
            return real(engine, work)

        monkeypatch.setattr(loop, "train_step", watched)

    return arm


@pytest.fixture
def stop_after(during: Callable[..., None]) -> Callable[..., None]:
    """Send this process a signal while it does a step."""
    return lambda step, number=signal.SIGTERM: during(step, lambda: os.kill(os.getpid(), number))


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
