"""One call that runs a method from options to a model directory. The command line is this call."""

import time
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from tropism.config import MethodOptions
from tropism.data.load import check_embedding
from tropism.data.rows import EncodedRow
from tropism.data.schedule import GivenSchedule, Steps
from tropism.dist import World, connect
from tropism.errors import ModelError, ReferenceMismatchError, TropismError, UsageError
from tropism.methods import Method
from tropism.methods.build import build_method, effective
from tropism.model import load
from tropism.model.probe import choose_layout
from tropism.observe.console import Voice
from tropism.observe.manifest import Manifest, text_fingerprints
from tropism.observe.metrics import BOOKKEEPING
from tropism.observe.rundir import RunDirectory
from tropism.observe.track import Trackers
from tropism.observe.track import check as check_trackers
from tropism.train import models
from tropism.train import reference as references
from tropism.train import teacher as teachers
from tropism.train.evaluate import Evaluator
from tropism.train.loop import Plan, Record, check_first_step, train
from tropism.train.memory import keep_freed_memory
from tropism.train.optim import build_updater, check_given
from tropism.train.options import TeacherOptions
from tropism.train.prepare import (
    Prepared,
    Source,
    introduce,
    labels_of,
    make_schedule,
    prepare_data,
    prepare_rows,
    probe_trees,
)
from tropism.train.samples import Sampler
from tropism.train.step import Engine
from tropism.train.store import ROWS, check_writable
from tropism.train.work import Planner, all_trees, has_partners, own_trees


