"""Turns padded batches of published trainers' dataloaders back into rows."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tropism.data.dataloaders.published_layouts import BatchContent, Side, recognize_layout
from tropism.data.formats import View
from tropism.data.rows import EncodedRow
from tropism.data.tree import Completion, TokenIds, Unsupervised, token_ids
from tropism.errors import DataError, count_of

_MAX_ID = np.iinfo(np.int32).max
_HOLDS: dict[View, str] = {"unpaired": "labeled completions (for KTO)", "paired": "pairs (for DPO)",
                           "single": "completions without labels (for SFT and distillation)"}


@dataclass(frozen=True, slots=True)
class BatchRows:
    """The rows of a batch.

    Args:
        rows: in the order of the batch, with ids and places such as `batch 3 row 1`.
        layout: its layout, as in `layouts.LAYOUTS`.
        has_partners: True if the batch has mismatched rows, used or not.
    """

    rows: tuple[EncodedRow, ...]
    layout: str
    has_partners: bool


def rows_of_batch(batch: Any, view: View, *, number: int, keep_partners: bool = False,
                  keep_unsupervised: bool = False) -> BatchRows:
    """Read one batch of a published trainer's dataloader: tensors on any device, arrays or lists.

    The prompt ends before the first supervised token. The completion ends with the last supervised token and may
    contain unsupervised ones. Tokens after it are dropped.

    Args:
        batch: from the dataloader.
        view: view that the method needs.
        number: of the batch, for places and errors.
        keep_partners: use the mismatched rows of a KTO batch as partners of its rows.
        keep_unsupervised: keep sequences without a supervised token, as completions whose log-prob is 0.

    Raises:
        DataError: for an unknown layout or one of another view, and for a row without prompt or supervised token, with
            an invalid id or label, with padding inside, or with different prompts on its sides.
    """
    place = f"batch {number}"
    layout, parts = recognize_layout(batch, place)
    if layout.view != view:
        raise DataError(f"{place}: this is a batch of {layout.name} with {_HOLDS[layout.view]}, but the method takes "
                        f"{_HOLDS[view]}. Use another method, or the dataset class for this one.")
    content = layout.read(parts)
    counts = {side.name or "rows": len(side.ids) for side in (*content.sides, content.mismatched) if side is not None}
    if len(set(counts.values())) > 1:
        raise DataError(f"{place}: parts have different numbers of rows: "
                        + ", ".join(f"{name} {count}" for name, count in counts.items()))
    rows = tuple(_row(content, index, f"{place} row {index + 1}", keep_partners, keep_unsupervised)
                 for index in range(len(content.sides[0].ids)))
    return BatchRows(rows, layout.name, content.mismatched is not None)


def _row(content: BatchContent, index: int, place: str, keep_partners: bool,
         keep_unsupervised: bool) -> EncodedRow:
    sides = [*content.sides]
    if keep_partners and content.mismatched is not None:
        sides.append(content.mismatched)
    empty = [keep_unsupervised and not side.supervised[index].any() for side in sides]
    parts = [_unsupervised(side, index) if none else _split(side, index, place)
             for side, none in zip(sides, empty, strict=True)]
    # Without a supervised token it does not show where the prompt ends, and does not matter.
    prompt = next((own for (own, _), none in zip(parts, empty, strict=True) if not none), parts[0][0])
    prompts = [prompt if none else own for (own, _), none in zip(parts, empty, strict=True)]
    completions, partner = [completion for _, completion in parts[: len(content.sides)]], None
    for other in prompts[1 : len(content.sides)]:
        if not np.array_equal(prompt, other):
            raise DataError(f"{place}: the prompts of chosen and rejected differ: {_difference(prompt, other)}")
    if len(sides) > len(completions):
        other, partner = prompts[-1], parts[-1][1]
        if not np.array_equal(prompt, other):
            raise DataError(f"{place}: its mismatched row has another prompt: {_difference(prompt, other)} Or set "
                            "kl_source='step', which does not use these rows.")
    return EncodedRow(place, place, prompt, tuple(completions), None if content.labels is None else
                      content.labels[index], prompt.tobytes(), partner=partner)


def _unsupervised(side: Side, index: int) -> tuple[TokenIds, Completion]:
    """First and last token of a row without supervised token."""
    ids = side.ids[index, side.text[index]] if side.text[index].any() else side.ids[index]
    return token_ids(ids[:1]), Unsupervised.of(ids)


def _split(side: Side, index: int, place: str) -> tuple[TokenIds, Completion]:
    """Prompt and completion of one row."""
    text, supervised = side.text[index], np.flatnonzero(side.supervised[index])
    where = f"{place}{side.name and f', {side.name}'}"
    if not supervised.size:
        raise DataError(f"{where}: no supervised token: the row was truncated, or masked because it was too long. "
                        "Remove these rows before batching, or raise the length limit of the dataset.")
    first, end = int(supervised[0]), int(supervised[-1]) + 1
    start = min(int(text.argmax()), first)
    outside = start + np.flatnonzero(~text[start:end])
    if outside.size:
        raise DataError(f"{where}: attention_mask excludes {count_of(outside.size, 'token')} (first at column "
                        f"{outside[0]}) before the last supervised one, so text and padding cannot be distinguished. "
                        "Pad at one end only, with a separate pad token.")
    if start == first:
        raise DataError(f"{where}: no prompt: the first token is supervised, and no token before it predicts it. Mask "
                        "the tokens of the prompt, or add a BOS.")
    ids = side.ids[index, start:end]
    if (invalid := ids[(ids < 0) | (ids > _MAX_ID)]).size:
        raise DataError(f"{where}: {invalid[0]} is not a valid token id")
    loss_mask = side.supervised[index, first:end].copy()
    loss_mask.setflags(write=False)
    short = ids.astype(np.int32)
    return token_ids(short[: first - start]), Completion(token_ids(short[first - start :]), loss_mask)


def _difference(one: TokenIds, other: TokenIds) -> str:
    """How two prompts differ, and the remedy."""
    short, long = sorted((one, other), key=len)
    lengths = f"{len(one)} and {len(other)} tokens"
    if len(short) < len(long) and np.array_equal(short, long[-len(short) :]):
        return (f"{lengths}, and the shorter one is the end of the longer one: they were truncated on the left by "
                "different amounts. Truncate the prompt before adding the completions.")
    if np.array_equal(short, long[: len(short)]):
        return (f"{lengths}, and the shorter one is the start of the longer one: the supervised parts start at "
                "different positions. Start both directly after the prompt.")
    place = int(np.flatnonzero(short != long[: len(short)])[0])
    return (f"{lengths}, different from token {place + 1} on. If a token spans the border of prompt and completion, "
            "encode them separately.")
