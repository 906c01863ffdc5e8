"""The training loop: a generator of records. It reads like the algorithm; observers only read what it yields."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from tropism.errors import StoppedEarly
from tropism.train.engine import Engine
from tropism.train.interval import Due, Interval
from tropism.train.monitor.first_update import FirstUpdate
from tropism.train.preemption import Halt
from tropism.train.records import Progress, Record, Window
from tropism.train.step import train_step
from tropism.train.step_packs import StepPacks, StepPlanner

Evaluate = Callable[[Engine], dict[str, float]]
"""Gives the metrics of the policy as it is (an `Evaluator`)."""


@dataclass(frozen=True)
class Plan:
    """When to do what.

    Args:
        log_every: between train records.
        eval_every: between evaluations; 0 for start and end only.
        save_every: between checkpoints, with one at the end; 0 for those alone that a stop or the keeper asks for.
        workers: threads that prepare steps ahead.
    """

    log_every: Interval
    eval_every: Interval
    save_every: Interval = field(default=Interval(0))
    workers: int = 0


class Keeper(Protocol):
    """Keeps a run as it stands."""

    @property
    def failed(self) -> bool:
        """Whether a save that went on beside the steps has failed."""
        ...

    def wants(self, step: int) -> bool:
        """Whether it asks for a save after the evaluation of this step; called by all ranks."""
        ...

    def save(self, progress: Progress) -> None:
        """Begin to save; called by all ranks."""
        ...

    def wait(self) -> None:
        """Come back when everything is on the disk; called by all ranks.

        Raises:
            OutputError: on all of them, if it could not be written.
        """
        ...


class _NoKeeper:
    failed = False

    def wants(self, step: int) -> bool:
        """Never."""
        return False

    def save(self, progress: Progress) -> None:
        """Nothing is kept."""

    def wait(self) -> None:
        """Nothing is awaited."""


def train(engine: Engine, planner: StepPlanner, evaluate: Evaluate | None, plan: Plan, progress: Progress | None = None,
          keeper: Keeper | None = None, halt: Halt | None = None) -> Iterator[Record]:
    """Run what is left of the schedule, after what the step before still owes.

    Args:
        evaluate: None if nothing is held out.
        progress: where to go on; by default before step 1.
        keeper: keeps the run at the steps that the plan says, and where it is stopped.
        halt: says when to stop.

    Raises:
        NothingLearnedError: if the first step with a learning rate above 0 changes no weight.
        NonFiniteError: at the first record or save after a step whose loss or gradient was not finite; that step
            changed nothing. The rows are named.
        StoppedEarly: where `halt` said so; the run is kept, and was evaluated after that if there was time.
        OutputError: if the keeper could not write.
    """
    run = _Run(engine, planner, evaluate, plan, progress or Progress(), keeper or _NoKeeper(),
               halt or Halt(engine.world))
    progress, halt = run.progress, run.halt
    timers = _Timers(plan, planner)
    last = 0 < progress.step == timers.total
    if last and progress.window.steps:
        yield run.record()
    progress.evaluation_due = progress.evaluation_due and evaluate is not None
    yield from run.close(last and plan.save_every.every > 0)
    halt.check()
    first = FirstUpdate(engine.model.module, progress.step > 0, engine.world.sum, engine.world.max)
    for work in () if halt.ending else _prepared(planner, plan.workers, progress.step + 1):
        began = time.monotonic()
        outcome = train_step(engine, work)
        progress.add(outcome, work.units, work.flat_tokens, work.computed_tokens)
        first.look(outcome)
        halt.took("step", time.monotonic() - began)
        due = timers.after(work.step, halt, run.keeper, evaluate is not None)
        if due.log:
            yield run.record()
        progress.evaluation_due = evaluate is not None and (due.evaluate or halt.ending is not None)
        if due.failed:
            run.keeper.wait()
        if due.stop:
            yield from run.stopped(due.stop)
        yield from run.close(due.save)
        if halt.ending:
            break
    run.keeper.wait()


@dataclass(frozen=True)
class _Run:
    """What the loop does at a step, besides the step."""

    engine: Engine
    planner: StepPlanner
    evaluate: Evaluate | None
    plan: Plan
    progress: Progress
    keeper: Keeper
    halt: Halt

    def record(self) -> Record:
        """The train record of the window, which begins anew."""
        progress, step = self.progress, self.progress.step
        metrics = progress.window.read(self.engine, self.planner.rows, progress.tolerance)
        metrics |= {"learning_rate": progress.learning_rate, "epoch": self.planner.schedule.epochs_after(step),
                    **progress.totals}
        skipped = tuple(progress.window.skipped)
        progress.window = Window()
        return Record(step, "train", metrics, skipped)

    def evaluated(self) -> Record:
        """The evaluation that is due. Where it is stopped in the middle, the run is kept and still owes it."""
        assert self.evaluate is not None
        began = time.monotonic()
        try:
            record = Record(self.progress.step, "eval", self.evaluate(self.engine))
        except StoppedEarly:
            if self.progress.step:
                self.save()
                self.keeper.wait()
            raise
        self.progress.evaluation_due = False
        self._paused("evaluate", began)
        return record

    def close(self, save: bool) -> Iterator[Record]:
        """What comes after a step and its record: the evaluation, where it is due, and what follows from it."""
        if self.progress.evaluation_due:
            yield self.evaluated()
            save = save or (self.progress.step > 0 and self.keeper.wants(self.progress.step))
        if self.halt.ending and self.progress.window.steps:
            yield self.record()
        if save or (self.halt.ending and self.progress.step and self.plan.save_every.every):
            self.save()

    def save(self) -> None:
        """Keep the run as it stands."""
        began = time.monotonic()
        self.progress.window.settle(self.engine, self.planner.rows, self.progress.tolerance)
        self.keeper.save(self.progress)
        self._paused("stall", began)

    def stopped(self, wish: int) -> Iterator[Record]:
        """Keep the run, then evaluate it where there is time: what is kept does not know of that evaluation, as a
        straight run would not.

        Raises:
            StoppedEarly: at the end.
        """
        self.save()
        self.keeper.wait()
        self.halt.kept = True
        if self.evaluate is not None and self.halt.leaves_time(wish):
            yield Record(self.progress.step, "eval", self.evaluate(self.engine))
        raise StoppedEarly(self.halt.reason(wish))

    def _paused(self, what: str, began: float) -> None:
        """It was no part of a step's time."""
        seconds = time.monotonic() - began
        self.halt.took(what, seconds)
        self.progress.window.pause(seconds)


