"""What stands where a model is named and none is: said with where to look."""

import json
import re
from pathlib import Path

import pytest

from tropism.errors import ModelError, TropismError, UsageError
from tropism.model import load
from tropism.model import source as model_source
from tropism.model.options import LoraOptions
from tropism.model.source import ModelSource
from tropism.train.setup.policy import PolicyBuilder


def test_a_run_is_no_model(tmp_path: Path) -> None:
    """X1: its result is one, and has a name."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "manifest.json").write_text("{}")
    with pytest.raises(ModelError, match=r"run is a run directory.*no trained model yet"):
        ModelSource.of(str(run))
    (run / "model").mkdir()
    with pytest.raises(ModelError, match=f"run is a run directory.*{run / 'model'}"):
        ModelSource.of(str(run))


def test_where_an_adapter_should_be(tmp_path: Path, tiny_model_dir: Path) -> None:
    """X1: a directory that is not there, one without an adapter, and a run, which has one."""
    def refused(match: str, path: Path) -> None:
        with pytest.raises(UsageError, match=match):
            PolicyBuilder.of(ModelSource.of(str(tiny_model_dir)), LoraOptions(adapter=str(path)), None)

    refused(f"adapter {tmp_path}/nowhere: directory not found$", tmp_path / "nowhere")
    refused(r"adapter_config\.json not found$", tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    refused(f"For the adapter of this run, use {tmp_path}/model$", tmp_path)


def test_a_mistyped_path_is_said_before_the_hub_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    """X1: `runs/nothing` beside `runs` may be a hub id, and is taken for one; `owner/name` says nothing."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    model_source._warn_missing.cache_clear()
    for _ in range(2):
        assert ModelSource.of("owner/name").name == "owner/name"
        source = ModelSource.of("runs/nothing")
    assert re.fullmatch(r"note: runs/nothing: .*not found in runs; .*Hub\n", capsys.readouterr().err)

    def gone(*args: object, **options: object) -> None:
        raise OSError("cannot connect")

    monkeypatch.setattr(load.AutoConfig, "from_pretrained", gone)
    with pytest.raises(TropismError, match=r"runs/nothing: directory not found, and .*cannot connect"):
        load.load_config(source)
