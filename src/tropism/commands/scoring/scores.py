"""Score rows with a model and, if there is one, a reference. Nothing is trained."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from tropism.commands.run_model import model_of
from tropism.commands.scoring.engine import EngineBuilder, LiveReference, Subject, computing_as, watched
from tropism.commands.scoring.held_out import read_own, split_of, warn_of_trained_rows
from tropism.commands.scoring.options_in_use import say_options
from tropism.commands.scoring.own_run import (
    RENDERING,
    OwnRun,
    in_use,
    is_from_python,
    plain_method,
    read_run,
)
from tropism.config import ScoringOptions
from tropism.data.audit.audit import Audit
from tropism.data.audit.findings import Finding
from tropism.data.formats import View
from tropism.data.read_rows import check_embedding, read_rows, view_of_source
from tropism.data.rows import EncodedRow
from tropism.data.sources.resolve import SplitChoice
from tropism.data.tokenization.chat_template import check_effect, make_renderer
from tropism.data.tokenization.render import Renderer
from tropism.data.tree import score_key
from tropism.distributed import World, connect
from tropism.distributed.agreement import check_same
from tropism.errors import ModelError, UsageError, clause, count_of
from tropism.losses.scored import CompletionScore, Scored
from tropism.methods import Method, Units
from tropism.model import load
from tropism.model.config import check_rope
from tropism.model.language_model import Precision
from tropism.model.source import ModelSource
from tropism.observe.console import Voice
from tropism.shapes import PerCompletion
from tropism.store import ROWS, tidy
from tropism.train.evaluation.evaluator import Evaluator, baselines, units_of
from tropism.train.reward_rounding import reward_noise
from tropism.train.setup.agreement import facts_at_start, facts_of_rows
from tropism.train.setup.data import limits
from tropism.train.setup.models import config_of, numerics_of, tokenizer_of
from tropism.train.setup.parallel import parallelize
from tropism.train.setup.planned import weights_fit


@dataclass(frozen=True)
class Scores:
    """Scores of a set of rows.

    Args:
        view: what a row is.
        rows: the rows that were scored, in file order.
        completions: scores of each row: one, or (chosen, rejected); with `ld_alpha` also those of the beginnings of
            both sides. With `has_kl` the divergence is the exact KL(model || reference) of the next-token
            distributions, summed over the completion.
        precision: of the computation.
        has_reference: whether there was a reference; without one its log-probs are 0.
        is_main: whether this process writes and prints.
        method: says what a reward is.
        is_own: the method is the one that a run trained the model with.
        has_kl: whether the divergence is the KL from the reference.
        record: the evaluation record of the method, on the main process.
        options: that were in use.
        source: of the rows.
        split: of the source.
        rounding: bfloat16's measured error, in nats per root of tokens.
    """

    view: View
    rows: Sequence[EncodedRow]
    completions: list[tuple[CompletionScore, ...]]
    precision: Precision
    has_reference: bool
    is_main: bool
    method: Method
    is_own: bool
    has_kl: bool
    record: Mapping[str, float]
    options: ScoringOptions
    source: str
    split: SplitChoice
    rounding: float = field(default=0.0)

    @cached_property
    def scored(self) -> Scored:
        """The completions of all rows, row after row."""
        return Scored.join(one for row in self.completions for one in row)

    @property
    def units(self) -> Units:
        """The rows as units of the method."""
        return units_of(self.rows, self.scored)

    @property
    def has_rewards(self) -> bool:
        """Whether rewards are defined: for labels and pairs, with the reference that they need."""
        return self.method.preference is not None and (self.has_reference or not self.method.needs_reference)

    def noise(self, method: Method) -> PerCompletion:
        """`[C]` rewards no larger than this are rounding."""
        if not method.needs_reference:
            return self.scored.logps.new_zeros(len(self.scored.logps))
        return reward_noise(self.scored, method.beta, self.precision, self.rounding)

    def rewards(self, method: Method | None = None) -> list[float]:
        """The reward of each completion, row after row; 0 if it is no larger than rounding.

        Args:
            method: in place of the scores' own.
        """
        method = method or self.method
        rewards: list[float] = method.clear_rewards(self.scored, self.units, self.noise(method)).flatten().tolist()
        return rewards


def score(model: str, options: ScoringOptions, voice: Voice | None = None) -> Scores:
    """Score every row of a source, or the rows that a run held out.

    Args:
        model: a Hugging Face directory, a hub id, a GGUF file, an adapter, or a run directory.
        options: the data, the reference, and how rows are read. Those that are not set are the run's, if there is one.
        voice: prints notices and progress, on the main process.

    Raises:
        TropismError: for data or models that cannot be scored.
    """
    with connect() as world:
        return score_in(world, model, options, voice if voice and world.is_main else Voice(loud=world.is_main))


def score_in(world: World, model: str, options: ScoringOptions, voice: Voice, heard: set[str] | None = None) -> Scores:
    """`score` for processes that are connected already.

    Args:
        world: the processes.
        model: as for `score`.
        options: as for `score`.
        voice: as for `score`.
        heard: reports on the data that earlier models printed. An equal one is not printed again.
    """
    return _Scoring(model, options, world, voice, set() if heard is None else heard).run()


class _Scoring:
    """One pass over the rows. They are read and checked before a model is loaded."""

    def __init__(self, model: str, given: ScoringOptions, world: World, voice: Voice,
                 heard: set[str]) -> None:
        self.given, self.voice, self.heard = given, voice, heard
        self.source = world.together(lambda: watched(model_of(model), voice))
        self.own, self.why = world.together(lambda: read_run(model, given))
        if given.data is None and self.own is None:
            raise UsageError(f"{self.why}. Pass --data DATA to evaluate the model with the default options." if self.why
                             else f"--data is required: {model} is not a run, so it has no held-out rows of its own")
        self.options = options = in_use(given, self.own)
        self.reference, self.teacher = world.together(self._others)
        check_same(world, lambda: facts_at_start("evaluate", options, {
            "model": self.source, "reference": self.reference, "teacher": self.teacher}))
        remote = options.trust_remote_code
        others = [other for other in (self.reference, self.teacher) if other is not None]
        self.configs = [config_of(one, remote) for one in (self.source, *others)]
        parallel = options.parallel
        if world.size > 1 and parallel.may_copy and weights_fit(world, self.configs, remote):
            parallel = parallel.model_copy(update={"shard": "off"})
        self.world = parallelize(world, parallel, learns=False)
        self.numerics = computing_as(self.own, numerics_of(options, self.world))
        self.tokenizer = load.load_tokenizer(self.source, trust_remote_code=remote)
        for name, one in (("reference", self.reference), ("teacher", self.teacher)):
            tokenizer_of(one, name, self.tokenizer, remote)
        self.renderer = make_renderer(self.tokenizer, limits(options, *self.configs), options)
        self.data, self.view, self.rows = self._read()
        self.subject = self._subject()
        if self.subject.method.ld_alpha is not None:
            self.rows = [row.with_shared_lengths() for row in self.rows]
        say_options(model, self.own, self.why, given, self._shown(), self.renderer, voice)

    def _others(self) -> tuple[ModelSource | None, ModelSource | None]:
        """The reference that was given or that the run names, and the run's teacher."""
        run, given = self.own, self.given.reference
        reference = _reference_of(run) if given is None else watched(model_of(given), self.voice)
        if run is None or run.options.values.get("teacher") is None:
            return reference, None
        try:
            return reference, ModelSource.of(run.named("teacher") or "")
        except ModelError as error:
            self.voice.warn(f"{clause(error)}. The losses of the run need this teacher, so they are omitted.")
            return reference, None

    def _read(self) -> tuple[str, View, Sequence[EncodedRow]]:
        """Source, view and rows of the measurement."""
        world, options, run = self.world, self.options, self.own
        if options.data is None:
            assert run is not None
            changed = [name for name in RENDERING if name in self.given.model_fields_set
                       and run.recorded[name] != getattr(run.options, name)]
            self._announce(f"reading {run.options.eval_data or run.options.data}")
            source, rows = world.together(lambda: read_own(run, *self._readers(run, bool(changed))))
            self._report(f"data: {source}: {count_of(len(rows), 'row')} that the run held out", (), ())
            view: View = run.options.view
            plain = len(rows)
        else:
            self._announce(f"reading {options.data}")
            source, view = options.data, view_of_source(options.data, options)
            audit = world.together(lambda: self._read_with(self.renderer, options, source, view))
            rows, plain = audit.rows, audit.plain_rows
            self._report(f"data: {audit.source}: {audit.summary()}", audit.reading, audit.notable())
            if run is not None:
                world.on_main(partial(warn_of_trained_rows, run.path, rows, self.voice))
        world.on_main(partial(tidy, options.store_root, options.store_bytes))
        check_effect(self.given, self.renderer, plain)
        for one in self.configs:
            check_rope(one, self.renderer.limits.max_length)
            check_embedding(rows, one.get_text_config().vocab_size, self.tokenizer.convert_ids_to_tokens)
        check_same(world, lambda: facts_of_rows("--data", source, rows))
        return source, view, rows

    def _announce(self, line: str) -> None:
        """Print a line, unless an earlier model did."""
        if line not in self.heard:
            self.heard.add(line)
            self.voice.say(line)

    def _report(self, summary: str, reading: Sequence[str], findings: Sequence[Finding]) -> None:
        """Print how the data was read, unless an earlier model printed the same report."""
        report = "\n".join((summary, *reading, *(finding.text for finding in findings)))
        if report in self.heard:
            return
        self.heard.add(report)
        self.voice.say(summary, *(f"  {line}" for line in reading))
        for finding in findings:
            self.voice.warn(finding.text, finding.word)

    @property
    def _split(self) -> SplitChoice:
        """The split of the source."""
        return split_of(self.own) if self.options.data is None and self.own is not None else (
            SplitChoice(self.options.split))

    def _readers(self, run: OwnRun, changed: bool) -> tuple[Any, Any]:
        """Reads a source as the run did, and as the options say that were given now."""
        now = partial(self._read_with, self.renderer, self.options)
        if not changed:
            return now, None
        then = self.options.model_copy(update=dict(run.recorded))
        tokenizer = load.load_tokenizer(self.source, trust_remote_code=self.options.trust_remote_code)
        return partial(self._read_with, make_renderer(tokenizer, limits(then, *self.configs), then), then), now

    def _read_with(self, renderer: Renderer, options: ScoringOptions, source: str, view: View,
                   most: int | None = None, split: SplitChoice | None = None) -> Audit:
        streaming = self.options.data is None and self.own is not None and self.own.options.streaming
        with self.voice.bar("read") as report, self.world.main_first():
            return read_rows(source, renderer, view, strict=options.strict, workers=options.workers, options=options,
                             cache=options.store_root / ROWS, most=most, split=split, streaming=streaming,
                             report=report)

    def _subject(self) -> Subject:
        """The method of the run for data of its view, else one with the same rewards as in most methods."""
        run, beta = self.own, self.options.beta
        if run is None:
            return Subject(self.source, self.reference, None, None, plain_method(self.view, beta), False, False)
        method, why = run.method(beta if "beta" in self.given.model_fields_set else None)
        compares = method.needs_reference
        if why and self.view == method.view:
            self.voice.warn(f"{run.path}: {why}, so the losses are omitted")
        lacks = why or (run.options.values.get("teacher") is not None and self.teacher is None)
        is_own = self.view == method.view and not lacks
        initial = compares and self.reference is None
        if initial and is_from_python(run.options.model):
            raise UsageError(f"{run.path}: the reference of this run is the model before training, which was passed in "
                             "Python. Pass --reference MODEL.")
        return Subject(self.source, self.reference, self.teacher if is_own else None, run,
                       method if is_own else plain_method(self.view, beta), is_own, initial)

    def _shown(self) -> dict[str, Any]:
        """The options that decide the figures, with the values that they have become."""
        own = None if self.own is None else self.own.reference
        return {"reference": self.options.reference or own, "beta": self.options.beta,
                "max_length": self.renderer.limits.max_length, "precision": self.numerics.precision}

    def run(self) -> Scores:
        """Load the models and score the rows."""
        numerics, rows, subject, world = self.numerics, self.rows, self.subject, self.world
        self.voice.say(f"loading model {self.source.absolute}")
        evaluator = Evaluator(rows, numerics.microbatch_tokens, self.renderer.limits.max_length)
        builder = EngineBuilder(subject, self.options, rows, evaluator, numerics, world, self.voice, self.tokenizer)
        with builder.engine() as engine:
            with self.voice.bar("score") as report:
                found = evaluator.score(engine, report)
            if world.is_main and subject.method.view != "single":
                evaluator.baselines |= baselines(rows, builder.first(evaluator.own(found)))
            record = world.on_main(lambda: evaluator.record(engine, found)) or {}
            completions = [tuple(found[score_key(row.prompt_ids, completion)] for completion in row.completions)
                           for row in rows]
            return Scores(self.view, rows, completions, numerics.precision, engine.reference is not None, world.is_main,
                          subject.method, subject.is_own, isinstance(engine.teacher, LiveReference), record,
                          self.options, self.data, self._split, engine.rounding)


def _reference_of(run: OwnRun | None) -> ModelSource | None:
    """The reference that a run names.

    Raises:
        ModelError: if it is gone.
    """
    try:
        named = None if run is None else run.named("reference")
        return None if named is None else ModelSource.of(named)
    except ModelError as error:
        raise ModelError(f"{clause(error)}. It is the reference of the run. If it was moved, pass --reference MODEL."
                         ) from error
