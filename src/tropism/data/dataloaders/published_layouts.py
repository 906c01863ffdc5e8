"""Layouts of padded batches from published trainers' dataloaders.

The layout is recognized by the parts of a batch; there is no option. Padding follows from masks and lengths, never from
token values. The supervised tokens are those that the batch marks.

    OpenRLHF       Tuples; ids may be [n, 1, L]. The second half of a KTO batch, with label -1, has mismatched rows.
                   The loss mask of its newer SFT batches is one position early, at the predicting token.
    coati          Dicts. The attention mask of KTO and SFT batches is "not the pad token", so with pad = EOS it
                   excludes every EOS, also the terminator. Such tokens are restored if they are between two tokens of
                   text or supervised. One at the start of a row stays excluded, as it is in coati.
    NeMo-Aligner   Dicts, padded on the right, without a mask per token. Labels of unsupervised tokens are -100.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tropism.data.formats import View
from tropism.data.sources.python_values import plain
from tropism.data.tree import Mask
from tropism.errors import DataError

Ids = npt.NDArray[np.int64]

_MISMATCHED = "mismatched row"
_NUMBERS = (bool, int, float, np.generic)
_UNSUPERVISED = -100  # the label of unsupervised tokens in all of these trainers


@dataclass(frozen=True, slots=True)
class Side:
    """One padded sequence per row: `[n, L]` ids, a mask of the text, and a mask of the supervised tokens."""

    name: str
    ids: Ids
    text: Mask
    supervised: Mask

    def select(self, name: str, rows: slice) -> "Side":
        """Some of the rows, under another name."""
        return Side(name, self.ids[rows], self.text[rows], self.supervised[rows])


@dataclass(frozen=True, slots=True)
class BatchContent:
    """A batch in the common form of all layouts."""

    sides: tuple[Side, ...]
    labels: list[bool] | None = None
    mismatched: Side | None = None


# --- parts of a batch -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BatchParts:
    """The named parts of a batch, as checked arrays."""

    parts: Mapping[str, Any]
    place: str

    def __contains__(self, name: str) -> bool:
        return self.parts.get(name) is not None

    def ids(self, name: str) -> Ids:
        """`[n, L]`."""
        array = self._table(name)
        if array.dtype.kind not in "iu":
            raise DataError(f"{self.place}: {name} must hold integers, not {array.dtype}")
        return array.astype(np.int64)

    def mask(self, name: str, ids: Ids) -> Mask:
        """`[n, L]` of a part of true/false or 0/1."""
        array = self._table(name, ids)
        if not np.isin(array, (0, 1)).all():
            raise DataError(f"{self.place}: {name} has values other than 0 and 1. If it numbers the sequences of a "
                            "packed batch, turn packing off (in OpenRLHF remove --packing_samples).")
        return array.astype(np.bool_)

    def labeled(self, name: str, ids: Ids) -> Mask:
        """`[n, L]` True for labels other than -100. Each label must equal the id at its position."""
        labels = self._table(name, ids)
        supervised: Mask = labels != _UNSUPERVISED
        wrong = np.argwhere(supervised & (labels != ids))
        if wrong.size:
            row, column = wrong[0]
            raise DataError(f"{self.place} row {row + 1}: {name} has {labels[row, column]} at column {column}, but the "
                            f"token is {ids[row, column]}. Labels must be at their own tokens, not shifted.")
        return supervised

    def numbers(self, name: str, rows: int) -> list[float]:
        """One number per row."""
        array = _array(self.parts[name], name, self.place)
        if array.size != rows or array.shape[:1] != (rows,):
            raise DataError(f"{self.place}: {name} has shape {list(array.shape)}, but must have one value for each "
                            f"of {rows} rows")
        for row, value in enumerate(plain(array.reshape(-1)) if array.dtype.kind == "O" else (), start=1):
            if not isinstance(value, _NUMBERS):
                raise DataError(f"{self.place} row {row}: {name} {value!r} is not a number")
        if array.dtype.kind not in "biuf":
            raise DataError(f"{self.place}: {name} must hold numbers, not {array.dtype}")
        return [float(value) for value in array.reshape(-1)]

    def lengths(self, name: str, rows: int) -> npt.NDArray[np.int64]:
        """`[n]` numbers of tokens."""
        values = self.numbers(name, rows)
        for row, value in enumerate(values, start=1):
            if not value.is_integer() or value < 0:
                raise DataError(f"{self.place} row {row}: {name} {value:g} is not a number of tokens")
        return np.array(values, dtype=np.int64)

    def labels(self, name: str, values: Sequence[float]) -> list[bool]:
        """Labels of unpaired rows."""
        for row, value in enumerate(values, start=1):
            if value not in (0, 1):
                raise DataError(f"{self.place} row {row}: {name} {value:g} is not 0 or 1. Convert ratings to "
                                "1 (desirable) or 0 before training.")
        return [value == 1 for value in values]

    def _table(self, name: str, like: Ids | None = None) -> npt.NDArray[Any]:
        array = _array(self.parts[name], name, self.place)
        if array.ndim == 3 and array.shape[1] == 1:
            array = array[:, 0]
        if array.ndim != 2 or not array.shape[1]:
            raise DataError(f"{self.place}: {name} has shape {list(array.shape)}, but must be [rows, tokens]")
        if like is not None and array.shape != like.shape:
            raise DataError(f"{self.place}: {name} has shape {list(array.shape)}, but its ids have "
                            f"{list(like.shape)}")
        return array


def _array(value: Any, name: str, place: str) -> npt.NDArray[Any]:
    """A tensor, an array, or lists of these, as an array."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return np.asarray((value.float() if value.is_floating_point() else value).numpy())
    if isinstance(value, (list, tuple)) and not all(isinstance(item, _NUMBERS) for item in value):
        items = [_array(item, name, place) for item in value]
        if len({item.shape for item in items}) > 1:
            raise DataError(f"{place}: the rows of {name} have different lengths. Pad the batch.")
        return np.array(items)
    return np.asarray(value)


