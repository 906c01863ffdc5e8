"""The scripts of examples/coming_from run as they are written: other trainers' code with only an import changed."""

import ast
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

SCRIPTS = Path(__file__).parents[2] / "examples" / "coming_from"


@pytest.fixture
def script(tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
           capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a script in an empty directory; what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TROPISM_STORE", str(tmp_path / "store"))
    monkeypatch.syspath_prepend(str(SCRIPTS))

    def go(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", str(tiny_model_dir), *arguments])
        runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return go


def test_coati(script: Callable[..., str], tmp_path: Path) -> None:
    """Two epochs of two updates: checkpoints, evaluations, and the trained weights in the saved model."""
    said = script("coati_kto", "--save_dir", "saved")
    saved = tmp_path / "saved"
    assert {path.name for path in saved.iterdir()} == {
        "epoch-0_step-4", "epoch-1_step-4", "eval_result_epoch0.txt", "eval_result_epoch1.txt", "modeling",
        "tropism-run"}
    assert said.count("Evaluation Result:") == 2
    assert "Gradients are clipped to norm 1, as the plugin says" in said
    assert "evaluates on the 4 batches of its training data instead" in said.replace("\n", " ")
    trained, exported = (AutoModelForCausalLM.from_pretrained(saved / name).state_dict()
                         for name in ("modeling", "tropism-run/model"))
    assert all((trained[name] == exported[name]).all() for name in exported)
    records = [json.loads(line) for line in (saved / "tropism-run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "train/chosen_rewards" in record] == [1, 2, 3, 4]


def test_nemo_aligner(script: Callable[..., str], tmp_path: Path) -> None:
    """Two epochs of four steps, validated every second one; the logger and the callback are called as theirs were."""
    said = script("nemo_aligner_kto", "--max_time_per_run", "00:01:00:00")
    assert "hyperparameters: exp_manager, model, pretrained_checkpoint, trainer" in said
    assert [said.count(f"step {number}: train/loss") for number in range(9)] == [1] * 8 + [0]
    assert [said.count(f"step {number}: val/loss") for number in range(9)] == [0, 0, 1, 0, 1, 0, 1, 0, 1]
    assert said.rstrip().endswith("finished")
    assert {path.name for path in (tmp_path / "results").iterdir()} == {"step=2", "step=4", "step=6", "step=8-last"}
    config = json.loads((tmp_path / "results" / "step=2" / "config.json").read_text())
    assert "tropism" not in json.dumps(config)


@pytest.mark.parametrize("name", ["coati_kto", "nemo_aligner_kto"])
def test_only_the_import_is_ours(name: str) -> None:
    tree = ast.parse((SCRIPTS / f"{name}.py").read_text(encoding="utf-8"))
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert [module for module in modules if module.startswith("tropism")] == [
        f"tropism.compat.{name.removesuffix('_kto')}"]
