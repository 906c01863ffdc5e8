"""Families with attention of their own kind on the tree layout: values and gradients equal padded eager attention."""

import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from attention_gradients import logps_and_gradient
from helpers import tree
from tropism.data.batching.collate import collate
from tropism.data.tree import PromptTree
from tropism.model.language_model import LanguageModel
from tropism.model.layout_check import choose_layout
from tropism.model.token_state import layers_of

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1}
LATENT: dict[str, Any] = {**EXPERTS, "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8,
                          "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "head_dim": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**LATENT, "v_head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
                    "topk_method": "greedy", "first_k_dense_replace": 1},
    "deepseek_v3": {**LATENT, "v_head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
                    "first_k_dense_replace": 1},
    "deepseek_v3 with wide values": {**LATENT, "v_head_dim": 20, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
                                     "first_k_dense_replace": 1},
    "gemma2": {"head_dim": 8, "attn_logit_softcapping": 3.0, "sliding_window": 6},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6,
                "layer_types": ["sliding_attention", "full_attention"]},
    "nemotron": {"head_dim": 8},
    "stablelm": {},
    "stablelm with norms": {"qk_layernorm": True, "use_parallel_residual": True},
}
KEYWORD_DROPPED = ("nemotron", "stablelm")


def build(name: str, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(1)
    config = CONFIG_MAPPING[name.split()[0]](**{**SIZES, **FAMILIES[name]})
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4.0) if weight.dim() == 2 else weight.add_(0.1 * torch.randn_like(weight))
    return model


def forest(seed: int = 0) -> list[PromptTree]:
    """Many completions, one completion, and completions of one token, which have no segment of their own."""
    draw = np.random.default_rng(seed)

    def ids(length: int) -> list[int]:
        return draw.integers(3, 61, length).tolist()

    return [tree(ids(9), *(ids(length) for length in (4, 1, 7, 2, 12))), tree(ids(1), ids(10)), tree(ids(17), ids(1))]


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager attention and norms of transformers go through float32, also in float64."""
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim=-1, dtype=None, **_: softmax(x, dim=dim))
    to = torch.Tensor.to

    def kept(self: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        narrow = self.dtype == torch.float64 and torch.float32 in (*given, named.get("dtype"))
        return self if narrow else to(self, *given, **named)

    monkeypatch.setattr(torch.Tensor, "to", kept)
    monkeypatch.setattr(torch.Tensor, "float", lambda self: kept(self, torch.float32))


@pytest.mark.parametrize("name", FAMILIES)
def test_values_and_gradients_equal_padded_eager_attention(name: str, exact: None) -> None:
    model = build(name)
    logps, gradient = logps_and_gradient(model, "tree", forest())
    expected, expected_gradient = logps_and_gradient(model, "padded", forest())
    assert (logps - expected).abs().max() < 1e-8
    assert (gradient - expected_gradient).norm() < 1e-8 * expected_gradient.norm()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_tree_layout_is_chosen(name: str, precision: Any) -> None:
    if "deepseek" in name and precision == "bf16":
        pytest.skip("random experts are chosen by rounding in bfloat16")
    _, found = choose_layout(build(name, torch.float32), precision, CPU, forest(), "auto")
    assert (found.layout, found.reason) == ("tree", "")


@pytest.mark.parametrize("name", KEYWORD_DROPPED)
def test_a_recomputation_finds_the_pass_of_its_forward(name: str) -> None:
    """Two forwards before two backwards, with every layer computed again, also in the thread of another model."""
    model = build(name)
    first, second = (collate(forest(seed), "tree") for seed in (0, 1))
    ours = LanguageModel(model, "tree", "fp64", CPU)

    def gradient() -> torch.Tensor:
        model.zero_grad()
        losses = [ours.logps(batch).sum() for batch in (first, second)]
        thread = threading.Thread(target=lambda: [loss.backward() for loss in losses])
        thread.start()
        thread.join()
        return torch.cat([p.grad.reshape(-1) for p in model.parameters()])

    expected = gradient()
    for layer in layers_of(model):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    assert torch.equal(gradient(), expected)


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in ("_local_scalar_dense", "item", "nonzero", "equal", "is_nonzero", "masked_select", "all", "any"):
            self.found.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma2", "nemotron", "stablelm"])
def test_a_pass_never_waits_for_the_device(kind: str) -> None:
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**SIZES)).eval()
    ours, batch = LanguageModel(model, "tree", "fp32", CPU), collate(forest(), "tree")
    with Waits() as waits:
        ours.hidden(batch, ours.tree_pass(batch)).sum().backward()
    assert waits.found == []


def test_half_precision_is_computed_in_float32_on_a_cpu() -> None:
    seen: set[torch.dtype] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "scaled_dot_product" in function.overloadpacket.__name__:
                seen.update(one.dtype for one in args if isinstance(one, torch.Tensor))
            return function(*args, **(kwargs or {}))

    model = LanguageModel(AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**SIZES)), "tree", "bf16", CPU)
    with Watch():
        model.logps(collate(forest(), "tree")).sum().backward()
    assert seen == {torch.float32}
