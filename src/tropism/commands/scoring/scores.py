"""What a model thinks of some rows: per row, and as figures of the whole set. Nothing is trained."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tropism.config import ScoringOptions
from tropism.data.batching.collate import collate
from tropism.data.batching.pack import assign_to_ranks, build_trees, cost, scoring_packs
from tropism.data.formats import View
from tropism.data.read_rows import check_embedding, read_rows, view_of_source
from tropism.data.rows import EncodedRow
from tropism.data.sources import resolve as sources
from tropism.data.tokenization.chat_template import check_effect, make_renderer
from tropism.data.tree import PromptTree, score_key
from tropism.distributed import World, connect
from tropism.errors import OutputError, UsageError
from tropism.files import check_writable, replacing, write_whole
from tropism.losses.divergence import reverse_kl
from tropism.model import load
from tropism.model.base_weights import base_hash, recorded_hash
from tropism.model.config import check_rope
from tropism.model.head.divergence import Comparison
from tropism.model.language_model import LanguageModel, summed
from tropism.model.source import ModelSource
from tropism.observe.console import Voice
from tropism.train.evaluation.evaluator import ranking
from tropism.train.frozen.score_store import ROWS
from tropism.train.frozen.teacher import LiveTeacher, shared_vocabulary
from tropism.train.setup.checks import probe_trees
from tropism.train.setup.data import limits
from tropism.train.setup.models import Numerics, config_of, numerics_of, tokenizer_of
from tropism.train.setup.parallel import parallelize


@dataclass(frozen=True)
class CompletionScore:
    """What was found of a completion.

    Args:
        logps: summed log-prob under the model, in nats.
        tokens: supervised tokens.
        reference_logps: the same log-prob under the reference; None without one.
        kl: summed exact KL(model || reference) of the next-token distributions along it; None without a reference.
    """

    logps: float
    tokens: int
    reference_logps: float | None = None
    kl: float | None = None


@dataclass(frozen=True)
class Scores:
    """Scores of a set of rows.

    Args:
        view: what a row is.
        rows: those that were scored, in file order.
        completions: of each row: one, or (chosen, rejected).
        is_main: whether this process writes and speaks.
    """

    view: View
    rows: Sequence[EncodedRow]
    completions: list[tuple[CompletionScore, ...]]
    is_main: bool = True


def score(model: str, options: ScoringOptions, voice: Voice | None = None) -> Scores:
    """Score every row of a file.

    Args:
        model: a directory, hub id, GGUF file, or run directory.

    Raises:
        TropismError: for data or models that cannot be scored.
    """
    with connect() as world:
        return _Scoring(model, options, world, voice or Voice(loud=world.is_main)).go()


class _Scoring:
    def __init__(self, model: str, options: ScoringOptions, world: World, voice: Voice) -> None:
        self.options, self.voice = options, voice
        self.world = world = parallelize(world, options.parallel, learns=False)
        self.numerics: Numerics = numerics_of(options, world)
        self.source = _source(model, voice)
        self.other = _source(options.reference, voice) if options.reference else None
        remote = options.trust_remote_code
        self.tokenizer = load.load_tokenizer(self.source, trust_remote_code=remote)
        tokenizer_of(self.other, "reference", self.tokenizer, remote)
        config = load.load_config(self.source, trust_remote_code=remote)
        self.view = view_of_source(options.data, options)
        configs = [config, *([config_of(self.other, remote)] if self.other else [])]
        renderer = make_renderer(self.tokenizer, limits(options, *configs), options)
        with voice.bar("read") as report, world.main_first():
            audit = read_rows(options.data, renderer, self.view, strict=options.strict, workers=options.workers,
                              options=options, cache=options.store_root / ROWS, report=report)
        check_effect(options, renderer)
        for one in configs:
            check_rope(one, renderer.limits.max_length)
            check_embedding(audit.rows, one.get_text_config().vocab_size, self.tokenizer.convert_ids_to_tokens)
        self.rows = audit.rows
        voice.say(f"data: {audit.source}: {audit.summary()}")
        voice.say(f"  {audit.format}")
        for notice in audit.notices():
            voice.warn(notice)

    def go(self) -> Scores:
        """Score with the models that were named."""
        numerics, rows = self.numerics, self.rows
        probes = probe_trees(rows, numerics.microbatch_tokens)
        model = numerics.frozen(self.source, probes, self.options.layout, "model")
        reference = self._reference(model, probes) if self.other else None
        trees = [placed.tree for placed in build_trees(rows, range(len(rows)))]
        packs = scoring_packs(trees, numerics.microbatch_tokens, model.layout)
        shares = assign_to_ranks([sum(map(cost, pack)) for pack in packs], self.world.parts)
        own, rounds = shares[self.world.part], max(map(len, shares))
        found: dict[bytes, CompletionScore] = {}
        with self.voice.bar("score") as report:
            for number in range(rounds):  # processes that share a model run equally many packs, empty ones included
                found |= self._score(model, reference, packs[own[number]] if number < len(own) else [])
                report(number + 1, rounds)
        found = {key: value for part in self.world.gather(found) for key, value in part.items()}
        return Scores(self.view, rows, [tuple(found[score_key(row.prompt_ids, completion)]
                                              for completion in row.completions) for row in rows],
                      self.world.is_main)

    def _reference(self, model: LanguageModel, probes: list[PromptTree]) -> LiveTeacher:
        """The other model, compared with as a teacher is."""
        reference = self.numerics.frozen(self.other, probes, "auto", "reference")
        heads = [len(one.module.get_output_embeddings().weight) for one in (model, reference)]
        return LiveTeacher(reference, Comparison(partial(reverse_kl, mix=0.5), 1.0, 1.0,
                                                 shared_vocabulary(self.tokenizer, *heads)))

    @torch.no_grad()
    def _score(self, model: LanguageModel, reference: LiveTeacher | None,
               pack: Sequence[PromptTree]) -> dict[bytes, CompletionScore]:
        batch = collate(pack, model.layout).to(model.device)
        keys = [key for tree in pack for key in tree.score_keys]
        lengths = batch.lengths.tolist()
        if reference is None:
            plain = model.logps(batch).tolist()
            return {key: CompletionScore(*entry) for key, *entry in zip(keys, plain, lengths, strict=True)}
        targets = reference.targets(pack, batch)
        out = model.score_completions(batch, comparison=reference.comparison, targets=targets)
        assert out.divergence is not None
        of_reference = summed(targets.head.per_token_logps(targets.hidden, batch.target_ids), batch)
        columns = (out.logps.tolist(), lengths, of_reference.tolist(), out.divergence.tolist())
        return {key: CompletionScore(*entry) for key, *entry in zip(keys, *columns, strict=True)}


def figures(scores: Scores, beta: float) -> dict[str, float]:
    """The set in figures, by the keys that `docs/evaluate.md` explains.

    Args:
        beta: what a log-ratio is multiplied with to be a reward.
    """
    columns = list(zip(*scores.completions, strict=True)) if scores.view == "paired" else [
        [one for (one,) in scores.completions]]
    sides: dict[str, list[CompletionScore]] = {"": [one for column in columns for one in column]}
    if scores.view == "paired":
        sides |= {"/chosen": list(columns[0]), "/rejected": list(columns[1])}
    elif scores.view == "unpaired":
        for name, label in (("/chosen", True), ("/rejected", False)):
            sides[name] = [one for row, one in zip(scores.rows, columns[0], strict=True) if row.desirable is label]
    found: dict[str, float] = {}
    for name, side in sides.items():
        if side:
            tokens = sum(one.tokens for one in side)
            total = sum(one.logps for one in side)
            found[f"perplexity{name}"] = math.exp(min(-total / tokens, 700.0))
            found[f"logps{name or '/all'}"] = total / len(side)
            if side[0].kl is not None:
                found[f"kl/token{name}"] = sum(one.kl or 0.0 for one in side) / tokens
                if name:
                    rewards = [_reward(one, beta) for one in side]
                    found[f"rewards{name}"] = sum(rewards) / len(rewards)
    if {"rewards/chosen", "rewards/rejected"} <= found.keys():
        found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
    return found | _rankings(scores, beta)


def _reward(one: CompletionScore, beta: float) -> float:
    """Beta x log-ratio; one that is no larger than the rounding of the two sums is 0."""
    reward = beta * (one.logps - (one.reference_logps or 0.0))
    return reward if abs(reward) > 1e-6 * (1 + beta * abs(one.logps)) else 0.0


def _rankings(scores: Scores, beta: float) -> dict[str, float]:
    """AUC or accuracy of the rewards, and of log-probs and length as scores."""
    if scores.view == "single":
        return {}

    def array(value: Any) -> Any:
        return torch.tensor([[value(one) for one in row] for row in scores.completions], dtype=torch.float64).numpy()

    found: dict[str, float] = {}
    if scores.completions[0][0].reference_logps is not None:
        found |= ranking(scores.rows, array(lambda one: _reward(one, beta)))
    for name, value in (("logps", lambda one: one.logps), ("logps_per_token", lambda one: one.logps / one.tokens),
                        ("length", lambda one: one.tokens)):
        ranked = ranking(scores.rows, array(value), with_ends=False)
        found |= {f"baselines/{name}": share for share in ranked.values()}
    return found


def records(scores: Scores, beta: float, columns: dict[str, dict[str, Any]] | None = None) -> list[dict[str, Any]]:
    """One object per row, as it is written.

    Args:
        columns: fields of the original record by the row's place, to be carried along.
    """
    names = ("chosen_", "rejected_") if scores.view == "paired" else ("",)
    found = []
    for row, completions in zip(scores.rows, scores.completions, strict=True):
        record: dict[str, Any] = dict((columns or {}).get(row.place, {}))
        record |= {"id": row.id, "place": row.place}
        if row.desirable is not None:
            record["label"] = row.desirable
        for name, one in zip(names, completions, strict=True):
            record |= {f"{name}logps": one.logps, f"{name}tokens": one.tokens}
            if one.reference_logps is not None:
                record |= {f"{name}reference_logps": one.reference_logps, f"{name}reward": _reward(one, beta),
                           f"{name}kl": one.kl}
        if scores.view == "paired" and completions[0].reference_logps is not None:
            record["margin"] = record["chosen_reward"] - record["rejected_reward"]
        found.append(record)
    return found


def write(rows: list[dict[str, Any]], path: Path) -> None:
    """Write rows as JSONL or Parquet, whole or not at all.

    Raises:
        UsageError: for another kind of file.
        OutputError: if the disk refuses.
    """
    check_target(path)
    try:
        with replacing(path, parents=True) as temporary:
            if path.suffix == ".parquet":
                import pyarrow
                from pyarrow import parquet

                parquet.write_table(pyarrow.Table.from_pylist(rows), temporary)
            else:
                # A column of dates, say, is written as text.
                lines = (json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
                # Half a surrogate pair, which JSON may spell, is spelled again: its escape is JSON's own.
                temporary.write_text("".join(lines), encoding="utf-8", errors="backslashreplace")
    except ValueError as error:  # of pyarrow
        raise OutputError.because(path, error) from error


def write_figures(content: dict[str, Any], path: Path) -> None:
    """Write figures as JSON, whole or not at all.

    Raises:
        OutputError: if the disk refuses.
    """
    write_whole(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode(), parents=True)


def check_target(path: Path) -> None:
    """Find out before the scoring whether its result can be written.

    Raises:
        UsageError: for an unknown kind of file, or one that is there already.
        OutputError: if its directory cannot be written.
    """
    if path.suffix not in (".jsonl", ".parquet"):
        raise UsageError(f"{path}: scores are written as .jsonl or .parquet")
    if path.exists():
        raise UsageError(f"{path} exists already; nothing was changed")
    check_writable(path.parent, path)


def original_columns(data: str) -> dict[str, dict[str, Any]]:
    """The records of a file by their places."""
    return {row.place: row.record for row in sources.read(data)}


def _source(name: str, voice: Voice) -> ModelSource:
    """A run directory stands for its model; an adapter there knows the base that it was trained on."""
    path = Path(name).expanduser()
    if not ((path / "manifest.json").is_file() and (path / "model").is_dir()):
        return ModelSource.of(name)
    source = ModelSource.of(str(path / "model"))
    known = recorded_hash(path / "model")

    def look(base: Any) -> None:
        if known is not None and base_hash(base) != known:
            voice.warn(f"{path}: its adapter was trained on other weights than {source.name} has now; the figures are "
                       "not those of the model that was trained")

    return replace(source, inspect_base=look)