# --- layouts ----------------------------------------------------------------------------------------------------------


def _after_prompt(parts: BatchParts, ids_name: str, mask_name: str, name: str = "") -> Side:
    """A side whose text after the prompt is supervised; the length of the prompt is given."""
    ids = parts.ids(ids_name)
    text = parts.mask(mask_name, ids)
    start = text.argmax(axis=1) + parts.lengths("prompt_ids_lens", len(ids))
    return Side(name, ids, text, text & (np.arange(ids.shape[1]) >= start[:, None]))


def _openrlhf_kto(parts: BatchParts) -> BatchContent:
    side = _after_prompt(parts, "input_ids", "attention_mask")
    rows = len(side.ids)
    values = parts.numbers("labels", rows)
    matched = rows - values.count(-1)
    if matched in (0, rows):
        return BatchContent((side,), parts.labels("labels", values))
    if 2 * matched != rows or values[matched:] != [-1] * matched:
        raise DataError(f"{parts.place}: {rows - matched} of {rows} labels are -1. Expected none, or exactly the "
                        "second half: one mismatched row for each row, in the same order.")
    return BatchContent((side.select("", slice(matched)),), parts.labels("labels", values[:matched]),
                   side.select(_MISMATCHED, slice(matched, None)))


def _openrlhf_dpo(parts: BatchParts) -> BatchContent:
    return BatchContent((_after_prompt(parts, "chosen_ids", "chosen_masks", "chosen"),
                    _after_prompt(parts, "reject_ids", "reject_masks", "rejected")))


def _openrlhf_sft(parts: BatchParts) -> BatchContent:
    ids = parts.ids("input_ids")
    text = parts.mask("attention_masks", ids)
    supervised = np.zeros_like(text)
    supervised[:, 1:] = parts.mask("loss_masks", ids)[:, :-1]  # OpenRLHF marks the token before the supervised one
    return BatchContent((Side("", ids, text, supervised & text),))


def _openrlhf_sft_by_length(parts: BatchParts) -> BatchContent:
    return BatchContent((_after_prompt(parts, "input_ids", "attention_masks"),))


