"""Attention to shared prompts and own keys apart equals attention to gathered keys, and padded eager attention."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import tropism.data.batching.collate as batching
from attention_gradients import logps_and_gradient
from helpers import tree
from tropism.data.batching.collate import Batch, collate, collate_leaves
from tropism.data.tree import PromptTree
from tropism.model import attention, merged_attention
from tropism.model.adapters.create import make_structure, set_initial_values
from tropism.model.adapters.targets import new_config
from tropism.model.attention import TreePass, tree_attention
from tropism.model.language_model import LanguageModel
from tropism.model.options import LoraOptions

CPU = torch.device("cpu")
KINDS = ("llama", "qwen3", "mistral", "gemma3_text")


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "_MANY", 0)


def forest(completions: int, seed: int = 0) -> list[PromptTree]:
    """Trees with this many completions, also of one token, which have no segment, and a tree of only such ones."""
    draw = np.random.default_rng(seed)

    def ids(length: int) -> list[int]:
        return draw.integers(3, 61, length).tolist()

    lengths = [(1, 5, 2, 9, 3)[i % 5] + i // 5 for i in range(completions)]
    return [tree(ids(30), *(ids(length + 1) for length in lengths)), tree(ids(4), ids(1)),
            tree(ids(1), *(ids(length) for length in lengths))]


def states(batch: Batch, dtype: torch.dtype, size: int = 8, out: int = 8) -> list[torch.Tensor]:
    torch.manual_seed(2)
    return [torch.randn(1, batch.tokens, heads, width, dtype=dtype).transpose(1, 2).requires_grad_()
            for heads, width in ((6, size), (2, size), (2, out))]


def results(batch: Batch, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    assert batch.segments is not None
    out, _ = tree_attention(torch.nn.Module(), *inputs, None, scaling=0.4, tree=TreePass(batch.segments))
    torch.manual_seed(3)
    return [out, *torch.autograd.grad((out * torch.randn_like(out)).sum(), inputs)]


@pytest.mark.parametrize("out", [8, 4, 12])
@pytest.mark.parametrize("completions", [1, 2, 4, 8, 16])
def test_equals_gathered_keys(completions: int, out: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gathered = collate(forest(completions), "tree")
    monkeypatch.setattr(batching, "_MANY", 0)
    merged = collate(forest(completions), "tree")
    assert merged.segments is not None
    assert merged.segments.shared is not None
    inputs = states(merged, torch.float64, out=out)
    for ours, wanted in zip(results(merged, inputs), results(gathered, inputs), strict=True):
        assert (ours - wanted).abs().max() < 1e-12


def test_many_completions_do_not_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 3 gathered keys per packed key on; and where gathering is cheap, it stays."""
    few, many = (collate([tree([5] * 40, *([n, 6, 6] for n in range(completions)))], "tree").segments
                 for completions in (2, 16))
    assert few is not None
    assert many is not None
    assert few.shared is None
    assert many.shared is not None
    assert sum(many.shared.key_lengths) == 40

    def failing(*_: Any) -> None:
        raise AssertionError("keys were gathered")

    monkeypatch.setattr(attention, "_segment", failing)
    batch = collate([tree([5] * 40, *([n, 6, 6] for n in range(16)))], "tree")
    results(batch, states(batch, torch.float32))


def test_half_precision_is_as_exact_as_gathered_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = collate(forest(16), "tree")
    monkeypatch.setattr(batching, "_MANY", 0)
    merged = collate(forest(16), "tree")
    inputs = [one.detach().bfloat16().requires_grad_() for one in states(merged, torch.float64)]
    wide = [one.detach().double().requires_grad_() for one in inputs]
    for ours, before, wanted in zip(results(merged, inputs), results(exact, inputs), results(exact, wide), strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours - wanted).norm() <= 1.05 * (before - wanted).norm()


