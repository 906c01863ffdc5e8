"""Models that carry a state from token to token are padded by the kind of their layers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from helpers import tree
from tropism.data.tree import PromptTree
from tropism.errors import ModelError, UsageError
from tropism.model.adapters.create import make_structure, set_initial_values
from tropism.model.adapters.summary import summarize
from tropism.model.adapters.targets import new_config
from tropism.model.head.logprob import head_of
from tropism.model.layout_check import choose_layout
from tropism.model.options import LoraOptions
from tropism.model.token_state import carries_state, without_attention

SIZES: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
                         "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": None,
                         "eos_token_id": 1, "pad_token_id": 0, "max_position_embeddings": 64}
LINEAR: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
                          "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
STATES = {
    "qwen3_5_text": LINEAR,
    "qwen3_next": {**LINEAR, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8,
                   "shared_expert_intermediate_size": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_ff_dim": 32},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
              "num_experts": 2, "num_experts_per_tok": 1, "mamba_d_state": 4, "mamba_dt_rank": 2,
              "use_mamba_kernels": False},
    "mamba": {"state_size": 4, "time_step_rank": 2},
    "mamba2": {"num_heads": 4, "head_dim": 8, "state_size": 4, "n_groups": 1, "chunk_size": 8},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "lru_width": 16, "attention_window_size": 32},
    "rwkv": {"attention_hidden_size": 16},
}
TREES = {
    "llama": {}, "qwen3": {}, "gemma2": {}, "mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64},
}
PROBES = [tree([5, 6, 7], [8, 9, 10], [11, 12]), tree([13, 14], [15, 16], [17])]


def model(kind: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**SIZES, **STATES.get(kind, TREES.get(kind, {})), **changes})
    return AutoModelForCausalLM.from_config(config).eval()


def layout(module: Any, wanted: Any = "auto", probes: Sequence[PromptTree] = PROBES) -> Any:
    return choose_layout(module, "fp32", torch.device("cpu"), list(probes), wanted)[1]


@pytest.mark.parametrize("kind", STATES)
def test_a_state_is_padded_however_small_the_difference(kind: str) -> None:
    """The weights are so close to zero that no comparison can see a leak between completions."""
    module = model(kind)
    with torch.no_grad():
        for weight in module.parameters():
            weight.mul_(1e-3)
    found = layout(module)
    assert found.layout == "padded"
    assert found.per_token <= 1e-6
    with pytest.raises(ModelError, match=r"token"):
        layout(module, "tree")


@pytest.mark.parametrize("kind", TREES)
def test_attention_keeps_the_tree(kind: str) -> None:
    module = model(kind)
    assert carries_state(module) is None
    assert layout(module).layout == "tree"


@pytest.mark.parametrize("changes", [{"no_rope_layers": [1, 0]}, {"no_rope_layers": [1, 1]},
                                     {"no_rope_layers": [0, 0]}])
def test_chunks_and_places_in_a_line_are_padded_however_short_the_probes(changes: dict[str, Any]) -> None:
    """Chunks and the scale of queries of Llama 4 begin at 8,192 tokens, which no comparison reaches."""
    module = model("llama4_text", intermediate_size_mlp=32, interleave_moe_layer_step=1, num_local_experts=2,
                   num_experts_per_tok=1, **changes)
    found = layout(module)
    assert found.layout == "padded"
    assert found.per_token <= 1e-6
    with pytest.raises(ModelError, match=r"place of a token in its line"):
        layout(module, "tree")


def test_a_window_that_is_in_the_mask_only_is_padded() -> None:
    """PhiMoE does not hand its window to attention; Mistral does."""
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    assert layout(model("phimoe", sliding_window=32, **experts)).layout == "padded"
    assert layout(model("phimoe", sliding_window=None, **experts)).layout == "tree"
    assert layout(model("mistral", sliding_window=32)).layout == "tree"


def test_a_layer_of_other_code_without_our_attention_is_padded() -> None:
    """Such a layer mixes tokens in a way that nobody has seen, or not at all."""
    module = model("llama")

    class Shift(nn.Module):
        def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
            return 1e-9 * torch.cat((torch.zeros_like(hidden_states[:, :1]), hidden_states[:, :-1]), dim=1), None

    module.model.layers[1].self_attn = Shift()
    found = layout(module)
    assert (found.layout, carries_state(module)) == ("padded", None)
    assert "LlamaDecoderLayer" in found.reason
    assert without_attention(module, {id(part) for part in module.model.layers[0].modules()}) == "LlamaDecoderLayer"


def test_an_indexer_is_padded() -> None:
    """It selects keys only beyond as many tokens as a comparison has."""
    module = model("llama")
    module.config.layer_types = ["full_attention", "indexed_attention"]
    assert "indexed_attention" in str(carries_state(module))


@pytest.mark.parametrize("kind", STATES)
def test_default_targets_of_an_adapter(kind: str) -> None:
    """Every adapter that is made takes part in the computation: each of them gets a gradient."""
    module = model(kind)
    make_structure(module, new_config(module, LoraOptions(rank=2), None))
    set_initial_values(module, 0, torch.float32)
    for name, weight in module.named_parameters():
        if ".lora_B" in name:
            nn.init.constant_(weight, 0.1)
    module(input_ids=torch.arange(2, 14)[None], use_cache=False).logits.square().mean().backward()
    idle = [name for name, weight in module.named_parameters() if ".lora_" in name and weight.grad is None]
    assert not idle
    assert not [name for name, _ in module.named_modules() if name.endswith((".out_proj.lora_A", ".dt_proj.lora_A"))
                and "mamba" in name]


def test_a_target_that_is_bypassed_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--lora.targets dt_proj: .* cannot have an adapter"):
        new_config(model("mamba"), LoraOptions(rank=2, targets="dt_proj"), None)


def test_frozen_experts_are_counted() -> None:
    """Mixtral: 2 layers x 2 experts x (2 x 32 x 16 + 16 x 32) weights."""
    module = model("mixtral")
    make_structure(module, new_config(module, LoraOptions(rank=2), None))
    facts = summarize(module)
    assert facts.experts == 2 * 2 * 3 * 32 * 16
    assert str(facts).endswith("; 6.14k weights of experts stay frozen")
    dense = model("llama")
    make_structure(dense, new_config(dense, LoraOptions(rank=2), None))
    assert "experts" not in str(summarize(dense))


def test_a_rank_above_all_layers_is_refused() -> None:
    new_config(model("llama"), LoraOptions(rank=16), None)
    with pytest.raises(UsageError, match=r"--lora.rank 17 exceeds the smaller side of every layer.* Use 16 or less"):
        new_config(model("llama"), LoraOptions(rank=17), None)


@pytest.mark.parametrize(("kind", "changes"), [("recurrent_gemma", {"logits_soft_cap": 2.0}),
                                               ("gemma2", {"final_logit_softcapping": 2.0}),
                                               ("cohere", {"logit_scale": 0.25}), ("granite", {"logits_scaling": 4.0}),
                                               ("hyperclovax", {"logits_scaling": 4.0})])
def test_the_head_is_the_models_own(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Scale and soft-cap are applied, also where logits are large: near 0 a missing soft-cap hardly shows."""
    module = model(kind, **changes)
    with torch.no_grad():
        module.get_output_embeddings().weight.mul_(100)
    ids = torch.arange(2, 10)[None]
    states = module.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]
    logits = module(input_ids=ids, use_cache=False).logits[0, :-1]
    wanted = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    assert torch.allclose(head_of(module).per_token_logps(states, ids[0, 1:]), wanted, atol=1e-5)
