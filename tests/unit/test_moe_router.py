"""The routers' load-balancing loss: its values, how often each token counts, and that packing changes nothing."""

from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    MixtralConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from helpers import tree
from tropism.data.batching.collate import collate, occurrences
from tropism.data.tree import Completion, PromptTree
from tropism.distributed.world import World
from tropism.errors import ModelError, UsageError
from tropism.methods import Units
from tropism.model.language_model import LanguageModel, Precision
from tropism.model.layout_check import choose_layout
from tropism.model.moe_router import Experts, RouterLogits, balance_loss, check_option, expert_counts, probabilities
from tropism.observe.metrics import Tally
from tropism.train.router_loss import RouterLoss, build_router_loss, token_weights
from tropism.train.setup.models import turned_off
from tropism.train.step_packs import Pack
from unit.test_collate import sequences, trees, visible_path

CPU = torch.device("cpu")
COMMON: dict[str, Any] = {
    "vocab_size": 16, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3}
FAMILIES: dict[str, Callable[[], Any]] = {
    "mixtral": lambda: MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": lambda: Qwen2MoeConfig(**COMMON, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=12,
                                        shared_expert_intermediate_size=20, mlp_only_layers=[0]),
    "qwen3_moe": lambda: Qwen3MoeConfig(**COMMON, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=12,
                                        head_dim=4, norm_topk_prob=True)}
FOREST = [tree([1, 2, 3, 4], [5, 6, 7], [5, 6, 7, 8, 9], [9, 9]), tree([7, 3], [1], [2, 2, 4])]


def module_of(family: str, dtype: torch.dtype = torch.float64, tied: bool = False) -> Any:
    """A random model; with `tied`, one whose routers find every expert equally good."""
    torch.manual_seed(3)
    module = AutoModelForCausalLM.from_config(FAMILIES[family]()).to(dtype).eval()
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if tied and name.endswith("mlp.gate.weight"):
                weight.zero_()
    return module


def pack_of(forest: Sequence[PromptTree], members: Sequence[Sequence[int]], layout: Any = "tree") -> Pack:
    units = Units(torch.tensor(members, dtype=torch.int64).reshape(len(members), -1 if members else 1), None)
    return Pack(tuple(forest), collate(forest, layout), units, tuple(range(len(members))), (len(members),))


# --- values -----------------------------------------------------------------------------------------------------------


def test_hand_value() -> None:
    """Two tokens, two experts, k = 1, probabilities (3/4, 1/4) and (1/3, 2/3), the first token twice:
    f = (2/3, 1/3), P = (11/18, 7/18), so 2 (2/3 * 11/18 + 1/3 * 7/18) = 29/27."""
    logits, weights = [torch.tensor([[3.0, 1.0], [1.0, 2.0]]).log()], torch.tensor([2.0, 1.0]).double()
    counted = expert_counts(logits, weights, 1)
    assert counted.tolist() == [2.0, 1.0, 3.0]
    assert float(balance_loss(counted, probabilities(logits, weights))) == pytest.approx(29 / 27, rel=1e-6)


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_even_routing_gives_k(top_k: int) -> None:
    logits, weights = [torch.zeros(6, 4, dtype=torch.float64)] * 3, torch.ones(6, dtype=torch.float64)
    loss = balance_loss(expert_counts(logits, weights, top_k), probabilities(logits, weights))
    assert float(loss) == pytest.approx(top_k)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_equals_that_of_transformers_on_a_flat_batch(top_k: int) -> None:
    """L2: value and gradient, with padding, for several layers; its sums are float32."""
    torch.manual_seed(top_k)
    ours = [torch.randn(12, 5, requires_grad=True) for _ in range(3)]
    theirs = [layer.detach().clone().requires_grad_() for layer in ours]
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]])
    weights = mask.flatten().double()
    loss = balance_loss(expert_counts(ours, weights, top_k), probabilities(ours, weights))
    expected = load_balancing_loss_func(tuple(theirs), 5, top_k, mask)
    assert isinstance(expected, Tensor)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    for one, other in zip(torch.autograd.grad(loss, ours), torch.autograd.grad(expected, theirs), strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-8)


# --- how often a token counts -----------------------------------------------------------------------------------------


