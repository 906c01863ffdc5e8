"""One call that runs a method from options to a model directory. The command line is this call."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from tropism.config import MethodOptions
from tropism.data.load import check_embedding
from tropism.data.rows import EncodedRow
from tropism.data.schedule import Steps
from tropism.distributed import World, connect
from tropism.errors import ModelError, ReferenceMismatchError, UsageError
from tropism.files import check_writable
from tropism.methods import Method
from tropism.methods.build import build_method, effective
from tropism.model import load
from tropism.model import moe_router as router
from tropism.model.layout_check import choose_layout
from tropism.model.source import ModelSource
from tropism.observe.checksums import file_hash
from tropism.observe.console import Voice
from tropism.observe.lock import Ownership
from tropism.observe.manifest import Manifest, libraries, text_fingerprints
from tropism.observe.rundir import RunDirectory
from tropism.observe.track import check as check_trackers
from tropism.train.checkpoints import resume
from tropism.train.checkpoints.find import Origin, find
from tropism.train.checkpoints.saver import Notes, check_metric
from tropism.train.engine import Engine
from tropism.train.evaluation.evaluator import Evaluator, evenly
from tropism.train.failure import record_failure
from tropism.train.frozen import reference as references
from tropism.train.frozen import teacher as teachers
from tropism.train.frozen.score_store import ROWS
from tropism.train.memory import keep_freed_memory
from tropism.train.monitor.early_stopping import make_rule
from tropism.train.optimizer import build_updater, check_given
from tropism.train.options import TeacherOptions
from tropism.train.preemption import Halt
from tropism.train.router_loss import build_router_loss
from tropism.train.session import RunResult, Session, result_of
from tropism.train.setup import models
from tropism.train.setup.announce import announce_data, announce_plan, sharding_lines
from tropism.train.setup.checks import check_first_step, probe_trees
from tropism.train.setup.data import (
    PreparedData,
    labels_of,
    make_schedule,
    prepare_data,
    prepare_rows,
    steps_fingerprint,
)
from tropism.train.setup.parallel import parallelize
from tropism.train.setup.policy import PolicyBuilder
from tropism.train.setup.python_objects import PythonObjects
from tropism.train.step_packs import StepPlanner, all_trees, check_partners, own_trees


def run(options: MethodOptions, voice: Voice | None = None, began: float | None = None) -> RunResult:
    """Train as the options say.

    Args:
        began: when the time of the run began to count, of the monotonic clock; by default now.

    Raises:
        TropismError: a subclass that says what is wrong and what to do; before the first step wherever it can be.
    """
    began = time.monotonic() if began is None else began
    with connect() as world:
        return Run(options, world, voice).fit(began)


class Run:
    """One run from checks to export. Each method is a stage.

    Args:
        options: all of them.
        world: this process among the others.
        voice: speaks to the user.
        objects: what comes as an object.
    """

    def __init__(self, options: MethodOptions, world: World, voice: Voice | None = None,
                 objects: PythonObjects | None = None) -> None:
        self.options = options
        self.objects = objects or PythonObjects()
        given = any(getattr(self.objects, name) is not None for name in ("model", "reference", "teacher"))
        self.world = world = parallelize(
            world, options.parallel,
            "a module that is given stays whole in each process; name the model instead" if given else "")
        self.voice = voice or Voice(loud=world.is_main)
        self.values = options.values
        self.numerics = models.numerics_of(options, world)
        self.store = options.store_root
        self.named = ModelSource.of(options.model) if self.objects.model is None else self.objects.model
        self.start = PolicyBuilder.of(self.named, options.lora, self.objects.optimizer, world)
        self.reference = self._other("reference")
        self.teacher = self._other("teacher")
        self.live = self.values.get("reference") == "live"
        self.halt = Halt(world)
        self._open()

    def _other(self, name: str) -> Any:
        """Another model of the run, as a module or by its name; None if there is none."""
        given, value = getattr(self.objects, name), self.values.get(name)
        if given is not None or value is None or (name, value) == ("reference", "live"):
            return models.given(given, name)
        return ModelSource.of(value)

    def _open(self) -> None:
        """Tokenizer, data and method: all that can be checked before a model is loaded."""
        options, objects, remote = self.options, self.objects, self.options.trust_remote_code
        check_trackers(options.track.split(",") if options.track else [])
        named = self.named
        if isinstance(named, ModelSource):
            config = load.load_config(named, trust_remote_code=remote)
        else:
            config = named.config
            check_given(objects.optimizer, named)
        self.start.check(config, remote, options.parallel.tensor)
        router.check_option(options.router_aux_weight, config)
        self.tokenizer = objects.tokenizer or load.load_tokenizer(
            named if isinstance(named, ModelSource) else ModelSource.of(config.name_or_path), trust_remote_code=remote)
        models.tokenizer_of(self.reference, "reference", self.tokenizer, remote)
        models.check_teacher(self.teacher, config, self.tokenizer, self.values.get("top_k"), remote)
        configs = [config, *(models.config_of(other, remote) for other in (self.reference, self.teacher)
                             if other is not None)]
        if objects.rows is not None:
            data = prepare_rows(options, self.tokenizer, configs, options.view, objects.rows, objects.eval_rows)
        else:
            def read() -> PreparedData:
                with self.voice.bar("read") as report, self.world.main_first():
                    return prepare_data(options, self.tokenizer, configs, options.view, objects.train,
                                        objects.evaluation, cache=self.store / ROWS, report=report,
                                        most=options.most_rows)

            data = self.world.together(read)
        for one in configs:
            load.check_rope(one, data.max_length)
            for rows in (data.train, data.evaluation):
                check_embedding(rows, one.get_text_config().vocab_size, self.tokenizer.convert_ids_to_tokens)
        self.method: Method = build_method(options.view, self.values, labels_of(data.train))
        if self.method.ld_alpha is not None:
            data = replace(data, train=[row.with_shared_lengths() for row in data.train],
                           evaluation=[row.with_shared_lengths() for row in data.evaluation])
        self.data: PreparedData = data
        prints = self.world.gather(data.fingerprints())
        if any(other != prints[0] for other in prints):
            raise UsageError("the processes read different data; each needs all of it, since the steps are shared out "
                             "here (no DistributedSampler)")
        check_metric(options.keep_best, self.method, bool(data.evaluation))
        make_rule(options.stop_metric, options.stop_patience, options.stop_delta, self.method, bool(data.evaluation))
        self.schedule: Steps = check_partners(objects.steps, data.train, self.method) if objects.steps else (
            make_schedule(options, options, data.train, self.method.needs_reference_point))
        self.config = config
        self.engine: Engine | None = None
        self.trained = False
        """Whether weights may no longer be those that the run begins with."""
        self.done_before = False
        self._idle: list[torch.nn.Parameter] = []

    def fit(self, began: float | None = None) -> RunResult:
        """Train, or go on training, and leave a run directory. Once: the model is then no longer what it was.

        Args:
            began: as `run` says.

        Raises:
            StoppedEarly: if it was stopped, or its time was up; it can go on.
        """
        if self.trained:
            raise UsageError("this trainer has trained already; make a new one. To go on with its run, give that one "
                             "the same model by name, or as a module that was loaded anew, and resume='auto'")
        began = time.monotonic() if began is None else began
        directory = RunDirectory(Path(self.options.output).expanduser())
        with Ownership(directory.path, self.voice.warn) as ownership:
            if self.options.resume != "never":  # what it goes on from must not change under its eyes
                self.world.on_main(lambda: ownership.take() if directory.holds_run else None)
            return self._fit(directory, ownership, began)

    def _fit(self, directory: RunDirectory, ownership: Ownership, began: float) -> RunResult:
        options = self.options
        self.halt = Halt(self.world, options.max_seconds, began)
        origin = self.world.broadcast(self.world.on_main(
            lambda: find(directory, options.resume, options.fall_back)))
        announce_data(self.data, self.method, self.voice)
        announce_plan(options, self.data, self.schedule, len(self.held_out), self.numerics.precision, self.world,
                       self.objects, self.voice)
        for note in models.turned_off(self.config, options.router_aux_weight):
            self.voice.say(note)
        if origin is not None and resume.is_over(origin, directory, self.schedule.total_steps, self._written(),
                                                 self._fingerprints(), self.voice):
            self._take_result(directory)
            return result_of(directory, origin.manifest)
        self.world.on_main(ownership.take)
        manifest = None if origin else self.world.on_main(lambda: self._begin(directory))
        try:
            with self.halt.listening():
                session = self._sit_down(directory, manifest, origin, began)
                manifest = session.manifest
                self.trained = True
                return session.train()
        except BaseException as error:
            record_failure(directory, manifest, error, self.world, self.numerics.microbatch_tokens,
                           self.objects == PythonObjects())
            raise
        finally:
            self.halt = Halt(self.world)  # what was asked of this sitting concerns no other

    def _take_result(self, directory: RunDirectory) -> None:
        """A run that was done before: a module that was given, or built, gets the weights that it ended with."""
        self.trained = self.done_before = True
        if self.objects.model is not None or self.engine is not None:
            module = self.engine.model.module if self.engine else self.start.module(self.numerics, self.options.seed)
            self.start.take_result(module, directory.model, self.numerics, self.world)

    def _sit_down(self, directory: RunDirectory, manifest: Manifest | None, origin: Origin | None,
                  began: float) -> Session:
        """The engine as it stands where the run goes on, and what a sitting needs besides."""
        options, world = self.options, self.world
        trainer = origin.trainer if origin else None
        engine = self.build(fresh=trainer is None)
        keep = (world.is_main or world.mesh is not None) and options.export_dtype != "float32"
        initial = engine.model.snapshot() if keep else None
        if origin is not None:
            resume.check_same(origin.manifest, self.facts, directory.path,
                              resume.possible_reasons(origin.manifest, world.device.type))
            if trainer is not None:
                self.trained = True
                resume.load(engine, origin)
            manifest = world.on_main(lambda: self._begin(directory, origin))
        if manifest is not None:
            manifest.add(**self.facts)
        frozen = {name: str(self.facts[name]) for name in ("policy", "reference", "teacher") if name in self.facts}
        prints = self._fingerprints() | frozen
        notes = Notes({"fingerprints": prints, "options": self._written(), "libraries": libraries(),
                       "world_size": world.size, "stop_ids": sorted(self.data.renderer.stop_ids)}, began=began)
        if trainer is not None:
            notes.resume(trainer)
        return Session(options, self._written(), engine, self.planner, self.data, self.tokenizer,
                       self.evaluator if self.data.evaluation else None, directory, manifest, self.voice, self.halt,
                       notes, options.workers or 0, origin, initial)

    def _written(self) -> dict[str, Any]:
        """Every option with the value that it had."""
        distilled = isinstance(self.options, TeacherOptions)
        of_teacher: dict[str, Any] = teachers.effective(self.options) if distilled else {}  # type: ignore[arg-type]
        return (self.options.dump() | effective(self.method, self.values) | of_teacher
                | {"precision": self.numerics.precision, "resume": "never", "fall_back": False})

    def _fingerprints(self) -> dict[str, str]:
        """Of everything that decides which ids are trained on, and in which steps."""
        given = {} if self.objects.steps is None else {"steps": steps_fingerprint(self.objects.steps)}
        return self.data.fingerprints() | text_fingerprints(self.tokenizer) | given

    def _begin(self, directory: RunDirectory, origin: Origin | None = None) -> Manifest:
        """Make the run directory and write what is known before the model is loaded; or bring one that is there to
        where the run goes on."""
        options = self.options
        if origin is None:
            directory.refuse_if_used()  # by a process that was faster, and has ended since
        directory.create()
        if origin is not None:
            resume.begin_again(directory, origin)
        directory.write_config(self._written())
        directory.write_json("audit.json", self.data.to_json())
        model = self.named.absolute if isinstance(self.named, ModelSource) else options.model
        facts = {
            "method": options.method, "model": model, "seed": options.seed,
            "world_size": self.world.size, "device": str(self.world.device), "precision": self.numerics.precision,
            "fingerprints": self._fingerprints(), **self.objects.facts}
        if self.world.device.type == "cuda":
            facts["device_name"] = torch.cuda.get_device_name(self.world.device)
        manifest = Manifest(directory, facts, origin.manifest if origin else None, origin.step if origin else 0)
        prints = {**manifest.facts["fingerprints"], "config": file_hash(directory.path / "config.yaml")}
        manifest.add(fingerprints=prints)  # of this sitting: options that may change may have changed
        return manifest

    def build(self, fresh: bool = True) -> Engine:
        """Model, layout, reference, teacher and optimizer, each checked as soon as it can be; built once.

        Args:
            fresh: policy and reference must agree: the run does not go on from where it has trained already.
        """
        if self.engine is not None:
            return self.engine
        options, world, method = self.options, self.world, self.method
        if world.device.type == "cpu":
            keep_freed_memory(world.mesh is None)
        if (method.needs_reference and not self.live) or self.values.get("top_k"):
            self.world.on_main(lambda: check_writable(
                self.store, what="the reference store cannot be written", advice="Choose another place with --store"))
        module, self.facts = self.start.begin(self.numerics, options.seed, self.voice,
                                              method.needs_reference and self.reference is None)
        self.halt.check()
        probes = probe_trees(self.data.train, self.numerics.microbatch_tokens)
        model, probe = choose_layout(module, self.numerics.precision, world.device, probes, options.layout)
        model = replace(model, sum_once=self.numerics.sum_once)
        self.voice.say(f"layout: {probe.layout}; differs from the model's own forward by at most "
                       f"{probe.per_token:.1e} nats per token" + (f" ({probe.reason})" if probe.reason else ""))
        self.start.round_weights(module, model.precision, sharded=False)
        if world.size > 1 and world.mesh is None and len(set(world.gather(references.fingerprint(model)))) > 1:
            raise ModelError("the processes hold different weights; load or seed the model equally on all of them")
        self.planner = StepPlanner(self.data.train, self.schedule, method, model.layout,
                                   self.numerics.microbatch_tokens, self.data.max_length, world,
                                   reuse_prompts=not self.live, balanced=options.router_aux_weight > 0)
        trees, oversized = self.planner.survey(self.halt.watching(lambda done, total: None))
        if oversized:
            self.voice.warn(f"{oversized} prompts with their completions exceed microbatch_tokens "
                            f"{self.numerics.microbatch_tokens} and get a pass of their own")
        held_out = all_trees(self.held_out, range(len(self.held_out)), method, self.data.max_length)
        reference = teacher = None
        if self.teacher is not None:
            teacher = models.build_teacher(
                model, self.teacher, options, self.tokenizer,  # type: ignore[arg-type]
                own_trees(self.data.train, self.schedule) + held_out, probes, self.numerics, self.store, world,
                self.voice, self.halt)
        if method.needs_reference:
            reference = self.start.live(model, probes, self.numerics, options.seed) if self.live else (
                models.build_reference(model, self.reference, trees + held_out, probes, self.numerics, self.store,
                                       world, self.voice, self.halt, self.start.as_reference))
        updater, self._idle = build_updater(module, options, self.schedule.total_steps, self.objects.optimizer,
                                            self.objects.scheduler)
        engine = Engine(model, reference, method, updater, world, options.max_grad_norm, teacher,
                        rounding=probe.per_root_token,
                        balance=build_router_loss(options.router_aux_weight, model, probes))
        self.facts |= {"layout": probe.layout, "layout_error_nats_per_token": probe.per_token}
        if world.mesh is not None:
            for line in sharding_lines(engine.modules, world):
                self.voice.say(line)
        self._check(engine, fresh)
        self.engine = engine
        return engine

    def _check(self, engine: Engine, fresh: bool) -> None:
        """Policy and reference agree before step 1, where they must."""
        own = engine.reference is not None and self.reference is None
        if own and fresh:
            agree, sentence = check_first_step(engine, self.planner)
            if not agree and self.options.strict:
                raise ReferenceMismatchError(sentence)
            (self.voice.say if agree else self.voice.warn)(sentence)
        self.facts["policy"] = (engine.reference.fingerprint if own and engine.reference
                                else self.start.fingerprint(engine.model))
        self.facts |= {name: one.fingerprint for name in ("reference", "teacher") if (one := getattr(engine, name))}

    @cached_property
    def held_out(self) -> Sequence[EncodedRow]:
        """The rows that are evaluated: all that are held out, or so many of them at even distances."""
        return evenly(self.data.evaluation, self.options.eval_limit)

    @cached_property
    def evaluator(self) -> Evaluator:
        """Evaluates the held-out rows; the first time says what the initial policy makes of them."""
        return Evaluator(self.held_out, self.numerics.microbatch_tokens, self.data.max_length)

    def evaluate(self) -> dict[str, float]:
        """The evaluation record of the policy as it is now.

        Raises:
            UsageError: if no rows are held out.
        """
        if not self.data.evaluation:
            raise UsageError("there is nothing to evaluate on: give eval_dataset, or eval_fraction")
        if self.done_before and self.engine is None:
            raise UsageError(f"the run was done before; its evaluations are in {self.options.output}, and `tropism "
                             f"evaluate {self.options.output}` makes others")
        engine = self.build()
        with self.voice.bar("evaluate") as report:
            return self.evaluator(engine, report)

    def release(self) -> None:
        """Let weights that the given optimizer does not hold learn again."""
        for parameter in self._idle:
            parameter.requires_grad_(True)
