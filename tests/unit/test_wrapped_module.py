"""Wrappers around a transformers model: what is inside is found, and what cannot be trained as a whole is refused."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tropism.errors import ModelError
from tropism.model.wrapped_module import model_inside

CONFIG = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)


class Holder(nn.Module):
    """A module that holds others under given names, and hands on every attribute of the first, as DeepSpeed does."""

    def __init__(self, **held: Any) -> None:
        super().__init__()
        self.first = next(iter(held))
        for name, value in held.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__(self.first), name)


@pytest.fixture
def model() -> Any:
    return LlamaForCausalLM(CONFIG)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("wrap", [
    lambda model: model, lambda model: Holder(model=model), lambda model: Holder(module=model),
    lambda model: Holder(module=Holder(model=model)), lambda model: Holder(policy=model), nn.DataParallel,
    lambda model: torch.compile(Holder(model=model)), lambda model: Holder(model=torch.compile(model)),
    lambda model: SimpleNamespace(model=model),
    lambda model: SimpleNamespace(module=Holder(lm=model))])
def test_the_model_in_a_wrapper(wrap: Any, model: Any) -> None:
    assert model_inside(wrap(model), "the module") is model


def test_the_model_in_ddp(model: Any, alone: None) -> None:
    assert model_inside(DistributedDataParallel(Holder(model=model)), "the module") is model


def test_an_adapter_stays_on_its_model(model: Any) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    assert model_inside(adapted, "the module") is adapted
    assert model_inside(Holder(model=adapted), "the module") is adapted


@pytest.mark.parametrize(("wrap", "message"), [
    (lambda model: nn.Linear(2, 2), "is a Linear, which holds no transformers model under .model or .module. Pass a"),
    (lambda model: 3, "is a int, which holds no transformers model"),
    (lambda model: Holder(a=model, b=LlamaForCausalLM(CONFIG)), "is a Holder that holds 2 models: a, b. Pass one"),
    (lambda model: Holder(model=model, head=nn.Linear(2, 1)),
     "with 2 weights outside its LlamaForCausalLM .first: head.weight., which would not be trained. Pass the Llama"),
    (lambda model: Holder(model=model, ref_model=LlamaForCausalLM(CONFIG)),
     "is a Holder that holds 2 models: model, ref_model. Pass one"),
    (lambda model: Holder(model=nn.Linear(2, 2)), "holds no transformers model")])
def test_wrappers_that_are_ambiguous(wrap: Any, message: str, model: Any) -> None:
    """Weights that no one trains are never accepted in silence."""
    with pytest.raises(ModelError, match=f"^the module .*{message}"):
        model_inside(wrap(model), "the module")


def test_a_wrapper_of_itself_ends(model: Any) -> None:
    holder = SimpleNamespace()
    holder.model = holder
    with pytest.raises(ModelError, match="holds no transformers model"):
        model_inside(holder, "the module")


def test_weights_that_are_not_here(model: Any) -> None:
    """The meta device, offloading by device_map, and what ZeRO-3 and Gemini leave in place of a weight."""
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(CONFIG)
    with pytest.raises(ModelError, match=r"^the module has weights on the meta device.*first: model.embed_tokens"):
        model_inside(Holder(model=empty), "the module")
    model.hf_device_map = {"model": 0}
    assert model_inside(model, "the module") is model
    model.hf_device_map = {"model": 0, "lm_head": "cpu"}
    with pytest.raises(ModelError, match=r"several devices .0, cpu. by device_map. Load it without device_map"):
        model_inside(model, "the module")
    del model.hf_device_map
    model.lm_head.weight.data = torch.empty(0)
    with pytest.raises(ModelError, match=r"weights without values .first: lm_head.weight.: they were moved"):
        model_inside(model, "the module")
    model.lm_head.weight.ds_id = 7
    with pytest.raises(ModelError, match=r"^the module is sharded by DeepSpeed ZeRO-3. Pass the plain model, or"):
        model_inside(Holder(module=model), "the module")


def test_sharded_modules(model: Any, alone: None) -> None:
    for shard in (fsdp.fully_shard, lambda module: fsdp.fully_shard(module.model.layers[0]),
                  lambda module: fsdp.FullyShardedDataParallel(module, device_id=torch.device("cpu"))):
        sharded = shard(LlamaForCausalLM(CONFIG))
        with pytest.raises(ModelError, match=r"^the module is sharded by FSDP. Pass the plain model, or pass it by"):
            model_inside(Holder(model=sharded), "the module")


def test_weights_that_cannot_be_trained(model: Any) -> None:
    """Quantized by any library: as a flag, as layers of torch, or as integers and 8-bit floats in plain layers."""
    for change, message in (
            (lambda one: setattr(one, "is_quantized", True), "has quantized weights, which would be expanded"),
            (lambda one: setattr(one.model.layers[0].mlp, "up_proj", nn.quantized.dynamic.Linear(8, 8)),
             "has quantized weights"),
            (lambda one: setattr(one.lm_head, "weight", nn.Parameter(torch.zeros(32, 8, dtype=torch.int8), False)),
             r"has weights of type int8 \(first: lm_head.weight\), which cannot be trained. Load it with"),
            (lambda one: one.model.norm.to(torch.float8_e4m3fn),
             r"has weights of type float8_e4m3fn \(first: model.norm.weight")):
        changed = LlamaForCausalLM(CONFIG)
        change(changed)  # type: ignore[no-untyped-call]
        with pytest.raises(ModelError, match=f"^the module {message}"):
            model_inside(Holder(model=changed), "the module")
    with pytest.raises(ModelError, match=r"^the module is a LlamaModel, which has no output head over the vocabulary"):
        model_inside(model.model, "the module")
