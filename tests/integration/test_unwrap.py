"""A module after training with an adapter: as a plain model again, with what was learned or without."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import tropism
from integration.resuming import answers  # noqa: F401
from tropism.errors import ModelError
from tropism.model import load
from tropism.model.adapters import merge as adapter_merge
from tropism.model.source import ModelSource

pytestmark = pytest.mark.filterwarnings("ignore")  # of peft, about ends that are tied

IDS = torch.arange(20)[None] % 90 + 3


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=IDS).logits


@pytest.mark.parametrize("lora", [{"rank": 2}, {"rank": 2, "dora": True, "modules_to_save": "embed_tokens"}])
@pytest.mark.parametrize("own", [False, True])
def test_the_module_saves_as_a_plain_model(tiny_model_dir: Path, answers: Path, tmp_path: Path, own: bool,  # noqa: F811
                                           lora: dict[str, Any]) -> None:
    """S1: merged it says what RUN/model says, without its adapter what the base said; it is the object that was given,
    or the model in the PeftModel."""
    from peft import LoraConfig, get_peft_model

    before = logits(AutoModelForCausalLM.from_pretrained(tiny_model_dir))
    for merge in (True, False):
        module = given = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
        if own:
            given = get_peft_model(module, LoraConfig(
                r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", use_dora="dora" in lora,
                modules_to_save=["lm_head"] if "dora" in lora else None), adapter_name="mine")
        run = tropism.SFTTrainer(given, train_dataset=str(answers), max_steps=2, samples=0, quiet=True,
                                 learning_rate=1e-2, output=str(tmp_path / f"run-{merge}"), lora=None if own else lora,
                                 ).fit()
        wanted = logits(load.load_model(ModelSource.of(str(run.model)), "fp32", torch.device("cpu"))) if merge else (
            before)
        assert torch.allclose(logits(module), wanted, atol=1e-5) is merge
        plain = tropism.unwrap(given, merge)
        assert plain is module
        assert torch.allclose(logits(plain), wanted, atol=1e-5)
        assert not hasattr(plain, "peft_config")
        assert all(weight.requires_grad for weight in plain.parameters())
        plain.save_pretrained(tmp_path / f"plain-{merge}")
        again, report = AutoModelForCausalLM.from_pretrained(tmp_path / f"plain-{merge}", output_loading_info=True)
        assert not any(report.values())
        assert torch.allclose(logits(again), wanted, atol=1e-5)
        assert tropism.unwrap(plain) is plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_module_in_training_mode(tiny_model_dir: Path, dtype: torch.dtype) -> None:
    """S1: neither dropout nor the rounding of few bits is taken for a wrong merge."""
    from peft import LoraConfig, get_peft_model

    module = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model_dir), LoraConfig(
        target_modules=["q_proj", "down_proj"], lora_dropout=0.5, init_lora_weights=False)).to(dtype)
    wanted = logits(module).float()
    module.train()
    plain = tropism.unwrap(module)
    assert plain.training
    assert float((logits(plain).float() - wanted).abs().max() / wanted.abs().max()) < 4 * torch.finfo(dtype).eps + 1e-5


def test_what_cannot_be_unwrapped(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """X1: an adapter that does not compute, is in the weights already, is not served, or cannot be merged is left as it
    is."""
    from peft import LoraConfig, get_peft_model

    def adapted(**settings: Any) -> Any:
        torch.manual_seed(1)
        return get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model_dir), LoraConfig(
            init_lora_weights=False, **settings))

    module = adapted(target_modules=["q_proj"])
    module.disable_adapter_layers()
    with pytest.raises(ModelError, match="adapter of the module is switched off"):
        tropism.unwrap(module)
    module.enable_adapter_layers()
    module.merge_adapter()
    with pytest.raises(ModelError, match="merged into its weights"):
        tropism.unwrap(module)
    module = adapted(target_modules=["q_proj"], trainable_token_indices=[3])
    with pytest.raises(ModelError, match="trainable_token_indices"):
        tropism.unwrap(module)
    module = adapted(target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"]).train()
    names = {name for name, weight in module.named_parameters() if weight.requires_grad}
    tied = module.config.tie_word_embeddings
    before = logits(module)
    module.train()
    monkeypatch.setattr(adapter_merge, "_TOLERANCE", 0.0)
    monkeypatch.setattr(adapter_merge.torch, "finfo", lambda dtype: SimpleNamespace(eps=0.0))
    with pytest.raises(ModelError, match="cannot be merged"):
        tropism.unwrap(module)
    monkeypatch.undo()
    assert {name for name, weight in module.named_parameters() if weight.requires_grad} == names
    assert (module.training, module.config.tie_word_embeddings) == (True, tied)
    assert torch.allclose(logits(module), before, atol=1e-5)
    assert tropism.unwrap(module) is module.get_base_model()
