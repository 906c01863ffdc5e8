"""Check before step 1 that the disk has room for the result and the checkpoints."""

import math

import torch

from tropism.data.schedule import Steps
from tropism.files import check_space
from tropism.model import save
from tropism.observe.rundir import RunDirectory
from tropism.train.checkpoints.saver import Saver
from tropism.train.engine import Engine
from tropism.train.interval import Interval
from tropism.train.options import RunOptions


def check_disk_space(engine: Engine, options: RunOptions, directory: RunDirectory, saver: Saver | None,
                     schedule: Steps) -> None:
    """Check that the result and the kept checkpoints fit on the disk.

    Raises:
        OutputError: with the required and the free bytes.
    """
    copies, saved_bytes = 1, 0
    saves = fewest_saves(options, schedule)
    if saver is not None and saves:
        together = min(saves, options.keep + 1 + bool(options.keep_best)) if options.keep else saves
        more = max(0, together - len(saver.finished()))
        saved_bytes, copies = more * saver.estimate_bytes(), copies + more * options.checkpoint_model
    what = ("the model" if copies == 1 else f"{copies} models") + (" and the checkpoints" if saved_bytes else "")
    one = save.model_bytes(engine.model.module, directory.path, getattr(torch, options.export_dtype))
    check_space(directory.path, copies * one + saved_bytes, f"not enough disk space for {what}")


def fewest_saves(options: RunOptions, schedule: Steps) -> int:
    """The smallest number of checkpoints that the run writes. Time intervals count as none: their number is unknown."""
    every, steps = Interval.parse(options.save_every or 0), schedule.total_steps
    best = int(options.keep_best is not None)
    if not every.every:
        return best
    length = {"steps": steps, "epochs": schedule.epochs_after(steps), "seconds": 0}[every.unit]
    return best + min(steps, max(1, math.ceil(length / every.every - 1e-9)))  # epochs are sums of fractions
