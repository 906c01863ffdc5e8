"""What an adapter stands on: that it is what the adapter was trained on, and that it is found again."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from integration.conftest import records
from tropism.cli.app import main
from tropism.commands.export import export
from tropism.errors import ModelError
from tropism.observe.console import Voice
from tropism.trainers import KTOTrainer

IDS = torch.arange(20)[None] % 90 + 3


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=IDS).logits


def changed(directory: Path) -> None:
    """Other weights in the same place."""
    file = directory / "model.safetensors"
    save_file({name: weight * 1.5 for name, weight in load_file(file).items()}, file, metadata={"format": "pt"})


def test_a_base_that_has_changed(train: Callable[..., Any], tiny_model_dir: Path, feedback: Path, tmp_path: Path,
                                 capsys: pytest.CaptureFixture[str]) -> None:
    """S1: merging refuses another base than the one trained on, evaluating says so; a copy of the first one serves."""
    base, kept = tmp_path / "base", tmp_path / "kept"
    shutil.copytree(tiny_model_dir, base)
    shutil.copytree(tiny_model_dir, kept)
    runs = [train("kto", model=str(base), max_steps=2, **more).directory for more in (
        {"lora": {"rank": 2}},
        {"lora": {"rank": 2, "dora": True, "modules_to_save": "embed_tokens"}, "precision": "fp64"})]
    known = [json.loads((run / "manifest.json").read_text())["base_weights"] for run in runs]
    assert known[0] == known[1]
    export(runs[0], tmp_path / "one", merge=True)
    export(runs[1], tmp_path / "other", merge=True)
    evaluate = ["evaluate", str(runs[0]), "--data", str(feedback)]
    assert main(evaluate) == 0
    assert "changed after the adapter" not in " ".join(capsys.readouterr().out.split())
    changed(base)
    for options in ({"merge": True}, {"merge": True, "dtype": "fp64"}):
        with pytest.raises(ModelError, match=r"its weights changed since the adapter.*--base DIR"):
            export(runs[0], tmp_path / "two", **options)
    assert not (tmp_path / "two").exists()
    assert main(evaluate) == 0
    assert "changed after the adapter was trained" in " ".join(capsys.readouterr().out.split())
    assert main(["export", str(runs[0]), "--to", str(tmp_path / "two"), "--merge", "--base", str(kept)]) == 0
    assert torch.equal(*(logits(AutoModelForCausalLM.from_pretrained(tmp_path / name)) for name in ("one", "two")))


def test_a_module_that_has_learned_names_no_base(tiny_model_dir: Path, feedback: Path, tmp_path: Path,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    """S1: the weights that the adapter stands on lie nowhere, so that none is named; saved by hand they serve."""
    module = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    with torch.no_grad():
        module.model.norm.weight += 0.5
    module.save_pretrained(tmp_path / "mine")
    result = KTOTrainer(module, train_dataset=str(feedback), store=str(tmp_path / "store"), max_steps=2, samples=0,
                        output=str(tmp_path / "run"), lora_rank=2, save_every=1, voice=Voice(),
                        learning_rate=1e-2).fit()
    said = " ".join(capsys.readouterr().out.split())
    assert f"differs from {tiny_model_dir} (in model.norm.weight)" in said
    config = json.loads((result.model / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] is None
    for checkpoint in (None, "last"):
        with pytest.raises(ModelError, match=r"has no recorded path.*--base DIR"):
            export(result.directory, tmp_path / "out", merge=True, checkpoint=checkpoint)
        with pytest.raises(ModelError, match="its weights changed since"):
            export(result.directory, tmp_path / "out", merge=True, checkpoint=checkpoint, base=tiny_model_dir)
        out = export(result.directory, tmp_path / f"out-{checkpoint}", merge=True, checkpoint=checkpoint,
                     base=tmp_path / "mine").path
        assert torch.allclose(logits(AutoModelForCausalLM.from_pretrained(out)), logits(module), atol=1e-5)
    assert records(result)


def test_a_module_from_nowhere_names_no_base(tiny_model_dir: Path, feedback: Path, tmp_path: Path,
                                             monkeypatch: pytest.MonkeyPatch,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    """S1: a module that was made of a config has no name, and the current directory is none; a PeftModel around it
    keeps the base that its own config names."""
    from peft import LoraConfig, get_peft_model

    monkeypatch.chdir(tiny_model_dir)
    for number, own in enumerate((None, "owner/name", ".")):
        module = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
        module.config._name_or_path = module.name_or_path = ""
        if own is not None:
            module = get_peft_model(module, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
            module.peft_config["default"].base_model_name_or_path = own
        result = KTOTrainer(module, train_dataset=str(feedback), store=str(tmp_path / "store"), max_steps=1, samples=0,
                            output=str(tmp_path / f"run{number}"), lora_rank=2 if own is None else None, voice=Voice(),
                            tokenizer=AutoTokenizer.from_pretrained(tiny_model_dir)).fit()
        said = " ".join(capsys.readouterr().out.split())
        assert ("has no directory or Hub id as its origin" in said) == (own is None)
        config = json.loads((result.model / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == (str(tiny_model_dir) if own == "." else own)


def test_checkpoints_of_a_peft_model(tiny_model_dir: Path, feedback: Path, tmp_path: Path) -> None:
    """S1: of an adapter with a name of its own; result and last checkpoint are one model."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model_dir), LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"), adapter_name="mine")
    run = KTOTrainer(model, train_dataset=str(feedback), store=str(tmp_path / "store"), max_steps=2, samples=0,
                     output=str(tmp_path / "run"), save_every=2, quiet=True).fit().directory
    for merge in (True, False):
        one, other = (load_file(next(export(run, tmp_path / f"{merge}-{name}", merge=merge, checkpoint=name).path.glob(
            "*model.safetensors"))) for name in (None, "last"))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_checkpoints_of_a_run_that_was_stopped(tiny_model_dir: Path, feedback: Path, tmp_path: Path) -> None:
    """S1: of a PeftModel, and from an adapter that is gone: the manifest has the adapter's config; a base that has
    moved is named, and asked for before the tokenizer."""
    from peft import LoraConfig, get_peft_model

    base = tmp_path / "base"
    shutil.copytree(tiny_model_dir, base)
    common = {"train_dataset": str(feedback), "store": str(tmp_path / "store"), "max_steps": 1, "samples": 0,
              "save_every": 1, "quiet": True, "learning_rate": 1e-2}
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], rank_pattern={"v_proj": 3}, lora_alpha=5, use_rslora=True,
        task_type="CAUSAL_LM"))
    runs = [KTOTrainer(model, output=str(tmp_path / "one"), **common).fit().directory]
    shutil.copytree(runs[0] / "model", tmp_path / "adapter")
    for number, named in enumerate(({"model": str(tmp_path / "adapter")},
                                    {"model": str(base), "lora": {"adapter": str(tmp_path / "adapter")}})):
        runs.append(KTOTrainer(output=str(tmp_path / f"run{number}"), **common, **named).fit().directory)
    wanted = [logits(AutoModelForCausalLM.from_pretrained(export(run, tmp_path / f"{run.name}-whole", merge=True).path))
              for run in runs]
    for run in (*runs, tmp_path / "adapter"):
        shutil.rmtree(run / "model" if run in runs else run)
    for run, found in zip(runs, wanted, strict=True):
        out = export(run, tmp_path / f"{run.name}-out", merge=True, checkpoint="last").path
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(out)), found)
        config = json.loads((export(run, tmp_path / f"{run.name}-alone", checkpoint="last").path
                             / "adapter_config.json").read_text())
        assert (config["rank_pattern"], config["lora_alpha"], config["use_rslora"]) == ({"v_proj": 3}, 5, True)
        assert config["base_model_name_or_path"] == str(base)
    shutil.move(base, tmp_path / "moved")
    for merge in (True, False):
        with pytest.raises(ModelError, match=r"/base: .*not found.*--base DIR"):
            export(runs[0], tmp_path / "out", merge=merge, checkpoint="last")
        out = export(runs[0], tmp_path / f"moved-{merge}", merge=merge, checkpoint="last", base=tmp_path / "moved").path
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == str(tmp_path / "moved")


