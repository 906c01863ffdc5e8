"""An adapter by its name: merged as peft computes it, or refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tropism.commands.export import export
from tropism.errors import ModelError
from tropism.model import load
from tropism.model.adapters import merge as adapter_merge
from tropism.model.source import ModelSource
from unit.test_adapters import llama, logits
from unit.test_export_adapters import run_of

pytestmark = pytest.mark.filterwarnings("ignore")  # of peft, about ends that are tied


def learned(model: Any, **settings: Any) -> Any:
    """A PeftModel whose adapter is away from 0."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(**{"r": 3, "task_type": "CAUSAL_LM", "target_modules": ["q_proj"],
                                                **settings}))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight += 0.3 * torch.randn(weight.shape, generator=generator)
    return model.eval()


@pytest.mark.parametrize(("settings", "stays_tied"), [
    ({"target_modules": ["q_proj", "embed_tokens"]}, False), ({"target_modules": ["q_proj", "lm_head"]}, False),
    ({"target_modules": ["embed_tokens", "lm_head"]}, False), ({"modules_to_save": ["lm_head"]}, False),
    ({"modules_to_save": ["embed_tokens"]}, False), ({"trainable_token_indices": [3, 7]}, True),
    ({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, True), ({}, True)])
def test_ends_of_a_tied_model(tmp_path: Path, settings: dict[str, Any], stays_tied: bool) -> None:
    """S1: what is merged into one end does not change the other; the model is tied no more then, and says so."""
    model = learned(llama(True), **settings)
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    wanted = logits(model)
    found = adapter_merge.merged(llama(True), tmp_path)
    assert torch.allclose(logits(found), wanted, atol=1e-5)
    assert (found.lm_head.weight is found.model.embed_tokens.weight) is stays_tied
    assert found.config.tie_word_embeddings is stays_tied


def test_what_does_not_say_the_same_is_refused(tmp_path: Path) -> None:
    """S1: layers that peft repeats share their weights, into which their adapters would be merged together."""
    learned(llama(False), layer_replication=[[0, 2], [1, 2]]).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"cannot be merged: .*logits change by"):
        adapter_merge.merged(llama(False), tmp_path)


def test_what_peft_cannot_merge(tiny_model_dir: Path, tmp_path: Path) -> None:
    """X1: a bias of the adapter has no place in a layer without one: by a sentence, by its name and exported."""
    source = ModelSource.of(str(tiny_model_dir))
    model = learned(load.load_model(source, "fp32", torch.device("cpu")), lora_bias=True)
    run = run_of(model, tiny_model_dir, tmp_path / "run")
    with pytest.raises(ModelError, match=r"cannot be merged: .*export it alone"):
        export(run, tmp_path / "out", merge=True)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ModelError, match="model: the adapter cannot be merged: "):
        load.load_model(ModelSource.of(str(run / "model")), "fp32", torch.device("cpu"))
