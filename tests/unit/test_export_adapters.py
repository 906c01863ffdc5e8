"""Exported adapters: alone and merged, of a result and of a checkpoint."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from exporting import IDS, filled_run, logits
from tropism.commands.export import export
from tropism.errors import CheckpointError, ModelError
from tropism.train.checkpoints import files as checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")  # of peft, about ends that are tied or saved

KINDS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": ["q_proj", "v_proj", "down_proj"]},
    "dora": {"target_modules": ["q_proj", "up_proj"], "use_dora": True, "use_rslora": True},
    "whole head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "embedding": {"target_modules": ["v_proj", "embed_tokens"]},
    "both ends": {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Callable[[bool], Path]:
    """The tiny model with a tied head, or with one of its own."""
    from transformers import AutoConfig

    untied = tmp_path_factory.mktemp("base") / "untied"
    config = AutoConfig.from_pretrained(tiny_model_dir)
    config.tie_word_embeddings = False
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).save_pretrained(untied)
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(untied)
    return lambda tied: tiny_model_dir if tied else untied


def trained(base: Path, kind: str) -> Any:
    """A model with an adapter whose weights are all away from what they begin with."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(
        r=4, lora_alpha=8, task_type="CAUSAL_LM", **KINDS[kind]))
    torch.manual_seed(11)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight += 0.05 * torch.randn_like(weight)
    return model.eval()


def run_of(model: Any, base: Path, path: Path) -> Path:
    """A run directory with the adapter as its result and in a checkpoint."""
    model.save_pretrained(path / "model", save_embedding_layers=False)
    AutoTokenizer.from_pretrained(base).save_pretrained(path / "model")
    config = model.peft_config["default"]
    lora = {"rank": 4, "alpha": 8.0, "targets": ",".join(sorted(config.target_modules)), "dora": config.use_dora,
            "rslora": config.use_rslora, "adapter": None, "quantize": None,
            "modules_to_save": ",".join(config.modules_to_save or []) or None}
    filled_run(path, base, lora=lora)
    inner = {f"model/{name}": weight.detach().clone() for name, weight in model.get_base_model().named_parameters()
             if weight.requires_grad}
    checkpoint.write(path / "checkpoints", 2, inner, {"step": 2, "stop_ids": [1], "fingerprints": {}})
    return path


@pytest.mark.parametrize(("kind", "tied"), [
    ("lora", True), ("dora", False), ("whole head", True), ("whole head", False), ("embedding", True),
    ("both ends", True)])
def test_merged_says_what_the_adapter_said(base: Callable[[bool], Path], tmp_path: Path, kind: str,
                                           tied: bool) -> None:
    """S1: of the result and of the checkpoint; also where the adapter changes one end of a tied model only, which is
    tied no more then."""
    model = trained(base(tied), kind)
    run = run_of(model, base(tied), tmp_path / "run")
    with torch.no_grad():
        wanted = model(input_ids=IDS).logits
    one_end = kind in ("whole head", "embedding")
    for name, named in (("result", None), ("kept", "last")):
        done = export(run, tmp_path / name, merge=True, checkpoint=named)
        assert (done.merged, done.is_adapter, done.dtype) == (True, False, torch.float32)
        assert not (tmp_path / name / "adapter_config.json").exists()
        torch.testing.assert_close(logits(tmp_path / name), wanted, rtol=1e-5, atol=1e-5)
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["tie_word_embeddings"] is (tied and not one_end)
        assert ("lm_head.weight" in load_file(tmp_path / name / "model.safetensors")) is not (tied and not one_end)


