"""Experts in one tensor per layer: the dtype in which they compute and are stored, and what reaches their weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen2MoeConfig, Qwen3MoeConfig

from tropism.data.batching.collate import collate
from tropism.model.bf16_weights import round_to_bf16, roundable
from tropism.model.language_model import LanguageModel, Precision
from tropism.model.moe_experts import NAME, expert_matrices
from unit.test_moe_router import COMMON, CPU, FAMILIES, FOREST

SIZES: dict[str, Any] = COMMON | {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
CONFIGS: dict[str, Callable[[], Any]] = {
    "mixtral": FAMILIES["mixtral"],
    "qwen2_moe": lambda: Qwen2MoeConfig(**SIZES, num_experts=6, num_experts_per_tok=2, mlp_only_layers=[0]),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SIZES, num_experts=6, num_experts_per_tok=3, head_dim=4),
    "gpt_oss": lambda: GptOssConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2, head_dim=4)}
EACH = pytest.mark.parametrize("family", CONFIGS)


def module_of(family: str) -> Any:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(CONFIGS[family](), dtype=torch.float32).eval()


def learned(module: Any, precision: Precision) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs of each completion, and the gradient of their sum by weight."""
    model = LanguageModel(module, "padded", precision, CPU)
    module.zero_grad()
    logps = model.logps(collate(FOREST, "padded"))
    logps.sum().backward()
    return logps.detach(), {name: weight.grad for name, weight in module.named_parameters() if weight.grad is not None}


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[set[torch.dtype]]:
    """The dtypes of the factors of each grouped product."""
    seen: list[set[torch.dtype]] = []
    own = torch.nn.functional.grouped_mm

    def watched(one: torch.Tensor, other: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        seen.append({one.dtype, other.dtype})
        return own(one, other, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", watched)
    return seen


@EACH
def test_experts_compute_in_the_precision_of_the_run(family: str, products: list[set[torch.dtype]]) -> None:
    """bf16 products and float32 gradients, within bf16 rounding of those of fp32, whose products stay in fp32."""
    module = module_of(family)
    wide, exact = learned(module, "fp32")
    assert products
    assert all(seen == {torch.float32} for seen in products)
    products.clear()
    narrow, rounded = learned(module, "bf16")
    assert products
    assert all(seen == {torch.bfloat16} for seen in products)
    assert torch.allclose(wide, narrow, rtol=0.03, atol=0.1)
    names = [name for name, _ in expert_matrices(module)]
    assert len(names) == 2 * sum(hasattr(layer, "is_transposed") for layer in module.modules())
    for name in names:
        assert rounded[name].dtype == torch.float32
        assert float((rounded[name] - exact[name]).norm() / exact[name].norm()) < 0.1


@EACH
def test_nothing_changes_in_float32(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probs and gradients are those of transformers' own grouped product, to the bit."""
    module = module_of(family)
    ours = learned(module, "fp32")
    assert module.config._experts_implementation == NAME
    monkeypatch.setattr("tropism.model.language_model.compute_experts", lambda module, float64: None)
    module.set_experts_implementation("grouped_mm")
    theirs = learned(module, "fp32")
    assert torch.equal(ours[0], theirs[0])
    assert all(torch.equal(grad, theirs[1][name]) for name, grad in ours[1].items())


@EACH
def test_frozen_experts_are_held_in_two_bytes(family: str) -> None:
    """Scores and the gradients of other weights stay the same, to the bit: autocast rounds in the same way."""
    wide, slim = module_of(family), module_of(family)
    for module in (wide, slim):
        module.requires_grad_(False)
        module.model.embed_tokens.weight.requires_grad_(True)
    round_to_bf16(slim)
    assert all(weight.dtype == torch.bfloat16 for _, weight in expert_matrices(slim))
    before, after = (learned(module, "bf16") for module in (wide, slim))
    assert torch.equal(before[0], after[0])
    assert before[1].keys() == after[1].keys() == {"model.embed_tokens.weight"}
    assert torch.equal(before[1]["model.embed_tokens.weight"], after[1]["model.embed_tokens.weight"])


def test_rounded_experts_compute_in_float32_when_asked(products: list[set[torch.dtype]]) -> None:
    """As the start-up comparison does with models that are sharded in bf16."""
    module = module_of("qwen3_moe").requires_grad_(False)
    round_to_bf16(module)
    rounded = {name: weight.data.float() for name, weight in expert_matrices(module)}
    model = LanguageModel(module, "padded", "fp32", CPU)
    for layer in module.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.float()
    with torch.no_grad():
        found = model.logps(collate(FOREST, "padded"))
        assert all(seen == {torch.float32} for seen in products)
        for name, weight in expert_matrices(module):
            weight.data = rounded[name]
        assert torch.equal(found, model.logps(collate(FOREST, "padded")))


def test_experts_to_which_an_adapter_adds_are_not_rounded() -> None:
    """Rounding them before the sum would round twice. Those of other layers are."""
    module = module_of("mixtral")
    inject_adapter_in_model(LoraConfig(r=2, target_modules=[], target_parameters=["layers.0.mlp.experts.down_proj"]),
                            module)
    module.requires_grad_(False)
    names = set(roundable(module))
    assert not any("layers.0" in name and "down_proj" in name for name in names)
    assert "model.layers.1.mlp.experts.down_proj" in names
    assert "model.layers.0.mlp.experts.base_layer.gate_up_proj" in names


def test_a_choice_of_the_user_is_kept() -> None:
    module = module_of("mixtral")
    module.set_experts_implementation("batched_mm")
    LanguageModel(module, "tree", "bf16", CPU)
    assert module.config._experts_implementation == "batched_mm"


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
def test_sizes_without_a_grouped_product_take_the_plain_loop(family: str, products: list[set[torch.dtype]]) -> None:
    """Rows of 12 numbers are 24 bytes in bf16."""
    torch.manual_seed(3)
    module = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32).eval()
    ours = learned(module, "bf16")
    assert not products
    module.set_experts_implementation("eager")
    theirs = learned(module, "bf16")
    assert torch.equal(ours[0], theirs[0])
    assert all(torch.equal(grad, theirs[1][name]) for name, grad in ours[1].items())