@given(trees(), st.data())
def test_a_shared_token_counts_for_each_row_that_brings_it(forest: list[PromptTree], data: st.DataObject) -> None:
    """L1, P1: by walking over the inputs of each completion; the last token is not computed, and counts nowhere."""
    flat = sequences(forest)
    counts = data.draw(st.lists(st.integers(0, 3), min_size=len(flat), max_size=len(flat)))
    batch, weights = collate(forest, "tree"), occurrences(forest, counts, "tree")
    assert weights.dtype == torch.float64
    expected: Counter[tuple[int, ...]] = Counter()
    for count, (ids, _, _) in zip(counts, flat, strict=True):
        expected.update({tuple(ids[: end + 1]): count for end in range(len(ids) - 1)})
    found: Counter[tuple[int, ...]] = Counter()
    for position, weight in enumerate(weights.tolist()):
        found[tuple(visible_path(batch, position))] += int(weight)
    assert found == expected
    padded = occurrences(forest, counts, "padded").reshape(len(flat), -1)
    mask = collate(forest, "padded").attention_mask
    assert mask is not None
    assert torch.equal(padded, mask * torch.tensor(counts, dtype=torch.float64)[:, None])


@pytest.mark.parametrize("layout", ["tree", "padded"])
def test_the_token_of_an_empty_pack_counts_nothing(layout: Any) -> None:
    assert occurrences([], [], layout).tolist() == [0.0]


def test_rows_count_and_beginnings_of_sides_do_not() -> None:
    """L1: two rows of one completion count it twice; what `ld_alpha` looks at besides is part of its side."""
    model: Any = SimpleNamespace(layout="tree")
    one = tree([1, 2], [3, 4, 5], [6, 7])
    assert token_weights(pack_of([one], [[0], [0], [1]]), model).tolist() == [3, 3, 2, 2, 1]
    beginnings = tree([1, 2], [3, 4, 5], [6, 7], [3, 4])
    assert token_weights(pack_of([beginnings], [[0, 1, 2, 1]]), model).tolist() == [2, 2, 1, 1, 1]


# --- packing ----------------------------------------------------------------------------------------------------------


class Exact(torch.nn.Module):
    """A norm that does not round through float32, as those of transformers do."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight

    def forward(self, states: Tensor) -> Tensor:
        return self.weight * states * (states.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def without_float32(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms and routers that stay in float64, so that layouts can be compared in it."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                setattr(parent, name, Exact(child))
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda logits, dim=None, dtype=None: softmax(logits, dim=dim))
    to_float, rotary = Tensor.float, module.model.rotary_emb
    angles = rotary.forward

    def as_it_is(*arguments: Any, **named: Any) -> Any:
        """Angles are float32 for every layout."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "float", to_float)
            return angles(*arguments, **named)

    monkeypatch.setattr(rotary, "forward", as_it_is)
    monkeypatch.setattr(Tensor, "float", Tensor.double)


