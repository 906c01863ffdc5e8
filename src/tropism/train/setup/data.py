"""Reads, renders, checks and splits the data of a run before any model is loaded."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tropism.data.audit.audit import Audit
from tropism.data.audit.findings import Finding, leakage
from tropism.data.audit.template_findings import find_in_template
from tropism.data.formats import View
from tropism.data.options import DataOptions
from tropism.data.read_rows import ReportProgress, read_rows
from tropism.data.row_blocks import RowTable
from tropism.data.row_facts import facts_of
from tropism.data.rows import EncodedRow
from tropism.data.schedule import GivenSchedule, Schedule
from tropism.data.sources.resolve import DataSource, SplitChoice
from tropism.data.split import split_by_prompt
from tropism.data.tokenization.chat_template import check_effect, make_renderer
from tropism.data.tokenization.render import Renderer
from tropism.data.tokenization.truncate import LengthOptions, Limits
from tropism.data.tree import prompt_key
from tropism.errors import DataError, UsageError
from tropism.model.config import max_positions
from tropism.train.options import RunOptions

_DEFAULT_MAX_LENGTH = 2048


@dataclass(frozen=True)
class PreparedData:
    """Data of a run.

    Args:
        train, evaluation: rows; `evaluation` may be empty.
        audit: of the training source; `eval_audit` of a separate evaluation source.
        renderer: produced the token ids.
        max_length: largest number of tokens of a prompt with its completion.
        divisible: `eval_fraction` could have held rows out.
    """

    train: Sequence[EncodedRow]
    evaluation: Sequence[EncodedRow]
    audit: Audit
    eval_audit: Audit | None
    renderer: Renderer
    max_length: int
    divisible: bool = True

    def fingerprints(self) -> dict[str, str]:
        """Hashes of the rendered data: token ids of the rows in order, and their labels."""
        return {name: data_fingerprint(rows) for name, rows in (("data", self.train), ("eval_data", self.evaluation))
                if rows}

    @cached_property
    def of_template(self) -> list[Finding]:
        """Findings about the chat template, if the data uses it."""
        return find_in_template(self.renderer) if self.renderer.saw_messages else []

    def prompts_on_both_sides(self) -> int:
        """Number of evaluation prompts, or first user messages, that are also in the training data; 0 with
        `eval_fraction`."""
        seen, held = facts_of(self.train), facts_of(self.evaluation)
        known = np.isin(held.split, seen.split) | np.isin(held.prompt, seen.prompt)
        return len(np.unique(held.split[known]))

    def to_json(self) -> dict[str, Any]:
        """Content of `audit.json`."""
        report = self.audit.to_json(self.renderer.text.decode)
        findings = leakage(self.train, self.evaluation, self.divisible) + self.of_template
        report["findings"] += [finding.to_json() for finding in findings]
        report["split"] = {"train": len(self.train), "eval": len(self.evaluation),
                           "prompts_on_both_sides": self.prompts_on_both_sides()}
        if self.eval_audit is not None:
            report["eval"] = self.eval_audit.to_json(self.renderer.text.decode)
        return report


def data_fingerprint(rows: Sequence[EncodedRow]) -> str:
    """Hash of prompt, completions and label of each row, in order, and of a weight other than 1. A truncated prompt
    counts with all of its tokens, since these decide its steps and its mismatched completions."""
    digest = hashlib.blake2b(digest_size=16)
    contents = rows.contents() if isinstance(rows, RowTable) else (
        (row.prompt_ids, row.prompt_key, [completion.key for completion in row.completions[:2]], row.desirable,
         row.weight) for row in rows)
    for ids, key, completions, desirable, weight in contents:
        whole = [] if key == prompt_key(ids) else [key]
        own = [] if weight == 1 else [repr(weight).encode()]
        for part in (ids.tobytes(), *whole, *completions, str(desirable).encode(), *own):
            digest.update(part)
    return digest.hexdigest()


def steps_fingerprint(steps: GivenSchedule) -> str:
    """Hash of the rows of each step, for schedules that seed and options do not determine."""
    known = repr(steps.steps) if not steps.sizes else repr(steps)
    return hashlib.blake2b(known.encode(), digest_size=16).hexdigest()


def prepare_data(options: DataOptions, tokenizer: Any, configs: Sequence[Any], view: View,
                 train: DataSource | None = None, evaluation: DataSource | None = None, *, cache: Path | None = None,
                 most: int | None = None, report: ReportProgress = lambda done, total: None) -> PreparedData:
    """Read, render and split the data.

    Args:
        configs: of the policy, the reference and the teacher.
        train, evaluation: in place of the files that the options name.
        cache: directory in which rendered rows are cached.
        most: maximum number of training rows to read.
        report: called with the number of records read.

    Raises:
        UsageError: for options that exclude each other.
        DataError: for data that cannot be trained on.
    """
    if options.eval_split is not None and options.eval_data is None and evaluation is None:
        raise UsageError("--eval-split has no effect without --eval-data")
    renderer = make_renderer(tokenizer, limits(options, *configs), options)

    def load(source: DataSource, most: int | None = None, split: SplitChoice | None = None) -> Audit:
        return read_rows(source, renderer, view, strict=options.strict, workers=options.workers, options=options,
                         cache=cache, most=most, split=split, streaming=options.streaming, report=report)

    audit = load(options.data if train is None else train, most)
    rows, eval_audit = audit.rows, None
    held_out: Sequence[EncodedRow] = []
    other = options.eval_data if evaluation is None else evaluation
    if options.eval_fraction:
        rows, held_out = split_by_prompt(audit.rows, options.eval_fraction)
    elif other is not None:
        eval_audit = load(other, split=SplitChoice(options.eval_split, "--eval-split", held_out=True))
        held_out = eval_audit.rows
    check_effect(options, renderer, audit.plain_rows + (eval_audit.plain_rows if eval_audit else 0))
    if view == "unpaired":
        check_classes(rows, audit.source)
    return PreparedData(rows, held_out, audit, eval_audit, renderer, renderer.limits.max_length)


def prepare_rows(options: DataOptions, tokenizer: Any, configs: Sequence[Any], view: View, rows: Sequence[EncodedRow],
                 evaluation: Sequence[EncodedRow], one_class: bool = False,
                 first_pass: int | None = None) -> PreparedData:
    """`prepare_data` for rows of token ids, which are neither rendered nor truncated.

    Args:
        one_class: accept labeled rows of one class, as published trainers do.
        first_pass: rows that the audit is about; the others are those of further passes. Default: all.

    Raises:
        DataError: for rows that cannot be trained on.
    """
    renderer = Renderer(tokenizer, limits(options, *configs))
    eos = renderer.text.eos_id
    renderer.stop_ids |= set() if eos is None else {eos}
    known = [positions for config in configs if (positions := max_positions(config)) is not None]
    longest = min(known, default=None) if options.max_length is None else options.max_length
    needed = 0
    for row in (*rows, *evaluation):
        tokens = len(row.prompt_ids) + max(len(completion.ids) for completion in row.completions)
        if longest is not None and tokens > longest:
            what = "of the model" if options.max_length is None else "max_length"
            raise DataError(f"{row.place}: {tokens} tokens exceed the limit {what} ({longest} tokens). Truncate the "
                            "rows before you pass them.")
        mismatched = 0 if row.partner is None else len(row.prompt_ids) + len(row.partner.ids)
        needed = max(needed, tokens, mismatched if longest is None else min(mismatched, longest))
    audits = [Audit(source="token ids from Python", read=len(part), rows=part)
              for part in (rows[:first_pass], evaluation)]
    if not rows:
        raise DataError("no rows to train on: the training data is empty")
    if view == "unpaired" and not one_class:
        check_classes(rows, audits[0].source)
    return PreparedData(rows, evaluation, audits[0], audits[1] if evaluation else None, renderer,
                    max(needed, renderer.limits.max_length), divisible=False)


def limits(options: LengthOptions, *configs: Any) -> Limits:
    """Token limits from the options and the configs of all models, the policy first.

    Raises:
        UsageError: if `max_length` exceeds the limit of a model, or `max_prompt_length` leaves no room.
    """
    known = [positions for config in configs if (positions := max_positions(config)) is not None]
    longest = min(known, default=None)
    if options.max_length is not None and longest is not None and options.max_length > longest:
        what = "the model" if longest == known[0] else "the reference or the teacher"
        raise UsageError(f"--max-length {options.max_length} exceeds the limit of {what} ({longest} tokens)")
    max_length = options.max_length or min(_DEFAULT_MAX_LENGTH, longest or _DEFAULT_MAX_LENGTH)
    if options.max_prompt_length is not None and options.max_prompt_length >= max_length:
        raise UsageError(f"--max-prompt-length {options.max_prompt_length} leaves no tokens of --max-length "
                         f"{max_length} for a completion")
    return Limits(max_length, options.max_prompt_length, options.overlong)


def labels_of(rows: Sequence[EncodedRow]) -> list[bool | None]:
    """The label of each row."""
    return [None if label < 0 else bool(label) for label in facts_of(rows).desirable.tolist()]


def check_row_weights(data: PreparedData, divisor: str) -> bool:
    """True if a row has another weight than 1.

    Args:
        divisor: the option `weight_divisor`.

    Raises:
        DataError: if the weights of all training rows are 0.
        UsageError: if the option has no effect.
    """
    weight = facts_of(data.train).weight
    assert weight is not None
    if not weight.any():
        raise DataError(f"{data.audit.source}: the weight of every training row is 0, so there is nothing to learn. "
                        "Fix the weights, or ignore them by renaming the column: --columns unused=weight")
    weighted = facts_of(data.train).weighted or facts_of(data.evaluation).weighted
    if divisor != "count" and not weighted:
        raise UsageError(f"--weight-divisor {divisor} has no effect, because no row has a weight other than 1. Remove "
                         "it, or add a column 'weight'.")
    return weighted


def check_classes(rows: Sequence[EncodedRow], source: str) -> None:
    """Check that both classes are there: KTO learns from their contrast.

    Raises:
        DataError: with the counts, if a class is absent.
    """
    desirable = sum(map(bool, labels_of(rows)))
    if desirable in (0, len(rows)):
        raise DataError(f"{source}: {desirable} desirable / {len(rows) - desirable} undesirable training rows, but "
                        "this method requires both classes. To train on desirable completions only, use `tropism sft`.")


def make_schedule(options: DataOptions, run: RunOptions, rows: Sequence[EncodedRow], needs_partners: bool) -> Schedule:
    """The rows of each step.

    Raises:
        UsageError: if the method needs mismatched completions and no step can have them.
    """
    prompts = facts_of(rows).prompt_numbers
    return Schedule(tuple(prompts.tolist()), run.batch_size, run.seed, run.epochs, run.max_steps, options.shuffle,
                    options.group_prompts, needs_partners)
