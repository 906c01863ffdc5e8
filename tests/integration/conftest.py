"""Runs of the tiny model, through the same call as the command line's."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fake_hub

WORDS = ["oak", "elm", "ash", "fir", "yew", "bay", "box", "fig", "may", "sea", "sky", "sun"]


def words(generator: random.Random, most: int) -> str:
    return " ".join(generator.choices(WORDS, k=generator.randint(1, most)))


@pytest.fixture(scope="session")
def feedback(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """43 labeled completions of 18 prompts: repeated prompts, uneven lengths, and a short last step of 8."""
    generator = random.Random(0)
    prompts = [words(generator, 20) + "? " for _ in range(18)]
    path = tmp_path_factory.mktemp("data") / "feedback.jsonl"
    rows = [{"prompt": generator.choice(prompts), "completion": words(generator, 15),
             "label": generator.random() < 0.5} for _ in range(43)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """43 pairs of 18 prompts."""
    generator = random.Random(1)
    prompts = [words(generator, 20) + "? " for _ in range(18)]
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    rows = [{"prompt": generator.choice(prompts), "chosen": words(generator, 15) + ".",
             "rejected": words(generator, 15)} for _ in range(43)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def exact_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that computes in float64 throughout. The norms of most families are in float32."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    path = tmp_path_factory.mktemp("models") / "exact"
    torch.manual_seed(4)
    GPT2LMHeadModel(GPT2Config(
        vocab_size=102, n_positions=64, n_embd=32, n_layer=2, n_head=4, initializer_range=0.2, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=1)).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def data_of(feedback: Path, pairs: Path) -> dict[str, Path]:
    """The data of each method."""
    return {"kto": feedback, "dpo": pairs}


@pytest.fixture
def small(tiny_model_dir: Path, tmp_path: Path, data_of: dict[str, Path]) -> Callable[..., Any]:
    """Makes trainers with small settings; each has an output of its own."""
    from tropism import DPOTrainer, KDTrainer, KTOTrainer, SFTTrainer
    from tropism.observe.console import Voice

    trainers = {"kto": KTOTrainer, "dpo": DPOTrainer, "sft": SFTTrainer, "kd": KDTrainer}
    count = 0

    def make(method: str, model: Any = None, **changes: Any) -> Any:
        nonlocal count
        count += 1
        rate = {} if "optimizer" in changes and not isinstance(changes["optimizer"], str) else {"learning_rate": 1e-3}
        settings = {"output": str(tmp_path / f"run{count}"), "samples": 0, "batch_size": 8, "max_steps": 3,
                    "train_dataset": data_of.get(method), "voice": Voice(loud=False), **rate, **changes}
        if method != "sft":
            settings.setdefault("store", str(tmp_path / "store"))
        return trainers[method](tiny_model_dir if model is None else model, **settings)

    return make


@pytest.fixture
def module(tiny_model_dir: Path) -> Any:
    """The tiny model."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model_dir)


@pytest.fixture
def train(tiny_model_dir: Path, tmp_path: Path, data_of: dict[str, Path]) -> Callable[..., Any]:
    """Run a method with small settings; returns its RunResult. Each call gets a run directory of its own."""
    from tropism.config import METHODS
    from tropism.runner import run

    count = 0

    def go(method: str, **changes: Any) -> Any:
        nonlocal count
        count += 1
        settings = {"model": str(tiny_model_dir), "data": str(data_of.get(method, data_of["kto"])),
                    "output": str(tmp_path / f"run{count}"), "store": str(tmp_path / "store"),
                    "batch_size": 8, "max_steps": 20, "learning_rate": 1e-3, "samples": 0, **changes}
        return run(METHODS[method](**settings))

    return go


def records(result: Any) -> list[dict[str, Any]]:
    """Lines of `metrics.jsonl`."""
    return [json.loads(line) for line in (result.directory / "metrics.jsonl").read_text().splitlines()]


def weights(directory: Path) -> dict[str, Any]:
    """Weights of a model directory, in float64."""
    from safetensors.torch import load_file

    return {name: tensor.double() for name, tensor in load_file(directory / "model.safetensors").items()}


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Euclidean distance of two sets of weights."""
    assert one.keys() == other.keys()
    return sum(float((one[name] - other[name]).pow(2).sum()) for name in one) ** 0.5


NOT_RESULTS = {"step_time", "tokens_per_second", "memory/peak_gib", "tokens/computed", "compile/recompiles"}


def assert_same_metrics(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], relative: float,
                        absolute: float) -> None:
    """Equal records, key for key; times, memory and layout left out."""
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() - NOT_RESULTS == other.keys() - NOT_RESULTS
        for key in one.keys() - NOT_RESULTS:
            if isinstance(one[key], float):
                assert one[key] == pytest.approx(other[key], rel=relative, abs=absolute), (key, one["step"])
            else:
                assert one[key] == other[key]


def train_steps(run: Any) -> Iterator[Any]:
    """Build a `Run` and train it; yields the record of each optimizer step before the next one begins."""
    from tropism.train.interval import Interval
    from tropism.train.loop import Plan, TrainingLoop, exhaust
    from tropism.train.preemption import Preemption
    from tropism.train.run_state import RunState

    engine, state = run.build(), RunState()
    found: list[Any] = []

    def stop(record: Any) -> str:
        found.append(record)
        return "one step at a time"

    while state.step < run.inputs.schedule.total_steps:
        state.ending = None
        exhaust(TrainingLoop(engine, run.planner, Plan(Interval(1), Interval(0)), Preemption(engine.world), stop,
                             state=state).steps())
        yield found.pop()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[fake_hub.Hub]:
    """A Hub on this machine, which huggingface_hub asks in this process."""
    with fake_hub.serving() as serving:
        fake_hub.use(serving, monkeypatch, str(tmp_path / "cache"))
        yield serving
