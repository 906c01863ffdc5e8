"""The rows that a run held out, found again in its data, and the rows of other data that it was trained on."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from tropism.commands.scoring.own_run import OwnRun, is_from_python
from tropism.data.audit.audit import Audit
from tropism.data.formats import View
from tropism.data.row_blocks import RowTable
from tropism.data.rows import EncodedRow
from tropism.data.sources.resolve import SplitChoice
from tropism.data.split import split_by_prompt
from tropism.errors import DataError, UsageError, clause, count_of
from tropism.observe.console import Voice
from tropism.train.evaluation.evaluator import evenly
from tropism.train.evaluation.row_files import completion_keys, read_eval_lines, row_keys, trained_among
from tropism.train.setup.data import data_fingerprint

Read = Callable[[str, View, int | None, SplitChoice], Audit]
"""Reads a source: its name, the view, the maximum number of rows, and the split."""

_ADVICE = "Pass --data DATA to evaluate other rows."


def read_own(run: OwnRun, read: Read, other: Read | None) -> tuple[str, Sequence[EncodedRow]]:
    """The source of the rows that the run evaluated, and these rows.

    Args:
        read: as the run did.
        other: reads the same source with other options, which were given now; None if they are the run's.

    Raises:
        UsageError: if the run held out none, or they cannot be found again.
        DataError: if the data cannot be read.
    """
    options = run.options
    source, most = (options.eval_data, None) if options.eval_data else (options.data, options.most_rows)
    split = split_of(run)
    if is_from_python(source):
        raise UsageError(f"{run.path}: the data of this run was passed in Python. {_ADVICE}")
    if not (options.eval_data or options.eval_fraction):
        raise UsageError(f"{run.path}: this run held out no rows. {_ADVICE}")
    try:
        rows = _held_out(run, source, read(source, options.view, most, split).rows)
        if other is not None:
            places = {row.place for row in rows}
            again = other(source, options.view, most, split).rows
            rows = _take(again, [number for number, row in enumerate(again) if row.place in places])
    except DataError as error:
        raise DataError(f"{clause(error)}. It is read as the evaluation data of the run {run.path}. Pass --data DATA "
                        "if it was moved, or to evaluate other rows.") from error
    return source, evenly(rows, options.eval_limit)


def split_of(run: OwnRun) -> SplitChoice:
    """The split of its data that the run held its rows out of."""
    options = run.options
    return (SplitChoice(options.eval_split, "--eval-split", held_out=True) if options.eval_data
            else SplitChoice(options.split))


def _held_out(run: OwnRun, source: str, rows: Sequence[EncodedRow]) -> Sequence[EncodedRow]:
    lines = read_eval_lines(run.path)
    if lines is None:  # a run of an earlier version
        fraction = run.options.eval_fraction
        found = rows if run.options.eval_data else split_by_prompt(rows, fraction)[1]
        if data_fingerprint(found) != run.manifest.get("fingerprints", {}).get("eval_data"):
            raise UsageError(f"{source}: the rows that the run {run.path} held out have changed, and the run has no "
                             f"eval_rows.jsonl, by which they could be recognized. {_ADVICE}")
        return found
    if not lines:
        raise UsageError(f"{run.path}: eval_rows.jsonl names no rows. {_ADVICE}")
    wanted = Counter(line["key"] for line in lines)
    numbers: dict[str, list[int]] = {}
    for number, key in enumerate(row_keys(rows)):
        if len(numbers.get(key, ())) < wanted[key]:
            numbers.setdefault(key, []).append(number)
    missing = [line for line in lines if len(numbers.get(line["key"], ())) < wanted[line["key"]]]
    if missing:
        raise UsageError(f"{source}: {len(missing)} of {count_of(len(lines), 'row')} that the run {run.path} held out "
                         f"have changed or are gone (first: {missing[0]['id'][:100]}, {missing[0]['place'][:200]}). "
                         f"{_ADVICE}")
    return _take(rows, [numbers[line["key"]].pop(0) for line in lines])


def _take(rows: Sequence[EncodedRow], numbers: list[int]) -> Sequence[EncodedRow]:
    if isinstance(rows, RowTable):
        return rows.take(np.array(numbers, dtype=np.int64))
    return [rows[number] for number in numbers]


def warn_of_trained_rows(run: Path, rows: Sequence[EncodedRow], voice: Voice) -> None:
    """Say how many of these rows the run was trained on, by their content."""
    keys = [completion_keys(row) for row in rows]
    try:
        found = trained_among(run, np.array([prompt for prompt, _ in keys], dtype=np.uint64),
                              np.array([key for _, own in keys for key in own], dtype=np.uint64))
    except DataError as error:
        voice.warn(f"{clause(error)}. Tropism cannot tell which of the rows the run was trained on.")
        return
    if found is None:
        voice.warn(f"{run} has no scores.parquet, so Tropism cannot tell which of the rows the run was trained on")
        return
    prompts, completions = (set(part.tolist()) for part in found)
    trained = sum(not completions.isdisjoint(own) for _, own in keys)
    beside = sum(prompt in prompts for prompt, _ in keys) - trained
    total = count_of(len(rows), "row")
    told = f"{trained:,} of {total} were trained on by the run {run}" if trained else ""
    if beside and trained:
        told += f", and {beside:,} more share a prompt with training rows"
    elif beside:
        told = f"{beside:,} of {total} share a prompt with training rows of the run {run}"
    if told:
        voice.warn(f"{told}. Their metrics say little about new data.")