@dataclass(frozen=True, slots=True)
class _Now:
    """What comes after a step; the same on every rank."""

    log: bool
    evaluate: bool
    save: bool
    failed: bool
    stop: int


class _Timers:
    """Decides what comes after each step."""

    def __init__(self, plan: Plan, planner: StepPlanner) -> None:
        self.total = planner.schedule.total_steps
        self.dues = [Due(every, planner.schedule.epochs_after)
                     for every in (plan.log_every, plan.eval_every, plan.save_every)]
        self.world = planner.world

    def after(self, step: int, halt: Halt, keeper: Keeper, evaluates: bool) -> _Now:
        """All ranks ask together. What depends on a clock is the main rank's to say; any rank may want to stop."""
        last = step == self.total
        found = [last or (one.after(step) and (self.world.is_main or one.interval.unit != "seconds"))
                 for one in self.dues]
        found[2] = found[2] and self.dues[2].interval.every > 0
        wish = halt.wish(last, evaluates and found[1])
        log, evaluate, save, failed, stop = self.world.max([*map(int, found), int(keeper.failed), wish])
        for one, now in zip(self.dues, (log, evaluate, save), strict=True):
            if now:
                one.done()
        return _Now(bool(log), bool(evaluate), bool(save), bool(failed), stop)


def _prepared(planner: StepPlanner, workers: int, first: int) -> Iterator[StepPacks]:
    """Each step's work in order; with workers, some steps ahead."""
    steps = range(first, planner.schedule.total_steps + 1)
    if not workers:
        yield from map(planner.work, steps)
        return
    with ThreadPoolExecutor(workers) as pool:
        ahead = [pool.submit(planner.work, step) for step in steps[: workers + 1]]
        for place in range(len(steps)):
            if place + workers + 1 < len(steps):
                ahead.append(pool.submit(planner.work, steps[place + workers + 1]))
            yield ahead.pop(0).result()


