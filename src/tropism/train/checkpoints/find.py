"""Finds the checkpoint that a run resumes from: the newest intact one, or the one that the user names."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tropism.errors import CheckpointError, UsageError, clause, first_line
from tropism.observe.rundir import RunDirectory
from tropism.train.checkpoints import files as checkpoint
from tropism.train.checkpoints.files import Checkpoint
from tropism.train.run_state import RunState

_MAPPINGS = {"options": (), "offsets": (), "guards": (), "random": ("torch", "numpy", "python"),
             "optimizer": ("groups", "values"), "totals": ("examples", "tokens", "tokens/computed")}
"""Entries of `trainer.json` that hold entries, and those that are used after the checkpoint was chosen."""


@dataclass(frozen=True)
class Origin:
    """The state that a run resumes from.

    Args:
        manifest: of the run so far.
        options: of the run so far.
        checkpoint: to resume from; None to start at step 1.
        trainer: content of its `trainer.json`.
        notes: for the log: why this checkpoint was chosen.
        aside: later checkpoints, which become invalid when the run resumes here.
        named: the user named this checkpoint by its path.
        problem: why no checkpoint of a finished run can be used; empty if one can.
    """

    manifest: dict[str, Any]
    options: dict[str, Any]
    checkpoint: Checkpoint | None = None
    trainer: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()
    aside: tuple[Path, ...] = ()
    named: bool = False
    problem: str = ""

    @property
    def finished(self) -> bool:
        """Whether the run is done, and the user does not go back to an earlier checkpoint."""
        return self.manifest.get("status") == "done" and not self.named

    @property
    def step(self) -> int:
        """The step of the checkpoint; 0 without one."""
        return self.checkpoint.step if self.checkpoint else 0


def find(directory: RunDirectory, resume: str, fall_back: bool = False) -> Origin | None:
    """The state to resume from; None for a new run.

    Args:
        directory: of the run.
        resume: `never`, `auto`, or the run's directory or one of its checkpoints.
        fall_back: if the newest checkpoint is corrupted, use the newest intact one.

    Raises:
        OutputExistsError: if the directory holds other files, or a run and `resume` is `never`.
        UsageError: if `resume` is neither the run directory nor a checkpoint in it, or there is no run.
        CheckpointError: if the checkpoint is not found or corrupted.
    """
    named = None
    if resume not in ("auto", "never"):
        named = Path(resume).expanduser().resolve()
        own = directory.path.resolve()
        if named != own and named.parent != directory.checkpoints.resolve():
            raise UsageError(f"--resume {resume} is neither {directory.path} nor a checkpoint in it. A run resumes in "
                             "its own directory, so pass that directory as --output.")
        if not directory.holds_run:
            raise UsageError(f"{directory.path}: no run to resume: config.yaml and manifest.json not found")
    if resume == "never" or not directory.holds_run:
        directory.refuse_if_used()
        return None
    manifest = _read(directory.path / "manifest.json", json.loads)
    options = _read(directory.path / "config.yaml", yaml.safe_load)
    wanted = named if named is not None and named.parent == directory.checkpoints.resolve() else None
    try:
        return _choose(directory, manifest, options, wanted, fall_back)
    except CheckpointError as error:
        if manifest.get("status") != "done" or wanted is not None:
            raise
        return Origin(manifest, options, problem=str(error))


def _read(file: Path, parse: Any) -> dict[str, Any]:
    """The content of a file of the run directory; empty if the run was stopped before it wrote the file."""
    try:
        found = parse(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise CheckpointError(f"{file}: cannot be read, so the run cannot be resumed: {first_line(error)}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file}: invalid content, so the run cannot be resumed")
    return found


def _choose(directory: RunDirectory, manifest: dict[str, Any], options: dict[str, Any], wanted: Path | None,
            fall_back: bool) -> Origin:
    """The newest checkpoint, or the newest intact one with `fall_back`, or the one that the user named."""
    finished = checkpoint.listed(directory.checkpoints)
    if wanted is not None and wanted.name not in {one.path.name for one in finished}:
        checkpoint.verify(wanted)  # raises if something is wrong with it
        raise CheckpointError(f"{wanted}: not a checkpoint of this run")
    tried = [one for one in reversed(finished) if wanted is None or one.path.name == wanted.name]
    notes: list[str] = []
    for one in tried:
        try:
            trainer = _verified(directory, one)
        except CheckpointError as error:
            if not fall_back or wanted is not None:
                raise CheckpointError(f"{clause(error)}. {_others(directory, finished, one)}") from error
            notes.append(f"skipped checkpoint: {error}")
            continue
        aside = tuple(other.path for other in finished if other.step > one.step)
        return Origin(manifest, options or trainer["options"], one, trainer, tuple(notes), aside, wanted is not None)
    if notes:
        raise CheckpointError(f"{directory.checkpoints}: no intact checkpoint: {'; '.join(notes)}")
    return Origin(manifest, options, None, None, (f"{directory.path}: stopped before its first checkpoint, so it "
                                                  "restarts at step 1",))


def _verified(directory: RunDirectory, one: Checkpoint) -> dict[str, Any]:
    trainer = checkpoint.verify(one.path)
    _check_content(trainer, one)
    for name, size in trainer["offsets"].items():
        file = directory.path / name
        if (file.stat().st_size if file.is_file() else 0) < size:
            raise CheckpointError(f"{file}: truncated file: it had {size:,} bytes when {one.path.name} was written")
    return trainer


def _check_content(trainer: dict[str, Any], one: Checkpoint) -> None:
    """Check the content of `trainer.json`, which someone else may have written with right hashes.

    Raises:
        CheckpointError: with what is odd.
    """
    wrong = [name for name, keys in _MAPPINGS.items()
             if not isinstance(trainer.get(name), dict) or not trainer[name].keys() >= set(keys)]
    try:
        state = RunState()
        state.restore(trainer)
        wrong += [] if state.step == one.step else ["step"]
        wrong += [] if math.isfinite(state.earlier_s) else ["seconds"]
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        wrong.append(first_line(error))
    if not wrong and not all(isinstance(size, int) for size in trainer["offsets"].values()):
        wrong = ["offsets"]
    if wrong:
        raise CheckpointError(f"{one.path / 'trainer.json'}: not what Tropism writes: {wrong[0]}")


def _others(directory: RunDirectory, finished: list[Checkpoint], bad: Checkpoint) -> str:
    """What to do about a corrupted checkpoint."""
    for one in reversed(finished):
        if one != bad:
            try:
                _verified(directory, one)
            except CheckpointError:
                continue
            return f"To resume from {one.path.name}, the newest intact checkpoint, pass --fall-back."
    return "The run has no other intact checkpoint. Use --output NEW to start a new run."
