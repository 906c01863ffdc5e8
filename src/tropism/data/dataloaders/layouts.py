"""What the published trainers' dataloaders put into a padded batch, and where.

Whose batch it is is seen from its parts; there is no option. What is padding is told by masks and lengths, never by
a token's value, and which tokens count is taken as the batch says it.

    OpenRLHF       tuples; ids may be [n, 1, L]. The last half of a KTO batch, with label -1, is mismatched rows.
                   The loss mask of its newer SFT batches stands one place early: at the token that predicts.
    coati          dicts. The attention mask of KTO and SFT batches is "is not the pad token", so with pad = eos it
                   leaves out every eos, the one that ends the answer too. Such tokens are put back where text
                   stands on both sides or they are supervised; one that begins a row stays out, as it did there.
    NeMo-Aligner   dicts, padded on the right, without a mask per token; labels are -100 where nothing is supervised.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tropism.data.formats import View
from tropism.data.tree import Mask
from tropism.errors import DataError

Ids = npt.NDArray[np.int64]

_MISMATCHED = "mismatched row"
_UNSUPERVISED = -100  # the label that all of these trainers write where nothing is supervised


@dataclass(frozen=True, slots=True)
class Side:
    """One padded sequence per row: `[n, L]` ids, which of them are text, and which of those are supervised."""

    name: str
    ids: Ids
    text: Mask
    supervised: Mask

    def half(self, name: str, rows: slice) -> "Side":
        return Side(name, self.ids[rows], self.text[rows], self.supervised[rows])


@dataclass(frozen=True, slots=True)
class Content:
    """A batch in the one shape that all layouts are read into."""

    sides: tuple[Side, ...]
    labels: list[bool] | None = None
    mismatched: Side | None = None


# --- parts of a batch -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Parts:
    """The named parts of a batch, given out as checked arrays."""

    parts: Mapping[str, Any]
    place: str

    def __contains__(self, name: str) -> bool:
        return self.parts.get(name) is not None

    def ids(self, name: str) -> Ids:
        """`[n, L]`."""
        array = self._table(name)
        if array.dtype.kind not in "iu":
            raise DataError(f"{self.place}: {name} must hold whole numbers, not {array.dtype}")
        return array.astype(np.int64)

    def mask(self, name: str, ids: Ids) -> Mask:
        """`[n, L]` of a part that is true/false or 0/1."""
        array = self._table(name, ids)
        if not np.isin(array, (0, 1)).all():
            raise DataError(f"{self.place}: {name} holds values other than 0 and 1. If it numbers the sequences of a "
                            "packed batch, turn packing off (OpenRLHF: no --packing_samples); packs are made here")
        return array.astype(np.bool_)

    def labeled(self, name: str, ids: Ids) -> Mask:
        """`[n, L]` where labels are not -100; each label must be the id at its own place."""
        labels = self._table(name, ids)
        supervised: Mask = labels != _UNSUPERVISED
        wrong = np.argwhere(supervised & (labels != ids))
        if wrong.size:
            row, column = wrong[0]
            raise DataError(f"{self.place} row {row + 1}: {name} has {labels[row, column]} at column {column}, where "
                            f"the token is {ids[row, column]}. Labels must stand at their own tokens, not shifted")
        return supervised

    def numbers(self, name: str, rows: int) -> list[float]:
        """One number per row."""
        array = _array(self.parts[name], name, self.place)
        if array.size != rows or array.shape[:1] != (rows,):
            raise DataError(f"{self.place}: {name} has shape {list(array.shape)}; expected one value for each of "
                            f"{rows} rows")
        if array.dtype.kind not in "biuf":
            raise DataError(f"{self.place}: {name} must hold numbers, not {array.dtype}")
        return [float(value) for value in array.reshape(-1)]

    def lengths(self, name: str, rows: int) -> npt.NDArray[np.int64]:
        """`[n]` token counts."""
        values = self.numbers(name, rows)
        for row, value in enumerate(values, start=1):
            if not value.is_integer() or value < 0:
                raise DataError(f"{self.place} row {row}: {name} is {value:g}, not a number of tokens")
        return np.array(values, dtype=np.int64)

    def labels(self, name: str, values: Sequence[float]) -> list[bool]:
        """Labels of unpaired rows."""
        for row, value in enumerate(values, start=1):
            if value not in (0, 1):
                raise DataError(f"{self.place} row {row}: {name} is {value:g}; it must be 1 (desirable) or 0. Turn "
                                "ratings into true/false before training")
        return [value == 1 for value in values]

    def _table(self, name: str, like: Ids | None = None) -> npt.NDArray[Any]:
        array = _array(self.parts[name], name, self.place)
        if array.ndim == 3 and array.shape[1] == 1:
            array = array[:, 0]
        if array.ndim != 2 or not array.shape[1]:
            raise DataError(f"{self.place}: {name} has shape {list(array.shape)}; expected [rows, tokens]")
        if like is not None and array.shape != like.shape:
            raise DataError(f"{self.place}: {name} has shape {list(array.shape)}, its ids {list(like.shape)}; they "
                            "must be equal")
        return array


def _array(value: Any, name: str, place: str) -> npt.NDArray[Any]:
    """A tensor, an array, or lists of them."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return np.asarray((value.float() if value.is_floating_point() else value).numpy())
    if isinstance(value, (list, tuple)) and not all(isinstance(item, (bool, int, float)) for item in value):
        items = [_array(item, name, place) for item in value]
        if len({item.shape for item in items}) > 1:
            raise DataError(f"{place}: the rows of {name} have different lengths; a batch must be padded")
        return np.array(items)
    return np.asarray(value)


