"""`tropism plan`: what it needs, what it says, and what it refuses."""

import json
import shutil
from pathlib import Path

import pytest

from tropism.cli.app import main
from tropism.commands import plan


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
    config.write_text(f"method: sft\nmodel: {bare}\ndata: {rows}\noutput: {tmp_path / 'run'}\n", encoding="utf-8")
    assert main(["plan", str(config), *given[4:], "--device=rtx4090", "--memory-limit", "1MiB", f"--json={file}"]) == 0
    assert json.loads(file.read_text(encoding="utf-8"))["fits"] is False
    assert "does not fit" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()
    assert not Path("planned").exists()


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

    monkeypatch.setattr(plan, "_planned", failing)
    assert main(["plan", "kto", "--model", str(bare), "--data", str(rows), "--device", "h200"]) == 2
    said = capsys.readouterr().err
    assert f"{bare}: cannot be planned (RuntimeError: no fake kernel). Training does not need a plan." in said
