"""Padded batches of the published trainers' dataloaders, read back into rows."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tropism.data.dataloaders.layouts import Content, Side, recognize
from tropism.data.formats import View
from tropism.data.rows import EncodedRow
from tropism.data.tree import Completion, TokenIds, token_ids
from tropism.errors import DataError

_MOST = np.iinfo(np.int32).max
_HOLDS: dict[View, str] = {"unpaired": "single labeled completions (for KTO)", "paired": "pairs (for DPO)",
                           "single": "completions without a label (for distillation)"}


@dataclass(frozen=True, slots=True)
class BatchRows:
    """What a batch holds.

    Args:
        rows: in the batch's order; a row that is first in batch 3 has `batch 3 row 1` as its id and place.
        layout: whose batch it was, as in `batch_layouts.LAYOUTS`.
        has_partners: whether mismatched rows came with it, kept or not.
    """

    rows: tuple[EncodedRow, ...]
    layout: str
    has_partners: bool


def rows_of_batch(batch: Any, view: View, *, number: int, keep_partners: bool = False) -> BatchRows:
    """Read one batch of a published trainer's dataloader. Tensors of any device, arrays and lists will do.

    A prompt is what stands before the first supervised token; its completion goes on to the last one, and may have
    unsupervised stretches between them. What follows is dropped.

    Args:
        batch: what the dataloader gave.
        view: what the method takes.
        number: the batch's, for messages and places.
        keep_partners: take the mismatched rows that came with a KTO batch as the rows' partners.

    Raises:
        DataError: if the layout is unknown or of another view; if a row has no supervised token or no prompt, an id
            that is none, a label other than 0 and 1, padding inside, or two sides (or a mismatched row) with
            different prompts.
    """
    place = f"batch {number}"
    layout, parts = recognize(batch, place)
    if layout.view != view:
        raise DataError(f"{place}: this is a batch of {layout.name}, which holds {_HOLDS[layout.view]}; the method "
                        f"takes {_HOLDS[view]}. Use the other method, or the dataset class made for this one")
    content = layout.read(parts)
    counts = {side.name or "rows": len(side.ids) for side in (*content.sides, content.mismatched) if side is not None}
    if len(set(counts.values())) > 1:
        raise DataError(f"{place}: parts of different numbers of rows do not belong together: "
                        + ", ".join(f"{name} {count}" for name, count in counts.items()))
    rows = tuple(_row(content, index, f"{place} row {index + 1}", keep_partners)
                 for index in range(len(content.sides[0].ids)))
    return BatchRows(rows, layout.name, content.mismatched is not None)


def _row(content: Content, index: int, place: str, keep_partners: bool) -> EncodedRow:
    prompt, completion = _split(content.sides[0], index, place)
    completions, partner = [completion], None
    for side in content.sides[1:]:
        other, completion = _split(side, index, place)
        if not np.array_equal(prompt, other):
            raise DataError(f"{place}: the prompts of chosen and rejected differ: {_difference(prompt, other)}")
        completions.append(completion)
    if keep_partners and content.mismatched is not None:
        other, partner = _split(content.mismatched, index, place)
        if not np.array_equal(prompt, other):
            raise DataError(f"{place}: the mismatched row that came with it has another prompt: "
                            f"{_difference(prompt, other)}. Or do without them: kl_source='step'")
    return EncodedRow(place, place, prompt, tuple(completions), None if content.labels is None else
                      content.labels[index], prompt.tobytes(), partner=partner)


def _split(side: Side, index: int, place: str) -> tuple[TokenIds, Completion]:
    """Prompt and completion of one row."""
    text, supervised = side.text[index], np.flatnonzero(side.supervised[index])
    where = f"{place}{side.name and f', {side.name}'}"
    if not supervised.size:
        raise DataError(f"{where}: no supervised token; the row was cut, or masked because it was too long. Leave "
                        "such rows out before they are put into batches, or raise the length limit there")
    first, end = int(supervised[0]), int(supervised[-1]) + 1
    start = min(int(text.argmax()), first)
    outside = start + np.flatnonzero(~text[start:end])
    if outside.size:
        raise DataError(f"{where}: attention_mask leaves out {outside.size} tokens (the first at column "
                        f"{outside[0]}) before the last supervised one, so text cannot be told from padding. Pad "
                        "at one end only, with a pad token of its own")
    if start == first:
        raise DataError(f"{where}: no prompt: the first token is supervised, and nothing stands before it to predict "
                        "it from. Mask the prompt's tokens, or put a BOS in front")
    ids = side.ids[index, start:end]
    if (strange := ids[(ids < 0) | (ids > _MOST)]).size:
        raise DataError(f"{where}: {strange[0]} is no token id; only text tokens can be trained on")
    loss_mask = side.supervised[index, first:end].copy()
    loss_mask.setflags(write=False)
    short = ids.astype(np.int32)
    return token_ids(short[: first - start]), Completion(token_ids(short[first - start :]), loss_mask)


def _difference(one: TokenIds, other: TokenIds) -> str:
    """How two prompts differ, and what to do."""
    short, long = sorted((one, other), key=len)
    lengths = f"{len(one)} and {len(other)} tokens"
    if len(short) < len(long) and np.array_equal(short, long[-len(short) :]):
        return (f"{lengths}, and the shorter is the end of the longer: they were cut on the left by different "
                "amounts. Cut the prompt first, to one length, and then add the completions")
    if np.array_equal(short, long[: len(short)]):
        return (f"{lengths}, and the shorter is the start of the longer: the supervised part starts at different "
                "places. Let it start behind the prompt on both")
    place = int(np.flatnonzero(short != long[: len(short)])[0])
    return (f"{lengths}, different from token {place + 1} on. If a token has grown together over the border, encode "
            "prompt and completion apart")
