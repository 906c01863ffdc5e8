"""Layers that are computed again in the backward pass give the same bits, keep less, and leave no trace."""

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, GPT2Config, GptOssConfig, MixtralConfig, Qwen3MoeConfig

import tropism.model.checkpointing as ours
from tropism.data.batching.collate import collate, collate_leaves
from tropism.data.tree import Completion, PromptTree, token_ids
from tropism.model.language_model import LanguageModel
from tropism.model.moe_router import RouterLogits
from unit.test_attention import VOCABULARY, build, gradients, trees

CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.float32}
_SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
          "max_position_embeddings": 128, "pad_token_id": 0}
OTHERS: dict[str, Any] = {
    "mixtral": MixtralConfig(**_SMALL, intermediate_size=48, num_key_value_heads=2, num_local_experts=4,
                             num_experts_per_tok=2),
    "qwen3-moe": Qwen3MoeConfig(**_SMALL, moe_intermediate_size=24, num_key_value_heads=2, num_experts=4, head_dim=8,
                                num_experts_per_tok=2),
    "gpt2": GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=128),
    "gpt-oss": GptOssConfig(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
                            num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=4,
                            num_experts_per_tok=2, pad_token_id=0, sliding_window=8),
}


def made(name: str, precision: str) -> torch.nn.Module:
    if name in OTHERS:
        torch.manual_seed(1)
        return AutoModelForCausalLM.from_config(OTHERS[name]).to(DTYPES[precision]).eval()
    model = build(name.removesuffix("-lora"), DTYPES[precision])
    if name.endswith("-lora"):
        model.requires_grad_(False)
        inject_adapter_in_model(LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False), model)
    return model


def language_model(name: str, layout: str = "tree", precision: str = "fp32", mode: str = "none") -> LanguageModel:
    return LanguageModel(made(name, precision), layout, precision, CPU, checkpointing=mode)  # type: ignore[arg-type]


