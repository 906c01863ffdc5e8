"""Tree attention against plain transformers forwards, one completion at a time."""

import copy

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen3Config

from tropism.data.batching.collate import collate
from tropism.data.tree import Completion, PromptTree, token_ids
from tropism.errors import ModelError
from tropism.model.attention import TreePass, attention, plain_implementation, tree_attention
from tropism.model.language_model import LanguageModel
from tropism.model.layout_check import choose_layout

VOCABULARY = 97
_SMALL = {"vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
          "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0}

CONFIGS = {
    "llama": LlamaConfig(**_SMALL, head_dim=8),
    "qwen3": Qwen3Config(**_SMALL, head_dim=16),
    "mistral-sliding": MistralConfig(**_SMALL, head_dim=8, sliding_window=7),
    "gemma3": Gemma3TextConfig(**_SMALL, head_dim=8, sliding_window=6, layer_types=[
        "sliding_attention", "full_attention", "sliding_attention"]),
    # SmolLM2's proportions: tied head, three queries per key head, rope theta 100000
    "smollm2": LlamaConfig(**{**_SMALL, "num_attention_heads": 3, "num_key_value_heads": 1}, head_dim=16,
                           tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e5}),
    "gemma2-softcaps": Gemma2Config(**_SMALL, head_dim=8, sliding_window=6, attn_logit_softcapping=3.0,
                                    final_logit_softcapping=5.0),
}


def build(name: str, dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name])).to(dtype).eval()
    with torch.no_grad():  # the default initialization is so small that all logits are nearly equal
        for parameter in model.parameters():
            parameter.mul_(4.0) if parameter.dim() == 2 else None
    return model


def trees() -> list[PromptTree]:
    generator = np.random.default_rng(5)

    def ids(length: int) -> np.ndarray:
        return token_ids(generator.integers(1, VOCABULARY, length).tolist())

    masked = Completion(ids(6), np.array([True, False, True, True, False, True]))
    return [PromptTree(ids(11), (Completion.supervised(ids(9)), Completion.supervised(ids(1)), masked)),
            PromptTree(ids(1), (Completion.supervised(ids(14)),)),
            PromptTree(ids(23), (Completion.supervised(ids(4)), Completion.supervised(ids(17))))]


def one_at_a_time(model: torch.nn.Module, forest: list[PromptTree], implementation: str = "eager") -> torch.Tensor:
    """Log-prob of each completion by the model's own forward on prompt + completion alone."""
    model.set_attn_implementation(implementation)
    logps = []
    for tree in forest:
        for completion in tree.completions:
            ids = torch.tensor([*tree.prompt_ids.tolist(), *completion.ids.tolist()])[None]
            logits = model(input_ids=ids, use_cache=False).logits[0]
            table = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
            where = len(tree.prompt_ids) + np.flatnonzero(completion.loss_mask)
            logps.append(sum(table[i - 1, ids[0, i]].double() for i in where.tolist()))
    return torch.stack(logps)


