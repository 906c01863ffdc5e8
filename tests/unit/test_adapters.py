"""Adapters: hand values, laws, and the functions of seed and name that they begin as."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tropism.errors import ModelError, UsageError
from tropism.model import load
from tropism.model.adapters import files as adapter_files
from tropism.model.adapters import merge as adapter_merge
from tropism.model.adapters.create import initial_values, make_structure, set_initial_values
from tropism.model.adapters.parameters import adapter_weight_names, base_name, saved_parameters
from tropism.model.adapters.summary import AdapterSummary, rank_warning, summarize
from tropism.model.adapters.switch import adapter_off
from tropism.model.adapters.targets import linear_names, new_config
from tropism.model.bf16_weights import round_to_bf16
from tropism.model.options import LoraOptions
from tropism.model.source import ModelSource

IDS = torch.randint(5, 40, (2, 9), generator=torch.Generator().manual_seed(0))


def llama(tied: bool = True, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=tied, max_position_embeddings=32)).eval()


def gpt2() -> Any:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=0,
                                      eos_token_id=1)).eval()


def adapt(model: Any, seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    make_structure(model, new_config(model, LoraOptions(**{"rank": 3, **options}), "base"))
    set_initial_values(model, seed, dtype)
    return model


def learned(model: Any, size: float = 0.3) -> Any:
    """A model whose adapter has learned something."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in saved_parameters(model):
            weight += size * torch.randn(weight.shape, generator=generator)
    return model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(IDS).logits


def test_a_hand_computed_output() -> None:
    """y = W x + (alpha / r) B A x with r 2, alpha 6: 3 x B A x."""
    model = adapt(llama(), rank=2, alpha=6.0, targets="q_proj")
    layer = model.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        layer.base_layer.weight.zero_()
        layer.lora_A.default.weight.zero_()
        layer.lora_A.default.weight[0, 0], layer.lora_A.default.weight[1, 1] = 2.0, -1.0
        layer.lora_B.default.weight.zero_()
        layer.lora_B.default.weight[4, 0], layer.lora_B.default.weight[5, 1] = 0.5, 1.0
    x = torch.zeros(16)
    x[0], x[1] = 1.0, 10.0
    expected = torch.zeros(16)
    expected[4], expected[5] = 3 * 0.5 * 2 * 1, 3 * 1 * -1 * 10
    assert torch.equal(layer(x), expected)


def test_rank_stabilised_scale_and_default_alpha() -> None:
    """alpha is 2 r by default: a scale of 2, and 2 sqrt(r) under rslora."""
    for options, scale in (({"rank": 4}, 2.0), ({"rank": 4, "rslora": True}, 4.0), ({"rank": 4, "alpha": 2.0}, 0.5)):
        assert adapt(llama(), **options).model.layers[1].mlp.up_proj.scaling == {"default": scale}


@pytest.mark.parametrize("options", [{}, {"dora": True}, {"rslora": True}, {"modules_to_save": "lm_head"}],
                         ids=["lora", "dora", "rslora", "head"])
@pytest.mark.parametrize("build", [llama, lambda: llama(False), gpt2], ids=["tied", "untied", "gpt2"])
def test_a_fresh_adapter_changes_nothing(build: Any, options: dict[str, Any]) -> None:
    """With B = 0 the logits are the base's, to the bit; and with it off they stay so, whatever it has learned."""
    model = build()
    plain = logits(model)
    adapt(model, **options)
    assert torch.allclose(logits(model), plain, atol=1e-6 if "dora" in options else 0.0, rtol=0.0)
    learned(model)
    assert not torch.allclose(logits(model), plain, atol=1e-3)
    with adapter_off(model):
        assert torch.equal(logits(model), plain)
    assert not torch.allclose(logits(model), plain, atol=1e-3)


def test_names_have_no_prefix_and_the_model_stays_itself() -> None:
    """The module is the causal model that it was: only `base_layer` stands between, and the head sees its weight."""
    model = llama()
    before = set(model.state_dict())
    adapt(model, modules_to_save="lm_head")
    names = [base_name(name) for name in model.state_dict() if "default" not in name]
    assert set(names) == before
    assert isinstance(model, LlamaForCausalLM)
    assert model.base_model is model.model
    head = model.get_output_embeddings()
    assert head.weight is model.get_input_embeddings().weight  # tied ones learn as one
    assert head.weight.requires_grad
    assert head.weight is not head.original_module.weight


@pytest.mark.parametrize(("wanted", "found"), [(["norm", "score"], True), (["layernorm"], True), (["score"], False),
                                               (["score", "martian"], False)])
def test_modules_to_save_match_as_peft_matches_them(wanted: list[str], found: bool) -> None:
    """Ends of names. Lists are shared between models, so a model need not have all of them."""
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=wanted)
    if found:
        make_structure(llama(), config)
    else:
        with pytest.raises(ModelError, match=f"modules_to_save names {', '.join(wanted)}, which the model does not"):
            make_structure(llama(), config)


