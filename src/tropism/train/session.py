"""One sitting of a run: from an engine that was built to the model on the disk, or to a stop in between."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from tropism.distributed.shard import gathered
from tropism.errors import OutputError, UsageError
from tropism.model import save
from tropism.model.adapters.parameters import adapter_weight_names
from tropism.model.config import max_positions
from tropism.observe.checksums import checksums
from tropism.observe.console import Voice
from tropism.observe.manifest import Manifest
from tropism.observe.metrics import BOOKKEEPING
from tropism.observe.rundir import RunDirectory
from tropism.observe.track import Trackers
from tropism.train.checkpoints.resume import Origin
from tropism.train.checkpoints.saver import Notes, Retention, Saver
from tropism.train.engine import Engine
from tropism.train.evaluation.evaluator import Evaluator
from tropism.train.evaluation.samples import Sampler
from tropism.train.interval import Interval
from tropism.train.loop import Plan, train
from tropism.train.monitor.early_stopping import EarlyStopping, make_rule
from tropism.train.monitor.guards import Guards, Subject
from tropism.train.monitor.nonfinite import Tolerance
from tropism.train.observers import Watch
from tropism.train.optimizer import why_not_kept
from tropism.train.options import RunOptions
from tropism.train.preemption import Halt
from tropism.train.records import Progress, Record
from tropism.train.setup.data import PreparedData
from tropism.train.step_packs import StepPlanner


@dataclass(frozen=True)
class RunResult:
    """What a run left behind.

    Args:
        directory: the run directory.
        model: the trained model's directory.
        steps: optimizer steps done.
        seconds: wall time.
        before, after: evaluation records at step 0 and at the end, or the first and last train records where
            nothing was held out.
        samples: prompts with the answers before and after.
    """

    directory: Path
    model: Path
    steps: int
    seconds: float
    before: dict[str, float]
    after: dict[str, float]
    samples: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Session:
    """What a sitting works with.

    Args:
        options: of the run.
        written: every option with the value that it had.
        engine, planner: to train with; the engine stands where the run goes on.
        data: of the run.
        tokenizer: of the policy.
        evaluator: of the held-out rows; None if there are none.
        directory, manifest: what is written; only the main rank has a manifest.
        voice: speaks to the user.
        halt: says when to stop.
        notes: what a checkpoint keeps beside the loop's progress.
        workers: threads that prepare steps ahead.
        origin: what the run goes on from, if it does.
        initial: the weights before step 1, where the export will be compared with them.
    """

    options: RunOptions
    written: dict[str, Any]
    engine: Engine
    planner: StepPlanner
    data: PreparedData
    tokenizer: Any
    evaluator: Evaluator | None
    directory: RunDirectory
    manifest: Manifest | None
    voice: Voice
    halt: Halt
    notes: Notes
    workers: int = 0
    origin: Origin | None = None
    initial: dict[str, torch.Tensor] | None = None

    def train(self) -> RunResult:
        """Train, and leave the model.

        Raises:
            StoppedEarly: if it was stopped before the end; the run can go on.
        """
        world, engine, directory, options = self.engine.world, self.engine, self.directory, self.options
        begins = self.origin is None or self.origin.trainer is None
        sampler = Sampler(self.data.evaluation or self.data.train, held_out=bool(self.data.evaluation),
                          count=options.samples, tokenizer=self.tokenizer, stop_ids=self._stop_ids,
                          max_positions=max_positions(engine.model.module.config))
        saver = self._saver()
        world.on_main(lambda: self._check_space(saver))
        if begins:
            self.halt.check()
            self.notes.answers = self._answers(sampler)
        progress = Progress(tolerance=Tolerance(options.on_nonfinite))
        if self.origin is not None and self.origin.trainer is not None:
            progress.restore(self.origin.trainer)
            if progress.step == self.planner.schedule.total_steps != self.notes.evaluation.get("step"):
                progress.evaluation_due = True  # the end is here now
            self.watch.restore(self.notes.guards)
            if not self.origin.finished and not progress.evaluation_due:
                self.halt.ending = self.watch.over
        if self.evaluator is not None:
            self.evaluator.baselines = self.notes.baselines
        try:
            self._follow(train(engine, self.planner, partial(self.evaluate, self.evaluator) if self.evaluator else None,
                               self._plan(), progress, saver, self.halt))
        except Exception:  # a second Ctrl-C is none, and does not wait
            if saver is not None:
                saver.leave()
            raise
        answers = self._answers(sampler)
        samples = sampler.compare(self.notes.answers, answers) if world.is_main else []
        world.on_main(lambda: directory.append_samples(samples))
        self._export()
        return self._finish(progress.step, samples)

    def _answers(self, sampler: Sampler) -> list[str]:
        """Answers of the policy as it is: of the main rank, or of all together where they share the model."""
        world, model = self.engine.world, self.engine.model
        if world.mesh is not None:
            return world.computed(lambda: sampler.ask(model))
        return world.on_main(lambda: sampler.ask(model)) or []

    def _finish(self, steps: int, samples: list[dict[str, Any]]) -> RunResult:
        """Say what came of it."""
        seconds, directory = self.notes.elapsed, self.directory
        before, after = self.engine.world.broadcast(
            first_and_last(directory) if self.engine.world.is_main else ({}, {}))
        if self.manifest is not None:
            reason = {"reason": self.halt.ending, "stopped_by": "stop_metric"} if self.halt.ending else {}
            self.manifest.end("done", steps=steps, planned_steps=self.planner.schedule.total_steps,
                              seconds=round(seconds, 3), model_files=checksums(directory.model),
                              stop_ids=self._stop_ids, **reason)
        what = (f"{len(self.evaluator.rows)} held-out rows" if self.evaluator is not None
                else "training steps, first and last")
        self.voice.before_after(f"{what}: before and after", before, after, leave_out=BOOKKEEPING)
        self.voice.say(f"model: {directory.model}  ({steps} steps, {seconds:.0f} s)")
        return RunResult(directory.path, directory.model, steps, seconds, before, after, samples)

    @cached_property
    def watch(self) -> Watch:
        """What looks at the records of this sitting."""
        options, method = self.options, self.engine.method
        rule = make_rule(options.stop_metric, options.stop_patience, options.stop_delta, method,
                         self.evaluator is not None)

        def line(name: str, value: dict[str, Any]) -> None:
            self.engine.world.on_main(lambda: self.directory.append_line(name, value))

        guards = Guards(Subject.of(method, getattr(options, "reference", None)))
        return Watch(guards, EarlyStopping(rule) if rule else None, self.voice,
                     partial(line, "notices.jsonl"), partial(line, "skipped.jsonl"))

    @property
    def _stop_ids(self) -> list[int]:
        return sorted(self.data.renderer.stop_ids)

    def _plan(self) -> Plan:
        options = self.options
        tenth = max(1, self.planner.schedule.total_steps // 10)
        return Plan(Interval.parse(options.log_every),
                    Interval.parse(tenth if options.eval_every is None else options.eval_every),
                    Interval.parse(options.save_every or 0), self.workers)

    def _saver(self) -> Saver | None:
        """What writes checkpoints, if the optimizer can be kept.

        Raises:
            UsageError: if checkpoints are asked for and it cannot.
        """
        reason = why_not_kept(self.engine.updater)
        if reason is not None:
            for name in ("save_every", "keep_best"):
                if getattr(self.options, name):
                    raise UsageError(f"{name}: {reason}; leave {name} out, or let Tropism make the optimizer")
            self.voice.warn(f"this run cannot be resumed if it is stopped: {reason}")
            return None
        options = self.options
        model = self._write_model if options.checkpoint_model else None
        return Saver(self.engine, self.directory, self.notes, Retention(options.keep, options.keep_best), self.halt,
                     self.voice, model)

    def _write_model(self, weights: dict[str, Any], path: Path) -> None:
        dtype = getattr(torch, self.options.export_dtype)
        save.export(self.engine.model.module, self.tokenizer, path, dtype, self._stop_ids, weights)

    def _check_space(self, saver: Saver | None) -> None:
        """The result and what is kept on the way fit on the disk."""
        options, copies, beside = self.options, 1, 0
        saves = self._fewest_saves()
        if saver is not None and saves:
            together = min(saves, options.keep + 1 + bool(options.keep_best)) if options.keep else saves
            more = max(0, together - len(saver.finished()))
            beside, copies = more * saver.estimate_bytes(), copies + more * options.checkpoint_model
        save.check_space(self.engine.model.module, self.directory.path, getattr(torch, options.export_dtype), copies,
                         beside)

    def _fewest_saves(self) -> int:
        """Checkpoints that the run is going to write, at the least: how long it takes nobody knows."""
        every, steps = self._plan().save_every, self.planner.schedule.total_steps
        best = int(self.options.keep_best is not None)
        if not every.every:
            return best
        length = {"steps": steps, "epochs": self.planner.schedule.epochs_after(steps), "seconds": 0}[every.unit]
        return best + min(steps, max(1, math.ceil(length / every.every - 1e-9)))  # epochs are sums of fractions

    def evaluate(self, evaluator: Evaluator, engine: Engine) -> dict[str, float]:
        """The evaluation record of the policy as it is."""
        with self.voice.bar("evaluate") as report:
            return evaluator(engine, self.halt.watching(report))

    def _follow(self, records: Iterator[Record]) -> None:
        """Write each record as it comes, and show it."""
        trackers, total = None, self.planner.schedule.total_steps
        main = self.engine.world.is_main
        names = self.options.track.split(",") if self.options.track else []
        if main and names:
            logs = Path(self.options.log_dir).expanduser() if self.options.log_dir else self.directory.path / "logs"
            trackers = Trackers(names, self.directory.path.name, logs, self.written, self.voice.warn)
        try:
            with self.voice.bar("train") as report:
                for record in records:
                    self._append(record)
                    if trackers is not None:
                        trackers.log(record.metrics, record.step, record.split)
                    self.observe(record)
                    if record.split == "train":
                        metrics = record.metrics
                        shown = {"loss": f"{metrics['loss']:.4f}"} if "loss" in metrics else {}
                        if "rewards/margins" in metrics:
                            shown["margin"] = f"{metrics['rewards/margins']:+.4f}"
                        shown["tokens/s"] = f"{metrics['tokens_per_second']:.0f}"
                        report(record.step, total, **shown)
        finally:
            if trackers is not None:
                trackers.finish()

    def _append(self, record: Record) -> None:
        """By the main rank; all hear of it where it cannot."""
        self.engine.world.on_main(lambda: self.directory.append_record(record.to_json()))

    def observe(self, record: Record) -> None:
        """Whoever watches records does it here, on every rank: between its line in `metrics.jsonl` and the next save.

        State that must survive a stop goes into `notes.guards`, by name; `halt.ending` ends the run with this step.
        """
        reason = self.watch.see(record)
        self.halt.ending = self.halt.ending or reason
        self.notes.guards = self.watch.state()
        if record.split == "eval":
            metric = self.options.keep_best
            if metric is not None and metric not in record.metrics:
                raise UsageError(f"keep_best {metric}: the evaluation does not have it; it has "
                                 f"{', '.join(sorted(record.metrics))}")
            self.notes.evaluation = {"step": record.step, **record.metrics}

    def _export(self) -> None:
        dtype, world = getattr(torch, self.options.export_dtype), self.engine.world
        module = self.engine.model.module
        weights = None
        if world.mesh is not None:
            learning = adapter_weight_names(module)
            weights = gathered({name: weight for name, weight in module.state_dict().items()
                                if learning is None or name in learning}, dtype, world.is_main)
        world.on_main(lambda: save.export(module, self.tokenizer, self.directory.model, dtype, self._stop_ids, weights))
        if self.initial is not None:
            own = save.count_changed_weights(module, self.initial, dtype)
            changed, kept = map(sum, zip(*(world.gather(own) if world.mesh else [own]), strict=True))
            share = kept / changed if changed else 1.0
            self.voice.say(f"export in {self.options.export_dtype}: {share:.1%} of the changed weights survive it")


def first_and_last(directory: RunDirectory) -> tuple[dict[str, float], dict[str, float]]:
    """The metrics with which a run began and ended: of its evaluations, or of its steps where there are none."""
    records = directory.records()
    shown = [record for record in records if record["split"] == "eval"] or records
    found = [{key: float("nan") if value is None else value for key, value in record.items()
              if key not in ("step", "split")} for record in (shown[0], shown[-1])] if shown else [{}, {}]
    return found[0], found[1]


def result_of(directory: RunDirectory, manifest: dict[str, Any]) -> RunResult:
    """What a finished run left behind.

    Raises:
        OutputError: if its files cannot be read.
    """
    try:
        before, after = first_and_last(directory)
        file = directory.path / "samples.jsonl"
        samples = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    except (OSError, ValueError) as error:
        raise OutputError(f"{directory.path}: cannot be read: {error}") from error
    return RunResult(directory.path, directory.model, int(manifest["steps"]), float(manifest["seconds"]), before, after,
                     samples)