def step_gradient(model: LanguageModel, balance: RouterLoss, packs: Sequence[Pack]) -> tuple[Tensor, dict[str, float]]:
    """Gradient of the weighted load-balancing loss of a step of one rank, and its tally."""
    model.module.zero_grad()
    tally = Tally()
    step = balance.of_step(model, World(0, 1, CPU))
    step.look_ahead(packs)
    for pack in packs:
        routed = RouterLogits()
        model.hidden(pack.batch, model.tree_pass(pack.batch), routed)
        step.share(routed, pack, tally).backward()
    total, count = tally.stacked(["router_aux"], CPU)[0].tolist()
    gradient = torch.cat([weight.grad.flatten() for weight in model.module.parameters() if weight.grad is not None])
    return gradient, {"value": total, "count": count}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_tree_and_padded_layout_agree(family: str, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """P1: value and gradient, in three families, with routers that prefer nobody too; one pack or several."""
    module = module_of(family, tied=tied)
    without_float32(module, monkeypatch)
    rows = [[[0], [1], [2], [1]], [[0], [1], [1]]]
    found = []
    for layout in ("tree", "padded"):
        model = LanguageModel(module, layout, "fp64", CPU)
        balance = build_router_loss(0.5, model, FOREST)
        assert balance is not None
        together = pack_of(FOREST, [*rows[0], [3], [4], [4]], layout)
        empty = pack_of([], [], layout)
        found.append(step_gradient(model, balance, [together]))
        found.append(step_gradient(model, balance, [empty, *(pack_of([one], members, layout) for one, members in
                                                             zip(reversed(FOREST), reversed(rows), strict=True))]))
    (gradient, record), *others = found
    assert record["count"] == pytest.approx(1.0, rel=1e-12)
    assert gradient.norm() > 1e-6
    for other, told in others:
        assert float((other - gradient).norm() / gradient.norm()) < 1e-8
        assert told == pytest.approx(record, rel=1e-12)


@settings(max_examples=25)
@given(st.integers(2, 5), st.integers(1, 3), st.integers(0, 2**16), st.data())
def test_order_and_parts_change_neither_value_nor_gradient(number: int, top_k: int, seed: int,
                                                            data: st.DataObject) -> None:
    """L1: permute the tokens, cut them into packs, write a token that counts twice as two."""
    top_k = min(top_k, number)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(9, number, generator=generator, dtype=torch.float64)
    weights = torch.randint(0, 4, (9,), generator=generator).double()
    weights[0] += 1

    def of(index: Tensor, counts: Tensor, cuts: Sequence[int]) -> tuple[float, Tensor]:
        leaf = logits.clone().requires_grad_()
        whole = expert_counts([leaf[index]], counts, top_k)
        parts = [balance_loss(whole, probabilities([leaf[rows]], own)) for rows, own in zip(
            index.tensor_split(cuts), counts.tensor_split(cuts), strict=True)]
        total = torch.stack(parts).sum()
        return float(total.detach()), torch.autograd.grad(total, leaf)[0]

    value, gradient = of(torch.arange(9), weights, [])
    order = torch.tensor(data.draw(st.permutations(range(9))))
    cuts = sorted(data.draw(st.lists(st.integers(1, 8), max_size=3)))
    single = torch.arange(9).repeat_interleave(weights.long())
    for other, counts in ((order, weights[order]), (single, torch.ones(len(single), dtype=torch.float64))):
        moved, of_moved = of(other, counts, cuts)
        assert moved == pytest.approx(value, rel=1e-12)
        assert torch.allclose(of_moved, gradient, rtol=1e-9, atol=1e-14)


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_start_up_comparison_serves_the_families_in_trees(family: str, tied: bool, precision: Precision) -> None:
    """P1, N5: who else is in a pack changes no token's experts; and in float64 experts are multiplied at all."""
    module = module_of(family, torch.float64 if precision == "fp64" else torch.float32, tied)
    model, probe = choose_layout(module, precision, CPU, FOREST, "auto")
    assert (probe.layout, probe.reason) == ("tree", "")
    routed = RouterLogits()
    batch = collate(FOREST, "tree")
    with torch.no_grad():
        with_logits = model.logps(batch, routed=routed)
        assert torch.equal(with_logits, model.logps(batch))  # to ask for the logits changes nothing
    experts = Experts.of(module.config)
    assert experts is not None
    layers = 1 if family == "qwen2_moe" else 2  # its first layer has no experts
    assert [layer.shape for layer in routed.logits] == [(batch.input_ids.numel(), experts.number)] * layers


def test_refusals_name_the_option() -> None:
    """L3: of a config without experts, and of a model that does not tell what its routers say."""
    dense = LlamaConfig(**COMMON, architectures=["LlamaForCausalLM"])
    check_option(0.0, dense)
    with pytest.raises(UsageError, match=r"^--router-aux-weight 0.01: LlamaForCausalLM is not a mixture of experts"):
        check_option(0.01, dense)
    with pytest.raises(UsageError, match=r"^--router-aux-weight 0.01: deepseek_v3 .* no router_aux_loss_coef"):
        check_option(0.01, DeepseekV3Config())
    with pytest.raises(ModelError, match=r"^--router-aux-weight: .* no router logits"):
        RouterLogits().keep(SimpleNamespace(last_hidden_state=torch.zeros(1)))
    module = module_of("mixtral")
    gate = type(module.model.layers[0].mlp.gate)
    told = gate.forward
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gate, "forward", lambda self, states: (told(self, states)[0].softmax(-1),
                                                               *told(self, states)[1:]))
        with pytest.raises(ModelError, match=r"^--router-aux-weight .* probabilities"):
            build_router_loss(0.1, LanguageModel(module, "tree", "fp64", CPU), FOREST)
    module.config.num_local_experts = 3
    with pytest.raises(ModelError, match=r"^--router-aux-weight .* \(13, 4\) instead of"):
        build_router_loss(0.1, LanguageModel(module, "tree", "fp64", CPU), FOREST)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_coefficient_of_the_config_is_named_where_it_has_no_effect(family: str) -> None:
    """L3: nothing that a config asks for is left out silently."""
    config = FAMILIES[family]()
    config.router_aux_loss_coef = 0.02
    note, = turned_off(config, 0.0)
    assert "router_aux_loss_coef 0.02" in note
    assert "--router-aux-weight 0.02" in note
    assert turned_off(config, 0.1) == []
    config.router_aux_loss_coef = 0.0
    assert turned_off(config, 0.0) == []
    assert turned_off(LlamaConfig(**COMMON, router_aux_loss_coef=0.1), 0.0) == []
    check_option(0.1, config)


def test_one_completion_of_one_token() -> None:
    """Its input is the prompt alone."""
    forest = [PromptTree(tree([1, 2], [3]).prompt_ids, (Completion.supervised([3]),))]
    assert occurrences(forest, [2], "tree").tolist() == occurrences(forest, [2], "padded").tolist() == [2.0, 2.0]