def step(model: LanguageModel, routed: RouterLogits | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    logps = model.logps(collate(trees(), model.layout), routed=routed)
    if routed is None:
        return logps.detach(), gradients(model.module, logps)
    balance = sum(layer.double().pow(2).mean() for layer in routed.logits)
    return logps.detach(), gradients(model.module, logps + balance)


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize(("name", "layout", "precision"), [
    ("llama", "tree", "fp32"), ("llama", "padded", "fp64"), ("qwen3", "tree", "bf16"), ("gemma3", "tree", "fp64"),
    ("gemma3", "padded", "fp32"), ("gemma2-softcaps", "tree", "fp32"), ("smollm2", "padded", "bf16"),
    ("mistral-sliding", "tree", "fp64"), ("mixtral", "tree", "fp32"), ("mixtral", "tree", "fp64"),
    ("qwen3-moe", "padded", "bf16"), ("gpt2", "padded", "fp32"), ("gpt-oss", "tree", "fp32"),
    ("gpt-oss", "padded", "bf16"), ("qwen3-lora", "tree", "fp32"),
    ("qwen3-lora", "tree", "bf16"), ("llama-lora", "padded", "fp64")])
def test_log_probs_and_gradients_are_those_of_a_pass_that_keeps_everything(
        name: str, layout: str, precision: str, mode: str) -> None:
    plain = language_model(name, layout, precision)
    expected, found = step(plain), step(replace(plain, checkpointing=mode))
    assert torch.isfinite(expected[1]).all()
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_router_logits_are_collected_once(name: str, mode: str) -> None:
    plain, expected, found = language_model(name), RouterLogits(), RouterLogits()
    gradient = step(plain, expected)[1]
    assert torch.equal(step(replace(plain, checkpointing=mode), found)[1], gradient)
    assert len(found.logits) == len(expected.logits) == 2
    assert all(map(torch.equal, found.logits, expected.logits))


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func.name().partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def costs(mode: str) -> tuple[int, Counter[str]]:
    """Elements that autograd keeps outside of checkpoints, and operations of the backward pass."""
    model, kept = language_model("llama", mode=mode), {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logps = model.logps(collate(trees(), "tree"))
    with Operations() as operations:
        logps.sum().backward()
    return sum(kept.values()), operations.seen


def test_less_is_kept_and_only_that_is_computed_again() -> None:
    """Full checkpoints repeat products and attention. Selective ones repeat neither, but what is element-wise."""
    none, selective, full = (costs(mode) for mode in ("none", "selective", "full"))
    assert full[0] < none[0] / 4
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert selective[1]["aten::mm"] == none[1]["aten::mm"] < full[1]["aten::mm"]
    assert selective[1][attention] == none[1][attention] == 0 < full[1][attention]
    assert none[1]["aten::rsqrt"] == 0 < selective[1]["aten::rsqrt"] == full[1]["aten::rsqrt"]


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_a_pass_is_recorded_once(mode: str) -> None:
    """The record is that of the forward pass, and nothing that waits for the backward pass holds it."""
    plain = language_model("gemma3", precision="fp64")
    model, forest = replace(plain, checkpointing=mode), trees()
    leaves = collate_leaves([PromptTree(tree.prompt_ids, (Completion.supervised(token_ids([5, 4, 3])),))
                             for tree in forest], forest)
    found = []
    for one in (plain, model):
        batch = collate(forest, "tree")
        main = one.tree_pass(batch, record=True)
        logps = one.logps(batch, main)
        kept = dict(main._kept)
        with torch.no_grad():
            continued = one.logps(leaves, one.tree_pass(leaves, earlier=main))
        (logps.sum() + continued.sum()).backward()
        assert len(kept) == 3
        assert all(main._kept[key] is value for key, value in kept.items())
        found.append((continued, [keys for keys, _ in kept.values()]))
    assert torch.equal(found[0][0], found[1][0])
    assert all(map(torch.equal, found[0][1], found[1][1]))
    main = model.tree_pass(batch, record=True)
    logps = model.logps(batch, main)
    record = weakref.ref(next(iter(main._kept.values()))[0])
    del main
    assert record() is None
    logps.sum().backward()


def fail(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a pass without gradients needs no checkpoint")


def test_passes_without_gradients_and_other_users_of_the_module_keep_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = language_model("llama", mode="full")
    monkeypatch.setattr(ours, "checkpoint", fail)
    with torch.no_grad():
        model.logps(collate(trees(), "tree"))
    model.module.set_attn_implementation("sdpa")
    model.module(input_ids=torch.ones(1, 3, dtype=torch.int64)).logits.sum().backward()
    with pytest.raises(AssertionError, match="needs no checkpoint"):
        model.logps(collate(trees(), "tree"))
    assert not any("forward" in vars(layer) for layer in model.layers)


def test_a_forward_method_of_the_user_is_kept() -> None:
    """Other libraries replace it on the layer, as we do for the time of a pass."""
    model = language_model("llama", mode="full")
    calls: list[int] = []

    def watched(forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (calls.append(1), forward(*args, **kwargs))[1]

    own = [watched(layer.forward) for layer in model.layers]
    for layer, forward in zip(model.layers, own, strict=True):
        layer.forward = forward
    step(model)
    assert len(calls) == 6
    assert all(layer.forward is forward for layer, forward in zip(model.layers, own, strict=True))


def test_a_layer_that_is_used_twice_under_autocast() -> None:
    """Autocast casts a weight once per pass. A layer that is computed again must not find fewer tensors to keep."""
    plain = language_model("llama", precision="bf16")
    plain.module.model.layers[1] = plain.module.model.layers[0]
    expected = step(LanguageModel(plain.module, "tree", "bf16", CPU))
    for mode in ("selective", "full"):
        found = step(LanguageModel(plain.module, "tree", "bf16", CPU, checkpointing=mode))
        assert torch.equal(found[0], expected[0])
        assert (found[1] - expected[1]).norm() < 1e-2 * expected[1].norm()


def test_what_is_offloaded_is_the_input_of_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[torch.Size] = []

    def counted() -> Any:
        return torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: (kept.append(tensor.shape), tensor.clone())[1], lambda tensor: tensor)

    plain = language_model("qwen3-lora")
    expected = step(plain)
    monkeypatch.setattr(ours, "in_host_memory", counted)
    found = step(replace(plain, checkpointing="full", offload=True))
    tokens = collate(trees(), "tree").tokens
    assert kept == [torch.Size((1, tokens, 48))] * 3
    assert torch.equal(found[1], expected[1])


def test_several_packs_may_all_be_forwarded_before_their_backward_passes() -> None:
    plain = language_model("llama", precision="fp64")
    packs = [collate([tree], "tree") for tree in trees()]
    found = []
    for model, together in ((plain, False), (replace(plain, checkpointing="full"), True)):
        model.module.zero_grad()
        waiting = []
        for pack in packs:
            waiting.append(model.logps(pack, model.tree_pass(pack, record=True)).sum())
            if not together:
                waiting.pop().backward()
        for share in waiting:
            share.backward()
        found.append([weight.grad for weight in model.module.parameters()])
    assert all(map(torch.equal, *found))


def test_a_layer_that_fails_leaves_the_module_as_it_was() -> None:
    model = language_model("llama", mode="full")
    model.module.model.layers[1].mlp.down_proj.weight.data = torch.zeros(1, 1)
    with pytest.raises(RuntimeError):
        model.logps(collate(trees(), "tree"))
    assert not any("forward" in vars(layer) for layer in model.layers)
