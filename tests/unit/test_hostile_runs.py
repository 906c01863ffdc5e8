"""Files of somebody else's run directory: every reader ends in one sentence, soon and in bounded memory."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from exporting import filled_run
from tropism.borders import read_mapping
from tropism.commands.export.read_run import choose, read_run
from tropism.commands.export.run import export
from tropism.commands.verify import _row_counts, verify
from tropism.errors import CheckpointError, TropismError, UsageError
from tropism.model.base_weights import recorded_hash
from tropism.observe.checksums import checksums
from tropism.observe.rundir import RunDirectory
from tropism.train.checkpoints import files as checkpoint
from tropism.train.checkpoints.find import find

NESTED = "[" * 100_000
BOMB = "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10))


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    signal.alarm(30)
    yield
    signal.alarm(0)


@pytest.fixture
def run(tiny_model_dir: Path, tmp_path: Path) -> Path:
    path = tmp_path / "run"
    shutil.copytree(tiny_model_dir, path / "model")
    filled_run(path, tiny_model_dir)
    checkpoint.write(path / "checkpoints", 2, {"model/weight": torch.ones(3)}, {"step": 2, "fingerprints": {}})
    return path


@pytest.mark.parametrize(("name", "content"), [
    ("config.yaml", NESTED), ("config.yaml", BOMB), ("config.yaml", "- 1"), ("audit.json", NESTED),
    ("audit.json", "[]"), ("manifest.json", NESTED), ("manifest.json", '{"steps": "many"}'),
    ("manifest.json", '{"given": "x"}'), ("config.yaml", "lora: 5"), ("audit.json", '{"labels": 5}'),
    ("audit.json", '{"rows": {"dropped": []}}'), ("audit.json", '{"eval": {"split": "x"}}')])
def test_export_reads_no_more_than_a_run_writes(run: Path, name: str, content: str) -> None:
    """G2: a sentence that names the file, for nesting, aliases and other types."""
    (run / name).write_text(content)
    with pytest.raises(UsageError, match=name):
        read_run(run)


@pytest.mark.parametrize("content", [NESTED, "[1]", '{"step": NaN}'])
def test_the_best_checkpoint(run: Path, content: str) -> None:
    (run / "checkpoints" / "best.json").write_text(content)
    with pytest.raises(UsageError, match=r"best\.json"):
        choose(read_run(run), "best")


def test_the_config_of_a_result(run: Path, tmp_path: Path) -> None:
    """G2: whoever wrote it may have written its checksum too."""
    (run / "model" / "config.json").write_text(NESTED)
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps({**manifest, "model_files": checksums(run / "model")}))
    with pytest.raises(TropismError, match=r"config\.json"):
        export(run, tmp_path / "out")


@pytest.mark.parametrize("content", [NESTED, BOMB, ""])
def test_a_config_that_cannot_be_read_is_empty(run: Path, content: str) -> None:
    """C1: a run resumes with the options of its checkpoint."""
    (run / "config.yaml").write_text(content)
    origin = find(RunDirectory(run), "auto")
    assert origin is not None
    assert origin.options == {}


@pytest.mark.parametrize("values", [
    {"step": "x"}, {"step": None}, {"stop_ids": 5}, {"stop_ids": ["x"]}, {"stop_ids": [10**30]}, {"fingerprints": [1]}])
def test_what_an_export_takes_from_a_checkpoint(run: Path, values: dict[str, Any]) -> None:
    """G2: a sentence, though its hashes are right."""
    checkpoint.write(run / "checkpoints", 2, {"model/weight": torch.ones(3)}, {"step": 2, "fingerprints": {}} | values)
    with pytest.raises(CheckpointError, match=r"trainer\.json: invalid content"):
        choose(read_run(run), "last")


def test_a_pipe_in_a_checkpoint(run: Path) -> None:
    """G2: it is not opened, which would wait for its other end."""
    file = run / "checkpoints" / "step-00000002" / "trainer.json"
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(CheckpointError, match=r"trainer\.json: not a regular file"):
        checkpoint.verify(file.parent)
    assert any(check.state == "differs" and "trainer.json" in check.how for check in verify(run).checks)


def test_a_manifest_beside_an_adapter(run: Path) -> None:
    """G2: the manifest is only a hint there."""
    for make in (os.mkfifo, lambda path: path.write_text(NESTED), lambda path: path.write_text("[]")):
        (run / "manifest.json").unlink()
        make(run / "manifest.json")
        assert recorded_hash(run / "model") is None


def test_the_counts_of_rows(run: Path) -> None:
    """G2: they only explain a difference."""
    for content in (NESTED, "[]", '{"split": 5}', '{"split": {"train": null}}', '{"split": {"train": "x"}}'):
        (run / "audit.json").write_text(content)
        assert _row_counts(run, "data", 3) == "its rows changed"


def test_a_mapping(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    for content, value in (("", {}), ("a: 1\nb: &b [1]\nc: *b", {"a": 1, "b": [1], "c": [1]})):
        file.write_text(content)
        assert read_mapping(file)[0] == value
    for content, text in ((BOMB, "aliases in it expand"), ("a: &a [*a]", "contains it"), ("a: 'b", "not valid YAML"),
                          (NESTED, "nested too deeply"), ("1", "not a mapping")):
        file.write_text(content)
        with pytest.raises(UsageError, match=text):
            read_mapping(file)


def test_a_checkpoint_may_hold_numbers_that_are_not_finite(tmp_path: Path) -> None:
    """C2: a run whose loss was NaN can still be read."""
    values = {"evaluation": {"loss": float("inf")}, "why": float("nan")}
    checkpoint.write(tmp_path, 2, {"model/weight": torch.ones(3)}, values)
    assert "NaN" in (tmp_path / "step-00000002" / "trainer.json").read_text()
    assert checkpoint.verify(tmp_path / "step-00000002")["evaluation"]["loss"] == float("inf")
