"""How a failed or stopped run ends: an entry in its manifest, and an error that says what to do."""

import os
import shlex
from contextlib import suppress

import torch

from tropism.borders import is_out_of_memory
from tropism.distributed.world import World, lost_another
from tropism.errors import OutputError, StoppedEarly, TropismError, clause
from tropism.observe.manifest import Manifest
from tropism.observe.rundir import RunDirectory
from tropism.train.checkpoints import files as checkpoint


def record_failure(directory: RunDirectory, manifest: Manifest | None, error: BaseException, world: World,
                   microbatch_tokens: int, by_name: bool) -> None:
    """Write the end of the run to its manifest, and raise a clearer error if there is one. All processes call this;
    those of a stopped run call it together.

    Args:
        directory: of the run.
        manifest: on the process that writes it.
        error: that ended the run.
        microbatch_tokens: tokens of a pack.
        by_name: the options name everything that the run uses, so the command line can resume it.

    Raises:
        TropismError: in place of an error that does not say what to do.
    """
    if isinstance(error, StoppedEarly):
        kept = world.broadcast(bool(checkpoint.listed(directory.checkpoints)) if world.is_main else False)
        world.on_main(lambda: manifest.end("stopped", reason=str(error)) if manifest is not None else None)
        raise StoppedEarly(f"stopped: {clause(error)}. {_advice(directory, world, by_name, kept)}") from error
    clear = _in_words(error, world, microbatch_tokens)
    if manifest is not None:
        status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        with suppress(OutputError):  # the disk is full or gone; the original error says more
            manifest.end(status, error=str(clear or error) or type(error).__name__)
    if clear is not None:
        raise clear from error


def _advice(directory: RunDirectory, world: World, by_name: bool, kept: bool) -> str:
    """How to resume a run that was stopped."""
    command = f"tropism resume {shlex.quote(str(directory.path))}" if by_name else "fit(resume='auto') of a new trainer"
    if by_name and world.size > 1:
        command = f"{_launch(world.size)} -m {command} (or, in one process, {command})"
    return f"Resume with: {command}" if kept else ("There is no checkpoint yet, so a resumed run starts at step 1 "
                                                   f"with the stored scores. Resume with: {command}")


def _launch(size: int) -> str:
    """The command that starts the same number of processes, as far as one process can know it."""
    machines, here = (os.environ.get(name, "") for name in ("GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if machines.isdecimal() and int(machines) > 1:
        return f"torchrun, as before on {machines} machines, with"
    return f"torchrun --nproc-per-node {here or size}"


def _in_words(error: BaseException, world: World, microbatch_tokens: int) -> TropismError | None:
    """A clearer error in place of this one; None if it is clear already."""
    first, _, _ = str(error).partition("\n")
    if world.size > 1 and lost_another(error):
        return TropismError(f"another process of the run failed ({first}). The first error in the log is the cause.")
    if is_out_of_memory(error) and world.mesh is not None:
        return TropismError(f"process {world.rank} is out of memory{f' ({first})' if first else ''}. The processes "
                            "compute each pass over a sharded model together, so none of them can repeat it. Resume "
                            f"with --microbatch-tokens {max(1, microbatch_tokens // 2)}: it needs less memory and does "
                            "not change results. If that does not help, use more processes or a lower --max-length.")
    if is_out_of_memory(error):
        gpu = world.device.type == "cuda" and isinstance(error, torch.OutOfMemoryError)
        detail = f" ({first})" if first else ""
        return TropismError(f"{'the GPU' if gpu else 'this machine'} is out of memory{detail}. Use --microbatch-tokens "
                            f"below {microbatch_tokens}: it needs less memory and does not change results. If that "
                            "does not help, use a lower --max-length or a smaller model.")
    return None
