"""Fixtures that all tests share: the tiny tokenizer and model of the cases, and shape checks on the losses."""

import os
from pathlib import Path

import jaxtyping
import pytest
import torch

# Before tropism.losses is imported by anyone: from here on a wrong shape or dtype is an error, not a broadcast.
jaxtyping.install_import_hook("tropism.losses", "beartype.beartype")

import quick  # noqa: E402, F401
from helpers import build_tokenizer, fixture_parts  # noqa: E402  (imports of tropism must come after the hook)

torch.set_num_threads(1)
os.getloadavg = lambda: (0.0, 0.0, 0.0)  # what else runs on the machine changes no output


@pytest.fixture(scope="session")
def fixture_tokenizer():
    """The character tokenizer of `cases/00-fixture.yaml`, with its chat template. Do not change it in a test."""
    return build_tokenizer()


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory, fixture_tokenizer) -> Path:
    """A directory with `model_random` of the cases and the fixture tokenizer, as `save_pretrained` writes them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    parts = fixture_parts()
    spec, ids = parts["model_random"], parts["ids"]
    config = LlamaConfig(
        vocab_size=parts["vocab_size"], hidden_size=spec["hidden"], intermediate_size=spec["mlp"],
        num_hidden_layers=spec["layers"], num_attention_heads=spec["heads"], num_key_value_heads=spec["heads"],
        max_position_embeddings=spec["max_pos"], tie_word_embeddings=spec["tied_head"],
        attention_dropout=spec["dropout"], bos_token_id=ids["bos"], eos_token_id=ids["eos"], pad_token_id=ids["pad"])
    torch.manual_seed(spec["init_seed"])
    model = LlamaForCausalLM(config).to(getattr(torch, spec["dtype"]))
    path = tmp_path_factory.mktemp("models") / "tiny"
    model.save_pretrained(path)
    fixture_tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def tiny_moe_dir(tmp_path_factory: pytest.TempPathFactory, fixture_tokenizer) -> Path:
    """A random Mixtral of two layers with four experts, of which two serve a token, and the fixture tokenizer."""
    from transformers import MixtralConfig, MixtralForCausalLM

    parts = fixture_parts()
    ids = parts["ids"]
    torch.manual_seed(6)
    model = MixtralForCausalLM(MixtralConfig(
        vocab_size=parts["vocab_size"], hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        max_position_embeddings=parts["model_random"]["max_pos"], tie_word_embeddings=False, initializer_range=0.2,
        bos_token_id=ids["bos"], eos_token_id=ids["eos"], pad_token_id=ids["pad"]))
    path = tmp_path_factory.mktemp("models") / "moe"
    model.save_pretrained(path)
    fixture_tokenizer.save_pretrained(path)
    return path
