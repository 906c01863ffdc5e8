"""Read a run directory, and choose what to export: the result or a checkpoint."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tropism.borders import read_mapping, read_object
from tropism.commands.files import check_run
from tropism.distributed.training_state import model_names
from tropism.errors import CheckpointError, UsageError, clause, first_line
from tropism.observe.checksums import differences
from tropism.observe.manifest import read_manifest
from tropism.observe.rundir import RunDirectory
from tropism.train.checkpoints import files as checkpoint
from tropism.train.checkpoints.content import invalid_entries

ADAPTER_CONFIG = "adapter_config.json"

_USED = ("step", "stop_ids", "fingerprints")  # of a checkpoint


@dataclass(frozen=True)
class ExportedRun:
    """Contents of a run directory.

    Args:
        path: of the directory.
        manifest: content of `manifest.json`.
        options: content of `config.yaml`.
        audit: content of `audit.json`; empty if there is none.
        records: lines of `metrics.jsonl`.
        other_base: directory of the adapter's base, if it was moved since the run.
        trust_remote_code: run code that comes with a model. The run's own option is not obeyed.
    """

    path: Path
    manifest: dict[str, Any]
    options: dict[str, Any]
    audit: dict[str, Any] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)
    other_base: str | None = None
    trust_remote_code: bool = False

    @property
    def directory(self) -> RunDirectory:
        """Its paths by name."""
        return RunDirectory(self.path)

    @property
    def base(self) -> str:
        """The model that the run started from: a directory, hub id, GGUF file, or a description of a Python object."""
        return str(self.manifest.get("model") or self.options.get("model"))

    @property
    def given(self) -> bool:
        """Whether it started from a module that was passed in Python."""
        return "given in Python" in self.base

    @property
    def lora(self) -> dict[str, Any]:
        """Options of the adapter; empty if all weights were trained."""
        lora = self.options.get("lora") or {}
        return lora if lora.get("rank") is not None or lora.get("adapter") is not None else {}


@dataclass(frozen=True)
class Chosen:
    """The result or checkpoint that is exported.

    Args:
        path: RUN/model, or the checkpoint.
        step: optimizer step that the weights are from.
        trainer: content of the checkpoint's `trainer.json`; None for the result.
        is_adapter: whether only an adapter of `ExportedRun.base` was trained.
        notes: warnings for the user.
        best: the metric by which it is the best checkpoint, and its value.
    """

    path: Path
    step: int
    trainer: dict[str, Any] | None = None
    is_adapter: bool = False
    notes: tuple[str, ...] = ()
    best: tuple[str, float] | None = None

    @property
    def stop_ids(self) -> list[int] | None:
        """The trained terminators, if a checkpoint has them."""
        found = (self.trainer or {}).get("stop_ids")
        return None if found is None else [int(token) for token in found]


def read_run(path: Path) -> ExportedRun:
    """Read a run directory.

    Raises:
        UsageError: if it is not one, or a file in it cannot be read.
    """
    check_run(path, "export")
    if not (path / "manifest.json").is_file():
        raise UsageError(f"{path}: not a run directory (no manifest.json)")
    try:
        manifest = read_manifest(path / "manifest.json")
    except ValueError as error:
        raise UsageError(f"{path / 'manifest.json'}: cannot be read: {first_line(error)}") from error
    options, _ = read_mapping(path / "config.yaml")
    _check_mappings(path / "config.yaml", options, "lora")
    audit = read_object(path / "audit.json", kind=UsageError) if (path / "audit.json").is_file() else {}
    _check_audit(path / "audit.json", audit)
    try:
        records = RunDirectory(path).records()
    except (OSError, ValueError) as error:
        raise UsageError(f"{path / 'metrics.jsonl'}: cannot be read: {error}") from error
    return ExportedRun(path, manifest, options, audit, records)


def _check_audit(file: Path, audit: Mapping[str, Any]) -> None:
    _check_mappings(file, audit, "rows", "labels", "split", "eval", "commits")
    _check_mappings(file, audit.get("rows") or {}, "dropped")
    if audit.get("eval"):
        _check_audit(file, {**audit["eval"], "eval": None})


def _check_mappings(file: Path, values: Mapping[str, Any], *names: str) -> None:
    """Check that these values are mappings or absent.

    Raises:
        UsageError: for one that is not.
    """
    for name in names:
        if not isinstance(values.get(name, {}), dict | None):
            raise UsageError(f"{file}: {name!r} is not a mapping")


def choose(run: ExportedRun, named: str | None) -> Chosen:
    """The result, or the named checkpoint. Its files are compared with their checksums.

    Args:
        named: `best`, `last`, a step (`step-00000100` or `100`), a path, or None for the result.

    Raises:
        UsageError: if it was not found.
        CheckpointError: if its files changed, or it belongs to another run.
    """
    return _result(run) if named is None else _checkpoint(run, named)


def _result(run: ExportedRun) -> Chosen:
    model, status = run.directory.model, run.manifest.get("status")
    if status != "done" or not model.is_dir():
        what = f"did not finish (status: {status})" if status != "done" else "finished, but its model/ is missing"
        raise UsageError(f"{run.path}: the run {what}. {_instead(run)}")
    notes = []
    files = run.manifest.get("model_files")
    if files is None:
        notes.append(f"{model}: cannot check whether the model changed: the manifest has no checksums of it")
    elif wrong := differences(model, files):
        raise CheckpointError(f"{model}: changed since the run wrote it: {', '.join(wrong[:3])}. {_instead(run)}")
    return Chosen(model, int(run.manifest.get("steps", 0)), None, (model / ADAPTER_CONFIG).is_file(), tuple(notes))


def _instead(run: ExportedRun) -> str:
    steps = [one.path.name for one in checkpoint.listed(run.directory.checkpoints)]
    return (f"To export {steps[-1]}, pass --checkpoint last." if steps else
            "It has no checkpoint to export instead.")


def _checkpoint(run: ExportedRun, named: str) -> Chosen:
    path, best = _find(run, named)
    try:
        trainer = checkpoint.verify(path)
    except CheckpointError as error:
        others = [one.path.name for one in checkpoint.listed(run.directory.checkpoints) if one.path != path]
        rest = f"Other checkpoints of the run: {', '.join(others)}" if others else "The run has no other checkpoint."
        raise CheckpointError(f"{clause(error)}. {rest}") from error
    if wrong := [name for name in invalid_entries(trainer) if name in trainer and name in _USED]:
        raise CheckpointError(f"{path / 'trainer.json'}: invalid content of {', '.join(wrong)}")
    if "step" not in trainer:
        raise CheckpointError(f"{path / 'trainer.json'}: has no step")
    _check_same(run, path, trainer)
    # The names tell, not the options: `model` may have been an adapter.
    is_adapter = any(".lora_" in name or ".modules_to_save." in name for name in model_names(path / "state"))
    return Chosen(path, int(trainer["step"]), trainer, is_adapter, (), best)


def _find(run: ExportedRun, named: str) -> tuple[Path, tuple[str, float] | None]:
    """Path of the named checkpoint; for `best` also its metric and value."""
    root = run.directory.checkpoints
    finished = {one.step: one.path for one in checkpoint.listed(root)}
    there = (f"The run has {', '.join(path.name for path in finished.values())}" if finished
             else "The run has no checkpoint.")
    if named == "last":
        if not finished:
            raise UsageError(f"--checkpoint last: {root}: the run has no checkpoint. Only a run with "
                             "--save-every keeps them.")
        return finished[max(finished)], None
    if named == "best":
        if not (root / "best.json").is_file():
            raise UsageError(f"--checkpoint best: {root / 'best.json'}: not found. Only a run with --keep-best METRIC "
                             f"keeps its best checkpoint. {there}")
        best = read_object(root / "best.json", kind=UsageError)
        step, value = best.get("step"), best.get("value")
        if type(step) is not int or not isinstance(value, int | float) or "metric" not in best:
            raise UsageError(f"--checkpoint best: {root / 'best.json'}: not the record of a checkpoint. {there}")
        if step not in finished:
            raise UsageError(f"--checkpoint best: {root / str(best.get('checkpoint'))}: not found. {there}")
        return finished[step], (str(best["metric"]), float(value))
    if found := re.fullmatch(r"(?:step-)?(\d+)", named):
        if int(found[1]) not in finished:
            raise UsageError(f"--checkpoint {named}: {root}: no checkpoint of this step. {there}")
        return finished[int(found[1])], None
    path = Path(named).expanduser()
    if not path.is_dir():
        raise UsageError(f"--checkpoint {named}: not best, last, a step or a directory. {there}")
    return path, None


def _check_same(run: ExportedRun, path: Path, trainer: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another run: the model card would describe the wrong training."""
    theirs = trainer.get("fingerprints") or {}
    ours = {**(run.manifest.get("fingerprints") or {}),
            **{name: run.manifest[name] for name in ("policy", "reference", "teacher") if name in run.manifest}}
    wrong = sorted(name for name in theirs.keys() & ours.keys() if name != "config" and theirs[name] != ours[name])
    if wrong:
        raise CheckpointError(f"{path}: not a checkpoint of {run.path}: different {', '.join(wrong)}")
