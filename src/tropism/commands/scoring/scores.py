"""Score rows with a model and, if there is one, a reference. Nothing is trained."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from tropism.commands.scoring.options_in_use import say_options
from tropism.config import ScoringOptions
from tropism.data.audit.audit import Audit
from tropism.data.batching.collate import Batch
from tropism.data.batching.pack import build_trees
from tropism.data.formats import View
from tropism.data.read_rows import check_embedding, read_rows, view_of_source
from tropism.data.rows import EncodedRow
from tropism.data.tokenization.chat_template import check_effect, make_renderer
from tropism.data.tree import PromptTree, score_key
from tropism.distributed import World, connect
from tropism.distributed.agreement import check_same
from tropism.losses.divergence import reverse_kl
from tropism.losses.scored import CompletionScore, Scored
from tropism.model import load
from tropism.model.base_weights import base_hash, recorded_hash
from tropism.model.config import check_rope
from tropism.model.head.divergence import Comparison
from tropism.model.language_model import LanguageModel, Precision, summed
from tropism.model.source import ModelSource
from tropism.observe.console import Voice
from tropism.shapes import PerCompletion
from tropism.store import ROWS, tidy
from tropism.train.frozen.teacher import LiveTeacher, shared_vocabulary
from tropism.train.reward_rounding import reward_noise
from tropism.train.score_packs import score_trees
from tropism.train.setup.agreement import facts_at_start, facts_of_rows
from tropism.train.setup.checks import probe_trees
from tropism.train.setup.data import limits
from tropism.train.setup.models import Numerics, config_of, numerics_of, tokenizer_of
from tropism.train.setup.parallel import parallelize


@dataclass(frozen=True)
class Scores:
    """Scores of a set of rows.

    Args:
        view: what a row is.
        rows: the rows that were scored, in file order.
        completions: scores of each row: one, or (chosen, rejected). `divergence` is the exact KL(model || reference)
            of the next-token distributions, summed over the completion; None without a reference.
        precision: of the computation.
        has_reference: whether there was a reference; without one its log-probs are 0.
        is_main: whether this process writes and prints.
    """

    view: View
    rows: Sequence[EncodedRow]
    completions: list[tuple[CompletionScore, ...]]
    precision: Precision
    has_reference: bool
    is_main: bool = True

    @property
    def scored(self) -> Scored:
        """The completions of all rows, row after row."""
        return Scored.join(chain.from_iterable(self.completions))

    def noise(self, beta: float) -> PerCompletion:
        """`[C]` rewards no larger than this are rounding."""
        return reward_noise(self.scored, beta, self.precision)

    def rewards(self, beta: float) -> list[float]:
        """Beta x log-ratio of each completion, row after row; 0 if it is no larger than rounding."""
        rewards = beta * self.scored.logratios
        rewards[rewards.abs() <= self.noise(beta)] = 0.0
        return rewards.tolist()


def score(model: str, options: ScoringOptions, voice: Voice | None = None) -> Scores:
    """Score every row of a source.

    Args:
        model: a Hugging Face directory, a hub id, a GGUF file, an adapter, or a run directory.
        options: the data, the reference, and how rows are read.
        voice: prints notices and progress, on the main process.

    Raises:
        TropismError: for data or models that cannot be scored.
    """
    with connect() as world:
        return _Scoring(model, options, world, voice if voice and world.is_main else Voice(loud=world.is_main)).run()


class _Scoring:
    """One pass over the rows. They are read and checked before a model is loaded."""

    def __init__(self, model: str, options: ScoringOptions, world: World, voice: Voice) -> None:
        self.options, self.voice = options, voice
        self.source, self.other = world.together(
            lambda: (_source(model, voice), _source(options.reference, voice) if options.reference else None))
        check_same(world, lambda: facts_at_start("evaluate", options, {"model": self.source, "reference": self.other}))
        self.world = world = parallelize(world, options.parallel, learns=False)
        self.numerics: Numerics = numerics_of(options, world)
        remote = options.trust_remote_code
        self.tokenizer = load.load_tokenizer(self.source, trust_remote_code=remote)
        tokenizer_of(self.other, "reference", self.tokenizer, remote)
        config = load.load_config(self.source, trust_remote_code=remote)
        configs = [config, *([config_of(self.other, remote)] if self.other else [])]
        renderer = make_renderer(self.tokenizer, limits(options, *configs), options)
        self.view = view_of_source(options.data, options)

        def read() -> Audit:
            with voice.bar("read") as report, world.main_first():
                return read_rows(options.data, renderer, self.view, strict=options.strict, workers=options.workers,
                                 options=options, cache=options.store_root / ROWS, report=report)

        audit = world.together(read)
        world.on_main(partial(tidy, options.store_root, options.store_bytes))
        check_effect(options, renderer, audit.plain_rows)
        for one in configs:
            check_rope(one, renderer.limits.max_length)
            check_embedding(audit.rows, one.get_text_config().vocab_size, self.tokenizer.convert_ids_to_tokens)
        self.rows: Sequence[EncodedRow] = audit.rows
        check_same(world, lambda: facts_of_rows("--data", options.data, audit.rows))
        voice.say(f"data: {audit.source}: {audit.summary()}")
        for line in audit.how():
            voice.say(f"  {line}")
        for notice in audit.notices():
            voice.warn(notice)
        say_options(model, options, renderer, self.numerics.precision, voice)

    def run(self) -> Scores:
        """Load the models and score the rows."""
        numerics, rows = self.numerics, self.rows
        probes = probe_trees(rows, numerics.microbatch_tokens)
        model = numerics.frozen(self.source, probes, self.options.layout, "model")
        reference = self._reference(model, probes) if self.other else None
        trees = [placed.tree for placed in build_trees(rows, range(len(rows)))]
        with self.voice.bar("score") as report:
            found = score_trees(model, trees, numerics.microbatch_tokens, partial(_score_pack, model, reference),
                                self.world, report)
        completions = [tuple(found[score_key(row.prompt_ids, completion)] for completion in row.completions)
                       for row in rows]
        return Scores(self.view, rows, completions, numerics.precision, reference is not None, self.world.is_main)

    def _reference(self, model: LanguageModel, probes: list[PromptTree]) -> LiveTeacher:
        """The other model as a live teacher: it gives the distributions that the KL is computed from."""
        reference = self.numerics.frozen(self.other, probes, "auto", "reference")
        heads = [len(one.module.get_output_embeddings().weight) for one in (model, reference)]
        return LiveTeacher(reference, Comparison(partial(reverse_kl, mix=0.5), 1.0, 1.0,
                                                 shared_vocabulary(self.tokenizer, *heads)))


def _score_pack(model: LanguageModel, reference: LiveTeacher | None, pack: Sequence[PromptTree],
                batch: Batch) -> list[CompletionScore]:
    if reference is None:
        logps = model.logps(batch)
        return Scored(logps, torch.zeros_like(logps), batch.lengths).split()
    targets = reference.targets(pack, batch)
    out = model.score_completions(batch, comparison=reference.comparison, targets=targets)
    of_reference = summed(targets.head.per_token_logps(targets.hidden, batch.target_ids), batch)
    return Scored(out.logps, of_reference, batch.lengths, out.divergence).split()


def _source(name: str, voice: Voice) -> ModelSource:
    """The model of a name. A run directory means the model in it; an adapter there knows its base's weights."""
    path = Path(name).expanduser()
    if not ((path / "manifest.json").is_file() and (path / "model").is_dir()):
        return ModelSource.of(name)
    source = ModelSource.of(str(path / "model"))
    known = recorded_hash(path / "model")

    def look(base: Any) -> None:
        if known is not None and base_hash(base) != known:
            voice.warn(f"{path}: the weights of {source.name} changed after the adapter was trained on them. The "
                       "metrics are not those of the trained model.")

    return replace(source, inspect_base=look)