@pytest.mark.parametrize("kind", KINDS)
def test_alone_every_row_of_it_is_there(base: Callable[[bool], Path], tmp_path: Path, kind: str) -> None:
    """S1: by peft alone, in a dtype of its own; result and checkpoint give the same file."""
    from peft import AutoPeftModelForCausalLM, get_peft_model_state_dict

    model = trained(base(True), kind)
    run = run_of(model, base(True), tmp_path / "run")
    whole = get_peft_model_state_dict(model, save_embedding_layers=False)
    for name, named in (("result", None), ("kept", "2")):
        done = export(run, tmp_path / name, checkpoint=named)
        assert (done.merged, done.is_adapter, done.dtype) == (False, True, torch.float32)
        there = load_file(tmp_path / name / "adapter_model.safetensors")
        assert there.keys() == whole.keys()
        assert all(torch.equal(there[key], whole[key]) for key in whole)
        assert all(there[key].abs().sum(1).min() > 0 for key in there if "lora_B" in key)
    with torch.no_grad():
        found = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "kept").eval()(input_ids=IDS).logits
        torch.testing.assert_close(found, model(input_ids=IDS).logits, rtol=1e-5, atol=1e-5)


def test_an_adapter_in_another_dtype_and_its_card(base: Callable[[bool], Path], tmp_path: Path) -> None:
    run = run_of(trained(base(True), "lora"), base(True), tmp_path / "run")
    export(run, tmp_path / "out", dtype="bf16")
    there = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in there.values()} == {torch.bfloat16}
    written = json.loads((run / "model" / "adapter_config.json").read_text())
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text()) == written
    assert written["base_model_name_or_path"] == str(base(True))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "library_name: peft" in card
    assert f"it needs `{Path(base(True)).name}`" in card
    assert "AutoPeftModelForCausalLM" in card
    assert "| `rank` | 4 |" in card
    assert {"tokenizer.json", "chat_template.jinja", "generation_config.json", "export.json"} <= {
        file.name for file in (tmp_path / "out").iterdir()}


def test_a_checkpoint_of_a_run_that_never_ended(base: Callable[[bool], Path], tmp_path: Path) -> None:
    """Its adapter config comes from what the run was told and from the names; the tokenizer from the base."""
    model = trained(base(False), "dora")
    run = run_of(model, base(False), tmp_path / "run")
    shutil.rmtree(run / "model")
    export(run, tmp_path / "out", merge=True, checkpoint="last")
    with torch.no_grad():
        torch.testing.assert_close(logits(tmp_path / "out"), model(input_ids=IDS).logits, rtol=1e-5, atol=1e-5)
    export(run, tmp_path / "alone", checkpoint="last")
    config = json.loads((tmp_path / "alone" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_dora"]) == (4, 8.0, True)
    assert config["base_model_name_or_path"] == str(base(False))


def test_what_is_missing_is_named(base: Callable[[bool], Path], tmp_path: Path) -> None:
    """S1: as a process that saved only its own share would leave it."""
    run = run_of(trained(base(True), "lora"), base(True), tmp_path / "run")
    file = run / "model" / "adapter_model.safetensors"
    whole = load_file(file)
    name = next(key for key in whole if "lora_B" in key)
    for weights, text in (({key: whole[key] for key in whole if key != name}, "lora_B.weight is missing"),
                          ({**whole, name: whole[name][:4].clone()}, "lora_B.weight has shape .4, 4., but .32, 4."),
                          ({**whole, "strange": torch.ones(1)}, "strange is not part of the adapter")):
        save_file(weights, file)
        filled_run(run, base(True), lora={"rank": 4})
        with pytest.raises(CheckpointError, match=text):
            export(run, tmp_path / "out")
    file.unlink()
    filled_run(run, base(True), lora={"rank": 4})
    with pytest.raises(ModelError, match="the adapter cannot be read"):
        export(run, tmp_path / "out")
    kept = {"model/model.layers.0.self_attn.q_proj.lora_A.default.weight": torch.ones(4, 32)}
    checkpoint.write(run / "checkpoints", 3, kept, {"step": 3, "fingerprints": {}})
    with pytest.raises(CheckpointError, match="is missing"):
        export(run, tmp_path / "out", checkpoint="3")
    assert not (tmp_path / "out").exists()


def test_a_base_that_is_gone(base: Callable[[bool], Path], tmp_path: Path) -> None:
    copy = tmp_path / "base"
    shutil.copytree(base(True), copy)
    run = run_of(trained(copy, "lora"), copy, tmp_path / "run")
    shutil.rmtree(copy)
    with pytest.raises(ModelError, match=r"base: .*not found.*--base DIR"):
        export(run, tmp_path / "out", merge=True)
