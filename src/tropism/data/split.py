"""Holds out a fraction of the prompts, independent of seed and row order."""

import hashlib
import math
from collections.abc import Sequence

import numpy as np

from tropism.data.row_blocks import RowTable
from tropism.data.rows import EncodedRow
from tropism.errors import UsageError


def split_by_prompt(rows: Sequence[EncodedRow], fraction: float) -> tuple[Sequence[EncodedRow], Sequence[EncodedRow]]:
    """Split rows into training and held-out rows; no prompt is on both sides.

    The ceil(fraction x prompts) prompts with the smallest hashes are held out. Each side has at least one prompt.

    Raises:
        UsageError: if all rows have the same prompt.
    """
    keys = rows.split_keys() if isinstance(rows, RowTable) else [row.split_key for row in rows]
    ranks = {key: hashlib.blake2b(key, digest_size=16).digest() for key in set(keys)}
    if len(ranks) < 2:
        raise UsageError("--eval-fraction: all rows have the same prompt, so none can be held out. Use --eval-data.")
    count = min(max(math.ceil(fraction * len(ranks)), 1), len(ranks) - 1)
    held_out = set(sorted(ranks, key=lambda key: ranks[key])[:count])
    side = np.fromiter((key in held_out for key in keys), dtype=np.bool_, count=len(keys))
    train, evaluation = (np.flatnonzero(which) for which in (~side, side))
    if isinstance(rows, RowTable):
        return rows.take(train), rows.take(evaluation)
    return [rows[number] for number in train.tolist()], [rows[number] for number in evaluation.tolist()]
