"""Holds out a fraction of the prompts, independent of seed and row order.

The unit is what must not be on both sides: rows with the same first user message (`split_key`), and rows with the same
prompt before truncation (`prompt_key`). These can differ, since a template may trim a message, or a tokenizer may give
two texts the same ids.
"""

import hashlib
import math
from collections.abc import Sequence

import numpy as np

from tropism.data.row_blocks import RowTable
from tropism.data.row_facts import Integers, facts_of
from tropism.data.rows import EncodedRow
from tropism.errors import UsageError


def split_by_prompt(rows: Sequence[EncodedRow], fraction: float) -> tuple[Sequence[EncodedRow], Sequence[EncodedRow]]:
    """Split rows into training and held-out rows; no prompt is on both sides.

    The ceil(fraction x units) units with the smallest hashes are held out. Each side has at least one.

    Raises:
        UsageError: if all rows have the same prompt.
    """
    keys = rows.split_keys() if isinstance(rows, RowTable) else [row.split_key for row in rows]
    by_hash = sorted(set(keys), key=lambda key: hashlib.blake2b(key, digest_size=16).digest())
    number_of = {key: number for number, key in enumerate(by_hash)}
    unit = _joined(np.array([number_of[key] for key in keys]), facts_of(rows).prompt_numbers)
    units = np.unique(unit)
    if len(units) < 2:
        raise UsageError("--eval-fraction: all rows have the same prompt, so none can be held out. Use --eval-data.")
    count = min(max(math.ceil(fraction * len(units)), 1), len(units) - 1)
    side = unit < units[count]
    train, evaluation = (np.flatnonzero(which) for which in (~side, side))
    if isinstance(rows, RowTable):
        return rows.take(train), rows.take(evaluation)
    return [rows[number] for number in train.tolist()], [rows[number] for number in evaluation.tolist()]


def _joined(keys: Integers, prompts: Integers) -> Integers:
    """`[n]` the unit of each row: the smallest key that is connected to its own by rows of one prompt."""
    unit = keys
    while True:
        before = unit
        for column in (prompts, keys):
            smallest = np.full(int(column.max()) + 1, len(keys), dtype=np.int64)
            np.minimum.at(smallest, column, unit)
            unit = smallest[column]
        if np.array_equal(unit, before):
            return unit
