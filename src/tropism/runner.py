"""One call that runs a method from options to a model directory. The command line is this call."""

import time
from collections.abc import Generator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from tropism import store
from tropism.config import MethodOptions
from tropism.distributed import World, connect
from tropism.distributed.agreement import Fact, check_same
from tropism.errors import UsageError
from tropism.losses.scored import Scored
from tropism.model.cpu_products import Products
from tropism.model.save import check_saved_files
from tropism.model.source import ModelSource
from tropism.observe.checksums import Files
from tropism.observe.console import Voice
from tropism.observe.lock import Ownership
from tropism.observe.manifest import Manifest, libraries, text_fingerprints
from tropism.observe.rundir import RunDirectory
from tropism.observe.track import check as check_trackers
from tropism.report import report_on
from tropism.train.checkpoints import resume
from tropism.train.checkpoints.find import FROZEN, Origin, find
from tropism.train.checkpoints.saver import make_saver
from tropism.train.disk_space import check_disk_space
from tropism.train.engine import Engine
from tropism.train.evaluation.evaluator import Evaluator
from tropism.train.evaluation.samples import Sampler
from tropism.train.evaluation.user_evaluators import UserEvaluators, load_evaluators
from tropism.train.failure import record_failure
from tropism.train.loop import Plan, TrainingLoop, exhaust
from tropism.train.monitor.nonfinite import Tolerance
from tropism.train.observers import Observers, check_metrics
from tropism.train.preemption import Preemption, stopping_at_once
from tropism.train.profiling import StepProfiler
from tropism.train.result import RunResult, begin_files, export_result, export_scores, finish, result_of
from tropism.train.run_state import RunState
from tropism.train.settings import Settings
from tropism.train.setup.agreement import facts_of_options
from tropism.train.setup.announce import announce_data, announce_plan
from tropism.train.setup.build import BuiltEngine, RunInputs, build_engine
from tropism.train.setup.checks import check_reference
from tropism.train.setup.data import steps_fingerprint
from tropism.train.setup.inputs import Named, check_start, read_inputs
from tropism.train.setup.parallel import parallelize
from tropism.train.setup.planned import arranged
from tropism.train.setup.python_objects import PythonObjects
from tropism.train.setup.resolve import resolve
from tropism.train.step_log import StepOutcome
from tropism.train.step_packs import StepPlanner

Steps = Generator[StepOutcome | None, str | None, RunResult]
"""A run that trains while it is iterated over, as in `TrainingLoop.steps`, and returns its result."""


def run(options: MethodOptions, voice: Voice | None = None, began: float | None = None) -> RunResult:
    """Train as the options say.

    Args:
        began: start of the run's time limit, by the monotonic clock. Default: now.

    Raises:
        TropismError: a subclass that names the problem and the remedy, before the first step where possible.
    """
    began = time.monotonic() if began is None else began
    with stopping_at_once(), connect() as world:
        return Run(options, world, voice).fit(began)


