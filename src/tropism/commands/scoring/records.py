"""One record per scored row, and the file that they are written to."""

import json
from pathlib import Path
from typing import Any

from tropism.commands.files import check_scores
from tropism.commands.scoring.own_run import plain_method
from tropism.commands.scoring.scores import Scores
from tropism.data.sources import resolve as sources
from tropism.errors import OutputError
from tropism.files import output


def original_columns(data: str, split: sources.SplitChoice | None = None) -> dict[str, dict[str, Any]]:
    """The records of a source by their places.

    Args:
        split: of a directory with several.
    """
    return {row.place: row.record for row in sources.read(data, split)}


def records(scores: Scores, beta: float | None = None,
            columns: dict[str, dict[str, Any]] | None = None) -> list[dict[str, Any]]:
    """One object per row, as it is written.

    Args:
        beta: factor between a log-ratio and a reward, in place of the one in use.
        columns: fields of the original record by the row's place, to be kept.
    """
    names = ("chosen_", "rejected_") if scores.view == "paired" else ("",)
    method = scores.method if beta in (None, scores.method.beta) else plain_method(scores.view, float(beta or 0.0))
    rewards = iter(scores.rewards(method) if scores.has_rewards else ())
    found = []
    for row, completions in zip(scores.rows, scores.completions, strict=True):
        record: dict[str, Any] = dict((columns or {}).get(row.place, {}))
        record |= {"id": row.id, "place": row.place}
        if row.desirable is not None:
            record["label"] = row.desirable
        for name, one in zip(names, completions, strict=False):  # with `ld_alpha` more completions follow
            record |= {f"{name}logps": one.logps, f"{name}tokens": one.length}
            if scores.has_reference:
                record[f"{name}reference_logps"] = one.reference_logps
            if scores.has_rewards:
                record[f"{name}reward"] = next(rewards)
            if scores.has_kl:
                record[f"{name}kl"] = one.divergence
        if scores.view == "paired" and scores.has_rewards:
            record["margin"] = record["chosen_reward"] - record["rejected_reward"]
        found.append(record)
    return found


def write(rows: list[dict[str, Any]], path: Path) -> None:
    """Write rows as JSONL or Parquet, whole or not at all.

    Raises:
        UsageError: for an unsupported kind of file, or one that exists.
        OutputError: if the disk refuses.
    """
    check_scores(path)
    try:
        with output(path) as temporary:
            if path.suffix == ".parquet":
                import pyarrow
                from pyarrow import parquet

                parquet.write_table(pyarrow.Table.from_pylist(rows), temporary)
            else:
                # `default`: a column of dates, for example, is written as text.
                lines = (json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
                # JSON may hold half a surrogate pair, which UTF-8 cannot: it is escaped again.
                temporary.write_text("".join(lines), encoding="utf-8", errors="backslashreplace")
    except ValueError as error:  # of pyarrow, for columns that Parquet cannot hold
        raise OutputError.because(path, error) from error
