"""Checkpoint files. A checkpoint is complete, or it does not count.

    RUN/checkpoints/step-00000100/state/         tensors, by torch.distributed.checkpoint
                                  trainer.json   everything else that is needed to resume
                                  model/         the model as Hugging Face loads it, with --checkpoint-model
                                  files.json     size and hash of every file above
                                  COMPLETE       the hash of files.json; written last, once all else is on the disk

It is written as `step-00000100.new`, and replaces an earlier checkpoint of the same step once it is complete. After a
kill between the two, `.new` counts as the checkpoint of its step, and the next run renames it.

The hashes find damage. They lie inside the checkpoint, so they do not tell who wrote it: no file of it can run code.
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from tropism.borders import read_object
from tropism.distributed.training_state import write_tensors
from tropism.distributed.world import World
from tropism.errors import CheckpointError, OutputError, clause, first_line
from tropism.files import bytes_on_disk, free_bytes, system_errors
from tropism.observe.checksums import checksums, file_hash

SCHEMA_VERSION = 1
_STAGED = ".new"
_NAME = re.compile(rf"step-(\d{{8,}})(?:{re.escape(_STAGED)})?")
_MOST_BYTES = 2**29  # of a JSON file that is read
_METADATA_BYTES = 512  # of a tensor in the metadata: its name, shape and place
_RECORD_BYTES = 64 * 1024  # of each other file: options, random states, hashes


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was completed. `verify` checks that it is still intact."""

    path: Path
    step: int

    @property
    def state(self) -> Path:
        """Directory of its tensors."""
        return self.path / "state"


def place_of(root: Path, step: int) -> Path:
    """The directory of the checkpoint after a step, in RUN/checkpoints."""
    return root / f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step in a directory's name, with or without `.new`; None for other names."""
    found = _NAME.fullmatch(path.name)
    return int(found[1]) if found else None


def listed(root: Path) -> list[Checkpoint]:
    """Complete checkpoints in RUN/checkpoints, oldest first. `.new` counts only if its step has no other."""
    found = [Checkpoint(path, step) for path in (root.iterdir() if root.is_dir() else ())
             if (step := step_of(path)) is not None and (path / "COMPLETE").is_file()]
    by_step = {one.step: one for one in sorted(found, key=lambda one: one.path.name, reverse=True)}
    return [by_step[step] for step in sorted(by_step)]


def space_of(tensor_bytes: int, tensors: int, root: Path) -> int:
    """Approximate space of a checkpoint without a model: tensors, their metadata and the other files.

    Args:
        tensors: number of tensors.
        root: RUN/checkpoints.
    """
    return bytes_on_disk([tensor_bytes, tensors * _METADATA_BYTES, *[_RECORD_BYTES] * 3], root)


def write(root: Path, step: int, tensors: dict[str, Tensor], trainer: dict[str, Any],
          model: Callable[[Path], None] | None = None, synced: tuple[Path, ...] = (),
          world: World | None = None, still_owned: Callable[[], None] = lambda: None) -> int:
    """Write a checkpoint. An earlier one of the same step stays valid until this one is complete.

    Args:
        root: RUN/checkpoints.
        tensors: on the CPU.
        trainer: plain values.
        model: writes a model directory to a path.
        synced: files whose size the checkpoint records. They are flushed to the disk before it is complete.
        world: processes that write their tensors and call this together; by default only this one.
        still_owned: raises an OutputError if the run directory now belongs to another process or is gone.

    Returns:
        Its size in bytes.

    Raises:
        OutputError: if it cannot be written, with the required and the free bytes. The partial checkpoint is removed.
    """
    place = place_of(root, step)
    staged = _staged(place)
    only_staged = (staged / "COMPLETE").is_file() and not (place / "COMPLETE").is_file()  # killed before the rename
    path = place if only_staged else staged

    def make_room() -> None:
        still_owned()
        root.mkdir(exist_ok=True)  # not its parents: a run directory that is gone is not made anew
        remove(path)
        (path / "state").mkdir(parents=True)

    try:
        if world is None:
            make_room()
            write_tensors(tensors, path / "state")
        else:
            path = world.broadcast(path)  # processes see the disk at different times
            world.on_main(make_room)
            write_tensors(tensors, path / "state", world)
            if not world.is_main:
                return 0
        content = json.dumps({"schema_version": SCHEMA_VERSION, **trainer}, indent=1)
        (path / "trainer.json").write_text(content, encoding="utf-8")
        if model is not None:
            with system_errors():
                model(path / "model")
        files = checksums(path)
        (path / "files.json").write_text(json.dumps(files, indent=1), encoding="utf-8")
        for file in (*synced, *path.rglob("*"), path):
            _sync(file)
        still_owned()
        (path / "COMPLETE").write_text(file_hash(path / "files.json") + "\n", encoding="utf-8")
        for file in (path / "COMPLETE", path, root, root.parent):
            _sync(file)
    except (OSError, OutputError) as error:
        still_owned()  # else what is there belongs to another process
        if world is None or world.is_main:
            shutil.rmtree(path, ignore_errors=True)
        free = free_bytes(root)
        needed = space_of(sum(tensor.numel() * tensor.itemsize for tensor in tensors.values()), len(tensors), root)
        reason = clause((error.strerror or error) if isinstance(error, OSError) else error)
        raise OutputError(f"{place}: the checkpoint could not be written: {reason}. About {needed:,} bytes are "
                          f"needed{' besides its model' if model else ''}, {free:,} are free. Earlier checkpoints are "
                          "unchanged.") from error
    try:
        if path == staged:
            remove(place)
            path.rename(place)
    except OSError as error:
        raise OutputError(f"{place}: cannot replace the earlier checkpoint of this step: {error.strerror}. The new "
                          f"checkpoint is {path}") from error
    return sum(entry["bytes"] for entry in files.values())


