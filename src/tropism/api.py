"""One call that runs a method from options to a model directory. The command line is this call."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from tropism.config import MethodOptions
from tropism.data.load import check_embedding
from tropism.data.schedule import Schedule
from tropism.data.tree import PromptTree
from tropism.dist import World, connect
from tropism.errors import ReferenceMismatchError, TropismError
from tropism.methods import LOSSES, Method
from tropism.model import load
from tropism.model.logps import LanguageModel
from tropism.model.probe import choose_layout
from tropism.observe.console import Voice
from tropism.observe.manifest import Manifest, text_fingerprints
from tropism.observe.metrics import BOOKKEEPING
from tropism.observe.rundir import RunDirectory
from tropism.train import reference as references
from tropism.train.evaluate import Evaluator
from tropism.train.loop import Plan, Record, check_first_step, train
from tropism.train.memory import keep_freed_memory
from tropism.train.optim import build_optimizer
from tropism.train.prepare import Prepared, build_method, describe_weights, make_schedule, prepare_data, probe_trees
from tropism.train.samples import Sampler
from tropism.train.step import Engine
from tropism.train.store import check_writable, default_root
from tropism.train.work import Planner, all_trees

T = TypeVar("T")


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


def run(options: MethodOptions, voice: Voice | None = None) -> RunResult:
    """Train as the options say.

    Raises:
        TropismError: a subclass that says what is wrong and what to do; before the first step wherever it can be.
    """
    with connect() as world:
        this = _Run(options, world, voice or Voice(loud=world.is_main))
        try:
            return this.go()
        except torch.OutOfMemoryError as error:
            raise TropismError(f"the GPU ran out of memory; --microbatch-tokens below {this.budget} takes less, and "
                               f"changes no result ({str(error).splitlines()[0]})") from error


class _Run:
    """One run from checks to export. Each method is a stage; `go` is their order."""

    def __init__(self, options: MethodOptions, world: World, voice: Voice) -> None:
        self.options = options
        self.world = world
        self.voice = voice
        self.began = time.monotonic()
        self.source = load.Source.of(options.model)
        cuda = world.device.type == "cuda"
        self.precision = options.precision if options.precision != "auto" else "bf16" if cuda else "fp32"
        self.budget = options.microbatch_tokens or (16384 if cuda else 2048)
        self.store = Path(options.store).expanduser() if options.store else default_root()
        self.other = load.Source.of(options.reference) if options.reference not in (None, "live") else None

    def go(self) -> RunResult:
        options, remote = self.options, self.options.trust_remote_code
        directory = RunDirectory(Path(options.output).expanduser())
        self._on_main(directory.refuse_if_used)
        self.tokenizer = load.load_tokenizer(self.source, trust_remote_code=remote)
        config = load.load_config(self.source, trust_remote_code=remote)
        if self.other is not None:
            references.check_vocabulary(load.load_tokenizer(self.other, trust_remote_code=remote), self.tokenizer)
        row = LOSSES[options.loss]  # type: ignore[attr-defined]
        data = prepare_data(options, self.tokenizer, config, row.view)
        load.check_rope(config, data.max_length)
        check_embedding([*data.train, *data.evaluation], config.get_text_config().vocab_size,
                        self.tokenizer.convert_ids_to_tokens)
        method = build_method(row, options.model_dump(), data.train)
        schedule = make_schedule(options, options, data.train, row.needs_reference_point)
        self._introduce(data, method, schedule, config)
        manifest = self._on_main(lambda: self._open(directory, data))
        try:
            return self._train(directory, manifest, data, method, schedule)
        except BaseException as error:
            if manifest is not None:
                status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
                manifest.end(status, error=str(error) or type(error).__name__)
            raise

    def _introduce(self, data: Prepared, method: Method, schedule: Schedule, config: Any) -> None:
        """What was read, and what is about to be done."""
        say, warn = self.voice.say, self.voice.warn
        for audit, name in ((data.audit, "data"), (data.eval_audit, "eval data")):
            if audit is not None:
                say(f"{name}: {audit.source}: {audit.summary()}")
                for drop in audit.dropped[:3]:
                    say(f"  left out: {drop.place}: {drop.reason}: {drop.detail}")
                for notice in audit.notices():
                    warn(notice)
        say(f"method: {method.row.name} ({method.row.reading}); "
            + ", ".join(f"{name} {value:g}" for name, value in method.options.items()))
        if seen := data.prompts_on_both_sides():
            warn(f"{seen} evaluation prompts are also trained on: figures on them are not held out")
        if method.row.view == "unpaired":
            say(f"labels: {describe_weights(method, data.train)}")
        held_out = f", {len(data.evaluation)} rows held out" if data.evaluation else ""
        say(f"plan: {len(data.train)} rows{held_out}; {schedule.total_steps} steps of {self.options.batch_size}, "
            f"learning rate {self.options.learning_rate:g}, max_length {data.max_length}, {self.precision}, "
            f"{self.world.size} x {self.world.device.type}")
        if dropout := load.dropout_of(config):
            say(f"dropout is off (the config asks for {', '.join(f'{k} {v}' for k, v in dropout.items())})")
        if self.options.learning_rate == 0:
            warn("learning_rate is 0: nothing will change")

    def _on_main(self, action: Callable[[], T]) -> T | None:
        """What the main rank alone does; an error of it is raised on every rank, so that none waits for it."""
        result, failure = None, None
        if self.world.is_main:
            try:
                result = action()
            except TropismError as error:
                failure = error
        failure = self.world.broadcast(failure)
        if failure is not None:
            raise failure
        return result

    def _open(self, directory: RunDirectory, data: Prepared) -> Manifest:
        """Make the run directory and write what is known before the model is loaded."""
        options = self.options
        directory.create()
        directory.write_config(options.dump() | {"precision": self.precision})
        directory.write_json("audit.json", data.to_json())
        return Manifest(directory, {
            "method": options.method, "model": self.source.absolute, "seed": options.seed,
            "world_size": self.world.size, "device": str(self.world.device), "precision": self.precision,
            "fingerprints": data.fingerprints() | text_fingerprints(self.tokenizer)})

    def _train(self, directory: RunDirectory, manifest: Manifest | None, data: Prepared, method: Method,
               schedule: Schedule) -> RunResult:
        engine, planner = self._build(data, method, schedule, manifest)
        evaluator = Evaluator(data.evaluation, self.budget, data.max_length) if data.evaluation else None
        sampler = Sampler(data.evaluation or data.train, held_out=bool(data.evaluation), count=self.options.samples,
                          tokenizer=self.tokenizer, stop_ids=sorted(data.renderer.stop_ids),
                          max_positions=load.max_positions(engine.model.module.config))
        dtype = getattr(torch, self.options.export_dtype)
        self._on_main(lambda: load.check_space(engine.model.module, directory.path, dtype))
        answers = sampler.ask(engine.model) if self.world.is_main else []
        keep = self.world.is_main and self.options.export_dtype != "float32"
        initial = engine.model.snapshot() if keep else None
        evaluate = partial(self._evaluate, evaluator) if evaluator else None
        records = self._follow(directory, train(engine, planner, evaluate, self._plan(schedule)), schedule)
        samples: list[dict[str, Any]] = []
        if self.world.is_main:
            samples = sampler.compare(answers, sampler.ask(engine.model))
            for sample in samples:
                directory.append_sample(sample)
            self._export(engine, directory, data, initial)
        shown = [record for record in records if record.split == "eval"] or records
        before, after = shown[0].metrics, shown[-1].metrics
        seconds = time.monotonic() - self.began
        if manifest is not None:
            manifest.end("done", steps=schedule.total_steps, seconds=round(seconds, 3))
        what = f"{len(data.evaluation)} held-out rows" if evaluator else "training steps, first and last"
        self.voice.before_after(f"{what}: before and after", before, after, leave_out=BOOKKEEPING)
        self.voice.say(f"model: {directory.model}  ({schedule.total_steps} steps, {seconds:.0f} s)")
        return RunResult(directory.path, directory.model, schedule.total_steps, seconds, before, after, samples)

    def _build(self, data: Prepared, method: Method, schedule: Schedule,
               manifest: Manifest | None) -> tuple[Engine, Planner]:
        """Model, layout, reference and optimiser, each checked as soon as it can be."""
        options, world = self.options, self.world
        if world.device.type == "cpu":
            keep_freed_memory()
        if options.reference != "live":
            self._on_main(lambda: check_writable(self.store))
        module = load.load_model(self.source, self.precision, world.device, trust_remote_code=options.trust_remote_code)
        probes = probe_trees(data.train, self.budget)
        model, probe = choose_layout(module, self.precision, world.device, probes, options.layout)
        self.voice.say(f"layout: {probe.layout}; differs from the model's own forward by at most "
                       f"{probe.per_token:.1e} nats per token" + (f" ({probe.reason})" if probe.reason else ""))
        planner = Planner(data.train, schedule, method, model.layout, self.budget, data.max_length, world)
        trees, oversized = planner.survey()
        if oversized:
            self.voice.warn(f"{oversized} prompts with their completions exceed microbatch_tokens {self.budget} and "
                            "get a pass of their own")
        reference = self._reference(model, data, trees, method, probes)
        planner = replace(planner, reuse_prompts=options.reference != "live")
        optimizer = build_optimizer(options.optimizer, module, options.weight_decay)
        engine = Engine(model, reference, method, optimizer, world, options.max_grad_norm, probe.per_root_token)
        frozen_policy = options.reference in (None, "live")
        if frozen_policy:
            agree, sentence = check_first_step(engine, planner)
            if not agree and options.strict:
                raise ReferenceMismatchError(sentence)
            (self.voice.say if agree else self.voice.warn)(sentence)
        if manifest is not None:
            policy = reference.fingerprint if frozen_policy else references.fingerprint(model)
            manifest.add(layout=probe.layout, layout_error_nats_per_token=probe.per_token,
                         policy=policy, reference=reference.fingerprint)
        return engine, planner

    def _reference(self, model: LanguageModel, data: Prepared, trees: list[PromptTree], method: Method,
                   probes: list[PromptTree]) -> references.Reference:
        """The frozen scorer: stored scores by default, of the policy as it is now or of another model."""
        options = self.options
        if options.reference == "live":
            return references.LiveReference(references.freeze(model))
        frozen = model
        if self.other is not None:
            other = load.load_model(self.other, self.precision, self.world.device,
                                    trust_remote_code=options.trust_remote_code)
            frozen, _ = choose_layout(other, self.precision, self.world.device, probes, model.layout)
        if data.evaluation:
            trees = trees + all_trees(data.evaluation, range(len(data.evaluation)), method, data.max_length)
        with self.voice.bar("reference") as report:
            built = references.build(frozen, trees, self.budget, self.store, self.world, report)
        if built.damaged:
            self.voice.warn(f"{len(built.damaged)} damaged files of the reference store were left out and their scores "
                            f"computed again (first {built.damaged[0]})")
        return built

    def _plan(self, schedule: Schedule) -> Plan:
        options = self.options
        every = options.eval_every if options.eval_every is not None else max(1, schedule.total_steps // 10)
        return Plan(options.learning_rate, options.schedule, options.warmup_ratio, options.log_every, every,
                    options.workers)

    def _evaluate(self, evaluator: Evaluator, engine: Engine) -> dict[str, float]:
        with self.voice.bar("evaluate") as report:
            return evaluator(engine, report)

    def _follow(self, directory: RunDirectory, records: Any, schedule: Schedule) -> list[Record]:
        """Write each record as it comes, and show it."""
        kept: list[Record] = []
        with self.voice.bar("train") as report:
            for record in records:
                kept.append(record)
                if self.world.is_main:
                    directory.append_record(record.to_json())
                if record.split == "train":
                    metrics = record.metrics
                    shown = {"loss": f"{metrics['loss']:.4f}"}
                    if "rewards/margins" in metrics:
                        shown["margin"] = f"{metrics['rewards/margins']:+.4f}"
                    shown["tokens/s"] = f"{metrics['tokens_per_second']:.0f}"
                    report(record.step, schedule.total_steps, **shown)
        return kept

    def _export(self, engine: Engine, directory: RunDirectory, data: Prepared,
                initial: dict[str, torch.Tensor] | None) -> None:
        dtype = getattr(torch, self.options.export_dtype)
        load.export(engine.model.module, self.tokenizer, directory.model, dtype, data.renderer.stop_ids)
        if initial is not None:
            share = load.survived_rounding(engine.model.module, initial, dtype)
            self.voice.say(f"export in {self.options.export_dtype}: {share:.1%} of the changed weights survive it")
