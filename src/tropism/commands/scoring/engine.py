"""The models of a measurement, loaded as the training of a run holds them, as an engine that evaluates."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tropism.commands.scoring.own_run import OwnRun
from tropism.config import ScoringOptions
from tropism.data.batching.collate import Batch
from tropism.data.rows import EncodedRow
from tropism.data.tree import PromptTree
from tropism.distributed import World
from tropism.errors import ModelError, clause
from tropism.losses.divergence import reverse_kl
from tropism.losses.scored import Scored
from tropism.methods import Method
from tropism.model.base_weights import base_hash, recorded_hash
from tropism.model.cpu_products import available, use_products
from tropism.model.head.divergence import Comparison, FullTargets
from tropism.model.language_model import LanguageModel, summed
from tropism.model.layout_check import choose_layout
from tropism.model.options import LoraOptions
from tropism.model.source import ModelSource
from tropism.observe.console import Voice
from tropism.train.engine import Engine
from tropism.train.evaluation.evaluator import Evaluator
from tropism.train.frozen.teacher import LiveTeacher, shared_vocabulary
from tropism.train.preemption import Preemption
from tropism.train.setup import models
from tropism.train.setup.checks import place_of, probe_trees
from tropism.train.setup.models import Numerics
from tropism.train.setup.policy import PolicyBuilder
from tropism.train.step_packs import all_trees
from tropism.train.step_statistics import RunningMean


class LiveReference(LiveTeacher):
    """A reference in memory. One pass gives its distributions, for the KL, and its log-probs."""

    def targets(self, trees: Sequence[PromptTree], batch: Batch) -> FullTargets:
        """As `Teacher` says."""
        self._seen = super().targets(trees, batch)
        return self._seen

    def score(self, trees: Sequence[PromptTree], batch: Batch) -> Tensor:
        """As `Reference` says, of the batch that `targets` has seen."""
        return summed(self._seen.head.per_token_logps(self._seen.hidden, batch.target_ids), batch)


def watched(source: ModelSource, voice: Voice) -> ModelSource:
    """The same model; if it is the adapter of a run, with a note if the weights of its base have changed."""
    known = recorded_hash(Path(source.adapter)) if source.adapter else None
    if known is None:
        return source

    def look(base: Any) -> None:
        if base_hash(base) not in (None, known):
            voice.warn(f"{source.adapter}: the weights of {source.name} changed after the adapter was trained on them. "
                       "The metrics are not those of the trained model.")

    return replace(source, inspect_base=look)


def computing_as(run: OwnRun | None, numerics: Numerics) -> Numerics:
    """Numerics with the library of matrix products of a run, if this machine has it."""
    same = run is not None and run.manifest.get("products") == "onednn" and numerics.device.type == "cpu"
    return replace(numerics, products="onednn") if same and available() else numerics


@dataclass(frozen=True)
class Subject:
    """What is measured.

    Args:
        model: that is evaluated.
        reference: another model by its name; None for the initial policy of a run, or for none.
        teacher: of the run; None if the method has none.
        run: that the model belongs to; None for any other model.
        method: losses and rewards.
        is_own: the method is the run's.
        initial_is_reference: the reference is the policy of the run before step 1.
    """

    model: ModelSource
    reference: ModelSource | None
    teacher: ModelSource | None
    run: OwnRun | None
    method: Method
    is_own: bool
    initial_is_reference: bool


@dataclass(frozen=True)
class EngineBuilder:
    """Loads the models of a subject and makes its engine.

    Args:
        subject: what is measured.
        options: in use.
        rows: that are scored.
        evaluator: of these rows.
        numerics, world, voice: as in a run.
        tokenizer: of the model.
        max_length: tokens of a prompt with its completion.
    """

    subject: Subject
    options: ScoringOptions
    rows: Sequence[EncodedRow]
    evaluator: Evaluator
    numerics: Numerics
    world: World
    voice: Voice
    tokenizer: Any

    @contextmanager
    def engine(self) -> Iterator[Engine]:
        """The engine, with the baselines of a run's initial policy in the evaluator."""
        subject, run = self.subject, self.subject.run
        with ExitStack() as stack:
            if run is not None and subject.method.view != "single" and not subject.initial_is_reference:
                self._find_baselines(run)
            reference = self._reference(run, stack) if subject.initial_is_reference or subject.reference else None
            model = self._policy() if run is not None else self.numerics.frozen(
                subject.model, self._probes, self.options.layout, "model")
            teacher: Any = None
            if subject.teacher is not None and run is not None:
                teacher = models.build_teacher(
                    model, subject.teacher, run.options, self.tokenizer,  # type: ignore[arg-type]
                    self._trees, self._probes, self.numerics, self.options.store_root, self.world, self.voice,
                    Preemption(self.world), partial(place_of, self.rows))
            elif reference is not None:
                heads = [len(one.module.get_output_embeddings().weight) for one in (model, reference)]
                teacher = LiveReference(reference, Comparison(partial(reverse_kl, mix=0.5), 1.0, 1.0,
                                                              shared_vocabulary(self.tokenizer, *heads)))
            scores: Any = teacher
            if reference is not None and run is not None:
                scores = self._stored(run, reference)
            elif reference is None:
                scores = None
            manifest = {} if run is None else run.manifest
            sums = manifest.get("reward_sums") if subject.is_own else None
            shift = RunningMean(None if sums is None else torch.tensor(sums, dtype=torch.float64,
                                                                       device=self.world.device))
            yield Engine(model, scores, subject.method, None, self.world, 0.0, teacher, shift,  # type: ignore[arg-type]
                         float(manifest.get("layout_error_nats_per_root_token", 0.0)))

    @property
    def _probes(self) -> list[PromptTree]:
        return probe_trees(self.rows, self.numerics.microbatch_tokens)

    @property
    def _trees(self) -> list[PromptTree]:
        return all_trees(self.rows, range(len(self.rows)), self.subject.method, self.evaluator.max_length)

    def _policy(self) -> LanguageModel:
        """The trained policy of a run, with its adapter as it was trained, not merged."""
        source, run = self.subject.model, self.subject.run
        assert run is not None
        quantize = run.options.lora.quantize if source.adapter else None
        builder = PolicyBuilder.of(source, LoraOptions(quantize=quantize), None)
        model = self._in_layout(builder, 0)
        if source.inspect_base is not None:
            source.inspect_base(model.module)
        return model

    def _in_layout(self, builder: PolicyBuilder, seed: int) -> LanguageModel:
        """The model of a builder, computed as in training."""
        module, precision = builder.module(self.numerics, seed), self.numerics.precision
        module.requires_grad_(False)
        builder.round_weights(module, precision, sharded=True)
        model, _ = choose_layout(module, precision, self.world.device, self._probes, self.options.layout)
        builder.round_weights(module, precision, sharded=False)
        use_products(module, self.numerics.products)
        return replace(model, stays=True)

    def _initial(self, run: OwnRun, stack: ExitStack) -> LanguageModel:
        """The policy of a run before step 1; until the stack ends, a new adapter is switched off.

        Raises:
            ModelError: if it cannot be loaded.
        """
        builder = PolicyBuilder.of(ModelSource.of(run.named("model") or ""), run.options.lora, None)
        model = self._in_layout(builder, run.options.seed)
        stack.enter_context(builder.as_reference(model.module))
        return model

    def _reference(self, run: OwnRun | None, stack: ExitStack) -> LanguageModel:
        if self.subject.reference is not None:
            return self.numerics.frozen(self.subject.reference, self._probes, "auto", "reference")
        assert run is not None
        try:
            return self._initial(run, stack)
        except ModelError as error:
            raise ModelError(f"{clause(error)}. It is the reference of the run {run.path}. If it was moved, pass "
                             "--reference MODEL.") from error

    def _stored(self, run: OwnRun, reference: LanguageModel) -> Any:
        """The reference's scores as a run has them: from the store, or computed in the same way."""
        found = models.build_reference(
            reference, None, self._trees, self._probes, self.numerics, self.options.store_root, self.world, self.voice,
            Preemption(self.world), partial(place_of, self.rows), lambda module: nullcontext(), None)
        then = run.manifest.get("reference")
        same = (run.manifest.get("precision") == self.numerics.precision
                and str(run.manifest.get("device", "")).partition(":")[0] == self.world.device.type)
        if self.subject.initial_is_reference and same and then not in (None, found.fingerprint):
            self.voice.warn(f"{run.path}: the reference is not the one of the run: weights or config of "
                            f"{run.named('model')} changed, or this version computes with them differently")
        return found

    def _find_baselines(self, run: OwnRun) -> None:
        """Rank the rows by the log-probs of the initial policy, which is not the reference."""
        try:
            with ExitStack() as stack:
                model = self._initial(run, stack)
                engine = Engine(model, None, replace(self.subject.method, terms=(), wpo=False), None,  # type: ignore[arg-type]
                                self.world, 0.0)
                with self.voice.bar("initial policy") as report:
                    found = self.evaluator.own(self.evaluator.score(engine, report))
        except ModelError as error:
            self.voice.warn(f"the baselines are those of the trained model, not of the model before training: {error}")
            return
        self.evaluator.first = found

    def first(self, scored: Scored) -> Scored:
        """The scores of the initial policy, for the baselines."""
        if self.subject.initial_is_reference:
            return replace(scored, logps=scored.reference_logps)
        return self.evaluator.first or scored