def remove(path: Path) -> None:
    """Remove a checkpoint. COMPLETE goes first, so that a partly removed one does not count."""
    (path / "COMPLETE").unlink(missing_ok=True)
    if path.exists():
        shutil.rmtree(path)


def tidy(root: Path) -> None:
    """Finish what a kill interrupted: give a complete `.new` the name of its step, and remove incomplete ones."""
    complete = [one.path for one in listed(root)]
    for path in list(root.iterdir()) if root.is_dir() else ():
        if step_of(path) is not None and path not in complete:
            remove(path)
    for path in complete:
        path.rename(path.with_name(path.name.removesuffix(_STAGED)))


def invalidate(path: Path) -> None:
    """Make a checkpoint invalid. Its files stay until the next one is written."""
    for place in (_staged(path), path):
        (place / "COMPLETE").unlink(missing_ok=True)


def _staged(place: Path) -> Path:
    """The path under which a checkpoint is written before it is renamed."""
    return place.with_name(place.name.removesuffix(_STAGED) + _STAGED)


def verify(path: Path) -> dict[str, Any]:
    """Check the hash of every file.

    Returns:
        The content of `trainer.json`.

    Raises:
        CheckpointError: naming the file and what is wrong with it.
    """
    try:
        return _verified(path)
    except OSError as error:  # the run may remove it at this moment
        raise CheckpointError(f"{error.filename or path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: invalid checkpoint: {type(error).__name__}: {first_line(error)}") from error


def _verified(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise CheckpointError(f"{path}: checkpoint not found")
    for file in path.rglob("*"):
        if file.exists() and not (file.is_file() or file.is_dir()):  # reading a named pipe would wait
            raise CheckpointError(f"{file}: not a regular file. Remove it.")
    _check_version(path / "trainer.json")
    if not (path / "COMPLETE").is_file():
        raise CheckpointError(f"{path}: incomplete checkpoint (no file COMPLETE)")
    if not (path / "files.json").is_file():
        raise CheckpointError(f"{path / 'files.json'}: not found")
    if file_hash(path / "files.json") != (path / "COMPLETE").read_bytes().decode(errors="replace").strip():
        raise CheckpointError(f"{path / 'files.json'}: corrupted file: its hash is not the one in COMPLETE")
    files = recorded(path / "files.json")
    present = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
    for name, entry in files.items():
        file = path / name
        if name not in present:  # also a name that leads out of the directory
            raise CheckpointError(f"{file}: not found")
        if not (isinstance(entry, dict) and {"bytes", "blake2b"} <= entry.keys() and isinstance(entry["bytes"], int)):
            raise CheckpointError(f"{path / 'files.json'}: has no size and hash of {name}")
        if file.stat().st_size != entry["bytes"]:
            raise CheckpointError(f"{file}: corrupted file: {file.stat().st_size:,} of {entry['bytes']:,} bytes")
    for file in (path / "state").rglob("*"):
        if file.relative_to(path).as_posix() not in files and not file.is_dir():
            raise CheckpointError(f"{file}: not part of this checkpoint. Remove it.")
    with ThreadPoolExecutor() as pool:
        for name, digest in zip(files, pool.map(lambda name: file_hash(path / name), files), strict=True):
            if digest != files[name]["blake2b"]:
                raise CheckpointError(f"{path / name}: corrupted file: its hash is not the one in files.json")
    return recorded(path / "trainer.json")


def recorded(file: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint. Its hash may be right and the content still anything, if someone else
    wrote both.

    Raises:
        CheckpointError: if it is anything else.
    """
    return read_object(file, _MOST_BYTES, CheckpointError, nan=True)


def _check_version(file: Path) -> None:
    """Runs before the hashes are checked, since another version may hash differently. Skips unreadable files."""
    try:
        version = recorded(file)["schema_version"]
    except (CheckpointError, KeyError):
        return
    if version != SCHEMA_VERSION:
        raise CheckpointError(f"{file}: unsupported schema version {version} (this version of Tropism reads version "
                              f"{SCHEMA_VERSION})")


def _sync(path: Path) -> None:
    if not path.exists():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
