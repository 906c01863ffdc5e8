"""`--profile N`: where the time of N optimizer steps goes, as a table and as a trace for Perfetto.

A trace begins after the first two steps of the process, which allocate and warm up, or as late as a short run allows.
The profiler only observes: it changes no result.
"""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from tropism.distributed.world import World
from tropism.errors import OutputError, clause, count_of
from tropism.observe.console import Voice
from tropism.observe.rundir import PROFILE, RunDirectory
from tropism.spans import STEP, recording, timed_as
from tropism.train.profile_table import step_times

T = TypeVar("T")
_WARM_UP = 2  # steps
_OPERATIONS = 10  # in the table


class StepProfiler:
    """Profiles the steps of a loop on the main process. It is a context in which the loop runs.

    Args:
        steps: number of steps to profile; None for none.
        left: steps that the run has left.
        world: this process among the others.
        directory: where the trace is written.
        voice: prints the table.
    """

    def __init__(self, steps: int | None, left: int, world: World, directory: RunDirectory, voice: Voice) -> None:
        self._wanted = steps if world.is_main else None
        self._begin = min(_WARM_UP, max(0, left - 1))
        self._world, self._directory, self._voice = world, directory, voice
        self._done = self._recorded = 0
        self._profiler: profile | None = None
        self._context, self._step = ExitStack(), ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        """Write what there is, if the run ends before all steps are profiled; nothing if it fails."""
        self._step.close()
        if self._profiler is not None:
            self._finish(write=error is None)

    def fetched(self, steps: Iterator[T]) -> Iterator[T]:
        """The prepared steps of a loop. The wait for each belongs to it."""
        while True:
            if self._wanted and self._done == self._begin:
                self._start()
            if self._profiler is not None:
                self._step.enter_context(record_function(STEP))
            try:
                step = _next(steps)
            except StopIteration:
                return
            yield step

    def stepped(self) -> None:
        """End a step: its update is done and its record is written. What follows is not part of the profile."""
        self._done += 1
        if self._profiler is None:
            return
        last = self._recorded + 1 == self._wanted
        if last and self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
        self._step.close()
        self._recorded += 1
        if last:
            self._finish()

    def _start(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it prints when it starts and stops
        activities = [ProfilerActivity.CPU]
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
            activities.append(ProfilerActivity.CUDA)
        self._context.enter_context(recording())
        self._profiler = self._context.enter_context(profile(activities=activities))

    def _finish(self, write: bool = True) -> None:
        found, self._profiler = self._profiler, None
        assert found is not None
        self._context.close()
        if not (write and self._recorded):
            return
        with tempfile.TemporaryDirectory() as scratch:
            trace = Path(scratch) / PROFILE
            found.export_chrome_trace(str(trace))
            text = trace.read_text(encoding="utf-8", errors="replace")
        times = step_times(json.loads(text)["traceEvents"], self._recorded)
        short = "" if self._recorded == self._wanted else f", of {self._wanted} requested: the run has no more"
        first = self._done - self._recorded + 1
        self._voice.table(f"profile: {count_of(times.steps, 'optimizer step')} from the {_ordinal(first)} of this "
                          f"process{short}", ("part", "seconds per step", "share"), times.rows())
        self._voice.table("profile: longest operations", ("operation", "calls per step", "seconds per step",
                                                                   "share"), times.top(_OPERATIONS))
        try:
            self._directory.write_profile(text)
        except OutputError as error:
            self._voice.warn(f"{clause(error)}. The run continues without this file.")
            return
        self._voice.say(f"profile: {self._directory.path / PROFILE}; open it in https://ui.perfetto.dev")


@timed_as("data")
def _next(steps: Iterator[T]) -> T:
    return next(steps)


def _ordinal(number: int) -> str:
    return {1: "1st", 2: "2nd", 3: "3rd"}.get(number, f"{number}th")


__all__ = ["StepProfiler"]
