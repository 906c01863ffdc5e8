"""Records of a run that somebody else wrote: an export names the file, and leaves nothing."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from exporting import filled_run
from tropism.commands.export import export
from tropism.errors import UsageError


@pytest.mark.parametrize(("name", "key", "value"), [
    ("manifest.json", "libraries", "x"), ("manifest.json", "fingerprints", -1), ("manifest.json", "steps", [1]),
    ("manifest.json", "planned_steps", None), ("manifest.json", "seconds", "x"), ("manifest.json", "given", 3),
    ("manifest.json", "adapter_config", []), ("audit.json", "rows", "x"), ("audit.json", "labels", -1),
    ("audit.json", "split", "x"), ("audit.json", "eval", "x"), ("audit.json", "rows", {"dropped": 1})])
def test_odd_records_are_named(tiny_model_dir: Path, tmp_path: Path, name: str, key: str, value: Any) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_model_dir, run / "model")
    filled_run(run, tiny_model_dir)
    (run / "audit.json").write_text("{}")
    (run / name).write_text(json.dumps(json.loads((run / name).read_text()) | {key: value}))
    with pytest.raises(UsageError, match=rf"{name}: (cannot be read|'\w+' is not a mapping)"):
        export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_manifest_without_versions_exports(tiny_model_dir: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_model_dir, run / "model")
    filled_run(run, tiny_model_dir)
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps(manifest | {"libraries": {}}))
    export(run, tmp_path / "out")
    assert (tmp_path / "out" / "README.md").is_file()


@pytest.mark.parametrize("best", [{}, {"step": [1], "metric": "loss", "value": 1.0}, {"step": 1, "value": None}])
def test_an_odd_record_of_the_best_checkpoint(tiny_model_dir: Path, tmp_path: Path, best: dict[str, Any]) -> None:
    run = filled_run(tmp_path / "run", tiny_model_dir)
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "best.json").write_text(json.dumps(best))
    with pytest.raises(UsageError, match=r"best.json: not the record of a checkpoint"):
        export(run, tmp_path / "out", checkpoint="best")