# --- layouts ----------------------------------------------------------------------------------------------------------


def _behind_prompt(parts: Parts, ids_name: str, mask_name: str, name: str = "") -> Side:
    """Supervised is all of the text behind the prompt, whose length is given."""
    ids = parts.ids(ids_name)
    text = parts.mask(mask_name, ids)
    start = text.argmax(axis=1) + parts.lengths("prompt_ids_lens", len(ids))
    return Side(name, ids, text, text & (np.arange(ids.shape[1]) >= start[:, None]))


def _openrlhf_kto(parts: Parts) -> Content:
    side = _behind_prompt(parts, "input_ids", "attention_mask")
    rows = len(side.ids)
    values = parts.numbers("labels", rows)
    matched = rows - values.count(-1)
    if matched in (0, rows):
        return Content((side,), parts.labels("labels", values))
    if 2 * matched != rows or values[matched:] != [-1] * matched:
        raise DataError(f"{parts.place}: {rows - matched} of {rows} labels are -1; expected none, or those of the "
                        "whole second half: one mismatched row for each row, in the same order")
    return Content((side.half("", slice(matched)),), parts.labels("labels", values[:matched]),
                   side.half(_MISMATCHED, slice(matched, None)))


def _openrlhf_dpo(parts: Parts) -> Content:
    return Content((_behind_prompt(parts, "chosen_ids", "chosen_masks", "chosen"),
                    _behind_prompt(parts, "reject_ids", "reject_masks", "rejected")))


def _openrlhf_sft(parts: Parts) -> Content:
    ids = parts.ids("input_ids")
    text = parts.mask("attention_masks", ids)
    supervised = np.zeros_like(text)
    supervised[:, 1:] = parts.mask("loss_masks", ids)[:, :-1]  # theirs marks the token before the one that counts
    return Content((Side("", ids, text, supervised & text),))


def _openrlhf_sft_by_length(parts: Parts) -> Content:
    return Content((_behind_prompt(parts, "input_ids", "attention_masks"),))


def _without_pad_value(parts: Parts, prefix: str = "", name: str = "") -> Side:
    """A side whose attention mask says which tokens differ from the pad token, and so may leave out text.

    Supervised tokens are text, and so is a token that alone is left out between two that are not; a longer run may
    be padding, and stays out.
    """
    ids = parts.ids(f"{prefix}input_ids")
    masks = [parts.mask(f"{prefix}loss_mask", ids)] if f"{prefix}loss_mask" in parts else []
    if not prefix and "labels" in parts:
        masks.append(parts.labeled("labels", ids))
    if (masks[0] != masks[-1]).any():
        raise DataError(f"{parts.place}: labels and loss_mask say different things of which tokens count; give one")
    text = parts.mask(f"{prefix}attention_mask", ids) | masks[0]
    text[:, 1:-1] |= text[:, :-2] & text[:, 2:]
    return Side(name, ids, text, masks[0])


def _coati_kto(parts: Parts) -> Content:
    side = _without_pad_value(parts)
    carried = all(f"kl_{name}" in parts for name in ("input_ids", "attention_mask", "loss_mask"))
    return Content((side,), parts.labels("label", parts.numbers("label", len(side.ids))),
                   _without_pad_value(parts, "kl_", _MISMATCHED) if carried else None)


def _coati_dpo(parts: Parts) -> Content:
    sides = []
    for name, prefix in (("chosen", "chosen"), ("rejected", "reject" if "reject_input_ids" in parts else "rejected")):
        ids = parts.ids(f"{prefix}_input_ids")
        text, supervised = (parts.mask(f"{prefix}_{part}_mask", ids) for part in ("attention", "loss"))
        sides.append(Side(name, ids, text, supervised))
    return Content(tuple(sides))