def _without_pad_value(parts: BatchParts, prefix: str = "", name: str = "") -> Side:
    """A side whose attention mask excludes all tokens equal to the pad token, and so may exclude text.

    Supervised tokens are text, and so is a single excluded token between two others. A longer run may be padding and
    stays excluded.
    """
    ids = parts.ids(f"{prefix}input_ids")
    masks = [parts.mask(f"{prefix}loss_mask", ids)] if f"{prefix}loss_mask" in parts else []
    if not prefix and "labels" in parts:
        masks.append(parts.labeled("labels", ids))
    if (masks[0] != masks[-1]).any():
        raise DataError(f"{parts.place}: labels and loss_mask mark different tokens as supervised. Give only one.")
    text = parts.mask(f"{prefix}attention_mask", ids) | masks[0]
    text[:, 1:-1] |= text[:, :-2] & text[:, 2:]
    return Side(name, ids, text, masks[0])


def _coati_kto(parts: BatchParts) -> BatchContent:
    side = _without_pad_value(parts)
    has_mismatched = all(f"kl_{name}" in parts for name in ("input_ids", "attention_mask", "loss_mask"))
    return BatchContent((side,), parts.labels("label", parts.numbers("label", len(side.ids))),
                   _without_pad_value(parts, "kl_", _MISMATCHED) if has_mismatched else None)


def _coati_dpo(parts: BatchParts) -> BatchContent:
    sides = []
    for name, prefix in (("chosen", "chosen"), ("rejected", "reject" if "reject_input_ids" in parts else "rejected")):
        ids = parts.ids(f"{prefix}_input_ids")
        text, supervised = (parts.mask(f"{prefix}_{part}_mask", ids) for part in ("attention", "loss"))
        sides.append(Side(name, ids, text, supervised))
    return BatchContent(tuple(sides))


def _coati_sft(parts: BatchParts) -> BatchContent:
    return BatchContent((_without_pad_value(parts),))


def _by_labels(parts: BatchParts, ids_name: str, labels: str, length: str, name: str = "") -> Side:
    """A side padded on the right, without a mask: text from the first column to at least the last label."""
    ids = parts.ids(ids_name)
    supervised = parts.labeled(labels, ids)
    text: Mask = np.logical_or.accumulate(supervised[:, ::-1], axis=1)[:, ::-1]
    if length in parts:
        late = np.flatnonzero(text.sum(axis=1) > parts.lengths(length, len(ids)))
        if late.size:
            raise DataError(f"{parts.place} row {late[0] + 1}: a label is beyond the {length} of the row, as if the "
                            "batch were padded on the left. Pad on the right, as NeMo-Aligner does.")
    return Side(name, ids, text, supervised)


def _nemo_kto(parts: BatchParts) -> BatchContent:
    side = _by_labels(parts, "samples", "sample_labels", "sample_length")
    has_mismatched = "kl_samples" in parts and "kl_sample_labels" in parts
    return BatchContent((side,), parts.labels("preference", parts.numbers("preference", len(side.ids))),
                   _by_labels(parts, "kl_samples", "kl_sample_labels", "", _MISMATCHED) if has_mismatched else None)


def _nemo_dpo(parts: BatchParts) -> BatchContent:
    return BatchContent(tuple(_by_labels(parts, name, f"{name}_labels", f"{name}_length", name)
                         for name in ("chosen", "rejected")))


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """A known layout: its name, its view, the names of its parts in order, and the function that reads them."""

    name: str
    view: View
    parts: str
    read: Callable[[BatchParts], BatchContent]

    def names(self, choice: int = 0) -> list[str]:
        """The names of the parts. For two spellings (a/b), `choice` selects one."""
        return [(name.split("/") * 2)[choice] for name in self.parts.split()]