def build(kind: str) -> Any:
    torch.manual_seed(1)
    config = CONFIG_MAPPING[kind](
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=6, pad_token_id=0, max_position_embeddings=128)
    return AutoModelForCausalLM.from_config(copy.deepcopy(config)).double().eval()


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager attention and norms of transformers go through float32, also in float64."""
    softmax, to = torch.nn.functional.softmax, torch.Tensor.to
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim=-1, dtype=None, **_: softmax(x, dim=dim))

    def kept(self: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        narrow = self.dtype == torch.float64 and torch.float32 in (*given, named.get("dtype"))
        return self if narrow else to(self, *given, **named)

    monkeypatch.setattr(torch.Tensor, "to", kept)
    monkeypatch.setattr(torch.Tensor, "float", lambda self: kept(self, torch.float32))


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_models_equal_padded_eager_attention(kind: str, adapter: bool, always: None, exact: None) -> None:
    model = build(kind)
    if adapter:
        make_structure(model, new_config(model, LoraOptions(rank=2), None))
        set_initial_values(model, 0, torch.float64)
        for name, weight in model.named_parameters():
            if ".lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1)
    logps, gradient = logps_and_gradient(model, "tree", forest(6))
    expected, expected_gradient = logps_and_gradient(model, "padded", forest(6))
    assert (logps - expected).abs().max() < 1e-8
    assert (gradient - expected_gradient).norm() < 1e-8 * expected_gradient.norm()


def test_completions_may_continue_the_prompts_of_another_pass(always: None) -> None:
    ours = LanguageModel(build("llama"), "tree", "fp64", CPU)
    trees, others = forest(5), forest(5, seed=1)
    others = [PromptTree(one.prompt_ids, other.completions) for one, other in zip(trees, others, strict=True)]
    batch, leaves = collate(trees, "tree"), collate_leaves(others, trees)
    main = ours.tree_pass(batch, record=True)
    with torch.no_grad():
        ours.logps(batch, main)
        continued = ours.logps(leaves, ours.tree_pass(leaves, earlier=main))
        assert torch.allclose(continued, ours.logps(collate(others, "tree")), atol=1e-10)


def test_the_cuda_operators_take_what_they_are_given(always: None) -> None:
    """Shapes and signatures of the variable-length kernel, which runs on CUDA only, on tensors without content."""
    batch = collate(forest(4), "tree")
    assert batch.segments is not None
    segments = batch.segments.to(torch.device("meta"))
    assert segments.shared is not None
    inputs = [torch.empty(1, heads, batch.tokens, 8, dtype=torch.bfloat16, device="meta", requires_grad=True)
              for heads in (6, 2, 2)]
    out = merged_attention.merged_attention(*inputs, segments, segments.shared, 0.4)
    assert (out.shape, out.dtype) == (inputs[0].shape, torch.bfloat16)
    grads = torch.autograd.grad(out.float().sum(), inputs)
    assert [(grad.shape, grad.dtype) for grad in grads] == [(one.shape, one.dtype) for one in inputs]


def test_the_cuda_kernel_is_given_the_merged_sums(always: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's contract, written out in plain operations, stands in: runs, causality, sums over all keys."""
    batch = collate(forest(4), "tree")
    inputs = states(batch, torch.float64)
    expected = results(batch, inputs)

    def runs(query: torch.Tensor, key: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, causal: bool,
             scale: float) -> torch.Tensor:
        scores = torch.full((query.shape[1], len(query), len(key)), float("-inf"), dtype=query.dtype)
        for q, q_end, k, k_end in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
            part = torch.einsum("qhd,khd->hqk", query[q:q_end], key[k:k_end].repeat_interleave(3, 1)) * scale
            later = torch.ones(part.shape[1:]).triu(1).bool()
            scores[:, q:q_end, k:k_end] = part.masked_fill(later & causal, -torch.inf)
        return scores

    def forward(query, key, value, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale):  # type: ignore[no-untyped-def]
        assert (max_q, max_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))
        scores = runs(query, key, cu_q, cu_k, causal, scale)
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value.repeat_interleave(3, 1))
        return out, scores.logsumexp(-1), None, None, None

    def backward(grad, query, key, value, out, log_sum, cu_q, cu_k, max_q, max_k, dropout, causal, *_, scale):  # type: ignore[no-untyped-def]
        weights = (runs(query, key, cu_q, cu_k, causal, scale) - log_sum[..., None]).exp()
        inner = torch.einsum("qhd,khd->hqk", grad, value.repeat_interleave(3, 1))
        inner = weights * (inner - (grad * out).sum(-1).T[..., None]) * scale
        dq = torch.einsum("hqk,khd->qhd", inner, key.repeat_interleave(3, 1))
        dk, dv = torch.einsum("hqk,qhd->khd", inner, query), torch.einsum("hqk,qhd->khd", weights, grad)
        return dq, *(one.unflatten(1, (2, 3)).sum(2) for one in (dk, dv))

    monkeypatch.setattr(merged_attention, "_fused_on_cpu", lambda query: False)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", backward)
    for ours, wanted in zip(results(batch, inputs), expected, strict=True):
        assert (ours - wanted).abs().max() < 1e-12
