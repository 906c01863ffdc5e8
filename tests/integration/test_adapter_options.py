"""Options of adapters: given twice, of another kind, or without effect; and what stands for an adapter."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from integration.resuming import answers  # noqa: F401
from tropism.cli.app import main
from tropism.commands.export import export
from tropism.config_file import read_yaml
from tropism.errors import CheckpointError, ModelError, UsageError
from tropism.model.options import LoraOptions, is_adapter
from tropism.model.source import ModelSource
from tropism.train.checkpoints.resume import check_options
from tropism.trainers import SFTTrainer


@pytest.fixture(scope="module")
def run(tiny_model_dir: Path, answers: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """A run with an adapter, done and with a checkpoint."""
    return SFTTrainer(str(tiny_model_dir), train_dataset=str(answers), max_steps=2, samples=0, save_every=1, quiet=True,
                      lora={"rank": 4}, output=str(tmp_path_factory.mktemp("run") / "run")).fit().directory


@pytest.mark.parametrize(("options", "match"), [
    ({"lora": {"rank": 4}, "lora_rank": 8}, "lora and lora_rank"),
    ({"lora_rank": 8, "lora": LoraOptions(rank=4)}, "lora and lora_rank"),
    ({"lora_rank": True}, r"lora\.rank: True is not"), ({"lora": {"rank": True}}, r"lora\.rank: True"),
    ({"lora": 16}, r"lora: is a group .* lora: \{rank: \.\.\.\}"),
    ({"lora": {"rank": 2, "targets": []}}, r"lora\.targets: no module"),
    ({"lora": {"rank": 2, "modules_to_save": " , "}}, r"lora\.modules_to_save: no module"),
    ({"lora": {"quantize": "nf4"}}, "--lora.quantize has no effect without --lora.rank")])
def test_what_is_refused(options: dict[str, Any], match: str) -> None:
    """X1: by the names that were given."""
    with pytest.raises(UsageError, match=match):
        SFTTrainer("m", train_dataset="d", output="o", **options)


def test_what_a_file_may_not_say(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    for text, match in (("lora: 16", r"run.yaml:2: lora: is a group .* lora: \{rank"),
                        ("parallel: 2", r"parallel: is a group .* parallel: \{shard"),
                        ("lora:\n  rank: 2\n  targets: []", r"run.yaml:4: lora\.targets: no module")):
        file.write_text(f"method: sft\n{text}\n")
        with pytest.raises(UsageError, match=match):
            read_yaml(file)


def test_a_default_may_be_spelled_out_where_a_run_goes_on(tmp_path: Path) -> None:
    """C1: alpha is 2 x rank where nothing else was said."""
    plain = {"lora": {"rank": 4, "alpha": None}}
    assert check_options(plain, {"lora": {"rank": 4, "alpha": 8.0}}, tmp_path) == []
    with pytest.raises(CheckpointError, match=r"--lora\.alpha \(was 8\.0, now 9\.0\)"):
        check_options(plain, {"lora": {"rank": 4, "alpha": 9.0}}, tmp_path)


def test_what_is_an_adapter(run: Path, tiny_model_dir: Path, tmp_path: Path) -> None:
    """S1: a config beside it, as some trainers leave it, makes no model of it; weights do."""
    shutil.copytree(run / "model", tmp_path / "both")
    shutil.copy(tiny_model_dir / "config.json", tmp_path / "both")
    assert ModelSource.of(str(tmp_path / "both")).adapter == str(tmp_path / "both")
    shutil.copy(tiny_model_dir / "model.safetensors", tmp_path / "both")
    assert not is_adapter(tmp_path / "both")


def test_a_base_that_is_gone_under_evaluate(run: Path, answers: Path, tmp_path: Path,  # noqa: F811
                                            capsys: pytest.CaptureFixture[str]) -> None:
    """X1: what it says can be done where it is said; an adapter without weights is no name of a model."""
    place = tmp_path / "adapter"
    shutil.copytree(run / "model", place)
    config = json.loads((place / "adapter_config.json").read_text())
    (place / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "/nowhere/at/all"}))
    assert main(["evaluate", str(place), "--data", str(answers)]) == 2
    assert f"base_model_name_or_path in {place}/adapter_config.json" in capsys.readouterr().err
    shutil.copytree(run, tmp_path / "other")
    shutil.copy(place / "adapter_config.json", tmp_path / "other" / "model")
    assert main(["evaluate", str(tmp_path / "other"), "--data", str(answers)]) == 2  # a run's files stay as they are
    assert f"tropism export {tmp_path}/other --to DIR --base BASE" in capsys.readouterr().err
    (place / "adapter_config.json").write_text(json.dumps(config))
    (place / "adapter_model.safetensors").unlink()
    assert main(["evaluate", str(place), "--data", str(answers)]) == 2
    assert f"{place}/adapter_model.safetensors: " in capsys.readouterr().err


def test_exports_of_an_adapter(run: Path, tiny_model_dir: Path, tmp_path: Path) -> None:
    """S1: options that would do nothing, a link to an empty directory, and a base that was moved."""
    with pytest.raises(UsageError, match="--max-shard-size has no effect on an adapter alone"):
        export(run, tmp_path / "out", max_shard_size="5GB")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert export(run, tmp_path / "link").path == tmp_path / "real"
    assert (tmp_path / "link" / "adapter_config.json").is_file()
    moved = tmp_path / "moved"
    shutil.copytree(tiny_model_dir, moved)
    shutil.copytree(run, tmp_path / "run")
    for file in (tmp_path / "run" / "manifest.json", tmp_path / "run" / "config.yaml"):
        file.write_text(file.read_text().replace(str(tiny_model_dir), "/nowhere/at/all"))
    checkpoint = str(tmp_path / "run" / "checkpoints" / "step-00000002")
    shutil.rmtree(tmp_path / "run" / "model")
    with pytest.raises(ModelError, match=r"nowhere.*not found"):
        export(tmp_path / "run", tmp_path / "out", checkpoint=checkpoint)
    out = export(tmp_path / "run", tmp_path / "out", checkpoint=checkpoint, base=moved).path
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == str(moved)


def test_an_adapter_as_the_model_of_a_quantized_run(run: Path, answers: Path, tmp_path: Path) -> None:  # noqa: F811
    """QLoRA goes on from an adapter that `model` names, as from one that lora.adapter names."""
    pytest.importorskip("bitsandbytes")
    model = str(run / "model")
    base = json.loads((run / "model" / "adapter_config.json").read_text())["base_model_name_or_path"]
    found = []
    for number, named in enumerate(({"model": model, "lora": {"quantize": "nf4"}},
                                    {"model": base, "lora": {"quantize": "nf4", "adapter": model}})):
        result = SFTTrainer(train_dataset=str(answers), max_steps=1, samples=0, quiet=True,
                            output=str(tmp_path / f"run{number}"), **named).fit()
        assert "base_weights" not in json.loads((result.directory / "manifest.json").read_text())
        found.append(load_file(result.model / "adapter_model.safetensors"))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_linear_layers_that_learn_whole_are_not_quantized(tiny_model_dir: Path, answers: Path, tmp_path: Path,  # noqa: F811
                                                          ) -> None:
    """QLoRA: named with spaces between, by the ends of their names, or by an adapter to start from."""
    pytest.importorskip("bitsandbytes")
    place = tmp_path / "run" / "model"
    for number, lora in enumerate(({"rank": 2, "targets": "q_proj", "modules_to_save": "embed_tokens, mlp.down_proj"},
                                   {"adapter": str(place)})):
        result = SFTTrainer(str(tiny_model_dir), train_dataset=str(answers), max_steps=1, samples=0, quiet=True,
                            output=str(tmp_path / ("run", "other")[number]), lora={"quantize": "nf4", **lora}).fit()
        whole = {name.removeprefix("base_model.model."): weight for name, weight in load_file(
            result.model / "adapter_model.safetensors").items() if "lora" not in name}
        assert len(whole) == 4  # of tied ends both
        before = AutoModelForCausalLM.from_pretrained(tiny_model_dir).state_dict()
        for name, weight in whole.items():
            assert torch.allclose(weight, before[name], atol=1e-2)
            assert not torch.equal(weight, before[name])


def test_a_rank_beyond_the_weights_is_said(tiny_model_dir: Path, answers: Path, tmp_path: Path,  # noqa: F811
                                           capsys: pytest.CaptureFixture[str]) -> None:
    """A rank above some layers is a warning; above all of them it is an error before the model is loaded."""
    for targets, beyond in (("q_proj", None), ("q_proj,down_proj", None), ("q_proj", 33)):
        options = {"rank": beyond or 32, "targets": targets}
        trainer = {"train_dataset": str(answers), "max_steps": 1, "samples": 0, "lora": options}
        output = str(tmp_path / f"run-{targets}-{beyond}")
        if beyond:
            with pytest.raises(UsageError, match=r"--lora.rank 33 exceeds .* Use 32 or less"):
                SFTTrainer(str(tiny_model_dir), output=output, **trainer).fit()
            continue
        SFTTrainer(str(tiny_model_dir), output=output, **trainer).fit()
        assert "smaller side" not in capsys.readouterr().out
