"""`tropism plan`: what it needs, what it says, and what it refuses."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, LlamaForCausalLM

from tropism.cli.app import main
from tropism.train.adamw8bit import eight_bit
from tropism.train.setup import run_plan


@pytest.fixture
def bare(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A model without weights."""
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors")))


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"q{n}", "completion": f"a{n}", "label": bool(n % 2)}) + "\n"
                            for n in range(8)), encoding="utf-8")
    return path


def test_a_plan_needs_no_weights_and_no_output(bare: Path, rows: Path, tmp_path: Path,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    """From a method and from a file, for a GPU that is not here."""
    given = ["--model", str(bare), "--data", str(rows), "--store", str(tmp_path / "store")]
    file = tmp_path / "plan.json"
    assert main(["plan", "kto", *given, "--device", "h200", "--json", str(file), "--batch-size=4"]) == 0
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["peak_bytes"] == sum(found["components"].values())
    assert found["fits"] is True
    assert found["seconds_per_step"] > 0
    assert found["settings"]["checkpointing"] == "none"
    assert found["components"]["weights"] > 0
    assert found["steps"] == 2
    assert "h200, 139.8 GiB" in capsys.readouterr().out
    config = tmp_path / "run.yaml"
    rows.write_text("".join(rows.read_text(encoding="utf-8").splitlines(keepends=True)[:2]), encoding="utf-8")
    config.write_text(f"method: sft\nmodel: {bare}\ndata: {rows}\noutput: {tmp_path / 'run'}\n", encoding="utf-8")
    assert main(["plan", str(config), *given[4:], "--device=rtx4090", "--memory-limit", "1MiB", f"--json={file}",
                 "--checkpointing=full"]) == 0
    assert json.loads(file.read_text(encoding="utf-8"))["fits"] is False
    assert "does not fit" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()
    assert not Path("planned").exists()


def plan_of(given: list[str], tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "plan.json"
    assert main(["plan", *given, "--json", str(file)]) == 0
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def test_optimizer_state_has_its_true_size(bare: Path, rows: Path, tmp_path: Path,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory and on the disk, without the package of 8-bit optimizers."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    file = bare / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    wide = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 128 // config["num_attention_heads"]}
    file.write_text(json.dumps(config | wide), encoding="utf-8")
    given = ["sft", "--model", str(bare), "--data", str(rows), "--store", str(tmp_path / "store"), "--device=h200"]
    found = {name: plan_of([*given, "--optimizer", name], tmp_path)
             for name in ("adamw", "adamw8bit", "paged-adamw8bit", "sgd")}
    sizes = {name: plan["components"].get("optimizer", 0) for name, plan in found.items()}
    weights = found["sgd"]["checkpoint_bytes"]
    assert sizes["sgd"] < 0.01 * weights
    assert sizes["adamw"] == pytest.approx(2 * weights, rel=0.01)
    module = LlamaForCausalLM(AutoConfig.from_pretrained(bare))
    fits = eight_bit(module.parameters(), {id(module.get_input_embeddings().weight)})
    assert any(fits)
    expected = sum(weight.numel() * (2 * (1 + 4 / 256) if small else 8)
                   for weight, small in zip(module.parameters(), fits, strict=True))
    assert sizes["adamw8bit"] == sizes["paged-adamw8bit"] == pytest.approx(expected, rel=0.01)
    assert found["adamw8bit"]["checkpoint_bytes"] == pytest.approx(weights + expected, rel=0.01)


def test_long_runs_on_gpus_compile_layers(bare: Path, rows: Path, tmp_path: Path) -> None:
    given = ["sft", "--model", str(bare), "--data", str(rows), "--store", str(tmp_path / "store"), "--device=h200"]
    long = ["--batch-size=1", "--epochs=80"]
    assert plan_of([*given, *long], tmp_path)["settings"]["compiled"] is True
    assert plan_of([*given, *long, "--compile=off"], tmp_path)["settings"]["compiled"] is False
    assert plan_of(given, tmp_path)["settings"]["compiled"] is False


@pytest.mark.parametrize(("given", "said"), [
    ([], "CONFIG or a method is required"),
    (["kto"], "are required"),
    (["kto", "--model", "MODEL", "--data", "ROWS", "--device", "tpu"], "--device: 'tpu' is not one of"),
    (["kto", "--model", "MODEL", "--data", "ROWS", "--device"], "--device needs a value"),
    (["kto", "--model", "MODEL", "--data", "absent.jsonl"], "absent.jsonl"),
    (["kto", "--model", "MODEL", "--data", "ROWS", "--bata", "2"], "Did you mean --beta"),
    (["dpo", "--model", "MODEL", "--data", "ROWS"], "rows.jsonl"),
    (["kto", "--model", "MODEL", "--data", "ROWS", "--memory-limit", "lots"], "not a valid size"),
    (["absent.yaml"], "absent.yaml"),
    (["kto", "--model", "MODEL", "--data", "ROWS", "--optimizer=adamw8bit", "--precision=fp64"], "--precision fp64"),
    (["kto", "--model", "MODEL", "--data", "ROWS", "--optimizer=paged-adamw8bit", "--device=cpu"], "requires a GPU"),
])
def test_wrong_input_is_reported_as_in_training(given: list[str], said: str, bare: Path, rows: Path,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    tokens = [{"MODEL": str(bare), "ROWS": str(rows)}.get(token, token) for token in given]
    assert main(["plan", *tokens]) == 2
    assert said in capsys.readouterr().err


def test_a_model_that_cannot_be_counted_is_an_error_in_words(bare: Path, rows: Path, monkeypatch: pytest.MonkeyPatch,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    def failing(*args: object) -> None:
        raise RuntimeError("no fake kernel\nmore")

    monkeypatch.setattr(run_plan, "_planned", failing)
    assert main(["plan", "kto", "--model", str(bare), "--data", str(rows), "--device", "h200"]) == 2
    said = capsys.readouterr().err
    assert f"{bare}: cannot be planned (RuntimeError: no fake kernel). Training does not need a plan." in said
