"""Code in a run directory or a model runs only if the command in hand allows it, whatever their files say."""

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tropism.cli.app import main
from tropism.commands.export import export
from tropism.commands.verify import verify
from tropism.config import KTOOptions
from tropism.config_file import CODE as DECIDED
from tropism.config_file import read_yaml
from tropism.errors import CheckpointError, ModelError, UsageError
from tropism.observe.checksums import checksums, file_hash
from tropism.observe.rundir import RunDirectory
from tropism.runner import run
from tropism.train.checkpoints import files as checkpoint
from tropism.train.checkpoints import find

CODE = """from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path({marker!r}).touch()
class Config(LlamaConfig):
    model_type = {kind!r}
class Model(LlamaForCausalLM):
    config_class = Config
class Tokenizer(PreTrainedTokenizerFast):
    pass
"""
FLAG = "--trust-remote-code"


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def plant(model: Path, marker: Path, kind: str, tokenizer: bool = True) -> None:
    """Give a model code that leaves a mark when it is imported. `kind` is its model_type: llama runs without it too."""
    (model / "planted.py").write_text(CODE.format(marker=str(marker), kind=kind))
    edit(model / "config.json", model_type=kind, auto_map={
        "AutoConfig": "planted.Config", "AutoModelForCausalLM": "planted.Model"})
    if tokenizer:
        edit(model / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "planted.Tokenizer"]})


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))

    def no_question(text: str = "") -> str:
        raise AssertionError(f"asked: {text}")

    monkeypatch.setattr("builtins.input", no_question)
    return tmp_path / "MARK"