def gradients(model: torch.nn.Module, logps: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(-1.0, 1.0, len(logps), dtype=logps.dtype)
    model.zero_grad()
    (logps * weights).sum().backward()
    return torch.cat([p.grad.double().reshape(-1) for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("layout", ["tree", "padded"])
@pytest.mark.parametrize("name", CONFIGS)
def test_log_probs_and_gradients_equal_separate_forwards_fp32(name: str, layout: str) -> None:
    """P1, N5: 1e-4 per token in log-probs, 1e-5 relative in gradients."""
    model, forest = build(name, torch.float32), trees()
    expected = one_at_a_time(model, forest)
    expected_gradient = gradients(model, expected)
    ours = LanguageModel(model, layout, "fp32", torch.device("cpu"))
    batch = collate(forest, layout)
    logps = ours.logps(batch)
    assert ((logps - expected).abs() / batch.lengths).max() < 1e-4
    difference = gradients(model, logps) - expected_gradient
    assert difference.norm() / expected_gradient.norm() < 1e-5


def double_norms(model: torch.nn.Module) -> None:
    """Let norms compute in float64. Transformers rounds them through float32, where a difference of 1e-16 in the
    order of a sum can flip a last bit, so that no path could agree to better than 1e-7."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            eps = getattr(module, "variance_epsilon", None) or module.eps
            weight = 1.0 + module.weight if "Gemma" in type(module).__name__ else module.weight
            module.forward = lambda x, w=weight, e=eps: w * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + e)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "gemma2-softcaps"])  # eager only: float32 softmax
def test_log_probs_and_gradients_equal_separate_forwards_fp64(name: str) -> None:
    """P1 in float64, where nothing but the order of sums differs."""
    model, forest = build(name, torch.float64), trees()
    double_norms(model)
    expected = one_at_a_time(model, forest, "sdpa")
    expected_gradient = gradients(model, expected)
    batch = collate(forest, "tree")
    logps = LanguageModel(model, "tree", "fp64", torch.device("cpu")).logps(batch)
    assert (logps - expected).abs().max() < 1e-9
    difference = gradients(model, logps) - expected_gradient
    assert difference.norm() / expected_gradient.norm() < 1e-9


def test_completions_of_a_tree_and_trees_of_a_pack_do_not_see_each_other() -> None:
    """Changing one completion changes the log-prob of no other."""
    model, forest = build("llama", torch.float64), trees()
    ours = LanguageModel(model, "tree", "fp64", torch.device("cpu"))
    before = ours.logps(collate(forest, "tree"))
    other = Completion.supervised(token_ids([3, 1, 4, 1, 5, 9, 2, 6, 5]))
    changed = PromptTree(forest[0].prompt_ids, (other, *forest[0].completions[1:]))
    after = ours.logps(collate([changed, *forest[1:]], "tree"))
    assert before[0] != after[0]
    assert torch.equal(before[1:], after[1:])


@pytest.mark.parametrize("name", CONFIGS)
def test_start_up_comparison_takes_the_tree_layout(name: str) -> None:
    model, probe = choose_layout(build(name, torch.float32), "fp32", torch.device("cpu"), trees(), "auto")
    assert model.layout == "tree"
    assert probe.per_token < 1e-4


def test_soft_caps_are_never_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """L3: sdpa does not know them, also where a release of transformers offers it for such a model."""
    model = build("gemma2-softcaps", torch.float32)
    monkeypatch.setattr(type(model), "_supports_sdpa", True)
    assert plain_implementation(model) == "eager"
    assert plain_implementation(build("llama", torch.float32)) == "sdpa"


def test_start_up_comparison_falls_back_to_padded_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose layers do not honor the tree is served padded under `auto`, and refused under `tree`."""
    def leaky(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):  # type: ignore[no-untyped-def]
        kwargs["tree"] = TreePass(collate([PromptTree(token_ids([1] * query.shape[2]), (
            Completion.supervised([1]),))], "tree").segments)
        return tree_attention(module, query, key, value, attention_mask, scaling, dropout, **kwargs)

    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "tropism_tree", leaky)
    model, probe = choose_layout(build("llama", torch.float32), "fp32", torch.device("cpu"), trees(), "auto")
    assert model.layout == "padded"
    assert "differ from the model's own forward" in probe.reason
    with pytest.raises(ModelError, match=r"unsupported: .*tree layout"):
        choose_layout(build("llama", torch.float32), "fp32", torch.device("cpu"), trees(), "tree")


def test_unknown_arguments_and_dropout_are_refused() -> None:
    """L3: an argument that would change the result is served or refused, never ignored."""
    batch = collate(trees(), "tree")
    assert batch.segments is not None
    q = torch.zeros(1, 2, batch.tokens, 4)
    with pytest.raises(ModelError, match="alibi_bias"):
        tree_attention(torch.nn.Module(), q, q, q, None, tree=TreePass(batch.segments), alibi_bias=q)
    with pytest.raises(ModelError, match="dropout"):
        tree_attention(torch.nn.Module(), q, q, q, None, tree=TreePass(batch.segments), dropout=0.1)
    with pytest.raises(ModelError, match="without a tree"):
        tree_attention(torch.nn.Module(), q, q, q, None)


def test_sinks_equal_transformers_eager() -> None:
    """gpt-oss attention sinks (`s_aux`) on one segment against the formula."""
    batch = collate([PromptTree(token_ids([1, 2, 3, 4, 5]), (Completion.supervised([6]),))], "tree")
    assert batch.segments is not None
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, 5, 8, dtype=torch.float64, generator=generator)
    k, v = (torch.randn(1, 2, 5, 8, dtype=torch.float64, generator=generator) for _ in range(2))
    sinks = torch.randn(4, dtype=torch.float64, generator=generator)
    out, _ = tree_attention(torch.nn.Module(), q, k, v, None, scaling=0.3, tree=TreePass(batch.segments), s_aux=sinks)
    scores = q @ k.repeat_interleave(2, 1).transpose(2, 3) * 0.3
    scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
    weights = torch.cat((scores, sinks.view(1, 4, 1, 1).expand(1, 4, 5, 1)), -1).softmax(-1)[..., :-1]
    assert torch.allclose(out.transpose(1, 2), weights @ v.repeat_interleave(2, 1), atol=1e-12)


def test_attention_is_restored_after_generation() -> None:
    model = build("llama", torch.float32)
    ours = LanguageModel(model, "tree", "fp32", torch.device("cpu"))
    with attention(ours.module, "sdpa"):
        assert model.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == "tropism_tree"


@pytest.mark.parametrize("window", [None, 5])
def test_the_cuda_call_is_given_what_it_needs(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    """The variable-length kernel runs on CUDA only. Here its contract, written out in plain operations, stands in."""
    import tropism.model.attention as ours

    def contract(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa=False):  # type: ignore[no-untyped-def]
        assert (query.dim(), query.shape[1], key.shape[1]) == (3, 6, 2)
        assert enable_gqa == bool(ours._GROUPED)
        assert (max_q, max_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))
        assert cu_q.dtype == cu_k.dtype == torch.int32
        out = torch.empty_like(query)
        for i in range(len(cu_q) - 1):
            q = query[cu_q[i] : cu_q[i + 1]].transpose(0, 1)
            k, v = (x[cu_k[i] : cu_k[i + 1]].transpose(0, 1).repeat_interleave(3, 0) for x in (key, value))
            distance = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - torch.arange(k.shape[1])
            left, right = window_size
            seen = (distance >= -right) & ((distance <= left) if left >= 0 else True)
            weights = (q @ k.transpose(1, 2) * scale).masked_fill(~seen, float("-inf")).softmax(-1)
            out[cu_q[i] : cu_q[i + 1]] = (weights @ v).transpose(0, 1)
        return out

    monkeypatch.setattr(ours, "varlen_attn", contract)
    batch = collate(trees(), "tree")
    segments = batch.segments
    assert segments is not None
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(1, 6, batch.tokens, 8, dtype=torch.float64, generator=generator)
    key, value = (torch.randn(1, 2, batch.tokens, 8, dtype=torch.float64, generator=generator) for _ in range(2))
    expected, _ = tree_attention(torch.nn.Module(), query, key, value, None, scaling=0.4, tree=TreePass(segments),
                                 sliding_window=window)
    gathered = (x.index_select(2, segments.key_index) for x in (key, value))
    assert torch.allclose(ours._varlen(query, *gathered, segments, 0.4, window)[None], expected, atol=1e-12)


def test_mismatched_completions_may_continue_the_prompts_of_another_pass() -> None:
    """Stored keys, values and states give the log-probs that a pass of its own would give."""
    from tropism.data.batching.collate import collate_leaves

    for name in ("llama", "mistral-sliding", "gemma3"):
        model, forest = build(name, torch.float64), trees()
        double_norms(model)
        ours = LanguageModel(model, "tree", "fp64", torch.device("cpu"))
        others = [PromptTree(tree.prompt_ids, (Completion.supervised(token_ids([5, 4, 3])),
                                               Completion.supervised(token_ids([7])))) for tree in forest]
        batch = collate(forest, "tree")
        main = ours.tree_pass(batch, record=True)
        ours.logps(batch, main)
        leaves = collate_leaves(others, forest)
        assert leaves.tokens == 6
        with torch.no_grad():
            continued = ours.logps(leaves, ours.tree_pass(leaves, earlier=main))
            assert torch.allclose(continued, ours.logps(collate(others, "tree")), atol=1e-10)
        single = [PromptTree(tree.prompt_ids, (Completion.supervised(token_ids([7])),)) for tree in forest]
        leaves = collate_leaves(single, forest)  # nothing to compute at all
        with torch.no_grad():
            continued = ours.logps(leaves, ours.tree_pass(leaves, earlier=main))
            assert torch.allclose(continued, ours.logps(collate(single, "tree")), atol=1e-10)


def test_under_autocast_the_kernel_gets_one_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary embeddings and norms leave queries and keys in float32 beside bfloat16 values; the kernel wants one."""
    import tropism.model.attention as ours

    seen = set()
    real = ours._segment

    def watched(tree, query, key, value, *rest):  # type: ignore[no-untyped-def]
        seen.add((query.dtype, key.dtype, value.dtype))
        return real(tree, query, key, value, *rest)

    monkeypatch.setattr(ours, "_segment", watched)
    for name in ("llama", "qwen3", "gemma3"):
        model = LanguageModel(build(name, torch.float32), "tree", "bf16", torch.device("cpu"))
        logps = model.logps(collate(trees(), "tree"))
        logps.sum().backward()
        assert logps.dtype == torch.float64
    assert seen == {(torch.bfloat16,) * 3}


def test_a_model_that_takes_views_of_what_attention_gives() -> None:
    """P1: JetMoe does."""
    from transformers import JetMoeConfig

    torch.manual_seed(0)
    jet = AutoModelForCausalLM.from_config(JetMoeConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_key_value_heads=2, kv_channels=8,
        intermediate_size=32, num_local_experts=4, num_experts_per_tok=2)).eval()
    assert choose_layout(jet, "fp32", torch.device("cpu"), trees(), "auto")[0].layout == "tree"


def test_a_layout_in_which_a_model_stops_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """P1: whatever it stops with."""
    whole = TreePass.with_earlier

    def failing(self: TreePass, *given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        whole(self, *given)
        raise RuntimeError("a layer that trees do not fit\nat some place")

    monkeypatch.setattr(TreePass, "with_earlier", failing)
    model, probe = choose_layout(build("llama", torch.float32), "fp32", torch.device("cpu"), trees(), "auto")
    assert (model.layout, probe.reason) == ("padded", "RuntimeError: a layer that trees do not fit")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_whose_attention_cannot_be_replaced_is_served_padded(precision: str) -> None:
    """P1: rounding in bfloat16 must not hide that completions see each other."""
    from transformers import FalconConfig

    torch.manual_seed(0)
    falcon = AutoModelForCausalLM.from_config(FalconConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_kv_heads=2,
        new_decoder_architecture=True)).eval()
    model, probe = choose_layout(falcon, precision, torch.device("cpu"), trees(), "auto")
    assert model.layout == "padded"
    assert model.precision == precision
    assert probe.reason


def test_rounding_is_measured_in_the_padded_layout_too() -> None:
    """R1: there the plain forward is the same computation; in packs of other shapes bfloat16 rounds otherwise, and two
    such scores of a completion are no different models."""
    model, probe = choose_layout(build("llama", torch.float32), "bf16", torch.device("cpu"), trees(), "padded")
    forest = trees()
    together = model.logps(collate(forest, "padded"))
    apart = torch.cat([model.logps(collate([tree], "padded")) for tree in forest])
    lengths = collate(forest, "padded").lengths
    assert ((together - apart).abs() / lengths.sqrt()).max() <= 2 * probe.per_root_token
