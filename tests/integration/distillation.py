"""What the tests of distillation share: teachers, texts, and runs whose words and passes can be looked at."""

import json
import random
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from helpers import build_tokenizer
from integration.conftest import records, weights, words
from tropism.config import METHODS
from tropism.distributed import World
from tropism.observe.console import Voice
from tropism.runner import run
from tropism.train.frozen import teacher as teachers

VOCABULARY = 102
WORLD = World(0, 1, torch.device("cpu"))
WHOLE = {"batch_size": 64, "max_steps": 1, "precision": "fp64", "export_dtype": "float64"}
"""All rows in one exact step."""


def make_model(path: Path, student: Path, seed: int, columns: int = VOCABULARY, size: float = 8.0) -> Path:
    """A model of the student's shape with other weights, surer of itself; `columns` beyond the tokenizer's are loud."""
    torch.manual_seed(seed)
    state = LlamaForCausalLM(LlamaConfig.from_pretrained(student)).state_dict()
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(student, vocab_size=columns))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        padding = 3 * torch.randn(max(columns - VOCABULARY, 0), state[name].shape[1])
        state[name] = torch.cat((size * state[name], padding))[:columns]
    model.load_state_dict(state)
    model.save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def teacher_dir(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    return make_model(tmp_path_factory.mktemp("teachers") / "teacher", tiny_model_dir, seed=11)


@pytest.fixture(scope="session")
def padded_teacher_dir(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    """The same teacher with 26 columns that no token belongs to."""
    return make_model(tmp_path_factory.mktemp("teachers") / "padded", tiny_model_dir, seed=11, columns=128)


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """22 completions of 9 prompts; one of them twice."""
    generator = random.Random(2)
    prompts = [words(generator, 8) + "? " for _ in range(9)]
    rows = [{"prompt": generator.choice(prompts), "completion": words(generator, 9)} for _ in range(21)]
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[0]]), encoding="utf-8")
    return path


class Said(Voice):
    """A voice whose sentences can be read."""

    def __init__(self) -> None:
        self.file = StringIO()
        super().__init__(console=Console(file=self.file, soft_wrap=True, highlight=False))

    @property
    def text(self) -> str:
        return self.file.getvalue()


@pytest.fixture
def options(tiny_model_dir: Path, teacher_dir: Path, texts: Path, data_of: dict[str, Path],
            tmp_path: Path) -> Callable[..., Any]:
    """Options with small settings; each call names a run directory of its own. `teacher=None` leaves it out."""
    count = 0

    def make(method: str = "kd", **changes: Any) -> Any:
        nonlocal count
        count += 1
        settings = {"model": str(tiny_model_dir), "teacher": str(teacher_dir), "store": str(tmp_path / "store"),
                    "data": str(data_of.get(method, texts)), "output": str(tmp_path / f"run{count}"), "batch_size": 8,
                    "max_steps": 3, "learning_rate": 1e-3, "samples": 0, **changes}
        settings = {name: value for name, value in settings.items() if value is not None}
        return METHODS[method](**settings)

    return make


@pytest.fixture
def distill(options: Callable[..., Any]) -> Callable[..., Any]:
    """Run with small settings."""
    return lambda method="kd", voice=None, **changes: run(options(method, **changes), voice or Said())


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of trees in each of the teacher's passes for the store."""
    seen: list[int] = []
    real = teachers._top_k_of

    def counted(model: Any, pack: Any, *rest: Any) -> Any:
        seen.append(len(pack))
        return real(model, pack, *rest)

    monkeypatch.setattr(teachers, "_top_k_of", counted)
    return seen


def first(result: Any) -> dict[str, Any]:
    return records(result)[0]


def moved(result: Any, start: Path) -> dict[str, Any]:
    """How far each weight went."""
    before = weights(start)
    return {name: after - before[name] for name, after in weights(result.model).items()}
