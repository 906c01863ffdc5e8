"""`tropism init`: the file that it writes trains, without a warning, and says why it has each value."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes import CONFIGS
from tropism.cli.app import main
from tropism.config_file import read_yaml

FILES = {"lf_dpo_en": "dpo kto", "lf_kto_en": "kto", "llmbar_pairs": "dpo kto", "oasst_tree_kto": "kto",
         "oasst_tree_pairs": "dpo kto", "pandalm_human_kto": "kto", "pandalm_human_pairs": "dpo kto",
         "qa_feedback_kto": "kto", "qa_feedback_pairs": "dpo kto", "qa_feedback_sft": "sft",
         "selfinstruct_human_sft": "sft", "tulu_human_accept_kto": "kto", "tulu_human_pairs": "dpo kto"}
"""Real data, with the methods that it fits."""

Begin = Callable[..., tuple[Path, str]]


@pytest.fixture
def begin(tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
          monkeypatch: pytest.MonkeyPatch) -> Begin:
    """Calls `init` for a tiny model, and returns the file and what was printed."""
    monkeypatch.chdir(tmp_path)

    def call(rows: Any, *arguments: str, method: str = "auto", code: int = 0) -> tuple[Path, str]:
        data = rows
        if isinstance(rows, list):
            data = tmp_path / "rows.jsonl"
            data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        capsys.readouterr()
        assert main(["init", method, f"--model={tiny_model_dir}", f"--data={data}", f"--store={tmp_path / 'store'}",
                     *arguments]) == code
        said = capsys.readouterr()
        return tmp_path / "run.yaml", said.out + said.err

    return call


def labeled(count: int, *, prompts: int | None = None, good: int = 2) -> list[dict[str, Any]]:
    """Rows with labels, one in `good` of them desirable."""
    return [{"prompt": [{"role": "user", "content": f"say {number % (prompts or count)}"}],
             "completion": [{"role": "assistant", "content": f"well {number}"}], "label": number % good == 0}
            for number in range(count)]


def trained(config: Path, *more: str) -> None:
    assert main(["train", str(config), "--max-steps=2", "--samples=1", "--no-report", *more]) == 0


def no_warning(said: str) -> None:
    assert not [line for line in said.splitlines() if line.startswith("warning")], said


def test_labels_train_without_a_warning(begin: Begin, capsys: pytest.CaptureFixture[str]) -> None:
    """Repeated prompts, unequal classes and rows over the model's positions: each has its option and its reason."""
    rows = labeled(120, prompts=60, good=4)
    rows += [{"prompt": [{"role": "user", "content": "long"}], "completion": [
        {"role": "assistant", "content": "word " * 5000}], "label": True}]
    config, said = begin(rows)
    values = yaml.safe_load(config.read_text(encoding="utf-8"))
    assert values["method"] == "kto"
    assert values["overlong"] == "drop"
    assert (values["desirable_weight"], values["undesirable_weight"]) == ("auto", "auto")
    assert values["eval_fraction"] * 60 >= 20
    assert values["batch_size"] <= 32
    assert isinstance(values["learning_rate"], float)
    assert values["learning_rate"] == 5e-5
    lines = config.read_text(encoding="utf-8").splitlines()
    for name in values.keys() - {"method"}:
        place = next(number for number, line in enumerate(lines) if line.startswith(f"{name}:"))
        assert lines[place - 1].startswith("# "), name
    trained(config)
    no_warning(said + capsys.readouterr().out)
    run = Path(values["output"])
    assert yaml.safe_load((run / "config.yaml").read_text())["max_length"] == values["max_length"]
    audit = json.loads((run / "audit.json").read_text())
    assert audit["rows"]["dropped"] == {"too_long": 1}


def test_a_length_that_decides_is_answered_by_the_loss(begin: Begin, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"say {number}"}],
             "chosen": [{"role": "assistant", "content": "a b c d e f " * (2 + number % 3)}],
             "rejected": [{"role": "assistant", "content": f"a {number}"}]} for number in range(60)]
    config, said = begin(rows)
    values = yaml.safe_load(config.read_text(encoding="utf-8"))
    assert (values["method"], values["ld_alpha"]) == ("dpo", 0.5)
    trained(config)
    no_warning(said + capsys.readouterr().out)
    assert json.loads((Path(values["output"]) / "audit.json").read_text())["findings"][0]["severity"] != "warning"


def test_plain_text_is_put_into_messages(begin: Begin) -> None:
    """A table with columns of other names, whose names are given; and completions without labels."""
    data = Path("table.csv")
    data.write_text("question,answer,good\n" + "".join(f"say {n},well {n},{n % 2}\n" for n in range(30)),
                    encoding="utf-8")
    assert "--columns" in begin(data, method="kto", code=2)[1]
    config, said = begin(data, "--columns=prompt=question,completion=answer,label=good", method="kto")
    values = yaml.safe_load(config.read_text(encoding="utf-8"))
    assert values["as_messages"] is True
    assert values["columns"] == "prompt=question,completion=answer,label=good"
    no_warning(said)
    config.unlink()
    config, _ = begin([{"instruction": f"say {n}", "output": f"well {n}"} for n in range(30)])
    assert yaml.safe_load(config.read_text(encoding="utf-8"))["method"] == "sft"


