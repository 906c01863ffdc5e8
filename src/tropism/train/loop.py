"""The training loop. It reads like the algorithm; observers return an answer, and the loop acts on it."""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from tropism.errors import StoppedEarly
from tropism.train.checkpoints.saver import Saver
from tropism.train.engine import Engine
from tropism.train.interval import Due, Interval
from tropism.train.listener import Asked, Listener
from tropism.train.memory import reset_peak
from tropism.train.monitor.first_update import FirstUpdate
from tropism.train.optimizer import reserve
from tropism.train.options import RunOptions
from tropism.train.preemption import Preemption
from tropism.train.profiling import StepProfiler
from tropism.train.records import Record, Window
from tropism.train.retry import Shortage, attempt, less_memory
from tropism.train.run_state import RunState
from tropism.train.settings import Settings
from tropism.train.step import train_step
from tropism.train.step_log import StepOutcome
from tropism.train.step_packs import StepPacks, StepPlanner

Evaluate = Callable[[Engine], dict[str, float]]
"""Returns the metrics of the current policy."""
Lowered = Callable[[Settings, str], None]
"""Learns of the settings that a run keeps after it ran out of memory, and the sentence for the log."""
Sample = Callable[[Engine, int], Any]
"""Completes the sample prompts after a step."""
Observe = Callable[[Record], str | None]
"""Looks at a record. Returns why the run ends with this step, or None to continue."""


T = TypeVar("T")