class Run:
    """One run, from checks to export.

    Args:
        options: all of them.
        world: this process among the others.
        voice: speaks to the user.
        objects: objects that a Python caller passes in place of names.

    Attributes:
        inputs: everything that the run needs, checked before a model is loaded.
        trained: the weights may have changed since the start.
    """

    def __init__(self, options: MethodOptions, world: World, voice: Voice | None = None,
                 objects: PythonObjects | None = None) -> None:
        self.options = options
        self.objects = objects = objects or PythonObjects()
        self.values = options.values
        given = any(getattr(objects, name) is not None for name in ("model", "reference", "teacher"))
        named = check_start(options, world, objects)
        whole = ("does not support models that are passed as modules. Pass the model by name." if given else
                 "does not support DoRA on quantized weights. Remove --lora.dora or --lora.quantize."
                 if options.lora.quantize and options.lora.dora else "")
        self.world = parallelize(world, options.parallel, whole, quantized=options.lora.quantize is not None)
        self.voice = (voice or Voice(loud=world.is_main)).preparing()
        self.named = named["model"]
        self.preemption = Preemption(self.world)
        self.trained = self.done_before = False
        self._built: BuiltEngine | None = None
        self.inputs = self._check_inputs(named)

    def _check_inputs(self, named: Named) -> RunInputs:
        """Everything that can be checked before a model is loaded."""
        options = self.options
        self.world.together(lambda: check_trackers(options.track.split(",") if options.track else []))
        functions = self.world.together(lambda: load_evaluators(options.evaluator, self.objects.evaluators))
        inputs = read_inputs(options, self.world, self.voice, self.objects, named)
        check_metrics(options, inputs.method, bool(inputs.data.evaluation), bool(functions))
        self.user_evaluators = UserEvaluators(functions, inputs, self.voice.warn)
        return inputs

    def _arrange(self, kept: Settings | None) -> None:
        """Settle once what `--parallel.shard auto` stands for. `kept` has the settings of the run that is resumed."""
        self.inputs = arranged(self.inputs, kept)
        self.world = self.inputs.world

    def _check_call(self, name: str) -> None:
        """Check that all processes make the same call, with the same options: `fit` may be given another `resume`."""
        check_same(self.world, lambda: {"call": Fact.of(f"{name}()"), **facts_of_options(self.options)})

    def fit(self, began: float | None = None) -> RunResult:
        """Train or resume, and write the run directory. A `Run` trains once, because training changes the model.

        Raises:
            StoppedEarly: if a signal or the time limit stopped it; it can be resumed.
        """
        return exhaust(self.steps(began))

    def steps(self, began: float | None = None) -> Steps:
        """As `fit`, for a caller that acts between optimizer steps. `began` is that of `run`."""
        if self.trained:
            raise UsageError("this trainer has already trained. Create a new one. To resume the run, pass the new one "
                             "the same model, by name or as a newly loaded module, and call fit(resume='auto').")
        began = time.monotonic() if began is None else began
        self._check_call("fit")
        directory = RunDirectory(Path(self.options.output).expanduser())
        with Ownership(directory.path, self.voice.warn) as ownership:
            ownership.callback(store.release)
            if self.options.resume != "never":  # no other process may change it while it is read
                self.world.on_main(lambda: ownership.take() if directory.holds_run else None)
            return (yield from self._steps(directory, ownership, began))

    def _steps(self, directory: RunDirectory, ownership: Ownership, began: float) -> Steps:
        options, inputs = self.options, self.inputs
        self.preemption = Preemption(self.world, options.max_seconds, began)
        origin = self.world.broadcast(self.world.on_main(
            lambda: find(directory, options.resume, options.fall_back)))
        self._arrange(Settings.kept_in(origin.trainer if origin else None))
        inputs = self.inputs
        announce_data(inputs.data, inputs.method, inputs.schedule.parts(1).rule, self.voice)
        announce_plan(options, inputs.data, inputs.schedule, len(inputs.held_out), inputs.numerics.precision,
                      self.world, self.objects, inputs.store, self.voice, inputs.shard)
        for note in inputs.notes:
            self.voice.say(note)
        if origin is not None and resume.is_over(origin, directory, inputs.schedule.total_steps, self._resolved(),
                                                 self._fingerprints(), self.voice):
            self._take_result(directory)
            return result_of(directory, origin.manifest)
        self.world.on_main(ownership.take)
        manifest = None if origin else self.world.on_main(lambda: self._begin(directory))
        try:
            with self.preemption.listening():
                manifest, initial = self._build_and_restore(directory, manifest, origin)
                self.trained = True
                return (yield from self._train(directory, manifest, origin, initial, began))
        except BaseException as error:
            record_failure(directory, manifest, error, self.world, inputs.numerics.microbatch_tokens,
                           self.objects == PythonObjects())
            raise
        finally:
            self.preemption = Preemption(self.world)  # a request to stop ends with this call

    def _take_result(self, directory: RunDirectory) -> None:
        """Load the final weights of a finished run into the module that was passed in or built."""
        self.trained = self.done_before = True
        if self.objects.model is not None or self._built is not None:
            policy, numerics = self.inputs.policy, self.inputs.numerics
            module = self.engine.model.module if self._built else policy.module(numerics, self.options.seed)
            policy.take_result(module, directory.model, numerics, self.world)

    def _build_and_restore(self, directory: RunDirectory, manifest: Manifest | None, origin: Origin | None,
                           ) -> tuple[Manifest | None, dict[str, torch.Tensor] | None]:
        """Build the engine and bring it to where the run starts or resumes.

        Returns:
            The manifest, on the main process; the weights before step 1, if the export is compared with them.
        """
        world, trainer = self.world, origin.trainer if origin else None
        engine = self.build(fresh=trainer is None, kept=Settings.kept_in(trainer))
        keep = (world.is_main or world.mesh is not None) and self.options.export_dtype != "float32"
        initial = engine.model.snapshot() if keep else None
        if origin is not None:
            resume.check_same(origin.fingerprints, self.facts, directory.path,
                              resume.possible_reasons(origin, world.device.type))
            if trainer is not None:
                self.trained = True
                if self.inputs.data.evaluation and not (self.inputs.method.needs_reference
                                                        and self.inputs.reference is None):
                    self.evaluator.first = self._score_held_out()  # `scores.parquet` has these values too
                resume.load(engine, origin, self.preemption)
            manifest = world.on_main(lambda: self._begin(directory, origin))
        if manifest is not None:
            manifest.add(**self.facts)
        return manifest, initial

    def _train(self, directory: RunDirectory, manifest: Manifest | None, origin: Origin | None,
               initial: dict[str, torch.Tensor] | None, began: float) -> Steps:
        """Train, and export the model.

        Raises:
            StoppedEarly: if it was stopped before the end; it can be resumed.
        """
        options, inputs, world, engine = self.options, self.inputs, self.world, self.engine
        trainer = origin.trainer if origin else None
        sampler = Sampler.of(inputs, engine)
        observers = Observers.of(inputs, directory)
        saver = make_saver(engine, directory, options, self._checkpoint_facts(), self.preemption, self.voice,
                           observers.state, inputs.tokenizer)
        world.on_main(lambda: check_saved_files(engine.model.module, inputs.tokenizer))
        world.on_main(lambda: check_disk_space(engine, options, directory, saver, inputs.schedule))
        assert self._built is not None
        state = RunState(began=began, tolerance=Tolerance(options.on_nonfinite), settings=self._built.settings)
        if trainer is None:
            with self.preemption.at_once():
                state.samples_before = sampler.ask_together(engine)
        else:
            state.restore(trainer)
            sampler.check(state.samples_before)
            if state.step == inputs.schedule.total_steps != state.evaluation.get("step"):
                state.evaluation_due = True  # its length was changed, so that it ends here
            observers.restore(trainer["guards"])
            self.user_evaluators.resume(state.evaluation, origin.manifest if origin else {})
            if origin is not None and not origin.finished and not state.evaluation_due:
                state.ending = observers.ending
        evaluator = self.evaluator if inputs.data.evaluation else None
        if evaluator is not None:
            evaluator.baselines, evaluator.last = state.baselines, None
            self.user_evaluators.note = lambda text: observers.note(state.step, text)
        profiler = StepProfiler(options.profile, inputs.schedule.total_steps - state.step, world, directory, self.voice)
        loop = TrainingLoop(engine, self.planner, Plan.of(options, inputs.schedule.total_steps), self.preemption,
                            observers.see, self._evaluate if evaluator is not None else None,
                            partial(observers.sample, sampler, during=True), saver, state,
                            partial(self._lowered, manifest), profiler, self.objects.listener)
        try:
            with observers.showing(inputs.schedule.total_steps, options, self._resolved()):
                observers.sampled(0, [] if trainer else sampler.lines(state.samples_before))
                with profiler:
                    yield from loop.steps()
                samples_after = observers.sample(sampler, engine, state.step)
        except Exception:  # not KeyboardInterrupt: a second Ctrl-C does not wait
            if saver is not None:
                saver.leave()
            raise
        samples = sampler.compare(state.samples_before, samples_after) if world.is_main else []
        world.on_main(lambda: directory.append_lines("samples.jsonl", samples))
        export_result(engine, inputs.tokenizer, directory.model, options.export_dtype, self._stop_ids, initial,
                      self.voice)
        if evaluator is not None and evaluator.last is None:  # resumed after its last evaluation
            evaluator.last = self._score_held_out()
        files, held_out = world.on_main(lambda: export_scores(directory, inputs, engine, evaluator, self.voice)) or (
            {}, None)
        result = finish(directory, manifest, state, samples, inputs.schedule.total_steps, held_out, self._stop_ids,
                        world, self.voice, **self._end_facts(manifest, files))
        if options.report and world.is_main:
            report_on(directory.path, self.voice)
        return result

    def _lowered(self, manifest: Manifest | None, settings: Settings, sentence: str) -> None:
        """Log that a step ran out of memory, and record the settings that the run keeps."""
        self.voice.warn(sentence)
        if manifest is not None:
            manifest.add(settings=settings.state())

    def _end_facts(self, manifest: Manifest | None, files: Files) -> dict[str, Any]:
        """Facts of a finished run that its evaluation depends on."""
        sums = self.engine.shift.state()
        own = {} if sums is None else {"reward_sums": sums}
        return {"files": {**(manifest.facts.get("files", {}) if manifest else {}), **files}, **own}

    def _checkpoint_facts(self) -> dict[str, Any]:
        """What identifies the run in a checkpoint."""
        frozen = {name: str(self.facts[name]) for name in FROZEN if name in self.facts}
        return {"fingerprints": self._fingerprints() | frozen, "options": self._resolved(), "libraries": libraries(),
                "world_size": self.world.size, "stop_ids": self._stop_ids}

    @property
    def _stop_ids(self) -> list[int]:
        return sorted(self.inputs.data.renderer.stop_ids)

    def _resolved(self) -> dict[str, Any]:
        """Every option with its effective value."""
        return resolve(self.options.dump(), self.inputs)

    def _fingerprints(self) -> dict[str, str]:
        """Hashes of everything that determines the token ids of each step."""
        given = {} if self.objects.steps is None else {"steps": steps_fingerprint(self.objects.steps)}
        return self.inputs.data.fingerprints() | text_fingerprints(self.inputs.tokenizer) | given

    def _begin(self, directory: RunDirectory, origin: Origin | None = None) -> Manifest:
        """Create the run directory, or reset an existing one to the step that is resumed, and write the facts that are
        known before the model is loaded."""
        if origin is None:
            directory.refuse_if_used()  # another process may have run here since the first check
        directory.create()
        if origin is not None:
            resume.begin_again(directory, origin)
        directory.write_config(self._resolved())
        model = self.named.absolute if isinstance(self.named, ModelSource) else self.options.model
        facts = {"method": self.options.method, "model": model, "fingerprints": self._fingerprints(),
                 **self.objects.facts, **self.user_evaluators.facts}
        return begin_files(directory, self.inputs, facts, *((origin.manifest, origin.step) if origin else (None, 0)))

    def build(self, fresh: bool = True, kept: Settings | None = None) -> Engine:
        """The engine, built once; each part is checked as soon as it can be.

        Args:
            fresh: check that policy and reference agree; False if the run resumes after step 1.
            kept: settings of the run that is resumed.
        """
        if self._built is None:
            if isinstance(self.named, ModelSource):
                self.voice.say(f"loading model {self.named.absolute}")
            self._arrange(kept)
            built = build_engine(self.inputs, self.preemption, kept)
            engine, own = built.engine, built.engine.reference is not None and self.inputs.reference is None
            if fresh and engine.reference is not None:
                name = "a module from Python" if self.objects.reference is not None else self.values["reference"]
                check_reference(engine, built.planner, None if own else name,
                                self.values["allow_reference_mismatch"], self.voice)
            built.facts["policy"] = (engine.reference.fingerprint if own and engine.reference
                                     else self.inputs.policy.fingerprint(engine.model))
            built.facts.update({name: one.fingerprint for name in ("reference", "teacher")
                                if (one := getattr(engine, name))})
            check_same(self.world, lambda: {f"weights of the {name}": Fact.of(built.facts[name]) for name in (
                "policy", "reference", "teacher") if name in built.facts})
            self._built = built
        return self._built.engine

    @property
    def engine(self) -> Engine:
        """The engine, once `build` has made it."""
        assert self._built is not None
        return self._built.engine

    @property
    def planner(self) -> StepPlanner:
        """Prepares the steps of the engine."""
        assert self._built is not None
        return self._built.planner

    @property
    def products(self) -> Products | None:
        """Library of the matrix products of the models; None before `build` has made them."""
        return self._built.settings.products if self._built else None

    @property
    def facts(self) -> dict[str, Any]:
        """Facts about the models, for the manifest."""
        assert self._built is not None
        return self._built.facts

    @cached_property
    def evaluator(self) -> Evaluator:
        """Evaluates the held-out rows; its first call also finds the initial policy's baselines."""
        return Evaluator(self.inputs.held_out, self.inputs.numerics.microbatch_tokens, self.inputs.data.max_length,
                         None if self.options.eval_limit else self.objects.eval_parts)

    def _score_held_out(self) -> Scored:
        """The held-out rows' scores under the current policy."""
        with self.voice.bar("evaluate") as report:
            return self.evaluator.own(self.evaluator.score(self.engine, self.preemption.interruptible(report)))

    def _evaluate(self, engine: Engine) -> dict[str, float]:
        with self.voice.bar("evaluate") as report:
            return self.evaluator(engine, self.preemption.interruptible(report)) | self.user_evaluators(engine)

    def evaluate(self) -> dict[str, float]:
        """Evaluate the current policy on the held-out rows.

        Raises:
            UsageError: if no rows are held out.
        """
        self._check_call("evaluate")
        if not self.inputs.data.evaluation:
            raise UsageError("no rows to evaluate. Pass eval_dataset or eval_fraction.")
        if self.done_before and self._built is None:
            raise UsageError(f"the run in {self.options.output} was already done, so no model was loaded. Its "
                             "evaluations are in metrics.jsonl. For a new one, run: "
                             f"tropism evaluate {self.options.output}")
        return self._evaluate(self.build())

    def release(self) -> None:
        """Make the weights that the user's optimizer does not hold trainable again."""
        for parameter in self._built.idle if self._built else ():
            parameter.requires_grad_(True)