@pytest.mark.parametrize("build", [llama, gpt2], ids=["linear", "conv1d"])
def test_all_linear_layers_but_the_head(build: Any) -> None:
    model = build()
    wanted = linear_names(model)
    adapt(model)
    assert [name for name, layer in model.named_modules() if hasattr(layer, "lora_A")] == wanted
    assert "lm_head" not in wanted
    assert len(wanted) == {"llama": 14, "gpt2": 8}[model.config.model_type]


def test_values_are_a_function_of_seed_and_name() -> None:
    """Neither the order of calls, nor dtype, nor the generator of torch has a say."""
    name = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    one = initial_values(3, name, (4, 16))
    torch.manual_seed(99)
    initial_values(3, name.replace("q_proj", "k_proj"), (4, 16))
    assert torch.equal(one, initial_values(3, name, (4, 16)))
    assert not torch.equal(one, initial_values(4, name, (4, 16)))
    assert not torch.equal(one, initial_values(3, name.replace("q_proj", "k_proj"), (4, 16)))
    assert float(one.abs().max()) <= 1 / 16 ** 0.5
    wide = initial_values(0, name, (64, 256))
    assert float(wide.std()) == pytest.approx(1 / (3 * 256) ** 0.5, rel=0.02)  # peft's kaiming_uniform_(a=sqrt(5))
    assert not initial_values(0, name.replace("lora_A", "lora_B"), (16, 4)).any()
    with pytest.raises(ValueError, match="depend on other weights"):
        initial_values(0, name.replace("lora_A", "lora_magnitude_vector"), (16,))


def test_the_same_seed_gives_the_same_adapter() -> None:
    def state(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        model = adapt(llama(), seed=seed, dtype=dtype, dora=True)
        return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}

    one, same, other, wide = state(1), state(1), state(2), state(1, torch.float64)
    for name in one:
        assert torch.equal(one[name], same[name])
        assert torch.equal(one[name], wide[name].float())
        assert torch.equal(one[name], other[name]) == ("lora_A" not in name)


def test_the_structure_needs_no_weights() -> None:
    """On the meta device first, filled later: the same names, shapes and values as at once."""
    whole = adapt(llama(), dora=True, modules_to_save="lm_head")
    empty = load.skeleton(llama().config)
    make_structure(empty, new_config(empty, LoraOptions(rank=3, dora=True, modules_to_save="lm_head"), "base"))
    assert {weight.device.type for weight in empty.parameters()} == {"meta"}
    assert {name: weight.shape for name, weight in empty.named_parameters()} == {
        name: weight.shape for name, weight in whole.named_parameters()}
    assert adapter_weight_names(empty) == adapter_weight_names(whole)
    assert summarize(empty) == summarize(whole)


def test_magnitudes_are_row_norms() -> None:
    """DoRA begins with the norms of the rows of W, of the columns of a Conv1D, which keeps W transposed."""
    for build, dim in ((llama, 1), (gpt2, 0)):
        layer = next(layer for layer in adapt(build(), dora=True).modules() if hasattr(layer, "lora_A"))
        expected = layer.base_layer.weight.norm(dim=dim)
        assert torch.allclose(layer.lora_magnitude_vector["default"].weight, expected, rtol=1e-6)


def test_figures() -> None:
    """rank 3 on q_proj (16 x 16) of two layers: 2 x 3 x 32 weights."""
    model = llama()
    total = sum(weight.numel() for weight in model.parameters())
    facts = summarize(adapt(model, targets="q_proj"))
    assert facts == AdapterSummary(3, 2, 1, 0, 192, total + 192)
    assert str(facts).startswith("rank 3 on 2 modules (1 kinds): 192 of ")
    big = AdapterSummary(16, 28, 7, 1, 1_234_567, 135_000_000)
    assert re.fullmatch(r"rank 16 on 28 modules \(7 kinds\) and 1 [a-z ]*: 1\.23M of 135M weights .*", str(big))


def test_ranks_beyond_a_weight() -> None:
    """k_proj is 8 x 16: rank 8 is all that it can change, and 9 is said."""
    assert rank_warning(adapt(llama(), rank=8)) is None
    assert re.match(r"rank 9 .* 4 modules \(model\.layers\.0\.self_attn\.k_proj is 8 x 16\)",
                    rank_warning(adapt(llama(), rank=9)) or "")


@pytest.mark.parametrize(("options", "message"), [
    ({"modules_to_save": "self_attn,mlp"}, r"--lora.modules-to-save self_attn,mlp .*every linear layer"),
    ({"targets": "qproj"}, r"--lora.targets qproj: .*\bq_proj\?"),
    ({"targets": "q_proj,xyzzy"}, r"--lora.targets xyzzy: .*: down_proj, gate_proj"),
    ({"targets": "lm_head"}, r"--lora.targets lm_head is the head.*--lora.modules-to-save lm_head"),
    ({"targets": "embed_tokens"}, r"model.embed_tokens .*\bEmbedding\b"),
    ({"targets": "q_proj", "modules_to_save": "self_attn"}, r"both name model.layers.0.self_attn.q_proj"),
    ({"targets": "q_proj", "modules_to_save": "q_proj"}, r"--lora.targets q_proj and --lora.modules-to-save both name"),
    ({"modules_to_save": "lmhead"}, r"--lora.modules-to-save lmhead: .*\blm_head\?"),
    ({"modules_to_save": "layers"}, r"--lora.modules-to-save layers: .*not found"),
])
def test_names_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        new_config(llama(), LoraOptions(rank=2, **options), "base")


