"""Turns padded batches of published trainers' dataloaders back into rows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tropism.data.dataloaders.published_layouts import BatchContent, Side, recognize_layout
from tropism.data.formats import View
from tropism.data.rows import EncodedRow
from tropism.data.tree import Completion, TokenIds, Unsupervised, prompt_key, token_ids
from tropism.errors import DataError, count_of

_MAX_ID = np.iinfo(np.int32).max
_NO_PROMPT, _APART, _OWN = "no_prompt", "prompts_apart", "own_completion"
_REMARKS = {
    _NO_PROMPT: "{rows} without a prompt (first: {first}): the second token is the first supervised one. If they have "
                "prompts, mask them, or set prompt_key in OpenRLHF's dataset.",
    _APART: "{rows} whose sides have less than half of their prompts in common (first: {first}). Check that the sides "
            "answer the same prompt.",
    _OWN: "{rows} whose mismatched row is the row's own completion (first: {first}), as in micro-batches of 1 row, and "
          "in the middle of coati's with an odd number. The reference point then follows the rewards of the rows "
          "themselves and cancels them. Use larger micro-batches, or kl_source='step' and reference_point='step'."}
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

    The prompt ends before the first supervised token, or after the first token if that one is supervised: nothing
    predicts it, so it is context. The completion ends with the last supervised token and may contain unsupervised
    ones. Tokens after it are dropped.

    Both sides of a pair have one `prompt_ids`: the common beginning of their prompts, possibly empty. The rest of
    either prompt is the unsupervised beginning of its completion, so that each side keeps its own border of
    supervision. Such a row has the `prompt_key` of its first prompt. A row and its mismatched row likewise.

    Args:
        batch: from the dataloader.
        view: view that the method needs.
        number: of the batch, for places and errors.
        keep_partners: use the mismatched rows of a KTO batch as partners of its rows.
        keep_unsupervised: keep sequences without a supervised token, as completions whose log-prob is 0.

    Raises:
        DataError: for an unknown layout or one of another view, and for a row without supervised token, with an invalid
            id or label, or with padding inside.
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
    empty = [keep_unsupervised and not side.supervised[index, side.text[index].argmax() + 1 :].any() for side in sides]
    parts = [_unsupervised(side, index) if none else _split(side, index, place)
             for side, none in zip(sides, empty, strict=True)]
    # Without a supervised token it does not show where the prompt ends, and does not matter.
    prompt = next((own for (own, _), none in zip(parts, empty, strict=True) if not none), parts[0][0])
    prompts = [prompt if none else own for (own, _), none in zip(parts, empty, strict=True)]
    shared, completions = _join(prompts, [completion for _, completion in parts])
    partner = completions.pop() if len(sides) > len(content.sides) else None
    notes = frozenset(note for note, applies in (
        (_NO_PROMPT, _unprompted(sides[0], index)), (_APART, _apart(prompts)),
        (_OWN, partner is not None and partner.key == completions[0].key)) if applies)
    return EncodedRow(place, place, shared, tuple(completions), None if content.labels is None else
                      content.labels[index], prompt.tobytes(), notes, partner, prompt_key(prompt))


def _join(prompts: Sequence[TokenIds], completions: Sequence[Completion]) -> tuple[TokenIds, list[Completion]]:
    """The common beginning of some prompts, and completions that begin with the rest of theirs, unsupervised."""
    common = min(_common(prompts[0], prompt) for prompt in prompts)
    return token_ids(prompts[0][:common]), [
        completion if len(prompt) == common else type(completion)(
            token_ids(np.concatenate((prompt[common:], completion.ids))),
            np.concatenate((np.zeros(len(prompt) - common, np.bool_), completion.loss_mask)))
        for prompt, completion in zip(prompts, completions, strict=True)]


def _common(one: TokenIds, other: TokenIds) -> int:
    """Number of equal tokens at the start."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if different.size else length


def _apart(prompts: Sequence[TokenIds]) -> bool:
    """Whether prompts differ by more than their borders or a truncation on the left: they have less than half of the
    shortest in common."""
    shortest = min(prompts, key=len)
    return len(shortest) > 1 and any(
        2 * _common(shortest, prompt) < len(shortest) and not np.array_equal(shortest, prompt[-len(shortest):])
        for prompt in prompts)


def _unprompted(side: Side, index: int) -> bool:
    return bool(side.supervised[index, side.text[index].argmax()])


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
        if supervised.size == 1:
            raise DataError(f"{where}: only the first token is supervised, and no token before it predicts it. Remove "
                            "these rows before batching, or add a BOS.")
        first += 1
    ids = side.ids[index, start:end]
    if (invalid := ids[(ids < 0) | (ids > _MAX_ID)]).size:
        raise DataError(f"{where}: {invalid[0]} is not a valid token id")
    loss_mask = side.supervised[index, first:end].copy()
    loss_mask.setflags(write=False)
    short = ids.astype(np.int32)
    return token_ids(short[: first - start]), Completion(token_ids(short[first - start :]), loss_mask)


def remarks_on(rows: Iterable[EncodedRow]) -> list[str]:
    """A sentence for each kind of row in batches that is probably not what the user wants."""
    found: dict[str, list[str]] = {note: [] for note in _REMARKS}
    for row in rows:
        for note in row.notes & found.keys():
            found[note].append(row.place)
    return [_REMARKS[note].format(rows=count_of(len(places), "row"), first=places[0])
            for note, places in found.items() if places]
