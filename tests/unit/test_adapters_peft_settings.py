"""Settings of an adapter's file: those that mean nothing, that nobody knows, or that are not trained as they say."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tropism.errors import ModelError
from tropism.model.adapters import files as adapter_files
from tropism.model.adapters import merge as adapter_merge
from tropism.model.source import ModelSource
from unit.test_adapters import adapt, llama

pytestmark = pytest.mark.filterwarnings("ignore")  # of peft, about settings that it does not know


def changed(path: Path, change: dict[str, Any]) -> Path:
    """An adapter whose file says something else."""
    adapter_files.save(adapt(llama(), targets="q_proj"), path, torch.float32)
    file = path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    return path


@pytest.mark.parametrize(("change", "message"), [
    ({"bias": "all"}, "bias 'all'"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4'.*base weights"),
    ({"init_lora_weights": "foo"}, "init_lora_weights 'foo' is unsupported"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices is unsupported"), ({"peft_type": "IA3"}, "IA3")])
def test_adapters_that_are_not_served(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """One that would be trained otherwise than it says is refused by the name of the setting."""
    with pytest.raises(ModelError, match=message):
        adapter_files.read_config(changed(tmp_path, change))


@pytest.mark.parametrize(("change", "message"), [
    ({"target_modules": None}, r"target_modules is None, .*module names"),
    ({"target_modules": []}, r"target_modules is \[\]"), ({"rank_pattern": [1]}, r"rank_pattern is \[1\]"),
    ({"rank_pattern": {"q_proj": "2"}}, "rank_pattern is"),
    ({"r": "four"}, "r is 'four', .*integer"),
    ({"r": 0}, "r is 0"), ({"lora_alpha": None}, "lora_alpha is None, .*number"),
    ({"bias": "junk"}, "bias is 'junk', .*none, all, lora_only"),
    ({"modules_to_save": "lm_head"}, "modules_to_save is 'lm_head'"), ({"use_dora": "no"}, "use_dora is 'no'")])
def test_values_that_mean_nothing(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """X1: by file and setting, wherever the adapter is used."""
    place = changed(tmp_path, change)
    for use in (adapter_files.read_config, lambda path: ModelSource.of(str(path)),
                lambda path: adapter_merge.merged(llama(), path)):
        with pytest.raises(ModelError, match=f"adapter_config.json: {message}"):
            use(place)


def test_settings_that_peft_does_not_know(tmp_path: Path) -> None:
    """S1: peft leaves them out with a warning, and computes another model; those that say nothing do no harm."""
    place = changed(tmp_path, {"use_hydra": True, "use_other": False, "more": None})
    for use in (adapter_files.read_config, lambda path: ModelSource.of(str(path)),
                lambda path: adapter_merge.merged(llama(), path)):
        with pytest.raises(ModelError, match=r"use_hydra is unknown to peft"):
            use(place)
    with pytest.raises(ModelError, match="peft_type 'NOPE' is unknown to peft"):
        ModelSource.of(str(changed(tmp_path, {"peft_type": "NOPE"})))
    changed(tmp_path, {"use_other": False, "more": None})
    assert adapter_files.read_config(place).r == 3
    assert adapter_merge.merged(llama(), place)


def test_sizes_that_do_not_fit(tmp_path: Path) -> None:
    """X1: what peft says below its heading is part of the sentence."""
    place = changed(tmp_path, {})
    file = place / "adapter_model.safetensors"
    save_file({name: torch.ones(5, 16) if "lora_A" in name else weight for name, weight in load_file(file).items()},
              file)
    with pytest.raises(ModelError, match=r"cannot be merged: .*size mismatch for .*lora_A"):
        adapter_merge.merged(llama(), place)