def test_a_model_with_an_adapter_gets_no_second() -> None:
    model = adapt(llama())
    with pytest.raises(UsageError, match="already has an adapter"):
        make_structure(model, new_config(llama(), LoraOptions(rank=2), "base"))


@pytest.mark.parametrize("options", [{}, {"dora": True}, {"modules_to_save": "lm_head"},
                                     {"modules_to_save": "embed_tokens,lm_head"}],
                         ids=["lora", "dora", "head", "embeddings"])
@pytest.mark.parametrize("tied", [True, False])
def test_files_round_trip_and_peft_reads_them(tmp_path: Path, options: dict[str, Any], tied: bool) -> None:
    """S1: written, read by us and by peft, merged by us: equal logits; tied embeddings that learned stay tied."""
    from peft import PeftModel

    model = learned(adapt(llama(tied), **options), 0.1)
    adapter_files.save(model, tmp_path, torch.float32)
    again = llama(tied)
    adapter_files.load_adapter(again, adapter_files.read_config(tmp_path), tmp_path, torch.float32)
    assert torch.equal(logits(again), logits(model))
    plain = PeftModel.from_pretrained(llama(tied), str(tmp_path)).eval()
    assert torch.allclose(logits(plain), logits(model), atol=1e-6)
    merged = adapter_merge.merged(llama(tied), tmp_path).eval()
    assert torch.allclose(logits(merged), logits(model), atol=1e-5)
    assert (merged.lm_head.weight is merged.model.embed_tokens.weight) == tied == merged.config.tie_word_embeddings
    assert not [name for name in merged.state_dict() if "lora" in name]


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    adapter_files.save(adapt(llama(), targets="q_proj"), tmp_path, torch.bfloat16)
    config = adapter_files.read_config(tmp_path)
    with pytest.raises(ModelError, match=r"does not match the model: .* is \[3, 16\].*\[3, 32\]"):
        adapter_files.load_adapter(LlamaForCausalLM(LlamaConfig(
            vocab_size=40, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)), config,
            tmp_path, torch.float32)
    with pytest.raises(ModelError, match="does not match the model"):
        adapter_files.load_adapter(gpt2(), config, tmp_path, torch.float32)
    with pytest.raises(ModelError, match=r"cannot be merged|does not match"):
        adapter_merge.merged(gpt2(), tmp_path)


def test_sources_that_are_adapters(tmp_path: Path, tiny_model_dir: Path) -> None:
    """A directory with an adapter and no model stands for base and adapter; one whose base is gone says what to do."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir).eval()
    make_structure(model, new_config(model, LoraOptions(rank=2), str(tiny_model_dir)))
    set_initial_values(model, 0, torch.float32)
    learned(model)
    adapter_files.save(model, tmp_path, torch.float32)
    source = ModelSource.of(str(tmp_path))
    assert (source.name, source.adapter) == (str(tiny_model_dir), str(tmp_path))
    assert source.absolute == str(tmp_path)
    assert source.base == ModelSource.of(str(tiny_model_dir))
    merged = load.load_model(source, "fp32", torch.device("cpu"))
    assert torch.allclose(logits(merged), logits(model), atol=1e-5)
    file = tmp_path / "adapter_config.json"
    file.write_text(file.read_text().replace(str(tiny_model_dir), "/nowhere/at/all"))
    with pytest.raises(ModelError, match=r"/nowhere/at/all.*--model BASE --lora\.adapter"):
        ModelSource.of(str(tmp_path))


def test_narrow_weights_give_the_same_products() -> None:
    """Under autocast the frozen weights may be held in bfloat16: logits and gradients are the same, to the bit."""
    wide, slim = (adapt(llama(False), modules_to_save="embed_tokens") for _ in range(2))
    round_to_bf16(slim)
    assert slim.model.layers[0].mlp.up_proj.base_layer.weight.dtype == torch.bfloat16
    assert slim.lm_head.weight.dtype == torch.bfloat16
    kept = {name for name, weight in slim.named_parameters() if weight.dtype == torch.float32}
    assert {name for name in kept if "default" not in name} == {
        name for name, _ in slim.named_parameters() if "norm" in name or "original_module" in name}
    outputs = []
    for model in (learned(wide), learned(slim)):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(IDS).logits
        out.float().square().sum().backward()
        outputs.append([out.detach(), *(weight.grad for weight in saved_parameters(model))])
    assert all(torch.equal(one, other) for one, other in zip(*outputs, strict=True))


def test_weights_of_dora_and_tied_heads_stay_wide() -> None:
    model = adapt(llama(), dora=True, targets="q_proj")
    round_to_bf16(model)
    assert model.model.layers[0].self_attn.q_proj.base_layer.weight.dtype == torch.float32
    assert model.lm_head.weight.dtype == torch.float32
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