def exhaust(steps: Generator[Any, None, T]) -> T:
    """Run a generator to its end. Returns what it returns."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


@dataclass(frozen=True)
class Plan:
    """When to log, evaluate and save.

    Args:
        log_every: between train records.
        eval_every: between evaluations; 0 for the start and the end only.
        save_every: between checkpoints, with one at the end; 0 saves only if the run is stopped or an evaluation is the
            best so far.
        sample_every: between completions of the sample prompts; 0 for none.
        prefetch: steps to prepare ahead, in threads.
    """

    log_every: Interval
    eval_every: Interval
    save_every: Interval = field(default=Interval(0))
    sample_every: Interval = field(default=Interval(0))
    prefetch: int = 0

    @classmethod
    def of(cls, options: RunOptions, total_steps: int) -> "Plan":
        """The plan of a run; by default it evaluates every tenth of it."""
        tenth = max(1, total_steps // 10)
        return cls(Interval.parse(options.log_every),
                   Interval.parse(tenth if options.eval_every is None else options.eval_every),
                   Interval.parse(options.save_every or 0), Interval.parse(options.sample_every or 0),
                   options.prefetch)


@dataclass
class TrainingLoop:
    """Runs the rest of the schedule.

    Args:
        engine, planner: what trains, and what prepares its steps.
        plan: when to log, evaluate and save.
        preemption: knows when the run must stop early.
        observe: looks at each record, on every process alike.
        evaluate: None if no rows are held out.
        sample: completes the sample prompts.
        saver: writes checkpoints; None if the run cannot be saved.
        state: where to start; by default before step 1.
        lowered: learns how a step is repeated that ran out of memory.
        profiler: of `--profile`.
        listener: attached by a Python caller.
    """

    engine: Engine
    planner: StepPlanner
    plan: Plan
    preemption: Preemption
    observe: Observe = lambda record: None
    evaluate: Evaluate | None = None
    sample: Sample = lambda engine, step: None
    saver: Saver | None = None
    state: RunState = field(default_factory=RunState)
    lowered: Lowered = lambda settings, sentence: None
    profiler: StepProfiler | None = None
    listener: Listener | None = None

    def steps(self) -> Generator[StepOutcome | None, str | None]:
        """Train until the schedule, an observer or a request ends the run. Yields twice in each step: its outcome,
        before its record; and None, when its record, evaluation and checkpoint are done. The run ends with the step if
        it is then sent a reason.

        Raises:
            NothingLearnedError: if the first step with a learning rate above 0 changes no weight.
            NonFiniteError: at the first record or save after a step whose loss or gradient was not finite. That step
                changed nothing, and the error names its rows.
            StoppedEarly: if `preemption` asked for it. The run is saved first, and evaluated if there is time.
            OutputError: if a checkpoint could not be written.
            TropismError: if a row does not fit into memory. It names the row.
        """
        state, timers = self.state, _Timers(self.plan, self.planner)
        self._catch_up(timers.total)
        reserve(self.engine.updater)
        reset_peak(self.engine.model.device)
        if self.listener:
            self.listener.begins(state)
        first = FirstUpdate(self.engine.model.module, state.step > 0, self.engine.world.sum, self.engine.world.max)
        for packs in self.profiler.fetched(self._prepared()) if self.profiler else self._prepared():
            began = time.monotonic()
            if self.listener:
                self.listener.step_begins(state)
            outcome, packs = self._step(packs)
            state.add(outcome, packs)
            first.look(outcome)
            self.preemption.record_time("step", time.monotonic() - began)
            yield outcome
            asked = self._asked()
            due = timers.after(state.step, asked, self.preemption, self.saver, self.evaluate is not None)
            if due.end:
                state.ending = "it was asked to end"
            if due.log:
                self._log()
            if self.profiler:
                self.profiler.stepped()
            state.evaluation_due = self.evaluate is not None and (due.evaluate or state.ending is not None)
            state.samples_due = due.sample
            if due.failed:
                self._wait()
            if due.stop:
                self._stop(due.stop)
            self._close(due.save)
            state.ending = (yield None) or state.ending
            if state.ending:
                break
        self._wait()

    def _asked(self) -> Asked:
        """What the listener asks for after this step."""
        if self.listener is None:
            return Asked()
        return self.listener.step_ended(self.state, self.planner.schedule.epochs_after(self.state.step))

    def _catch_up(self, total: int) -> None:
        """Emit the record, evaluation or checkpoint that the step before the first one has not produced yet."""
        state = self.state
        last = 0 < state.step == total
        if last and state.window.steps:
            self._log()
        state.evaluation_due = state.evaluation_due and self.evaluate is not None
        self._close(last and self.plan.save_every.every > 0)
        self.preemption.check()

    def _step(self, packs: StepPacks) -> tuple[StepOutcome, StepPacks]:
        """Do a step. If memory runs out, it is packed again and repeated from its start with settings that need less,
        which the rest of the run keeps. Returns its outcome, and its packs in the end."""
        while isinstance(outcome := attempt(self.engine, packs, train_step), Shortage):
            settings, sentence = less_memory(outcome, self.engine, self.planner, packs, self.state.settings)
            self.state.settings = settings
            self.engine = replace(self.engine, model=replace(self.engine.model, checkpointing=settings.checkpointing))
            self.planner = self.planner.under(settings)
            self.lowered(settings, sentence)
            packs = self.planner.packs_of(packs.step)
        return outcome, packs

    def _prepared(self) -> Iterator[StepPacks]:
        """The packs of each step in order; with `prefetch`, some steps ahead. None if the run has ended already."""
        steps = range(self.state.step + 1, 1 if self.state.ending else self.planner.schedule.total_steps + 1)
        if not self.plan.prefetch:
            for step in steps:
                yield self.planner.packs_of(step)
            return
        with ThreadPoolExecutor(self.plan.prefetch) as pool:
            ahead = deque[tuple[StepPlanner, Future[StepPacks]]]()
            for place, step in enumerate(steps):
                for coming in steps[place + len(ahead) : place + self.plan.prefetch + 1]:
                    ahead.append((self.planner, pool.submit(self.planner.packs_of, coming)))
                planner, packs = ahead.popleft()
                yield packs.result() if planner is self.planner else self.planner.packs_of(step)

    def _emit(self, record: Record) -> None:
        """Hand a record to the observers and act on their answer."""
        self.state.see(record)
        reasons = [self.observe(record), self.listener.recorded(record) if self.listener else None]
        self.state.ending = self.state.ending or next(filter(None, reasons), None)

    def _log(self) -> None:
        """Emit the train record of the window, and begin a new window."""
        state = self.state
        metrics = state.window.read(self.engine, self.planner.rows, state.tolerance)
        metrics |= {"learning_rate": state.learning_rate, "epoch": self.planner.schedule.epochs_after(state.step),
                    **state.totals}
        skipped = tuple(state.window.skipped)
        state.window = Window()
        self._emit(Record(state.step, "train", metrics, skipped))

    def _evaluate(self) -> None:
        """Emit the evaluation that is due. If it is interrupted, the run is saved with the evaluation still due."""
        assert self.evaluate is not None
        began = time.monotonic()
        try:
            record = Record(self.state.step, "eval", self.evaluate(self.engine))
        except StoppedEarly:
            if self.state.step:
                self._save()
                self._wait()
            raise
        self.state.evaluation_due = False
        self._pause("evaluate", began)
        self._emit(record)

    def _sample(self) -> None:
        """Complete the sample prompts."""
        began = time.monotonic()
        self.sample(self.engine, self.state.step)
        self.state.samples_due = False
        self._pause("sample", began)

    def _close(self, save: bool) -> None:
        """What follows a step and its record: evaluation and samples if they are due, a checkpoint if one is wanted."""
        state = self.state
        if state.evaluation_due:
            self._evaluate()
            save = save or (state.step > 0 and self.saver is not None and self.saver.wants(state))
        if state.samples_due:
            self._sample()
        if state.ending and state.window.steps:
            self._log()
        if save or (state.ending and state.step and self.plan.save_every.every):
            self._save()

    def _save(self) -> None:
        """Start to write a checkpoint in the background."""
        began = time.monotonic()
        self.state.window.settle(self.engine, self.planner.rows, self.state.tolerance)
        if self.saver is not None:
            self.saver.save(self.state)
            if self.listener and self.listener.follows_saves:
                self._wait()
                self.listener.saved(self.state)
        self._pause("stall", began)

    def _wait(self) -> None:
        """Wait until the checkpoint in progress is on the disk."""
        if self.saver is not None:
            self.saver.wait()

    def _stop(self, request: int) -> None:
        """Save the run, then evaluate it if there is time. The checkpoint does not contain that evaluation, as in a run
        that is not stopped.

        Raises:
            StoppedEarly: at the end.
        """
        self._save()
        self._wait()
        self.preemption.saved = True
        if self.evaluate is not None and self.preemption.leaves_time(request):
            self._emit(Record(self.state.step, "eval", self.evaluate(self.engine)))
        raise StoppedEarly(self.preemption.reason(request))

    def _pause(self, what: str, began: float) -> None:
        """Exclude time that was not spent in a step."""
        seconds = time.monotonic() - began
        self.preemption.record_time(what, seconds)
        self.state.window.pause(seconds)


@dataclass(frozen=True, slots=True)
class _Now:
    """What follows a step; the same on every process."""

    log: bool
    evaluate: bool
    save: bool
    sample: bool
    failed: bool
    end: bool
    stop: int


class _Timers:
    """Decides what follows each step."""

    def __init__(self, plan: Plan, planner: StepPlanner) -> None:
        self.total = planner.schedule.total_steps
        self.dues = [Due(every, planner.schedule.epochs_after)
                     for every in (plan.log_every, plan.eval_every, plan.save_every, plan.sample_every)]
        self.world = planner.world

    def after(self, step: int, asked: Asked, preemption: Preemption, saver: Saver | None, evaluates: bool) -> _Now:
        """All processes call this together. The main process decides what depends on a clock; any process can request
        a stop."""
        last = step == self.total
        *found, sample = (one.after(step) and (self.world.is_main or one.interval.unit != "seconds")
                          for one in self.dues)
        saves = self.dues[2].interval.every > 0
        found = [now or more or always for now, more, always in zip(
            found, (asked.log, asked.evaluate, asked.save), (last, last, last and saves), strict=True)]
        request = preemption.request(last, evaluates and found[1], sample)
        failed = saver is not None and saver.failed
        log, evaluate, save, sampling, failing, end, stop = self.world.max(
            [*map(int, found), int(sample), int(failed), int(asked.stop), request])
        for one, now in zip(self.dues, (log, evaluate, save, sampling), strict=True):
            if now:
                one.done()
        return _Now(bool(log), bool(evaluate), bool(save), bool(sampling), bool(failing), bool(end), stop)