@dataclass(frozen=True)
class RunResult:
    """What a run left behind.

    Args:
        directory: the run directory.
        model: the trained model's directory.
        steps: optimiser steps done.
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


@dataclass(frozen=True)
class Objects:
    """What comes from Python as an object, in place of a name among the options.

    Args:
        model, reference, teacher: transformers modules.
        tokenizer: of the policy.
        optimizer, scheduler: over weights of `model`.
        train, evaluation: rows as dicts, or a file.
        rows, eval_rows: rows as token ids.
        steps: which of `rows` each step takes.
    """

    model: Any = None
    reference: Any = None
    teacher: Any = None
    tokenizer: Any = None
    optimizer: Any = None
    scheduler: Any = None
    train: Source | None = None
    evaluation: Source | None = None
    rows: list[EncodedRow] | None = None
    eval_rows: list[EncodedRow] = field(default_factory=list)
    steps: GivenSchedule | None = None


def run(options: MethodOptions, voice: Voice | None = None) -> RunResult:
    """Train as the options say.

    Raises:
        TropismError: a subclass that says what is wrong and what to do; before the first step wherever it can be.
    """
    with connect() as world:
        return Run(options, world, voice).fit()


class Run:
    """One run from checks to export. Each method is a stage.

    Args:
        options: all of them.
        world: this process among the others.
        voice: speaks to the user.
        objects: what comes as an object.
    """

    def __init__(self, options: MethodOptions, world: World, voice: Voice | None = None,
                 objects: Objects | None = None) -> None:
        self.options = options
        self.objects = objects or Objects()
        self.world = world
        self.voice = voice or Voice(loud=world.is_main)
        self.values = options.values
        self.numerics = models.numerics_of(options, world)
        self.store = options.store_root
        self.named = load.Source.of(options.model) if self.objects.model is None else self.objects.model
        self.reference = self._other("reference")
        self.teacher = self._other("teacher")
        self.live = self.values.get("reference") == "live"
        self.trackers = options.track.split(",") if options.track else []
        self._open()

    def _other(self, name: str) -> Any:
        """Another model of the run, as a module or by its name; None if there is none."""
        given, value = getattr(self.objects, name), self.values.get(name)
        if given is not None or value is None or (name, value) == ("reference", "live"):
            return given
        return load.Source.of(value)

    def _open(self) -> None:
        """Tokenizer, data and method: all that can be checked before a model is loaded."""
        options, objects, remote = self.options, self.objects, self.options.trust_remote_code
        check_trackers(self.trackers)
        named = self.named
        if isinstance(named, load.Source):
            config = load.load_config(named, trust_remote_code=remote)
        else:
            config = named.config
            check_given(objects.optimizer, named)
        self.tokenizer = objects.tokenizer or load.load_tokenizer(
            named if isinstance(named, load.Source) else load.Source.of(config.name_or_path), trust_remote_code=remote)
        models.tokenizer_of(self.reference, "reference", self.tokenizer, remote)
        models.check_teacher(self.teacher, config, self.tokenizer, self.values.get("top_k"), remote)
        configs = [config, *(models.config_of(other, remote) for other in (self.reference, self.teacher)
                             if other is not None)]
        if objects.rows is not None:
            data = prepare_rows(options, self.tokenizer, configs, options.view, objects.rows, objects.eval_rows)
        else:
            with self.voice.bar("read") as report, self.world.main_first():
                data = prepare_data(options, self.tokenizer, configs, options.view, objects.train, objects.evaluation,
                                    cache=self.store / ROWS, report=report,
                                    most=options.batch_size * options.max_steps  # type: ignore[operator]
                                    if options.streaming else None)
        for one in configs:
            load.check_rope(one, data.max_length)
            for rows in (data.train, data.evaluation):
                check_embedding(rows, one.get_text_config().vocab_size, self.tokenizer.convert_ids_to_tokens)
        self.method: Method = build_method(options.view, self.values, labels_of(data.train))
        if self.method.ld_alpha is not None:
            data = replace(data, train=[row.with_shared_lengths() for row in data.train],
                           evaluation=[row.with_shared_lengths() for row in data.evaluation])
        self.data: Prepared = data
        prints = self.world.gather(data.fingerprints())
        if any(other != prints[0] for other in prints):
            raise UsageError("the processes read different data; each needs all of it, since the steps are shared out "
                             "here (no DistributedSampler)")
        self.schedule: Steps = self._check_partners(objects.steps) if objects.steps else make_schedule(
            options, options, data.train, self.method.needs_reference_point)
        self.config = config
        self.engine: Engine | None = None
        self._idle: list[torch.nn.Parameter] = []

    def _check_partners(self, steps: GivenSchedule) -> GivenSchedule:
        """Each given step has a partner for each of its rows, where the method needs them."""
        for number, rows in enumerate(steps.steps, start=1):
            if self.method.needs_reference_point and not has_partners(self.data.train, rows):
                raise UsageError(f"step {number}: all of its {len(rows)} rows have one prompt, and KTO needs "
                                 "completions of another prompt in the same step; mix the batches, set "
                                 "accumulation_steps, or take kl_source='batch'")
        return steps

    def fit(self) -> RunResult:
        """Train, and leave a run directory."""
        began = time.monotonic()
        directory = RunDirectory(Path(self.options.output).expanduser())
        self.world.on_main(directory.refuse_if_used)
        self._introduce()
        manifest = self.world.on_main(lambda: self._begin(directory))
        try:
            return self._train(directory, manifest, began)
        except BaseException as error:
            if manifest is not None:
                status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
                manifest.end(status, error=str(error) or type(error).__name__)
            if isinstance(error, torch.OutOfMemoryError):
                raise TropismError(
                    f"the GPU ran out of memory; --microbatch-tokens below {self.numerics.budget} takes less, and "
                    f"changes no result ({str(error).splitlines()[0]})") from error
            raise

    def _introduce(self) -> None:
        """What was read, and what is about to be done."""
        options, own = self.options, self.objects.optimizer is None
        introduce(self.data, self.method, self.voice)
        held_out = f", {len(self.data.evaluation)} rows held out" if self.data.evaluation else ""
        size = "a dataloader's batches" if self.objects.steps is not None else str(options.batch_size)
        rate = f"{options.learning_rate:g}" if own else "the optimizer's own"
        self.voice.say(f"plan: {len(self.data.train)} rows{held_out}; {self.schedule.total_steps} steps of {size}, "
                       f"learning rate {rate}, max_length {self.data.max_length}, {self.numerics.precision}, "
                       f"{self.world.size} x {self.world.device.type}")
        if dropout := load.dropout_of(self.config):
            listed = ", ".join(f"{name} {rate}" for name, rate in dropout.items())
            self.voice.say(f"dropout is off (the config asks for {listed})")
        if options.learning_rate == 0 and own:
            self.voice.warn("learning_rate is 0: nothing will change")

    def _written(self) -> dict[str, Any]:
        """Every option with the value that it had."""
        distilled = isinstance(self.options, TeacherOptions)
        of_teacher: dict[str, Any] = teachers.effective(self.options) if distilled else {}  # type: ignore[arg-type]
        return (self.options.dump() | effective(self.method, self.values) | of_teacher
                | {"precision": self.numerics.precision})

    def _begin(self, directory: RunDirectory) -> Manifest:
        """Make the run directory and write what is known before the model is loaded."""
        options = self.options
        directory.create()
        directory.write_config(self._written())
        directory.write_json("audit.json", self.data.to_json())
        model = self.named.absolute if isinstance(self.named, load.Source) else options.model
        return Manifest(directory, {
            "method": options.method, "model": model, "seed": options.seed,
            "world_size": self.world.size, "device": str(self.world.device), "precision": self.numerics.precision,
            "fingerprints": self.data.fingerprints() | text_fingerprints(self.tokenizer)})

    def build(self) -> Engine:
        """Model, layout, reference, teacher and optimiser, each checked as soon as it can be; built once."""
        if self.engine is not None:
            return self.engine
        options, world, method = self.options, self.world, self.method
        if world.device.type == "cpu":
            keep_freed_memory()
        if (method.needs_reference and not self.live) or self.values.get("top_k"):
            self.world.on_main(lambda: check_writable(self.store))
        module = self.numerics.module(self.named)
        probes = probe_trees(self.data.train, self.numerics.budget)
        model, probe = choose_layout(module, self.numerics.precision, world.device, probes, options.layout)
        self.voice.say(f"layout: {probe.layout}; differs from the model's own forward by at most "
                       f"{probe.per_token:.1e} nats per token" + (f" ({probe.reason})" if probe.reason else ""))
        if world.size > 1 and len(set(world.gather(references.fingerprint(model)))) > 1:
            raise ModelError("the processes hold different weights; load or seed the model equally on all of them")
        self.planner = Planner(self.data.train, self.schedule, method, model.layout, self.numerics.budget,
                               self.data.max_length, world, reuse_prompts=not self.live)
        trees, oversized = self.planner.survey()
        if oversized:
            self.voice.warn(f"{oversized} prompts with their completions exceed microbatch_tokens "
                            f"{self.numerics.budget} and get a pass of their own")
        held_out = all_trees(self.data.evaluation, range(len(self.data.evaluation)), method, self.data.max_length)
        reference = teacher = None
        if self.teacher is not None:
            teacher = models.build_teacher(
                model, self.teacher, options, self.tokenizer,  # type: ignore[arg-type]
                own_trees(self.data.train, self.schedule) + held_out, probes, self.numerics, self.store, world,
                self.voice)
        if method.needs_reference:
            reference = models.build_reference(model, self.reference, self.live, trees + held_out, probes,
                                               self.numerics, self.store, world, self.voice)
        updater, self._idle = build_updater(module, options, self.schedule.total_steps, self.objects.optimizer,
                                            self.objects.scheduler)
        self.engine = Engine(model, reference, method, updater, world, options.max_grad_norm, teacher,
                             rounding=probe.per_root_token)
        self.facts: dict[str, Any] = {"layout": probe.layout, "layout_error_nats_per_token": probe.per_token}
        self._check(self.engine)
        return self.engine

    def _check(self, engine: Engine) -> None:
        """Policy and reference agree before step 1, where they must."""
        own = engine.reference is not None and self.reference is None
        if own:
            agree, sentence = check_first_step(engine, self.planner)
            if not agree and self.options.strict:
                raise ReferenceMismatchError(sentence)
            (self.voice.say if agree else self.voice.warn)(sentence)
        self.facts["policy"] = (engine.reference.fingerprint if own and engine.reference
                                else references.fingerprint(engine.model))
        self.facts |= {"reference": engine.reference.fingerprint} if engine.reference else {}
        self.facts |= {"teacher": engine.teacher.fingerprint} if engine.teacher else {}

    def _train(self, directory: RunDirectory, manifest: Manifest | None, began: float) -> RunResult:
        engine, data, options = self.build(), self.data, self.options
        if manifest is not None:
            manifest.add(**self.facts)
        sampler = Sampler(data.evaluation or data.train, held_out=bool(data.evaluation), count=options.samples,
                          tokenizer=self.tokenizer, stop_ids=sorted(data.renderer.stop_ids),
                          max_positions=load.max_positions(engine.model.module.config))
        dtype = getattr(torch, options.export_dtype)
        copies = 1 + (self.schedule.total_steps - 1) // (options.save_every or self.schedule.total_steps)
        self.world.on_main(lambda: load.check_space(engine.model.module, directory.path, dtype, copies))
        answers = sampler.ask(engine.model) if self.world.is_main else []
        keep = self.world.is_main and options.export_dtype != "float32"
        initial = engine.model.snapshot() if keep else None
        records = self._follow(directory, train(
            engine, self.planner, partial(self._evaluate, self.evaluator) if data.evaluation else None, self._plan(),
            lambda step: self.world.on_main(lambda: self._keep(engine, directory, step))))
        samples: list[dict[str, Any]] = []
        if self.world.is_main:
            samples = sampler.compare(answers, sampler.ask(engine.model))
            for sample in samples:
                directory.append_sample(sample)
            self._export(engine, directory.model)
            if initial is not None:
                share = load.survived_rounding(engine.model.module, initial, dtype)
                self.voice.say(f"export in {options.export_dtype}: {share:.1%} of the changed weights survive it")
        shown = [record for record in records if record.split == "eval"] or records
        before, after = shown[0].metrics, shown[-1].metrics
        seconds = time.monotonic() - began
        if manifest is not None:
            manifest.end("done", steps=self.schedule.total_steps, seconds=round(seconds, 3))
        what = f"{len(data.evaluation)} held-out rows" if data.evaluation else "training steps, first and last"
        self.voice.before_after(f"{what}: before and after", before, after, leave_out=BOOKKEEPING)
        self.voice.say(f"model: {directory.model}  ({self.schedule.total_steps} steps, {seconds:.0f} s)")
        return RunResult(directory.path, directory.model, self.schedule.total_steps, seconds, before, after, samples)

    @cached_property
    def evaluator(self) -> Evaluator:
        """Evaluates the held-out rows; the first time says what the initial policy makes of them."""
        return Evaluator(self.data.evaluation, self.numerics.budget, self.data.max_length)

    def evaluate(self) -> dict[str, float]:
        """The evaluation record of the policy as it is now.

        Raises:
            UsageError: if no rows are held out.
        """
        if not self.data.evaluation:
            raise UsageError("there is nothing to evaluate on: give eval_dataset, or eval_fraction")
        engine = self.build()
        return self._evaluate(self.evaluator, engine)

    def release(self) -> None:
        """Let weights that the given optimiser does not hold learn again."""
        for parameter in self._idle:
            parameter.requires_grad_(True)

    def _plan(self) -> Plan:
        options = self.options
        every = options.eval_every if options.eval_every is not None else max(1, self.schedule.total_steps // 10)
        return Plan(options.log_every, every, options.save_every or 0, options.workers or 0)

    def _evaluate(self, evaluator: Evaluator, engine: Engine) -> dict[str, float]:
        with self.voice.bar("evaluate") as report:
            return evaluator(engine, report)

    def _follow(self, directory: RunDirectory, records: Any) -> list[Record]:
        """Write each record as it comes, and show it."""
        kept: list[Record] = []
        trackers = None
        if self.world.is_main and self.trackers:
            logs = Path(self.options.log_dir).expanduser() if self.options.log_dir else directory.path / "logs"
            trackers = Trackers(self.trackers, directory.path.name, logs, self._written(), self.voice.warn)
        try:
            with self.voice.bar("train") as report:
                for record in records:
                    kept.append(record)
                    if self.world.is_main:
                        directory.append_record(record.to_json())
                    if trackers is not None:
                        trackers.log(record.metrics, record.step, record.split)
                    if record.split == "train":
                        metrics = record.metrics
                        shown = {"loss": f"{metrics['loss']:.4f}"}
                        if "rewards/margins" in metrics:
                            shown["margin"] = f"{metrics['rewards/margins']:+.4f}"
                        shown["tokens/s"] = f"{metrics['tokens_per_second']:.0f}"
                        report(record.step, self.schedule.total_steps, **shown)
        finally:
            if trackers is not None:
                trackers.finish()
        return kept

    def _keep(self, engine: Engine, directory: RunDirectory, step: int) -> None:
        with directory.checkpoint(step) as path:
            self._export(engine, path / "model")

    def _export(self, engine: Engine, path: Path) -> None:
        dtype = getattr(torch, self.options.export_dtype)
        load.export(engine.model.module, self.tokenizer, path, dtype, self.data.renderer.stop_ids)
