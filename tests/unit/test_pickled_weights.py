"""G1: weights in a pickle: those of honest models load, and a payload is refused in a sentence and never run."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tropism.cli.app import main
from tropism.errors import ModelError
from tropism.model import load
from tropism.model.adapters import files as adapter_files
from tropism.model.source import ModelSource


class Call:
    """Pickles as a call of a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.called = (function, arguments)

    def __reduce__(self) -> Any:
        return self.called


def in_old_format(value: Any, file: Path) -> None:
    torch.save(value, file, _use_new_zipfile_serialization=False)


def plain_pickle(value: Any, file: Path) -> None:
    file.write_bytes(pickle.dumps(value, 2))


TOUCH = Call(os.system, "touch MARKER")
PAYLOADS: dict[str, Callable[[dict[str, torch.Tensor], Path], None]] = {
    "instead of the weights": lambda state, file: torch.save(TOUCH, file),
    "beside the weights": lambda state, file: torch.save({**state, "extra": TOUCH}, file),
    "in the old format": lambda state, file: in_old_format({**state, "extra": TOUCH}, file),
    "as a pickle alone": lambda state, file: plain_pickle(TOUCH, file),
    "eval": lambda state, file: torch.save({**state, "extra": Call(eval, "open('MARKER', 'w')")}, file),
    "a load of more": lambda state, file: torch.save({**state, "extra": Call(torch.load, "other.bin")}, file)}
DAMAGED: dict[str, bytes] = {
    "empty": b"", "text": b"weights", "half a pickle": b"\x80\x02}q\x00", "zeros": bytes(1000),
    "a zip": b"PK\x03\x04xx", "no weights": pickle.dumps([1, 2], 2)}


def bin_model(tiny: Path, path: Path) -> dict[str, torch.Tensor]:
    """A copy of the model with pickled weights only."""
    from safetensors.torch import load_file

    shutil.copytree(tiny, path)
    state = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    torch.save(state, path / "pytorch_model.bin")
    return state


def load_model(path: Path) -> Any:
    return load.load_model(ModelSource.of(str(path)), "fp32", torch.device("cpu"))


@pytest.mark.parametrize("write", [torch.save, in_old_format])
def test_honest_weights_load(write: Any, tiny_model_dir: Path, tmp_path: Path) -> None:
    state = bin_model(tiny_model_dir, tmp_path / "model")
    write(state, tmp_path / "model" / "pytorch_model.bin")
    found = load_model(tmp_path / "model").state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("name", PAYLOADS)
def test_a_model_with_a_payload(name: str, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                capsys: pytest.CaptureFixture[str]) -> None:
    """Of every command that reads weights: policy, reference, and the model of a run."""
    monkeypatch.chdir(tmp_path)
    model, data = tmp_path / "model", tmp_path / "rows.jsonl"
    PAYLOADS[name](bin_model(tiny_model_dir, model), model / "pytorch_model.bin")
    data.write_text("".join(json.dumps({"prompt": f"why {k}", "completion": "so", "label": bool(k % 2)}) + "\n"
                            for k in range(4)))
    for tokens in (["evaluate", str(model), "--data", str(data)],
                   ["kto", "--model", str(model), "--data", str(data), "--output", str(tmp_path / "out")],
                   ["evaluate", str(tiny_model_dir), "--reference", str(model), "--data", str(data)]):
        assert main(tokens) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert f"{model}: the weights are not a pickle of tensors alone. Nothing in it was run." in said, said
        assert "weights_only" not in said
    assert not (tmp_path / "MARKER").exists()


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_pickle(name: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    bin_model(tiny_model_dir, tmp_path / "model")
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(DAMAGED[name])
    with pytest.raises(ModelError, match=str(tmp_path / "model")):
        load_model(tmp_path / "model")


def adapter(path: Path, base: Path) -> dict[str, torch.Tensor]:
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "base_model_name_or_path": str(base), "r": 2, "lora_alpha": 4,
        "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}))
    layers = len([name for name, _ in load_model(base).named_modules() if name.endswith("q_proj")])
    size = json.loads((base / "config.json").read_text())["hidden_size"]
    return {f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{side}.weight":
            torch.ones(2, size) if side == "A" else torch.ones(size, 2) for layer in range(layers) for side in "AB"}


@pytest.mark.parametrize("name", [*PAYLOADS, *DAMAGED])
def test_an_adapter_with_a_payload(name: str, tiny_model_dir: Path, tmp_path: Path,
                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is trained further and where it is merged, which peft reads."""
    monkeypatch.chdir(tmp_path)
    path, file = tmp_path / "adapter", tmp_path / "adapter" / "adapter_model.bin"
    state = adapter(path, tiny_model_dir)
    if name in PAYLOADS:
        PAYLOADS[name](state, file)
    else:
        file.write_bytes(DAMAGED[name])
    for read in (adapter_files.read_weights, load_model):
        with pytest.raises(ModelError) as error:
            read(path)
        assert str(file) in str(error.value)
        assert "weights_only" not in str(error.value)
        assert "not a pickle of tensors alone. Nothing in it was run" in str(error.value) or name in DAMAGED
    assert not (tmp_path / "MARKER").exists()


def test_an_honest_adapter_loads(tiny_model_dir: Path, tmp_path: Path) -> None:
    state = adapter(tmp_path / "adapter", tiny_model_dir)
    torch.save(state, tmp_path / "adapter" / "adapter_model.bin")
    found = adapter_files.read_weights(tmp_path / "adapter")
    assert len(found) == len(state)
    before, after = (load_model(path).model.layers[0].self_attn.q_proj.weight
                     for path in (tiny_model_dir, tmp_path / "adapter"))
    assert not torch.equal(before, after)
