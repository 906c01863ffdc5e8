"""Compiled layers give what plain ones give, for any number of tokens, and are given up if they do not."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import tropism.train.setup.memory_and_speed as setup
from tropism.data.batching.collate import collate
from tropism.distributed.world import World
from tropism.errors import ModelError, UsageError
from tropism.model.compiled import CompiledLayers, worth_compiling
from tropism.model.language_model import LanguageModel
from tropism.model.moe_router import RouterLogits
from tropism.train.options import ComputeOptions
from tropism.train.settings import Settings
from unit.test_attention import gradients, trees
from unit.test_checkpointing import language_model, step

CPU, GPU = torch.device("cpu"), torch.device("cuda")


class Heard:
    """What is said to the user."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.say = self.lines.append


def settled(model: LanguageModel, wanted: bool = False, **settings: Any) -> tuple[LanguageModel, Settings, list[str]]:
    heard = Heard()
    found, used = setup.with_settings(model, Settings(compiled=True, **settings), trees(), World(0, 1, CPU), heard,
                                      wanted)
    return found, used, heard.lines


def broken(change: Callable[[Any], Any]) -> Callable[[], CompiledLayers]:
    """Compiled layers of a compiler that makes something else of each graph."""
    def made() -> CompiledLayers:
        compiled = CompiledLayers("eager")
        compiled._backend = lambda graph, inputs: change(graph)
        return compiled

    return made


def check_sizes(name: str, precision: str, graphs: int, backend: str = "aot_eager",
                modes: tuple[str, ...] = ("none", "selective", "full")) -> None:
    """Log-probs and gradients over many sizes of packs, without recompiling."""
    plain, forest = language_model(name, precision=precision), trees()
    model = replace(plain, compiled=CompiledLayers(backend))
    expected, found = step(plain), step(model)
    assert model.compiled is not None
    assert model.compiled.graphs == graphs
    model.compiled.expect_no_more()
    assert (found[0] - expected[0]).abs().max() < 1e-5
    assert (found[1] - expected[1]).norm() < 1e-5 * expected[1].norm()
    for mode in modes:
        for part in ([forest[0]], [forest[1]], [forest[2]], forest[:2], forest[1:], forest[::2], forest * 2, forest * 3,
                     forest[:2] * 3, forest[1:] * 5, forest * 7):
            batch = collate(part, "tree")
            ours, theirs = (one.logps(batch) for one in (replace(model, checkpointing=mode), plain))
            assert (ours - theirs).abs().max() < 1e-5
            gradients(model.module, ours)
    assert model.compiled.recompiles == 0


def test_packs_of_other_sizes_compile_nothing_new() -> None:
    """Layers of two kinds share their graphs."""
    check_sizes("gemma3", "fp32", 4, "eager", ("none",))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision", "graphs"), [
    ("gemma3", "fp32", 5), ("llama", "fp32", 5), ("qwen3", "fp32", 5), ("llama", "fp64", 5), ("mixtral", "fp32", 5),
    ("qwen3-moe", "fp32", 5), ("qwen3-lora", "fp32", 9)])
def test_packs_of_other_sizes_compile_nothing_new_in_other_families(name: str, precision: str, graphs: int) -> None:
    """A layer behind frozen embeddings has graphs of its own, since its input needs no gradient."""
    check_sizes(name, precision, graphs)


@pytest.mark.slow
def test_router_logits_of_compiled_layers_are_collected() -> None:
    plain, expected, found = language_model("mixtral"), RouterLogits(), RouterLogits()
    model = replace(plain, compiled=CompiledLayers("aot_eager"))
    gradient = step(plain, expected)[1]
    assert (step(model, found)[1] - gradient).norm() < 1e-5 * gradient.norm()
    assert all(map(torch.allclose, found.logits, expected.logits))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_compiler_of_the_cpu(precision: str) -> None:
    """The real one. It is compared with plain layers on the way."""
    model, settings, lines = settled(language_model("llama", precision=precision), wanted=True)
    assert settings.compiled
    assert lines == ["compiling the layers of the model", "compiled 3 layers as 5 graphs"]
    plain = replace(model, compiled=None)
    batch = collate(trees() * 2, "tree")
    tolerance = 1e-5 if precision == "fp32" else 0.5
    assert (model.logps(batch) - plain.logps(batch)).abs().max() < tolerance
    assert model.compiled is not None
    assert model.compiled.recompiles == 0


