"""The page about TRL and its examples run as they are written."""

import json
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from trl_data import rows_for

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "coming-from" / "trl.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory to run in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TROPISM_STORE", str(tmp_path / "store"))
    return tmp_path


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda text: re.findall(r"(\w+)Config", text)[0])
def test_snippets_of_the_page_run(snippet: str, tiny_model_dir: Path, place: Path,
                                  monkeypatch: pytest.MonkeyPatch) -> None:
    def load(kind: str, data_files: str, split: str) -> list[Any]:
        return [json.loads(line) for line in Path(data_files).read_text(encoding="utf-8").splitlines()]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))  # not everywhere installed
    (place / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_for("dpo", 8)), encoding="utf-8")
    exec(compile(snippet.replace("MODEL", str(tiny_model_dir)), "trl.md", "exec"), {})
    if "save_model" in snippet:
        AutoModelForCausalLM.from_pretrained(place / "out" / "final")


def test_the_examples_run(tiny_model_dir: Path, place: Path, monkeypatch: pytest.MonkeyPatch,
                          capsys: pytest.CaptureFixture[str]) -> None:
    for name, arguments, said in (
            ("trl_dpo", [str(tiny_model_dir)], [r"step 4: margin [+-]\d\.\d{3}", r"evaluation accuracy: \d\.\d\d"]),
            ("trl_kto", ["--model_name_or_path", str(tiny_model_dir), "--output_dir", "kto-out", "--use_peft",
                         "--lora_r", "4", "--max_steps", "2", "--per_device_train_batch_size", "4"],
             [r"2 steps, z0 \d\.\d{3}"])):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        runpy.run_path(str(ROOT / "examples" / "coming_from" / f"{name}.py"), run_name="__main__")
        out = capsys.readouterr().out
        assert all(re.search(pattern, out) for pattern in said), out
    assert (place / "dpo-out" / "final" / "model.safetensors").is_file()
    assert (place / "kto-out" / "adapter_model.safetensors").is_file()
