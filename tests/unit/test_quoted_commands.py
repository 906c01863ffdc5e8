"""Commands in messages can be pasted, whatever the directory is called."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from tropism.commands.files import check_run
from tropism.commands.run_model import model_of
from tropism.errors import TropismError
from tropism.model.adapters.files import base_advice
from tropism.observe.rundir import RunDirectory


def model(run: Path) -> Path:
    (run / "model").mkdir()
    return run / "model"


def from_advice(run: Path) -> None:
    raise TropismError(base_advice(model(run)))


@pytest.mark.parametrize("act", [
    lambda run: model_of(str(run), "chat with"), lambda run: model_of(str(run / "checkpoints/step-1"), "chat with"),
    lambda run: check_run(run / "checkpoints/step-1", "export"), lambda run: check_run(model(run), "report"),
    lambda run: RunDirectory(run).refuse_if_used(), from_advice], ids=range(6))
def test_a_directory_is_one_word(act: Callable[[Path], None], tmp_path: Path) -> None:
    run = tmp_path / "my; run's $(id)"
    (run / "checkpoints/step-1").mkdir(parents=True)
    (run / "checkpoints/step-1/COMPLETE").touch()
    (run / "manifest.json").write_text(json.dumps({"status": "stopped"}))
    (run / "config.yaml").write_text("method: kto\n")
    with pytest.raises(TropismError) as failed:
        act(run)
    commands = re.findall(r"tropism (?:export|resume|report) .*?(?=`|\. |$)", str(failed.value))
    assert commands
    for command in commands:
        assert shlex.split(command)[2] == str(run)