def _coati_sft(parts: Parts) -> Content:
    return Content((_without_pad_value(parts),))


def _by_labels(parts: Parts, ids_name: str, labels: str, length: str, name: str = "") -> Side:
    """Padded on the right, without a mask: the text goes from the first column to, at least, the last label."""
    ids = parts.ids(ids_name)
    supervised = parts.labeled(labels, ids)
    text: Mask = np.logical_or.accumulate(supervised[:, ::-1], axis=1)[:, ::-1]
    if length in parts:
        late = np.flatnonzero(text.sum(axis=1) > parts.lengths(length, len(ids)))
        if late.size:
            raise DataError(f"{parts.place} row {late[0] + 1}: a label stands behind the {length} of the row, as if "
                            "it were padded on the left. NeMo-Aligner pads on the right; do so too")
    return Side(name, ids, text, supervised)


def _nemo_kto(parts: Parts) -> Content:
    side = _by_labels(parts, "samples", "sample_labels", "sample_length")
    carried = "kl_samples" in parts and "kl_sample_labels" in parts
    return Content((side,), parts.labels("preference", parts.numbers("preference", len(side.ids))),
                   _by_labels(parts, "kl_samples", "kl_sample_labels", "", _MISMATCHED) if carried else None)


def _nemo_dpo(parts: Parts) -> Content:
    return Content(tuple(_by_labels(parts, name, f"{name}_labels", f"{name}_length", name)
                         for name in ("chosen", "rejected")))


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """A known layout: whose it is, the view it serves, the names of its parts in order, and how to read them."""

    name: str
    view: View
    parts: str
    read: Callable[[Parts], Content]

    def names(self, choice: int = 0) -> list[str]:
        """The names of the parts; where there is a choice (a/b), of that choice."""
        return [(name.split("/") * 2)[choice] for name in self.parts.split()]


# Tuples, by how many dimensions each part has (ids as [n, 1, L] count as two; None is anything).
_TUPLES: tuple[tuple[tuple[int | None, ...], BatchLayout], ...] = (
    ((2, 2, 1, 1), BatchLayout("OpenRLHF KTO", "unpaired", "input_ids attention_mask labels prompt_ids_lens",
                          _openrlhf_kto)),
    ((2, 2, 2, 2, 1), BatchLayout("OpenRLHF DPO", "paired",
                             "chosen_ids chosen_masks reject_ids reject_masks prompt_ids_lens", _openrlhf_dpo)),
    ((2, 2, 2), BatchLayout("OpenRLHF SFT", "single", "input_ids attention_masks loss_masks", _openrlhf_sft)),
    ((1, 2, 2, None), BatchLayout("OpenRLHF SFT with lengths", "single",
                             "prompt_ids_lens input_ids attention_masks infos", _openrlhf_sft_by_length)),
)
# Dicts, by the names they have at least; the first that fits. A slash parts two spellings.
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


def recognize(batch: Any, place: str) -> tuple[BatchLayout, Parts]:
    """The layout of a batch and its parts by name.

    Raises:
        DataError: if no layout fits, with what was found and what is known.
    """
    if isinstance(batch, Mapping):
        found = {name for name, value in batch.items() if value is not None}
        for layout in _DICTS:
            if any(found.issuperset(layout.names(choice)) for choice in (0, 1)):
                return layout, Parts(batch, place)
    elif isinstance(batch, (tuple, list)):  # torch's pinning of memory turns tuples into lists
        dims = tuple(_dims(part) for part in batch)
        for wanted, layout in _TUPLES:
            if len(dims) == len(wanted) and all(b in (None, a) for a, b in zip(dims, wanted, strict=True)):
                return layout, Parts(dict(zip(layout.names(), batch, strict=True)), place)
        if dims == (2, 2, 1):
            raise DataError(f"{place}: this is a batch of OpenRLHF's first KTO dataset, which does not say where a "
                            "prompt ends. Use a later one, whose batches end with prompt_ids_lens")
    known = "".join(f"\n  {name}: {parts}" for name, parts in LAYOUTS.items())
    raise DataError(f"{place}: no known batch: {_describe(batch)}. Give one of these, or a dataset of text:{known}")


def _dims(value: Any) -> int:
    """Number of dimensions, `[n, 1, L]` counted as two; -1 for what is no array."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return 2 if value.ndim == 3 else value.ndim
    if isinstance(value, (list, tuple)):
        inner = _dims(value[0]) if value else 0
        return min(1 + inner, 2) if inner >= 0 else -1
    return 0 if isinstance(value, (bool, int, float)) else -1


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
