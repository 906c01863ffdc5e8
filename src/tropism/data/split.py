"""A held-out share of the prompts, independent of seed and order."""

import hashlib
import math
from collections.abc import Sequence

from tropism.data.rows import EncodedRow
from tropism.errors import UsageError


def split_by_prompt(rows: Sequence[EncodedRow], fraction: float) -> tuple[list[EncodedRow], list[EncodedRow]]:
    """Training and held-out rows; no prompt is on both sides.

    The prompts with the smallest ceil(fraction x prompts) hashes are held out, at least one on each side.

    Raises:
        UsageError: if there are not two prompts to split.
    """
    ranks = {key: hashlib.blake2b(key, digest_size=16).digest() for key in {row.split_key for row in rows}}
    if len(ranks) < 2:
        raise UsageError("eval_fraction: the data has one prompt only, so none can be held out")
    count = min(max(math.ceil(fraction * len(ranks)), 1), len(ranks) - 1)
    held_out = set(sorted(ranks, key=lambda key: ranks[key])[:count])
    return ([row for row in rows if row.split_key not in held_out],
            [row for row in rows if row.split_key in held_out])
