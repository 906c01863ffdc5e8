"""The examples run as they are written, on the tiny model, and say what their comments promise."""

import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"

# Name, further arguments, steps by default, and what is said at the end.
CASES: list[tuple[str, list[str], int, list[str]]] = [
    ("kto_from_feedback", [], 3, [r"held-out AUC: 0\.50 before, \d\.\d\d after", r"for transformers: out/model"]),
    ("dpo_family", [], 4, [r"1 x sigmoid .*; 0\.2 x sft", r"loss/sigmoid: 0\.6931 before", r"loss/sft: \d",
                           r"rewards/accuracies: 0\.5000 before"]),
    ("dpo_family", ["--loss", "simpo", "--weights", "1"], 4, [r"method: simpo", r"loss: \d\.\d+ before"]),
    ("sft", [], 6, [r"loss per token: 4\.\d+ at the first step, 4\.\d+ at the last\n.*"]),
    ("distill", ["TEACHER"], 10, [r"teacher: forward_kl, .* live", r"kd/divergence: 0\.\d+ at the first", r"kd/ce: 4"]),
    ("distill", ["TEACHER", "--top-k", "8"], 10, [r"stored top 8 tokens", r"kd/divergence: 0\.\d+ at the first"]),
    ("lm_eval_evaluator", [], 4, [r"lm_eval is not installed|capitals/acc: \d", r"loss: 0\.500 before"]),
    ("custom_trees", [], 3, [r"36 training rows, 12 held-out rows", r"weights 2 and 1", r"held-out AUC: 0\.50 before"]),
    ("from_openrlhf_batches", [], 4, [r"kl\) rows of 4 batches are not used", r"held-out AUC: 0\.50 before"]),
    ("from_coati_batches", [], 3, [r"kl\) rows of 6 batches", r"checkpoint: .*step-00000002/model"]),
    ("from_nemo_batches", [], 3, [r"beta 0\.2", r"reference point: 0\.0000 at the first step, \d\.\d{4} at the last"]),
]


@pytest.fixture(scope="module")
def teacher_dir(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with other weights."""
    path = tmp_path_factory.mktemp("models") / "teacher"
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.5)
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(path)
    return path


@pytest.fixture
def example(tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
            capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run an example in an empty directory; what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TROPISM_STORE", str(tmp_path / "store"))

    def go(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", str(tiny_model_dir), *arguments])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return go


@pytest.mark.parametrize(("name", "further", "steps", "said"), CASES,
                         ids=[" ".join([name, *further]) for name, further, _, _ in CASES])
def test_an_example_runs(name: str, further: list[str], steps: int, said: list[str], example: Any, teacher_dir: Path,
                         ) -> None:
    """S1: as many steps as its help says, the words at its end, and a model that loads."""
    further = [str(teacher_dir) if word == "TEACHER" else word for word in further]
    printed = example(name, *further, "--output", "out")
    assert not [pattern for pattern in said if not re.search(pattern, printed)], printed
    lines = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    assert max(line["step"] for line in lines) == steps
    train = [line["loss"] for line in lines if line["split"] == "train"]
    assert len(set(train)) > 1
    assert AutoModelForCausalLM.from_pretrained("out/model").config.vocab_size == 102
    short = example(name, *further, "--steps", "1")
    assert Path("tropism-run/model/config.json").is_file()
    assert len(Path("tropism-run/metrics.jsonl").read_text().splitlines()) <= 3, short


def test_every_example_is_run_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {name for name, *_ in CASES}
    assert not [path for path in EXAMPLES.rglob("*.py") if len(path.read_text().splitlines()) > 120
                and not path.stem.endswith("stand_ins")]


def test_the_documentation_leads_to_every_example() -> None:
    text = (EXAMPLES.parent / "docs" / "python.md").read_text(encoding="utf-8")
    assert not [path.name for path in EXAMPLES.glob("*.py") if f"../examples/{path.name}" not in text]


@pytest.mark.parametrize("name", dict.fromkeys(name for name, *_ in CASES))
def test_help(name: str, example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """It needs no model, and names the arguments that all examples share."""
    with pytest.raises(SystemExit) as end:
        example(name, "--help")
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert "--output" in said
    assert "--steps" in said


def test_the_documentation_runs(tiny_model_dir: Path, teacher_dir: Path, feedback: Path, pairs: Path, tmp_path: Path,
                                monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of docs/python.md, from the first line to the last, in one go."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TROPISM_STORE", str(tmp_path / "store"))
    for name, target in (("MODEL", tiny_model_dir), ("TEACHER", teacher_dir), ("feedback.jsonl", feedback),
                         ("pairs.jsonl", pairs)):
        Path(name).symlink_to(target)
    rows = [json.loads(line) for line in feedback.read_text().splitlines()]
    Path("texts.jsonl").write_text("".join(json.dumps({**row, "label": True}) + "\n" for row in rows))
    text = (EXAMPLES.parent / "docs" / "python.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) > 6
    exec(compile("\n".join(blocks), "docs/python.md", "exec"), {})
    models = list(tmp_path.glob("tropism-run*/model/tokenizer_config.json"))
    assert len(models) == sum(block.count(".fit()") for block in blocks)
