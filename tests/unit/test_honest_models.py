"""Models as people save them, with leftovers and files of their own beside the weights, are not refused."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tropism.errors import ModelError
from tropism.model import load, source
from tropism.model.config import check_values
from tropism.model.content import model_files
from tropism.model.finite_weights import check_finite
from tropism.model.source import ModelSource


@pytest.fixture
def model(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A copy with a single file of weights."""
    copy = Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))
    assert (copy / "model.safetensors").is_file()
    return copy


def loaded(model: Path) -> Any:
    return load.load_model(ModelSource.of(str(model)), "fp32", torch.device("cpu"))


@pytest.mark.parametrize("index", [{"model.embed_tokens.weight": "model-00001-of-00002.safetensors"}, {}])
def test_an_index_left_beside_a_single_file_is_not_read(model: Path, index: dict[str, str]) -> None:
    """transformers prefers the single file, so that is the one to check and to compare between processes."""
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    weights = ModelSource.of(str(model)).weight_files()
    assert weights is not None
    assert set(weights.values()) == {str(model / "model.safetensors")}
    assert weights.keys() == load_file(model / "model.safetensors").keys()
    loaded(model)


def test_the_loaded_weights_are_compared_if_there_are_others(model: Path) -> None:
    """Two processes whose single files differ were taken for the same model by the files of a leftover index."""
    state = load_file(model / "model.safetensors")
    save_file(state, model / "old.safetensors", metadata={"format": "pt"})
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(state,
                                                                                                "old.safetensors")}))
    before = {file.name: file.hash for file in model_files(ModelSource.of(str(model)))}
    save_file({name: weight + 1 for name, weight in state.items()}, model / "model.safetensors",
              metadata={"format": "pt"})
    after = {file.name: file.hash for file in model_files(ModelSource.of(str(model)))}
    assert {name for name in before if before[name] != after[name]} == {"model.safetensors"}


def test_a_config_may_name_the_file_of_the_weights(model: Path) -> None:
    """transformers reads it in place of model.safetensors."""
    state = load_file(model / "model.safetensors")
    save_file({name: weight + 1 for name, weight in state.items()}, model / "own.safetensors", {"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "transformers_weights": "own.safetensors"}))
    weights = ModelSource.of(str(model)).weight_files()
    assert weights is not None
    assert set(weights.values()) == {str(model / "own.safetensors")}
    name = "model.embed_tokens.weight"
    assert torch.equal(loaded(model).get_parameter(name), state[name].float() + 1)


def test_data_of_any_size_may_lie_beside_a_model(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "TOKENIZER_BYTES", 10**6)
    for name in ("train.json", "notes.txt", "trainer_state.json"):
        (model / name).touch()
        os.truncate(model / name, 10**6 + 1)
    (model / "gone.model").symlink_to(model / "nothing")
    (model / "vocab.d").mkdir()
    ModelSource.of(str(model)).check_files()
    for name in ("vocab.json", "tokenizer.model", "merges.txt", "spiece.model", "chat_template.jinja"):
        (model / name).write_text("")
        os.truncate(model / name, 10**6 + 1)
        with pytest.raises(ModelError, match=f"{name}: too large"):
            ModelSource.of(str(model)).check_files()
        (model / name).unlink()


@pytest.mark.parametrize("settings", [
    {"quant_method": "bitsandbytes", "load_in_4bit": True}, {"quant_method": "bitsandbytes", "load_in_8bit": True},
    {"load_in_8bit": True}, {"quant_method": "fp8"}, {"quant_method": "gptq", "bits": 4}])
def test_methods_of_quantization_that_transformers_knows(settings: dict[str, Any]) -> None:
    check_values({"quantization_config": settings}, "config.json")


@pytest.mark.parametrize("settings", [{"quant_method": "bitsandbytes"}, {"load_in_4bit": False}, {}])
def test_methods_of_quantization_that_it_does_not_know(settings: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="quantization_config has the method"):
        check_values({"quantization_config": settings}, "config.json")


def test_a_quantized_model_is_smaller_than_its_config_tells(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of its weights is known when they are read."""
    monkeypatch.setattr("tropism.model.weights_check.machine_memory", lambda: 1000)
    with pytest.raises(ModelError, match="the weights need"):
        loaded(model)
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (model / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(load.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("reached"))
    with pytest.raises(pytest.fail.Exception, match="reached"):
        loaded(model)


def test_weights_of_8_bits_are_checked_too() -> None:
    """torch adds none of them up."""
    weight = torch.ones(4).to(torch.float8_e4m3fn)
    check_finite([("w", weight)], "DIR")
    with pytest.raises(ModelError, match="1 of the 4 values of w is NaN"):
        check_finite([("w", torch.tensor([1.0, float("nan"), 2.0, 3.0]).to(torch.float8_e4m3fn))], "DIR")
