"""A checkpoint on the disk: written whole, or not there.

    RUN/checkpoints/step-00000100/state/         tensors, by torch.distributed.checkpoint
                                  trainer.json   everything else that the run needs to go on
                                  model/         the model as Hugging Face loads it, where that was asked for
                                  files.json     size and hash of every file above
                                  COMPLETE       the hash of files.json; written last, after all else is on the disk

It is written under the name `step-00000100.new`, and takes the place of an earlier one of its step when it is complete.

Nothing is opened before its hash was compared with the one that was written: the metadata of `state/` is a pickle.
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

from tropism.distributed.state import write_tensors
from tropism.distributed.world import World
from tropism.errors import CheckpointError, OutputError
from tropism.observe.checksums import checksums, file_hash

SCHEMA_VERSION = 1
_BESIDE = ".new"
_NAME = re.compile(rf"step-(\d{{8,}})(?:{re.escape(_BESIDE)})?")
_CHUNK_BYTES = 2**22


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One that was finished; whether it is still whole is another question (`verify`)."""

    path: Path
    step: int

    @property
    def state(self) -> Path:
        """Where its tensors lie."""
        return self.path / "state"


def place_of(root: Path, step: int) -> Path:
    """The directory of the checkpoint after a step, in RUN/checkpoints."""
    return root / f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step that a directory's name says, if it says one; also where it is not in its place yet."""
    found = _NAME.fullmatch(path.name)
    return int(found[1]) if found else None


def listed(root: Path) -> list[Checkpoint]:
    """Finished checkpoints in RUN/checkpoints, oldest first; of a step the one in its place, where that is finished."""
    found = [Checkpoint(path, step) for path in (root.iterdir() if root.is_dir() else ())
             if (step := step_of(path)) is not None and (path / "COMPLETE").is_file()]
    by_step = {one.step: one for one in sorted(found, key=lambda one: one.path.name, reverse=True)}
    return [by_step[step] for step in sorted(by_step)]


def write(root: Path, step: int, tensors: dict[str, Tensor], trainer: dict[str, Any],
          model: Callable[[Path], None] | None = None, synced: tuple[Path, ...] = (),
          world: World | None = None) -> int:
    """Write a checkpoint. One of the same step counts until this one does.

    Args:
        root: RUN/checkpoints.
        tensors: on the CPU.
        trainer: plain values.
        model: writes a model directory to a path.
        synced: files whose size the checkpoint remembers; they are brought to the disk before it counts.
        world: the processes that write their tensors together, and call this together; by default this one alone.

    Returns:
        Its size in bytes.

    Raises:
        OutputError: if the disk refuses, with the bytes that are needed and free. What was written of it is removed.
    """
    place = place_of(root, step)
    beside = _beside(place)
    only_beside = (beside / "COMPLETE").is_file() and not (place / "COMPLETE").is_file()  # was killed before the rename
    path = place if only_beside else beside

    def make_room() -> None:
        remove(path)
        (path / "state").mkdir(parents=True)

    try:
        if world is None:
            make_room()
            write_tensors(tensors, path / "state")
        else:
            path = world.broadcast(path)  # they look at the disk at different times
            world.on_main(make_room)
            write_tensors(tensors, path / "state", world)
            if not world.is_main:
                return 0
        content = json.dumps({"schema_version": SCHEMA_VERSION, **trainer}, indent=1)
        (path / "trainer.json").write_text(content, encoding="utf-8")
        if model is not None:
            model(path / "model")
        files = checksums(path)
        (path / "files.json").write_text(json.dumps(files, indent=1), encoding="utf-8")
        for file in (*synced, *path.rglob("*"), path):
            _sync(file)
        (path / "COMPLETE").write_text(file_hash(path / "files.json") + "\n", encoding="utf-8")
        for file in (path / "COMPLETE", path, root, root.parent):
            _sync(file)
    except (OSError, OutputError) as error:
        if world is None or world.is_main:
            shutil.rmtree(path, ignore_errors=True)
        free = _free(root)
        needed = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        raise OutputError(f"{place}: the checkpoint could not be written: {reason}. It takes {needed} bytes for its "
                          f"tensors, and {free} bytes are free. What was there before is untouched") from error
    try:
        if path == beside:
            remove(place)
            path.rename(place)
    except OSError as error:
        raise OutputError(f"{place}: an earlier checkpoint of this step cannot be replaced: {error.strerror}. The new "
                          f"one is {path}") from error
    return sum(entry["bytes"] for entry in files.values())


def remove(path: Path) -> None:
    """Remove a checkpoint, which stops to count before its files begin to go."""
    (path / "COMPLETE").unlink(missing_ok=True)
    if path.exists():
        shutil.rmtree(path)


def set_aside(path: Path) -> None:
    """Let a checkpoint no longer count. Its files stay until the next one is written."""
    for place in (_beside(path), path):
        (place / "COMPLETE").unlink(missing_ok=True)


def _beside(place: Path) -> Path:
    """Where a checkpoint is written before it takes its place."""
    return place.with_name(place.name.removesuffix(_BESIDE) + _BESIDE)


def verify(path: Path) -> dict[str, Any]:
    """Compare every file with what was written, and hand out `trainer.json`.

    Raises:
        CheckpointError: with a sentence of its own for each thing that can be wrong.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such checkpoint")
    _check_version(path / "trainer.json")
    if not (path / "COMPLETE").is_file():
        raise CheckpointError(f"{path}: was never finished (it has no file COMPLETE)")
    if not (path / "files.json").is_file():
        raise CheckpointError(f"{path / 'files.json'}: is missing")
    if file_hash(path / "files.json") != (path / "COMPLETE").read_bytes().decode(errors="replace").strip():
        raise CheckpointError(f"{path / 'files.json'}: is damaged, or COMPLETE is: its hash is not the one in COMPLETE")
    files = json.loads((path / "files.json").read_text(encoding="utf-8"))
    for name, entry in files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file}: is missing")
        if file.stat().st_size != entry["bytes"]:
            raise CheckpointError(f"{file}: is damaged: it has {file.stat().st_size} bytes of {entry['bytes']}")
    with ThreadPoolExecutor() as pool:
        for name, digest in zip(files, pool.map(lambda name: file_hash(path / name), files), strict=True):
            if digest != files[name]["blake2b"]:
                raise CheckpointError(f"{path / name}: is damaged: its content is not what was written")
    trainer: dict[str, Any] = json.loads((path / "trainer.json").read_text(encoding="utf-8"))
    return trainer


def _check_version(file: Path) -> None:
    """Before hashes: another version may hash in another way. What cannot be read is damaged, and found to be."""
    try:
        version = json.loads(file.read_text(encoding="utf-8"))["schema_version"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if version != SCHEMA_VERSION:
        raise CheckpointError(f"{file}: has schema version {version}, and this version of Tropism reads "
                              f"{SCHEMA_VERSION}")


def _sync(path: Path) -> None:
    if not path.exists():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _free(path: Path) -> int:
    place = next(place for place in (path, *path.parents) if place.exists())
    return shutil.disk_usage(place).free
