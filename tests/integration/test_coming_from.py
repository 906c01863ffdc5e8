"""The scripts in examples/coming_from/: written for other trainers, they run after one import was changed."""

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "examples" / "coming_from"

# Script, further arguments, the run directory, and what is printed at the end.
CASES = [
    ("openrlhf_kto", [], "ckpt/checkpoints_kto", r"evaluation at step 8: eval_loss 0\.\d+, chosen_reward"),
    ("openrlhf_dpo", ["--nll_loss_coef", "0.1"], "ckpt/checkpoints_dpo", r"evaluation at step 4: eval_loss \d\.\d+"),
    ("openrlhf_kd", ["MODEL"], "ckpt/checkpoints_kd", r"evaluation at step 4: eval gpt_loss \d\.\d+"),
]


@pytest.mark.parametrize(("name", "further", "directory", "said"), CASES, ids=[name for name, *_ in CASES])
def test_a_script_runs(name: str, further: list[str], directory: str, said: str, tiny_model_dir: Path, tmp_path: Path,
                       monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[Any]) -> None:
    """It trains, evaluates, and saves its model where it always did."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TROPISM_STORE", str(tmp_path / "store"))
    monkeypatch.syspath_prepend(str(SCRIPTS))
    given = [str(tiny_model_dir) if word == "MODEL" else word for word in ["MODEL", *further]]
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *given])
    runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert re.search(said, printed), printed
    lines = [json.loads(line) for line in Path(directory, "metrics.jsonl").read_text().splitlines()]
    assert len({line["loss"] for line in lines if line["split"] == "train"}) > 1
    assert [line["step"] for line in lines if line["split"] == "eval"][1:]
    assert Path("ckpt/model.safetensors").is_file()


@pytest.mark.parametrize("name", [name for name, *_ in CASES])
def test_only_the_import_is_ours(name: str) -> None:
    """Nothing else in a script, or in what stands in for other packages, comes from Tropism."""
    text = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
    assert len(re.findall(r"tropism", text)) == 1
    assert re.search(r"^from tropism\.compat\.\w+ import \w+$", text, re.MULTILINE)
    assert not [path.name for path in SCRIPTS.glob("*_stand_ins.py") if "tropism" in path.read_text(encoding="utf-8")]
