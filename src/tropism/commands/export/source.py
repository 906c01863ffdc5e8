"""What is exported: the result of a run or one of its checkpoints, and what the run says of it."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tropism.distributed.state import model_names
from tropism.errors import CheckpointError, UsageError
from tropism.observe.checksums import differences
from tropism.observe.rundir import RunDirectory
from tropism.train.checkpoints import files as checkpoint

ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class ExportedRun:
    """What a run directory holds; nothing of it is changed.

    Args:
        path: of the directory.
        manifest: content of `manifest.json`.
        options: content of `config.yaml`.
        audit: content of `audit.json`; empty if there is none.
        records: lines of `metrics.jsonl`.
        other_base: where the base of its adapter lies, if not where the run found it.
    """

    path: Path
    manifest: dict[str, Any]
    options: dict[str, Any]
    audit: dict[str, Any] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)
    other_base: str | None = None

    @property
    def directory(self) -> RunDirectory:
        """Its places by name."""
        return RunDirectory(self.path)

    @property
    def base(self) -> str:
        """The model that the run began with: a directory, a hub id, a GGUF file, or words for one given in Python."""
        return str(self.manifest.get("model") or self.options.get("model"))

    @property
    def given(self) -> bool:
        """Whether it began with a module from Python."""
        return "given in Python" in self.base

    @property
    def lora(self) -> dict[str, Any]:
        """Options of the adapter; empty where all weights were trained."""
        lora = self.options.get("lora") or {}
        return lora if lora.get("rank") is not None or lora.get("adapter") is not None else {}

    @property
    def trust_remote_code(self) -> bool:
        """As the run was told."""
        return bool(self.options.get("trust_remote_code"))


@dataclass(frozen=True)
class Chosen:
    """What is exported of a run.

    Args:
        path: RUN/model, or the checkpoint.
        step: after which the weights are these.
        trainer: content of the checkpoint's `trainer.json`; None for the result.
        is_adapter: only an adapter of `ExportedRun.base` was trained.
        notes: what a person should know.
        best: by which metric it is the best, and its value.
    """

    path: Path
    step: int
    trainer: dict[str, Any] | None = None
    is_adapter: bool = False
    notes: tuple[str, ...] = ()
    best: tuple[str, float] | None = None

    @property
    def stop_ids(self) -> list[int] | None:
        """The trained terminators, where a checkpoint keeps them."""
        found = (self.trainer or {}).get("stop_ids")
        return None if found is None else [int(token) for token in found]


def read_run(path: Path) -> ExportedRun:
    """Read what a run says of itself.

    Raises:
        UsageError: if there is no run, or a file of it cannot be read.
    """
    if not (path / "manifest.json").is_file():
        run = path.parent.parent
        hint = ""
        if (path / "COMPLETE").is_file() and (run / "manifest.json").is_file():
            hint = f"; this is a checkpoint: tropism export {run} --checkpoint {path.name}"
        elif path.name == "model" and (path.parent / "manifest.json").is_file():
            hint = f"; name the run: tropism export {path.parent}"
        raise UsageError(f"{path}: holds no run (there is no manifest.json){hint}")
    manifest = _read(path / "manifest.json", json.loads)
    options = _read(path / "config.yaml", yaml.safe_load)
    audit = _read(path / "audit.json", json.loads) if (path / "audit.json").is_file() else {}
    try:
        records = RunDirectory(path).records()
    except (OSError, ValueError) as error:
        raise UsageError(f"{path / 'metrics.jsonl'}: cannot be read: {error}") from error
    return ExportedRun(path, manifest, options, audit, records)


def _read(file: Path, parse: Any) -> dict[str, Any]:
    try:
        found = parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"{file}: cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{file}: cannot be read: it holds no fields")
    return found


def choose(run: ExportedRun, named: str | None) -> Chosen:
    """The result, or the checkpoint that was named. Its files are compared with what was written.

    Args:
        named: `best`, `last`, a step (`step-00000100` or `100`), a path, or None for the result.

    Raises:
        UsageError: if there is no such thing.
        CheckpointError: if its files are not what was written, or it belongs to another run.
    """
    return _result(run) if named is None else _checkpoint(run, named)


def _result(run: ExportedRun) -> Chosen:
    model, status = run.directory.model, run.manifest.get("status")
    if status != "done" or not model.is_dir():
        what = (f"has not come to its end (status: {status})" if status != "done" else "is done, but RUN/model is gone")
        raise UsageError(f"{run.path}: the run {what}. {_instead(run)}")
    notes = []
    files = run.manifest.get("model_files")
    if files is None:
        notes.append("the manifest has no checksums of RUN/model: whether it is as it was written cannot be told")
    elif wrong := differences(model, files):
        raise CheckpointError(f"{model}: is not what the run wrote: {', '.join(wrong[:3])}. {_instead(run)}")
    return Chosen(model, int(run.manifest.get("steps", 0)), None, (model / ADAPTER_CONFIG).is_file(), tuple(notes))


def _instead(run: ExportedRun) -> str:
    steps = [one.path.name for one in checkpoint.listed(run.directory.checkpoints)]
    return (f"--checkpoint last exports {steps[-1]}" if steps else
            "It has no checkpoint that could be exported in its place")


def _checkpoint(run: ExportedRun, named: str) -> Chosen:
    path, best = _find(run, named)
    try:
        trainer = checkpoint.verify(path)
    except CheckpointError as error:
        others = [one.path.name for one in checkpoint.listed(run.directory.checkpoints) if one.path != path]
        raise CheckpointError(f"{error}. " + (f"Other checkpoints of the run: {', '.join(others)}" if others else
                                              "It is the only one of the run")) from error
    _check_same(run, path, trainer)
    # An adapter may be what `model` named, so that the options do not say it. The names do.
    is_adapter = any(".lora_" in name or ".modules_to_save." in name for name in model_names(path / "state"))
    return Chosen(path, int(trainer["step"]), trainer, is_adapter, (), best)


def _find(run: ExportedRun, named: str) -> tuple[Path, tuple[str, float] | None]:
    """Where a checkpoint lies that was named, and by what it is the best if that was asked for."""
    root = run.directory.checkpoints
    finished = {one.step: one.path for one in checkpoint.listed(root)}
    there = (f"there are: {', '.join(path.name for path in finished.values())}" if finished
             else "the run has no checkpoint")
    if named == "last":
        if not finished:
            raise UsageError(f"--checkpoint last: {root}: the run has no checkpoint (--save-every writes them)")
        return finished[max(finished)], None
    if named == "best":
        if not (root / "best.json").is_file():
            raise UsageError(f"--checkpoint best: {root / 'best.json'}: is not there: the run kept no best checkpoint "
                             f"(--keep-best METRIC does); {there}")
        best = _read(root / "best.json", json.loads)
        if best.get("step") not in finished:
            raise UsageError(f"--checkpoint best: {root / str(best.get('checkpoint'))}: is not there; {there}")
        return finished[best["step"]], (str(best["metric"]), float(best["value"]))
    if found := re.fullmatch(r"(?:step-)?(\d+)", named):
        if int(found[1]) not in finished:
            raise UsageError(f"--checkpoint {named}: {root}: no checkpoint of that step; {there}")
        return finished[int(found[1])], None
    path = Path(named).expanduser()
    if not path.is_dir():
        raise UsageError(f"--checkpoint {named}: is neither best, last, a step nor a directory; {there}")
    return path, None


def _check_same(run: ExportedRun, path: Path, trainer: Mapping[str, Any]) -> None:
    """A checkpoint from elsewhere may be of another run: the card would tell of what it was not made from."""
    theirs = trainer.get("fingerprints") or {}
    ours = {**(run.manifest.get("fingerprints") or {}),
            **{name: run.manifest[name] for name in ("policy", "reference", "teacher") if name in run.manifest}}
    wrong = sorted(name for name in theirs.keys() & ours.keys() if name != "config" and theirs[name] != ours[name])
    if wrong:
        raise CheckpointError(f"{path}: belongs to another run than {run.path}: other {', '.join(wrong)}")