def test_the_module_is_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, other passes and copies are those of the plain model, and no gradient is left of the comparison."""
    monkeypatch.setattr(setup, "CompiledLayers", partial(CompiledLayers, "eager"))
    plain = language_model("llama")
    names, kinds = list(plain.module.state_dict()), [type(part) for part in plain.module.modules()]
    model, settings, _ = settled(plain)
    assert settings.compiled
    assert model.compiled is not None
    assert list(model.module.state_dict()) == names
    assert [type(part) for part in model.module.modules()] == kinds
    assert all(weight.grad is None for weight in model.module.parameters())
    graphs = model.compiled.graphs
    with torch.no_grad():
        model.logps(collate(trees(), "tree"))
    assert not model.compiled.serves(collate(trees(), "padded"))
    assert not model.compiled.serves(collate([], "tree"))
    model.module.set_attn_implementation("sdpa")
    model.module.generate(input_ids=torch.ones(1, 3, dtype=torch.int64), max_new_tokens=2, do_sample=False)
    assert model.compiled.graphs == graphs


def stops(graph: Any) -> Any:
    raise RuntimeError("no compiler on this machine\nmore")


def doubles(graph: Any) -> Any:
    return lambda *inputs: tuple(2 * value if isinstance(value, torch.Tensor) and value.is_floating_point() else value
                                 for value in graph(*inputs))


@pytest.mark.parametrize(("change", "why"), [
    (stops, "no compiler on this machine"), pytest.param(doubles, "differ from plain", marks=pytest.mark.slow)])
def test_layers_that_do_not_compile_or_differ_are_plain(
        monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any], why: str) -> None:
    monkeypatch.setattr(setup, "CompiledLayers", broken(change))
    model, settings, lines = settled(plain := language_model("llama"))
    assert model.compiled is None
    assert not settings.compiled
    assert lines[-1].startswith("layers are not compiled: ")
    assert why in lines[-1]
    assert "\n" not in lines[-1]
    assert all(weight.grad is None for weight in model.module.parameters())
    with pytest.raises(ModelError, match=f"--compile on: .*{why}.*Use --compile off"):
        settled(plain, wanted=True)


def test_padded_layouts_are_not_compiled() -> None:
    model, settings, lines = settled(language_model("llama", layout="padded"))
    assert (model.compiled, settings.compiled) == (None, False)
    assert lines[-1] == "layers are not compiled: the model trains in the padded layout"


def test_only_long_runs_on_a_gpu_are_worth_compiling() -> None:
    assert worth_compiling(1000, GPU)
    assert not worth_compiling(20, GPU)
    assert not worth_compiling(10**6, CPU)


@pytest.mark.parametrize(("options", "device", "message"), [
    ({"offload_checkpoints": True}, CPU, "--offload-checkpoints has no effect without a GPU"),
    ({"offload_checkpoints": True, "checkpointing": "full"}, CPU, "--offload-checkpoints has no effect"),
    ({"offload_checkpoints": True, "checkpointing": "none"}, GPU, "--offload-checkpoints .* --checkpointing full"),
    ({"offload_checkpoints": True, "checkpointing": "selective"}, GPU, "it is selective"),
    ({"compile": "on", "layout": "padded"}, GPU, "--compile on .*--layout padded")])
def test_options_without_effect_are_refused(options: dict[str, Any], device: torch.device, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        setup.check_compute(ComputeOptions(**options), device)


@pytest.mark.parametrize("options", [
    {}, {"offload_checkpoints": True}, {"offload_checkpoints": True, "checkpointing": "full"}, {"compile": "on"},
    {"compile": "auto", "layout": "padded"}, {"checkpointing": "selective"}])
def test_options_with_effect_are_taken(options: dict[str, Any]) -> None:
    setup.check_compute(ComputeOptions(**options), GPU)


@pytest.mark.parametrize("flat", [True, False])
def test_layers_that_change_their_products_in_place_get_full_checkpoints(flat: bool) -> None:
    """As in Llama 4, whose experts add to the result of a linear layer. torch does not notice it in a view."""
    model = language_model("llama")

    def forward(part: Any, states: torch.Tensor) -> torch.Tensor:
        gate = part.gate_proj(states[0] if flat else states).mul_(2.0)
        return part.down_proj(torch.tanh(gate)).view(states.shape)

    for layer in model.layers:
        layer.mlp.forward = partial(forward, layer.mlp)
    plain, heard = step(model), Heard()
    model, settings = setup.with_settings(model, Settings(checkpointing="selective"), trees(), World(0, 1, CPU), heard,
                                          False)
    assert (model.checkpointing, settings.checkpointing) == ("full", "full")
    assert all(weight.grad is None for weight in model.module.parameters())
    assert all(map(torch.equal, step(model), plain))
    assert heard.lines == ["full checkpointing: selective checkpointing does not work for layers of LlamaForCausalLM"]


def test_a_model_without_layers_has_no_checkpoints() -> None:
    model = language_model("llama")
    object.__setattr__(model, "layers", [])
    with pytest.raises(ModelError, match="has no list of decoder layers"):
        setup.with_settings(model, Settings(checkpointing="full"), trees(), World(0, 1, CPU), Heard(), False)
    setup.with_settings(model, Settings(), trees(), World(0, 1, CPU), Heard(), False)