# Tuples, by the number of dimensions of each part (2 for ids as [n, 1, L]; None matches any).
_TUPLES: tuple[tuple[tuple[int | None, ...], BatchLayout], ...] = (
    ((2, 2, 1, 1), BatchLayout("OpenRLHF KTO", "unpaired", "input_ids attention_mask labels prompt_ids_lens",
                          _openrlhf_kto)),
    ((2, 2, 2, 2, 1), BatchLayout("OpenRLHF DPO", "paired",
                             "chosen_ids chosen_masks reject_ids reject_masks prompt_ids_lens", _openrlhf_dpo)),
    ((2, 2, 2), BatchLayout("OpenRLHF SFT", "single", "input_ids attention_masks loss_masks", _openrlhf_sft)),
    ((1, 2, 2, None), BatchLayout("OpenRLHF SFT with lengths", "single",
                             "prompt_ids_lens input_ids attention_masks infos", _openrlhf_sft_by_length)),
)
# Dicts, by the names that they must have. The first match is used. A slash separates two spellings.
_DICTS = (
    BatchLayout("NeMo-Aligner KTO", "unpaired", "samples sample_labels preference", _nemo_kto),
    BatchLayout("NeMo-Aligner DPO", "paired", "chosen rejected chosen_labels rejected_labels", _nemo_dpo),
    BatchLayout("coati DPO", "paired", "chosen_input_ids chosen_attention_mask chosen_loss_mask reject_input_ids/"
           "rejected_input_ids reject_attention_mask/rejected_attention_mask reject_loss_mask/rejected_loss_mask",
           _coati_dpo),
    BatchLayout("coati KTO", "unpaired", "input_ids attention_mask loss_mask label", _coati_kto),
    BatchLayout("coati SFT", "single", "input_ids attention_mask labels/loss_mask", _coati_sft),
)
LAYOUTS: dict[str, str] = {
    **{layout.name: f"tuple ({', '.join(layout.names())})" for _, layout in _TUPLES},
    **{layout.name: f"dict with {', '.join(layout.parts.split())}" for layout in _DICTS},
}
"""Known layouts and their parts."""


def recognize_layout(batch: Any, place: str) -> tuple[BatchLayout, BatchParts]:
    """The layout of a batch, and its parts by name.

    Raises:
        DataError: if no layout matches, with the found parts and the known layouts.
    """
    if isinstance(batch, Mapping):
        found = {name for name, value in batch.items() if value is not None}
        for layout in _DICTS:
            if any(found.issuperset(layout.names(choice)) for choice in (0, 1)):
                return layout, BatchParts(batch, place)
    elif isinstance(batch, (tuple, list)):  # torch's pinning of memory turns tuples into lists
        dims = tuple(_dims(part) for part in batch)
        for wanted, layout in _TUPLES:
            if len(dims) == len(wanted) and all(b in (None, a) for a, b in zip(dims, wanted, strict=True)):
                return layout, BatchParts(dict(zip(layout.names(), batch, strict=True)), place)
        if dims == (2, 2, 1):
            raise DataError(f"{place}: this is a batch of OpenRLHF's first KTO dataset class, which does not say where "
                            "a prompt ends. Use a later class, whose batches have prompt_ids_lens.")
    known = (f"  {name}: {parts}" for name, parts in LAYOUTS.items())
    raise DataError(f"{place}: unknown batch layout: {_describe(batch)}. Use one of these, or a text dataset:", *known)


def _dims(value: Any) -> int:
    """Number of dimensions, 2 for `[n, 1, L]`; -1 for values that are not arrays."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return 2 if value.ndim == 3 else value.ndim
    if isinstance(value, (list, tuple)):
        inner = _dims(value[0]) if value else 0
        return min(1 + inner, 2) if inner >= 0 else -1
    return 0 if isinstance(value, _NUMBERS) else -1


def _describe(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return "a dict with " + (", ".join(f"{name} ({_shape(part)})" for name, part in batch.items()) or "nothing")
    if isinstance(batch, (tuple, list)):
        return f"a {type(batch).__name__} of {len(batch)} parts ({'; '.join(map(_shape, batch))})"
    return type(batch).__name__


def _shape(value: Any) -> str:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return f"{list(value.shape)} {value.dtype}"
    return type(value).__name__ + (f" of {len(value)}" if isinstance(value, (tuple, list, Mapping)) else "")