@pytest.fixture(scope="module")
def original(tiny_model_dir: Path, feedback: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step with a checkpoint, beside its model and its data."""
    root = tmp_path_factory.mktemp("original")
    shutil.copytree(tiny_model_dir, root / "base")
    shutil.copy(feedback, root / "data.jsonl")
    run(KTOOptions(model=str(root / "base"), data=str(root / "data.jsonl"), output=str(root / "run"), samples=0,
                   store=str(root / "store"), batch_size=8, max_steps=1, save_every=1))
    return root


@pytest.fixture
def hostile(original: Path, tmp_path: Path, mark: Path) -> Path:
    """The same run as someone else may hand it over: its configuration allows code, and its models have some."""
    root = tmp_path / "theirs"
    shutil.copytree(original, root)
    config = yaml.safe_load((root / "run" / "config.yaml").read_text().replace(str(original), str(root)))
    (root / "run" / "config.yaml").write_text(yaml.safe_dump(config | {"trust_remote_code": True}))
    for model in (root / "base", root / "run" / "model"):
        plant(model, mark, "llama")
    return root


def said(capsys: pytest.CaptureFixture[str]) -> str:
    out = capsys.readouterr()
    return " ".join((out.out + out.err).split())


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("inside", ["alone", "in good metadata", "in the tensors"])
def test_a_checkpoint_with_a_payload_and_right_hashes(inside: str, original: Path, tmp_path: Path, mark: Path,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    """G1: hashes lie inside the checkpoint, so they prove nothing about who wrote it. Nothing of it is run."""
    root = tmp_path / "theirs"
    shutil.copytree(original, root)
    path = root / "run" / "checkpoints" / "step-00000001"
    file = path / "state" / ".metadata"
    good = pickle.loads(file.read_bytes())
    good.planner_data = {"x": Payload(mark)}
    if inside == "in the tensors":
        file = path / "state" / "__0_0.distcp"
        torch.save(Payload(mark), file.with_name("payload"))
        content = file.with_name("payload").read_bytes()
        file.with_name("payload").unlink()
        file.write_bytes(content.ljust(file.stat().st_size, b"\0"))
    else:
        file.write_bytes(pickle.dumps(Payload(mark) if inside == "alone" else good))
    for name in ("files.json", "COMPLETE"):
        (path / name).unlink()
    (path / "files.json").write_text(json.dumps(checksums(path)))
    (path / "COMPLETE").write_text(file_hash(path / "files.json") + "\n")
    assert main(["verify", str(root / "run")]) in (0, 1)
    for tokens in (["resume", str(root / "run"), "--max-steps", "2"], ["resume", str(path), "--max-steps", "2"],
                   ["export", str(root / "run"), "--to", str(tmp_path / "out"), "--checkpoint", "last"]):
        capsys.readouterr()
        assert main(tokens) == 2
        text = said(capsys)
        assert "state" in text
        assert "Traceback" not in text
        if inside != "in the tensors":
            assert f"{file}: contains {os.system.__module__}.system, which the metadata of a checkpoint never" in text
        assert not mark.exists(), tokens
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [None, 5, "x", [], {}, [None], float("nan"), -1])
@pytest.mark.parametrize("key", ["step", "totals", "window", "tolerance", "options", "guards", "offsets", "random",
                                 "optimizer", "seconds", "learning_rate", "baselines", "shift", "answers", "updater",
                                 "evaluation", "stop_ids"])
def test_a_checkpoint_with_odd_values_and_right_hashes(key: str, value: Any, original: Path, tmp_path: Path) -> None:
    """G1, G2: a sentence that names the file, or a value that means nothing; never another error."""
    path = shutil.copytree(original / "run" / "checkpoints" / "step-00000001", tmp_path / "step-00000001")
    (path / "trainer.json").write_text(json.dumps(json.loads((path / "trainer.json").read_text()) | {key: value}))
    for name in ("files.json", "COMPLETE"):
        (path / name).unlink()
    (path / "files.json").write_text(json.dumps(checksums(path)))
    (path / "COMPLETE").write_text(file_hash(path / "files.json") + "\n")
    harmless = {(name, kind) for name, kind in (
        ("options", dict), ("guards", dict), ("offsets", dict), ("baselines", dict), ("evaluation", dict),
        ("updater", dict), ("answers", list), ("stop_ids", list), ("shift", type(None)),
        ("learning_rate", int), ("learning_rate", float), ("seconds", int), ("seconds", float))}
    with suppress(CheckpointError):
        find._verified(RunDirectory(original / "run"), checkpoint.Checkpoint(path, 1))
        assert (key, type(value)) in harmless
        return
    with pytest.raises(CheckpointError, match=f"{path / 'trainer.json'}: invalid content"):
        find._verified(RunDirectory(original / "run"), checkpoint.Checkpoint(path, 1))


COMMANDS: dict[str, Callable[[Path], list[str]]] = {
    "train": lambda root: ["train", str(root / "run" / "config.yaml"), "--output", str(root / "new")],
    "config": lambda root: ["kto", "--config", str(root / "run" / "config.yaml"), "--output", str(root / "new")],
    "config=": lambda root: ["kto", f"--config={root / 'run' / 'config.yaml'}", "--output", str(root / "new")],
    "resume": lambda root: ["resume", str(root / "run"), "--max-steps", "2"],
    "checkpoint": lambda root: ["resume", str(root / "run" / "checkpoints" / "step-00000001")]}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_file_that_allows_code_is_refused(name: str, hostile: Path, mark: Path,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is loaded, with the line, and with both ways to go on."""
    assert main(COMMANDS[name](hostile)) == 2
    text = said(capsys)
    assert re.search(r"config\.yaml:\d+: trust_remote_code: a file cannot allow", text), text
    assert "--trust-remote-code" in text
    assert "--no-trust-remote-code" in text
    assert not mark.exists()
    assert not (hostile / "new").exists()


@pytest.mark.parametrize("given", [["--no-trust-remote-code"], ["--trust-remote-code", "false"],
                                   ["--trust_remote_code=false"]])
def test_a_run_may_be_repeated_without_the_code(given: list[str], hostile: Path, mark: Path) -> None:
    """The classes of transformers do as well for this model. Its result names no code."""
    assert main([*COMMANDS["train"](hostile), *given]) == 0
    assert not mark.exists()
    for file in ("config.json", "tokenizer_config.json"):
        assert "auto_map" not in (hostile / "new" / "model" / file).read_text()
    assert not list((hostile / "new").rglob("*.py"))


def test_the_flag_of_this_command_allows_it(hostile: Path, mark: Path) -> None:
    """The run records it, its model has the code, and the next command must say it again."""
    assert main([*COMMANDS["train"](hostile), FLAG]) == 0
    assert mark.exists()
    mark.unlink()
    assert yaml.safe_load((hostile / "new" / "config.yaml").read_text())["trust_remote_code"] is True
    assert "auto_map" in (hostile / "new" / "model" / "config.json").read_text()
    assert main(["resume", str(hostile / "new")]) == 2
    assert not mark.exists()


@pytest.mark.parametrize("word", ["true", "yes", "'on'", "1"])
def test_every_spelling_of_true_counts(word: str, tmp_path: Path) -> None:
    file = tmp_path / "base.yaml"
    file.write_text(f"method: kto\nmodel: x\ntrust_remote_code: {word}\n")
    with pytest.raises(UsageError, match=r"base\.yaml:3: trust_remote_code"):
        read_yaml(file)
    assert "trust_remote_code" not in read_yaml(file, decided=DECIDED)[1]


def test_a_merged_key_counts_and_null_is_no_word_for_it(tmp_path: Path) -> None:
    file = tmp_path / "base.yaml"
    file.write_text("method: kto\nlora: &other {trust_remote_code: true}\n<<: *other\n")
    with pytest.raises(UsageError, match=r"base\.yaml:\d+: "):
        read_yaml(file)
    file.write_text("method: kto\n<<: {trust_remote_code: true}\n")
    with pytest.raises(UsageError, match=r"base\.yaml:1: trust_remote_code: a file cannot allow"):
        read_yaml(file)
    file.write_text("method: kto\ntrust_remote_code: null\n")
    with pytest.raises(UsageError, match=r"base\.yaml:2: trust_remote_code"):
        read_yaml(file, decided=DECIDED)


def test_verify_and_export_read_a_run_without_its_code(hostile: Path, mark: Path, tmp_path: Path,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    """Their checks of files notice the change; an export of a checkpoint has no trace of the code."""
    assert main(["verify", str(hostile / "run")]) == 1
    assert main(["export", str(hostile / "run"), "--to", str(tmp_path / "out"), "--checkpoint", "last"]) == 0
    assert FLAG in said(capsys)
    assert not mark.exists()
    assert "auto_map" not in (tmp_path / "out" / "config.json").read_text()
    assert "auto_map" not in (tmp_path / "out" / "tokenizer_config.json").read_text()
    assert not list((tmp_path / "out").rglob("*.py"))
    assert main(["evaluate", str(hostile / "run"), "--data", str(hostile / "data.jsonl")]) == 0
    assert main(["inspect", str(hostile / "data.jsonl"), "--model", str(hostile / "run" / "model")]) == 0
    assert not mark.exists()


def test_verify_and_export_have_the_flag(hostile: Path, mark: Path, tmp_path: Path) -> None:
    verify(hostile / "run", trust_remote_code=True)
    assert mark.exists()
    mark.unlink()
    shutil.rmtree(tmp_path / "modules")
    export(hostile / "run", tmp_path / "out", checkpoint="last", trust_remote_code=True)
    assert (tmp_path / "out" / "planted.py").is_file()


@pytest.mark.parametrize("what", ["model", "tokenizer"])
def test_a_model_that_needs_its_code_is_refused_with_the_flag(what: str, original: Path, tmp_path: Path, mark: Path,
                                                              capsys: pytest.CaptureFixture[str]) -> None:
    """Of every command, for the policy, the reference, the teacher and the base of an adapter. No question is asked."""
    model, data = tmp_path / "strange", str(original / "data.jsonl")
    shutil.copytree(original / "base", model)
    if what == "model":
        plant(model, mark, "strange", tokenizer=False)
    else:
        plant(model, mark, "llama")
        edit(model / "tokenizer_config.json", tokenizer_class="Tokenizer")
        (model / "tokenizer.json").unlink()
    adapter, plain, out = tmp_path / "adapter", str(original / "base"), str(tmp_path / "out")
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "base_model_name_or_path": str(model), "r": 2, "target_modules": ["q_proj"]}))
    runs = ["--data", data, "--output", out]
    for tokens in (["kto", "--model", str(model), *runs], ["kto", "--model", str(adapter), *runs],
                   ["kto", "--model", plain, "--reference", str(model), *runs],
                   ["kd", "--model", plain, "--teacher", str(model), *runs],
                   ["inspect", data, "--model", str(model)], ["evaluate", str(model), "--data", data],
                   ["evaluate", plain, "--reference", str(model), "--data", data],
                   ["score", str(model), "--data", data, "--output", f"{out}.jsonl"]):
        assert main(tokens) == 2, tokens
        text = said(capsys)
        assert "needs Python code that comes with it, which was not run. If you trust it, pass" in text, (tokens, text)
        assert FLAG in text
        assert not mark.exists()
    assert not Path(out).exists()


