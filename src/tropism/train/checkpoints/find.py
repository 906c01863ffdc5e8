"""What a run goes on from: the newest checkpoint in its directory that is whole."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tropism.errors import CheckpointError, UsageError
from tropism.observe.rundir import RunDirectory
from tropism.train.checkpoints import files as checkpoint
from tropism.train.checkpoints.files import Checkpoint


@dataclass(frozen=True)
class Origin:
    """What a run goes on from.

    Args:
        manifest: of the sittings before.
        options: with which it ran.
        checkpoint: where it goes on; None to begin at step 1.
        trainer: content of its `trainer.json`.
        notes: what a person should know of how it was chosen.
        aside: checkpoints that no longer count if it goes on from here.
        named: this checkpoint was asked for by its path.
        problem: why there is no checkpoint, where those of a finished run cannot be used.
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
        """Whether the run came to its end, and is not to go back from there."""
        return self.manifest.get("status") == "done" and not self.named

    @property
    def step(self) -> int:
        """The last step that is kept."""
        return self.checkpoint.step if self.checkpoint else 0


def find(directory: RunDirectory, resume: str, fall_back: bool = False) -> Origin | None:
    """What there is to go on from; None for a run that begins.

    Args:
        directory: of the run.
        resume: `never`, `auto`, or the run's directory or one of its checkpoints.
        fall_back: take an earlier checkpoint where a later one is damaged.

    Raises:
        OutputExistsError: if the directory holds something that is no run, or `resume` is `never`.
        UsageError: if a path leads elsewhere.
        CheckpointError: if there is nothing to go on from although it was named, or it is damaged.
    """
    named = None
    if resume not in ("auto", "never"):
        named = Path(resume).expanduser().resolve()
        own = directory.path.resolve()
        if named != own and named.parent != directory.checkpoints.resolve():
            raise UsageError(f"resume {resume}: is neither {directory.path} nor a checkpoint in it; a run goes on in "
                             "its own directory, so name that one as output")
        if not directory.holds_run:
            raise UsageError(f"{directory.path}: there is no run to go on with (no config.yaml and manifest.json)")
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
    """A file of the run directory; empty if the run did not come to write it."""
    try:
        found = parse(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise CheckpointError(f"{file}: cannot be read, so the run cannot go on: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file}: cannot be read, so the run cannot go on")
    return found


def _choose(directory: RunDirectory, manifest: dict[str, Any], options: dict[str, Any], wanted: Path | None,
            fall_back: bool) -> Origin:
    """The newest checkpoint that is whole, or the one that was named."""
    finished = checkpoint.listed(directory.checkpoints)
    if wanted is not None and wanted.name not in {one.path.name for one in finished}:
        checkpoint.verify(wanted)  # says what is wrong with it
        raise CheckpointError(f"{wanted}: is no checkpoint of this run")
    tried = [one for one in reversed(finished) if wanted is None or one.path.name == wanted.name]
    notes: list[str] = []
    for one in tried:
        try:
            trainer = _verified(directory, one)
        except CheckpointError as error:
            if not fall_back or wanted is not None:
                raise CheckpointError(f"{error}. {_others(directory, finished, one)}") from error
            notes.append(f"left out: {error}")
            continue
        aside = tuple(other.path for other in finished if other.step > one.step)
        return Origin(manifest, options or trainer["options"], one, trainer, tuple(notes), aside, wanted is not None)
    if notes:
        raise CheckpointError(f"{directory.checkpoints}: no checkpoint is whole: {'; '.join(notes)}")
    return Origin(manifest, options, None, None, (f"{directory.path}: stopped before its first checkpoint; it begins "
                                                  "at step 1 again",))


def _verified(directory: RunDirectory, one: Checkpoint) -> dict[str, Any]:
    trainer = checkpoint.verify(one.path)
    for name, size in trainer["offsets"].items():
        file = directory.path / name
        if (file.stat().st_size if file.is_file() else 0) < size:
            raise CheckpointError(f"{file}: is shorter than when {one.path.name} was written ({size} bytes), so its "
                                  "records cannot be continued")
    return trainer


def _others(directory: RunDirectory, finished: list[Checkpoint], bad: Checkpoint) -> str:
    """Which other checkpoint is whole, for the error of one that is not."""
    for one in reversed(finished):
        if one != bad:
            try:
                _verified(directory, one)
            except CheckpointError:
                continue
            return f"{one.path.name} is whole: --fall-back goes on from the newest one that is"
    return "No other checkpoint of the run is whole; --output NEW begins anew"