def test_nothing_is_overwritten_and_nothing_half_written(begin: Begin, capsys: pytest.CaptureFixture[str],
                                                         tiny_model_dir: Path) -> None:
    config = Path("run.yaml")
    config.write_text("mine", encoding="utf-8")
    assert "already exists" in begin(labeled(8), code=2)[1]
    assert config.read_text(encoding="utf-8") == "mine"
    config.unlink()
    assert "both classes" in begin(labeled(8, good=1), method="kto", code=2)[1]
    assert "unknown method ktoo. Did you mean kto?" in begin(labeled(8), method="ktoo", code=2)[1]
    assert "--device: 'abacus' is not one of" in begin(labeled(8), "--device=abacus", code=2)[1]
    assert main(["init", "--model", str(tiny_model_dir)]) == 2
    assert "--data is required" in capsys.readouterr().err
    assert not config.exists()


def test_standard_output_gets_the_file_alone(tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                             capfd: pytest.CaptureFixture[str]) -> None:
    """What a user gives is kept, also from a file, and names cannot break out of a comment or a value."""
    monkeypatch.chdir(tmp_path)
    odd = Path("odd # name\n: {x.jsonl")
    odd.write_text("".join(json.dumps(row) + "\n" for row in labeled(6)), encoding="utf-8")
    Path("base.yaml").write_text("beta: 0.3\nlora:\n  rank: 4\n", encoding="utf-8")
    assert main(["init", "kto", f"--model={tiny_model_dir}", f"--data={odd}", "--config", "base.yaml", "--to", "-",
                 "--seed=7", "--epochs=9", "--store=store", "--output=out"]) == 0
    text = capfd.readouterr().out
    values = yaml.safe_load(text)
    assert values["data"] == str(odd)
    assert (values["beta"], values["seed"], values["epochs"], values["output"]) == (0.3, 7, 9, "out")
    assert values["lora"] == {"rank": 4}
    assert "fewer than the 20" in text
    Path("read.yaml").write_text(text, encoding="utf-8")
    assert read_yaml("read.yaml")[0] == "kto"


@pytest.fixture
def large(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A model of 1.7B weights, without them."""
    path = tmp_path / "large"
    shutil.copytree(tiny_model_dir, path, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    CONFIGS["HuggingFaceTB/SmolLM2-1.7B-Instruct"].save_pretrained(path)
    return path


@pytest.mark.slow
def test_a_model_that_does_not_fit_gets_an_adapter(begin: Begin, large: Path) -> None:
    """On a card of 24 GB: all weights do not fit, an adapter does; in less, its base in 4 bits."""
    found = {}
    for name, more in (("card", []), ("less", ["--memory-limit=5GiB"])):
        begin(labeled(40), "--device=rtx4090", f"--to={name}.yaml", f"--model={large}", *more, method="kto")
        found[name] = yaml.safe_load(Path(f"{name}.yaml").read_text(encoding="utf-8"))
    assert found["card"]["lora"] == {"rank": 16}
    assert found["card"]["learning_rate"] == 1e-4
    assert found["less"]["lora"] == {"rank": 16, "quantize": "nf4"}


@pytest.mark.slow
@pytest.mark.parametrize(("data", "method"), [(data, method) for data, methods in FILES.items()
                                              for method in methods.split()])
def test_every_file_of_real_data(test_data: Path, data: str, method: str, tmp_path: Path,
                                 capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps without a warning. TROPISM_TEST_MODEL names another model, of which a few rows are evaluated."""
    monkeypatch.chdir(tmp_path)
    model = os.environ.get("TROPISM_TEST_MODEL")
    small = ["--eval-limit=4", "--batch-size=4", "--samples=0"] if model else ["--samples=1"]
    assert main(["init", method, f"--model={model or test_data / 'models' / 'stories260K'}",
                 f"--data={test_data / 'data' / data}.jsonl", "--store=store"]) == 0
    assert main(["train", "run.yaml", "--max-steps=2", "--no-report", *small]) == 0
    said = capsys.readouterr().out
    Path(os.environ.get("TROPISM_TEST_LOGS", "."), f"{method}-{data}.log").write_text(said, encoding="utf-8")
    # Pairs of the same prompt can contradict one another as labels. No option answers that, so the file says it.
    contradicted = [line for line in said.splitlines() if line.startswith("warning: the data labels")]
    assert not contradicted or (method, data.endswith("_pairs")) == ("kto", True)
    assert all(f"# {line}" in Path("run.yaml").read_text(encoding="utf-8") for line in contradicted)
    no_warning("\n".join(line for line in said.splitlines() if line not in contradicted))
    assert re.search(r"^verdict: ", said, re.MULTILINE)
