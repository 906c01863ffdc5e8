"""Finds the checkpoint that a run resumes from: the newest intact one, or the one that the user names."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tropism.borders import read_mapping
from tropism.errors import CheckpointError, DataError, UsageError, clause, first_line
from tropism.observe.log_files import check_log
from tropism.observe.manifest import read_manifest
from tropism.observe.rundir import RunDirectory
from tropism.train.checkpoints import files as checkpoint
from tropism.train.checkpoints.content import invalid_entries
from tropism.train.checkpoints.files import Checkpoint
from tropism.train.run_state import RunState

FROZEN = ("policy", "reference", "teacher", "layout")
"""Facts of the manifest that a checkpoint has among its fingerprints."""


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

    @property
    def in_manifest(self) -> dict[str, str]:
        """The fingerprints in the manifest, which may be lost or edited."""
        return {**self.manifest.get("fingerprints", {}),
                **{name: self.manifest[name] for name in FROZEN if name in self.manifest}}

    @property
    def in_checkpoint(self) -> dict[str, str]:
        """The fingerprints in the checkpoint."""
        return dict((self.trainer or {}).get("fingerprints", {}))

    @property
    def fingerprints(self) -> dict[str, str]:
        """All that is known of the run so far."""
        return self.in_manifest | self.in_checkpoint

    @property
    def libraries(self) -> dict[str, str]:
        """Versions of libraries when the run started, or at its checkpoint if the manifest does not say."""
        return dict(self.manifest.get("libraries") or (self.trainer or {}).get("libraries", {}))


def find(directory: RunDirectory, resume: str, fall_back: bool = False) -> Origin | None:
    """The state to resume from; None for a new run.

    Args:
        directory: of the run.
        resume: `never`, `auto`, or the run's directory or one of its checkpoints.
        fall_back: if the newest checkpoint is corrupted, use the newest intact one.

    Raises:
        OutputExistsError: if the directory holds other files, or a run and `resume` is `never`; if a file of the run is
            a link, pipe or device.
        UsageError: if `resume` is neither the run directory nor a checkpoint in it, or there is no run.
        CheckpointError: if the checkpoint is not found or corrupted.
    """
    wanted = directory.check_resume(resume)
    if resume == "never" or not directory.holds_run:
        return None
    manifest, lost = _read(directory.path / "manifest.json", read_manifest)
    options, unread = _read(directory.path / "config.yaml", _options)
    try:
        origin = _choose(directory, manifest, options, wanted, fall_back)
        if origin.trainer is None:
            if lost and directory.model.exists():
                raise CheckpointError(f"{lost}, so whether the run is finished is unknown, and it has no checkpoint to "
                                      f"resume from. Its model is in {directory.model}. Use --output NEW to start a "
                                      "new run.")
            return origin
        notes = [f"{problem}. What the checkpoint recorded is used instead." for problem in (lost, unread) if problem]
        return replace(origin, notes=(*notes, *origin.notes))
    except CheckpointError as error:
        if manifest.get("status") != "done" or wanted is not None:
            raise
        return Origin(manifest, options, problem=str(error))


def recorded_options(run: Path, named: Path) -> tuple[dict[str, Any], Path] | None:
    """The options that a checkpoint of a run recorded, and the file that holds them; None without a checkpoint.

    Args:
        named: the run, or the checkpoint whose options are wanted.

    Raises:
        CheckpointError: if the checkpoint is corrupted.
    """
    directory = RunDirectory(run)
    directory.check_kinds()
    finished = {one.step: one for one in checkpoint.listed(directory.checkpoints)}
    step = checkpoint.step_of(named) if named != run else max(finished, default=None)
    if step not in finished:
        return None
    one = finished[step]
    trainer = checkpoint.verify(one.path)
    _check_content(one, trainer)
    return trainer["options"], one.path / "trainer.json"


def _read(file: Path, read: Callable[[Path], dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """The content of a file of the run directory, empty if it has none, and why it has none."""
    try:
        return read(file), ""
    except FileNotFoundError:
        return {}, f"{file}: not found"
    except UsageError as error:
        return {}, clause(error)
    except (OSError, ValueError) as error:
        return {}, f"{file}: cannot be read: {clause(first_line(error))}"


def _options(file: Path) -> dict[str, Any]:
    file.stat()  # raises FileNotFoundError
    found, _ = read_mapping(file)
    if not found:
        raise ValueError("not a mapping")
    return found


def _choose(directory: RunDirectory, manifest: dict[str, Any], options: dict[str, Any], wanted: Path | None,
            fall_back: bool) -> Origin:
    """The newest checkpoint, or the newest intact one with `fall_back`, or the one that the user named."""
    finished = checkpoint.listed(directory.checkpoints)
    step = None if wanted is None else checkpoint.step_of(wanted)
    if wanted is not None and step not in {one.step for one in finished}:
        checkpoint.verify(wanted)  # raises if something is wrong with it
        raise CheckpointError(f"{wanted}: not a checkpoint of this run")
    tried = [one for one in reversed(finished) if wanted is None or one.step == step]
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
    """The content of `trainer.json`, if the checkpoint is intact, and the logs so far too: they are read at the end."""
    trainer = checkpoint.verify(one.path)
    _check_content(one, trainer)
    for name, size in trainer["offsets"].items():
        file = directory.path / name
        try:
            there = file.stat().st_size
        except FileNotFoundError:
            raise CheckpointError(f"{file}: not found: it had {size:,} bytes when {one.path.name} was written. Restore "
                                  "it to resume from this checkpoint") from None
        if there < size:
            raise CheckpointError(f"{file}: truncated file: it had {size:,} bytes when {one.path.name} was written")
        try:
            check_log(file, size)
        except DataError as error:
            raise CheckpointError(f"{clause(error)}. Correct that line, and keep its length with spaces at its "
                                  "end") from error
    return trainer


def _check_content(one: Checkpoint, trainer: dict[str, Any]) -> None:
    """Check that a checkpoint has what a run is restored from."""
    try:
        wrong = invalid_entries(trainer) or ["step"] * (trainer["step"] != one.step)
        if not wrong:
            RunState().restore(trainer)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RuntimeError) as error:
        raise CheckpointError(f"{one.path / 'trainer.json'}: invalid content: {type(error).__name__}: "
                              f"{first_line(error)}") from error
    if wrong:
        raise CheckpointError(f"{one.path / 'trainer.json'}: invalid content of {', '.join(wrong)}")


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
