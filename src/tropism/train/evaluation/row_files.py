"""The files of a run about its rows: which ones are held out, and the scores of each before and after training."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import compute, parquet

from tropism.borders import border
from tropism.data.row_blocks import RowTable
from tropism.data.rows import EncodedRow
from tropism.data.tree import score_key
from tropism.errors import DataError
from tropism.files import replacing
from tropism.losses.scored import Scored
from tropism.methods import Method
from tropism.observe.file_kinds import check_kind
from tropism.observe.log_files import read_log
from tropism.observe.rundir import EVAL_ROWS, SCORES
from tropism.train.evaluation.evaluator import units_of

Keys = npt.NDArray[np.uint64]

_BATCH = 8192  # completions in memory at once
_MOST_BYTES = 2**30  # of the held-out rows
_MOST_LINES = 2**31  # of the scores
SCHEMA = pa.schema([
    ("id", pa.large_string()), ("place", pa.large_string()), ("split", pa.dictionary(pa.int8(), pa.string())),
    ("side", pa.dictionary(pa.int8(), pa.string())), ("label", pa.bool_()), ("tokens", pa.int32()),
    ("logps_before", pa.float64()), ("logps_after", pa.float64()), ("reference_logps", pa.float64()),
    ("reward_before", pa.float64()), ("reward_after", pa.float64()),
    ("prompt_key", pa.uint64()), ("completion_key", pa.uint64())])
"""Columns of `scores.parquet`."""


def row_keys(rows: Sequence[EncodedRow]) -> Iterator[str]:
    """A hash of each row's content: its prompt before truncation, its completions after it, and its label."""
    contents = ((key, sides, desirable) for _, key, sides, desirable, _ in rows.contents()) if isinstance(
        rows, RowTable) else ((row.prompt_key, [one.key for one in row.completions[:2]], row.desirable) for row in rows)
    for prompt, completions, desirable in contents:
        yield hashlib.blake2b(b"".join((prompt, *completions, str(desirable).encode())), digest_size=16).hexdigest()


def completion_keys(row: EncodedRow) -> tuple[int, list[int]]:
    """Numbers by which the row's prompt, and each completion with its prompt, are recognized in other data."""
    def number(*parts: bytes) -> int:
        return int.from_bytes(hashlib.blake2b(b"".join(parts), digest_size=8).digest(), "little")

    return number(row.prompt_key), [number(row.prompt_key, one.key) for one in row.completions[:2]]


def eval_lines(rows: Sequence[EncodedRow]) -> Iterator[dict[str, str]]:
    """Lines of `eval_rows.jsonl`."""
    return ({"id": row.id, "place": row.place, "key": key} for row, key in zip(rows, row_keys(rows), strict=True))


def read_eval_lines(run: Path) -> list[dict[str, str]] | None:
    """Lines of a run's `eval_rows.jsonl`; None if it has none.

    Raises:
        DataError: with FILE:LINE, for a line that no run writes.
        OutputExistsError: if it is not a regular file.
    """
    file = run / EVAL_ROWS
    check_kind(file)
    if not file.exists():
        return None
    if file.stat().st_size > _MOST_BYTES:
        raise DataError(f"{file}: too large: at most {_MOST_BYTES / 2**20:g} MiB are read")
    found = []
    for number, line in read_log(file):
        if not all(isinstance(line.get(name), str) for name in ("id", "place", "key")):
            raise DataError(f"{file}:{number}: 'id', 'place' and 'key' are not all texts")
        found.append(line)
    return found


@dataclass(frozen=True)
class HeldOutScores:
    """The evaluated rows of a run with their scores.

    Args:
        rows: that were evaluated.
        before, after: their completions, row after row, under the initial and the trained policy.
        method: says what a reward is.
    """

    rows: Sequence[EncodedRow]
    before: Scored
    after: Scored
    method: Method

    def columns(self) -> Iterator[dict[str, float | None]]:
        """The scores of each completion, row after row; of a pair those of its two sides."""
        members = units_of(self.rows, self.after).members[:, :2]
        rewarded = self.method.preference is not None
        columns: dict[str, list[float | None]] = {}
        for name, scored in (("before", self.before), ("after", self.after)):
            rewards = self.method.unit_rewards(scored, units_of(self.rows, scored)) if rewarded else None
            columns[f"logps_{name}"] = scored.logps[members].flatten().tolist()
            columns[f"reward_{name}"] = [None] * members.numel() if rewards is None else rewards.flatten().tolist()
        compared = self.method.needs_reference
        columns["reference_logps"] = (self.after.reference_logps[members].flatten().tolist() if compared
                                      else [None] * members.numel())
        return (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))


def write_scores(path: Path, train: Iterable[EncodedRow], held_out: HeldOutScores | None,
                 reference: Mapping[bytes, float]) -> None:
    """Write `scores.parquet`: a line for each completion, first of the held-out rows, then of the training rows, which
    have the reference's log-probs only.

    Args:
        train: training rows.
        held_out: evaluated rows; None without any.
        reference: log-prob by `score_key`, as far as known.

    Raises:
        OutputError: if the disk refuses.
    """
    def stored(row: EncodedRow) -> Iterator[dict[str, float | None]]:
        return ({"reference_logps": reference.get(score_key(row.prompt_ids, one))} for one in row.completions[:2])

    lines = chain.from_iterable(_lines(row, "train", stored(row)) for row in train)
    if held_out is not None:
        scores = held_out.columns()
        lines = chain(chain.from_iterable(_lines(row, "eval", scores) for row in held_out.rows), lines)
    with replacing(path) as temporary, parquet.ParquetWriter(temporary, SCHEMA, compression="zstd") as writer:
        while batch := list(islice(lines, _BATCH)):
            writer.write_table(pa.Table.from_pylist(batch, SCHEMA))


def _lines(row: EncodedRow, split: str, scores: Iterator[dict[str, float | None]]) -> Iterator[dict[str, Any]]:
    prompt, keys = completion_keys(row)
    for number, key in enumerate(keys):
        side = ("chosen", "rejected")[number] if len(keys) == 2 else None
        yield {"id": _plain(row.id), "place": _plain(row.place), "split": split, "side": side, "label": row.desirable,
               "tokens": row.completions[number].length, **next(scores), "prompt_key": prompt, "completion_key": key}


def _plain(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()  # Parquet holds no half of a surrogate pair


def trained_among(run: Path, prompts: Keys, completions: Keys) -> tuple[Keys, Keys] | None:
    """Which of these keys belong to training rows of a run; None if it has no `scores.parquet`.

    Raises:
        DataError: if the file is not one that a run writes.
        OutputExistsError: if it is not a regular file.
    """
    file = run / SCORES
    check_kind(file)
    if not file.exists():
        return None
    found: tuple[list[Keys], list[Keys]] = ([], [])
    with border(f"{file}: cannot be read", DataError), parquet.ParquetFile(file) as opened:
        if opened.metadata.num_rows > _MOST_LINES:
            raise ValueError(f"it has more than {_MOST_LINES:,} lines")
        for batch in opened.iter_batches(_BATCH, columns=["split", "prompt_key", "completion_key"]):
            train = np.array(compute.equal(batch.column("split").cast(pa.string()), "train"), dtype=np.bool_)
            for name, wanted, kept in (("prompt_key", prompts, found[0]), ("completion_key", completions, found[1])):
                keys = batch.column(name).cast(pa.uint64()).to_numpy(zero_copy_only=False)
                kept.append(np.intersect1d(keys[train], wanted))
    own, others = (np.unique(np.concatenate([np.zeros(0, np.uint64), *part])) for part in found)
    return own, others
