"""What exports of adapters take from where, and what they refuse."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from exporting import filled_run, logits
from tropism.commands.export import export
from tropism.commands.export.read_run import ExportedRun
from tropism.errors import ModelError
from tropism.model import generation, load
from tropism.model.adapters import files as adapter_files
from tropism.model.source import ModelSource
from unit.test_export_adapters import IDS, base, run_of, trained  # noqa: F401

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed")


def silent(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """A call that says nothing by Python's warnings but what torch says of itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        return call(*args, **options)


def test_nothing_is_looked_up_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """X1: a RUN/model that is not there is no hub id, though it looks like one."""
    from tropism.commands.export import tokenizer_and_generation as beside
    from tropism.commands.export.read_run import Chosen

    monkeypatch.chdir(tmp_path)
    asked: list[str] = []
    monkeypatch.setattr(generation, "cached_file", lambda name, *_, **__: asked.append(name))
    run = ExportedRun(Path("run"), {"model": "a LlamaForCausalLM given in Python (from x/y)"}, {})
    chosen = Chosen(Path("run/checkpoints/step-1"), 1, {"stop_ids": [3]}, True)
    assert beside.generation_of(run, chosen, run.base, None, None)[0].eos_token_id == 3
    assert asked == []
    beside.generation_of(run, chosen, "owner/name", None, None)
    assert asked == ["owner/name"]


def test_from_an_adapter_generation_stops_where_its_base_did(base: Callable[[bool], Path], tmp_path: Path) -> None:  # noqa: F811
    """S1: a checkpoint of a run that began from peft's own adapter has the base's stop ids, and those trained."""
    place = tmp_path / "base"
    shutil.copytree(base(False), place)
    GenerationConfig(eos_token_id=[7, 9]).save_pretrained(place)
    model = trained(place, "lora")
    run = run_of(model, place, tmp_path / "run")
    shutil.move(run / "model", tmp_path / "adapter")
    filled_run(run, tmp_path / "adapter", lora={"rank": None, "adapter": None})
    for merge in (True, False):
        out = silent(export, run, tmp_path / f"out-{merge}", merge=merge, checkpoint="last").path
        assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [7, 9, 1]


def test_a_checkpoint_of_a_model_given_in_python(base: Callable[[bool], Path], tmp_path: Path) -> None:  # noqa: F811
    """S1: the adapter's own file names the base, whatever the run was given."""
    model = trained(base(False), "lora")
    run = run_of(model, base(False), tmp_path / "run")
    filled_run(run, base(False), model="a PeftModelForCausalLM given in Python", lora={"rank": None, "adapter": None})
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps(manifest | {"model": "a PeftModelForCausalLM given in Python"}))
    with torch.no_grad():
        wanted = model(input_ids=IDS).logits
    out = silent(export, run, tmp_path / "out", merge=True, checkpoint="last").path
    torch.testing.assert_close(logits(out), wanted, rtol=1e-5, atol=1e-5)


def test_weights_left_over_or_gone(base: Callable[[bool], Path], tmp_path: Path) -> None:  # noqa: F811
    """S1: where an adapter's directory stands for a model, all of its file must count."""
    model = trained(base(False), "lora")
    model.save_pretrained(tmp_path / "adapter")
    source = ModelSource.of(str(tmp_path / "adapter"))
    silent(load.load_model, source, "fp32", torch.device("cpu"))
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    strange = "base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight"
    save_file({**load_file(file), strange: torch.ones(4, 32)}, file)
    with pytest.raises(ModelError, match=r"layers\.7.*belongs to no module"):
        load.load_model(source, "fp32", torch.device("cpu"))
    file.unlink()
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors: .*not found"):
        load.load_model(source, "fp32", torch.device("cpu"))


def test_the_config_repeats(base: Callable[[bool], Path], tmp_path: Path) -> None:  # noqa: F811
    config = trained(base(False), "lora").peft_config["default"]
    adapter_files.write_config(config, tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == sorted(config.target_modules)


def card_of(run: Path, out: Path, **options: Any) -> str:
    return (silent(export, run, out, **options).path / "README.md").read_text()


def test_the_card_says_what_an_adapter_began_from(base: Callable[[bool], Path], tmp_path: Path) -> None:  # noqa: F811
    """S1: also where `model` named it; rank and scale are those of its own config."""
    model = trained(base(False), "lora")
    run = run_of(model, base(False), tmp_path / "run")
    shutil.copytree(run / "model", tmp_path / "first")
    for number, (named, lora) in enumerate(((tmp_path / "first", {"rank": None, "adapter": None}),
                                            (base(False), {"rank": None, "adapter": str(tmp_path / "first")}))):
        filled_run(run, named, lora=lora, max_steps=4)
        for merge in (True, False):
            card = card_of(run, tmp_path / f"out-{number}-{merge}", merge=merge)
            assert "| `adapter` | first |" in card
            assert "| `rank` | 4 |" in card
            assert "| `alpha` | 8 |" in card
            assert f"Trained from `{Path(base(False)).name}`" in card
            assert "| epochs |" not in card


def test_the_card_leaves_out_what_an_object_decided(tiny_model_dir: Path, tmp_path: Path) -> None:
    """S1: the rate and schedule of a run whose optimizer came from Python are the optimizer's own."""
    run = tmp_path / "run"
    shutil.copytree(tiny_model_dir, run / "model")
    filled_run(run, tiny_model_dir)
    manifest = json.loads((run / "manifest.json").read_text())
    assert {"| optimizer | adamw |", "| epochs | 1 |"} <= set(card_of(run, tmp_path / "one").splitlines())
    (run / "manifest.json").write_text(json.dumps({**manifest, "given": {"optimizer": "SGD", "scheduler": "StepLR"}}))
    card = card_of(run, tmp_path / "two")
    assert "| optimizer | SGD, passed in Python |" in card
    assert "| scheduler | StepLR, passed in Python |" in card
    for word in ("adamw", "learning rate", "| schedule |", "weight decay"):
        assert word not in card