@pytest.mark.parametrize("value", ["someone/kernel", "kernels-community/flash-attn2", "someone/kernel@main:name",
                                   {"": "someone/kernel"}])
def test_a_kernel_of_the_hub_is_code(value: Any, original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                     capsys: pytest.CaptureFixture[str]) -> None:
    """transformers downloads and runs the kernel that a config names, if the package `kernels` is installed."""
    def downloaded(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a kernel was loaded")

    monkeypatch.setattr("transformers.integrations.hub_kernels.get_kernel", downloaded)
    monkeypatch.setattr("transformers.integrations.hub_kernels.is_kernels_available", lambda: True)
    shutil.copytree(original / "base", tmp_path / "base")
    edit(tmp_path / "base" / "config.json", attn_implementation=value)
    assert main(["evaluate", str(tmp_path / "base"), "--data", str(original / "data.jsonl")]) == 2
    text = said(capsys)
    assert "kernel" in text
    assert FLAG in text


def test_export_reads_back_without_code_that_appears_meanwhile(hostile: Path, mark: Path, tmp_path: Path) -> None:
    """RUN/model with code that the run's result needs: nothing is exported, and the sentence names the flag."""
    plant(hostile / "run" / "model", mark, "strange")
    manifest = json.loads((hostile / "run" / "manifest.json").read_text())
    manifest["model_files"] = checksums(hostile / "run" / "model")  # hashes of a hostile run agree with its files
    (hostile / "run" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ModelError, match=r"needs Python code that comes with it.* pass --trust-remote-code"):
        export(hostile / "run", tmp_path / "out")
    assert not mark.exists()
    assert not (tmp_path / "out").exists()