def test_training_on_from_an_adapter_over_another_base(tiny_model_dir: Path, feedback: Path, tmp_path: Path,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    """S1: weights that the adapter was not trained on are said, as evaluating does; a base that has only moved is none,
    and of an adapter without a run the names are compared."""
    base, moved = tmp_path / "base", tmp_path / "moved"
    shutil.copytree(tiny_model_dir, base)
    shutil.copytree(tiny_model_dir, moved)
    number = 0

    def said(model: Path, adapter: Path | None = None) -> str:
        nonlocal number
        number += 1
        KTOTrainer(str(model), train_dataset=str(feedback), store=str(tmp_path / "store"), max_steps=1, samples=0,
                   save_every=1, checkpoint_model=True, output=str(tmp_path / f"run{number}"), voice=Voice(),
                   lora={"rank": 2} if number == 1 else {} if adapter is None else {"adapter": str(adapter)}).fit()
        return " ".join(capsys.readouterr().out.split())

    said(base)
    result = tmp_path / "run1" / "model"
    kept = tmp_path / "run1" / "checkpoints" / "step-00000001" / "model"
    shutil.copytree(result, tmp_path / "alone")
    for text in (said(result), said(moved, result), said(base, tmp_path / "alone")):
        assert "other weights" not in text
        assert "cannot check that their weights" not in text
    assert f"the base model of this adapter is {base}, but it is trained on {moved}" in said(moved, tmp_path / "alone")
    changed(base)
    for text in (said(result), said(base, result), said(base, kept)):
        assert f"trained on a base model whose weights differ from those of {base}" in text
