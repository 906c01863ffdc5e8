"""The last word of a run that did not come to its end: in its manifest, and as an error that says what to do."""

import os
from contextlib import suppress

import torch

from tropism.distributed.world import World, lost_another
from tropism.errors import OutputError, StoppedEarly, TropismError
from tropism.observe.manifest import Manifest
from tropism.observe.rundir import RunDirectory
from tropism.train.checkpoints import files as checkpoint


def record_failure(directory: RunDirectory, manifest: Manifest | None, error: BaseException, world: World,
                   microbatch_tokens: int, by_name: bool) -> None:
    """The manifest's last word, and the error in the words of this run where it needs any. All ranks call this, those
    of a run that was stopped together.

    Args:
        directory: of the run.
        manifest: on the rank that writes it.
        error: with which it ends.
        microbatch_tokens: tokens of a pack.
        by_name: all that the run is made of is named by its options, so the command line can go on with it.

    Raises:
        TropismError: in place of an error that says too little.
    """
    if isinstance(error, StoppedEarly):
        kept = world.broadcast(bool(checkpoint.listed(directory.checkpoints)) if world.is_main else False)
        world.on_main(lambda: manifest.end("stopped", reason=str(error)) if manifest is not None else None)
        raise StoppedEarly(f"stopped: {error}. {_advice(directory, world, by_name, kept)}") from error
    clear = _in_words(error, world, microbatch_tokens)
    if manifest is not None:
        status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        with suppress(OutputError):  # a disk that is full or gone; the error itself says more
            manifest.end(status, error=str(clear or error) or type(error).__name__)
    if clear is not None:
        raise clear from error


def _advice(directory: RunDirectory, world: World, by_name: bool, kept: bool) -> str:
    """How to go on with a run that was stopped."""
    command = f"tropism resume {directory.path}" if by_name else "resume='auto' in Python"
    if by_name and world.size > 1:
        command = f"{_launch(world.size)} -m {command} (or, in one process, {command})"
    return f"Go on with: {command}" if kept else (f"There is no checkpoint yet: {command} begins at step 1, with the "
                                                  "scores that are in the store")


def _launch(size: int) -> str:
    """The command that starts as many processes, as far as it can be told from one of them."""
    machines, here = (os.environ.get(name, "") for name in ("GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if machines.isdecimal() and int(machines) > 1:
        return f"torchrun, as before on {machines} machines, with"
    return f"torchrun --nproc-per-node {here or size}"


def _in_words(error: BaseException, world: World, microbatch_tokens: int) -> TropismError | None:
    """An error that says too little in the words of this run."""
    first, _, _ = str(error).partition("\n")
    if world.size > 1 and lost_another(error):
        return TropismError(f"another process of the run has failed; the first error of the log says why ({first})")
    if isinstance(error, torch.OutOfMemoryError):
        return TropismError(f"the GPU ran out of memory; --microbatch-tokens below {microbatch_tokens} takes less, and "
                            f"changes no result ({first})")
    return None
