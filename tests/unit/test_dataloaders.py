"""Padded batches of other trainers: what goes into one comes out again as rows, or the batch is refused by name."""

from collections import UserDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from published_batches import (
    Known,
    coati_dpo,
    coati_kto,
    coati_sft,
    following,
    known,
    mirrored,
    nemo_dpo,
    nemo_kto,
    openrlhf_dpo,
    openrlhf_kto,
    openrlhf_sft,
    openrlhf_sft_with_lengths,
)
from tropism.data.dataloaders.published_layouts import LAYOUTS
from tropism.data.dataloaders.rows import BatchRows, remarks_on, rows_of_batch
from tropism.data.rows import EncodedRow
from tropism.errors import DataError

PAD, EOS = 0, 9


@dataclass(frozen=True)
class Case:
    """How a layout is made; whether it can mark single tokens, and whether its mask is made from the pad's value."""

    layout: str
    view: Any
    collate: Callable[..., Any]
    masks: bool
    by_value: bool = False
    partners: Callable[[int], list[int]] | None = None


CASES = [
    Case("OpenRLHF KTO", "unpaired", openrlhf_kto, False, partners=following),
    Case("OpenRLHF DPO", "paired", openrlhf_dpo, False),
    Case("OpenRLHF SFT", "single", openrlhf_sft, True),
    Case("OpenRLHF SFT with lengths", "single", openrlhf_sft_with_lengths, False),
    Case("coati KTO", "unpaired", coati_kto, True, by_value=True, partners=mirrored),
    Case("coati DPO", "paired", coati_dpo, True),
    Case("coati SFT", "single", coati_sft, True, by_value=True),
    Case("NeMo-Aligner KTO", "unpaired", nemo_kto, True, partners=following),
    Case("NeMo-Aligner DPO", "paired", nemo_dpo, True),
]
EACH = pytest.mark.parametrize("case", CASES, ids=lambda case: case.layout)


@st.composite
def known_rows(draw: st.DrawFn, case: Case) -> tuple[list[Known], int]:
    """Rows, and a pad token: any, but for masks that are made from it one that no row has."""
    tokens = st.lists(st.integers(1, 4), min_size=1, max_size=6)
    rows = []
    for _ in range(draw(st.integers(1, 5))):
        completions = tuple(draw(tokens) for _ in range(2 if case.view == "paired" else 1))
        masks = tuple([draw(st.integers(0, 1)) if case.masks and 0 < place < len(completion) - 1 else 1
                       for place in range(len(completion))] for completion in completions)
        rows.append(Known(draw(tokens), completions, masks, draw(st.booleans())))
    return rows, PAD if case.by_value else draw(st.integers(0, 4))


def check(found: BatchRows, rows: Sequence[Known], case: Case, partners: bool = False) -> None:
    assert found.layout == case.layout
    assert found.has_partners is (case.partners is not None)
    assert [row.place for row in found.rows] == [f"batch 3 row {number + 1}" for number in range(len(rows))]
    others = case.partners(len(rows)) if case.partners else []
    for number, (row, wanted) in enumerate(zip(found.rows, rows, strict=True)):
        assert isinstance(row, EncodedRow)
        assert row.prompt_ids.tolist() == wanted.prompt
        assert row.prompt_ids.dtype == np.int32
        assert row.split_key == row.prompt_ids.tobytes()
        sides = 2 if case.view == "paired" else 1
        assert [completion.ids.tolist() for completion in row.completions] == list(wanted.completions[:sides])
        assert [completion.loss_mask.astype(int).tolist() for completion in row.completions] == list(
            wanted.masks[:sides])
        assert row.desirable is (wanted.label if case.view == "unpaired" else None)
        if partners and case.partners:
            assert row.partner is not None
            assert row.partner.ids.tolist() == rows[others[number]].completions[0]
            assert row.partner.loss_mask.astype(int).tolist() == rows[others[number]].masks[0]
        else:
            assert row.partner is None


def test_every_layout_is_tested() -> None:
    assert [case.layout for case in CASES if case.layout.startswith("OpenRLHF")] == list(LAYOUTS)[:4]
    assert {case.layout for case in CASES} == LAYOUTS.keys()


# --- what comes out -------------------------------------------------------------------------------------------------


@EACH
@given(st.data())
def test_rows_survive_the_round_trip(case: Case, data: st.DataObject) -> None:
    rows, fill = data.draw(known_rows(case))
    side, keep = data.draw(st.sampled_from(["left", "right"])), data.draw(st.booleans())
    check(rows_of_batch(case.collate(rows, fill, side), case.view, number=3, keep_partners=keep), rows, case, keep)


ROWS = [known([1, 2], [3, EOS], [4, EOS], label=False), known([5], [6, 7, EOS], [8], label=True)]


def _as_lists(part: Any) -> Any:
    return part.tolist() if isinstance(part, torch.Tensor) else part


def _as_arrays(part: Any) -> Any:
    return part.numpy() if isinstance(part, torch.Tensor) else part


def _as_lists_of_tensors(part: Any) -> Any:
    return list(part) if isinstance(part, torch.Tensor) else part


def _as_small_integers(part: Any) -> Any:
    small = isinstance(part, torch.Tensor) and part.dtype == torch.int64 and int(part.min()) >= 0
    return part.to(torch.uint8) if small else part


def _as_halves(part: Any) -> Any:
    """Masks in bfloat16, which numpy does not know."""
    return part.bfloat16() if isinstance(part, torch.Tensor) and part.max() <= 1 else part


@EACH
@pytest.mark.parametrize("change", [_as_lists, _as_arrays, _as_lists_of_tensors, _as_small_integers, _as_halves])
def test_any_kind_of_array_will_do(case: Case, change: Callable[[Any], Any]) -> None:
    batch = case.collate(ROWS, PAD, "right")
    changed = ({name: change(part) for name, part in batch.items() if name != "attention_mask" or part.ndim == 2}
               if isinstance(batch, dict) else tuple(map(change, batch)))
    check(rows_of_batch(changed, case.view, number=3), ROWS, case)


@EACH
def test_other_containers_will_do(case: Case) -> None:
    """Pinned memory makes lists of tuples; tokenizers give a dict of their own."""
    batch = case.collate(ROWS, PAD, "right")
    batch = UserDict(batch) if isinstance(batch, dict) else list(batch)
    check(rows_of_batch(batch, case.view, number=3), ROWS, case)


@pytest.mark.parametrize("case", [case for case in CASES if case.view == "single" or case.by_value],
                         ids=lambda case: case.layout)
@pytest.mark.parametrize("side", ["left", "right"])
def test_pad_may_be_eos(case: Case, side: str) -> None:
    """Every eos is text: in a prompt of several turns, in the completion, at its end, whatever a mask by value says."""
    rows = [known([1, EOS, 2], [3, EOS, 4, EOS]), known([1], [3]), known([1, EOS, 2, 4], [5, EOS])]
    check(rows_of_batch(case.collate(rows, EOS, side), case.view, number=3), rows, case)


def test_a_first_token_of_the_pads_value_is_padding_to_coati() -> None:
    """With bos = eos = pad its mask hides the bos, and its model never saw it; behind it, every eos is text."""
    (row,) = rows_of_batch(coati_kto([known([EOS, 1, EOS, 2], [3, EOS])], EOS, "right"), "unpaired", number=0).rows
    assert row.prompt_ids.tolist() == [1, EOS, 2]
    assert row.completions[0].ids.tolist() == [3, EOS]


def test_trailing_tokens_that_do_not_count_are_dropped() -> None:
    row = Known([1, 2], ([3, 4, 5, 6],), ([1, 0, 1, 0],))
    for collate in (openrlhf_sft, coati_sft):
        (found,) = rows_of_batch(collate([row, known([1], [2])], PAD, "right"), "single", number=0).rows[:1]
        assert found.completions[0].ids.tolist() == [3, 4, 5]
        assert found.completions[0].loss_mask.tolist() == [True, False, True]


def test_plain_text_batches_lose_only_their_first_token() -> None:
    """OpenRLHF's pretraining mode counts every place, the one behind the text too."""
    ids, mask = torch.tensor([[5, 6, 7, 0]]), torch.tensor([[1, 1, 1, 0]])
    (row,) = rows_of_batch((ids, mask, mask.float()), "single", number=0).rows
    assert row.prompt_ids.tolist() == [5]
    assert row.completions[0].ids.tolist() == [6, 7]


def test_batches_without_mismatched_rows() -> None:
    ids, mask, labels, lengths = openrlhf_kto(ROWS, PAD, "right")
    found = [rows_of_batch((ids[:2], mask[:2], labels[:2], lengths[:2]), "unpaired", number=1, keep_partners=True)]
    for batch in (coati_kto(ROWS, PAD, "right"), nemo_kto(ROWS, PAD, "right")):
        bare = {name: None if "kl_" in name else part for name, part in batch.items()}
        found.append(rows_of_batch(bare, "unpaired", number=1, keep_partners=True))
    for batch in found:
        assert not batch.has_partners
        assert [row.partner for row in batch.rows] == [None, None]


def test_coati_spells_rejected_in_two_ways() -> None:
    batch = {name.replace("reject_", "rejected_"): part for name, part in coati_dpo(ROWS, PAD, "left").items()}
    check(rows_of_batch(batch, "paired", number=3), ROWS, CASES[5])


@pytest.mark.parametrize("labels", [[0.0, 1.0], [False, True], [[0], [1]], np.array([0, 1], dtype=np.uint8)])
def test_labels_of_any_kind(labels: Any) -> None:
    batch = {**nemo_kto(ROWS, PAD, "right"), "preference": labels}
    assert [row.desirable for row in rows_of_batch(batch, "unpaired", number=0).rows] == [False, True]


def test_an_empty_batch_has_no_rows() -> None:
    batch = {name: part[:0] for name, part in coati_sft(ROWS, PAD, "right").items()}
    assert rows_of_batch(batch, "single", number=0).rows == ()


# --- what is refused ------------------------------------------------------------------------------------------------


def refused(batch: Any, view: Any, *messages: str, keep_partners: bool = False) -> None:
    with pytest.raises(DataError) as error:
        rows_of_batch(batch, view, number=3, keep_partners=keep_partners)
    assert str(error.value).startswith("batch 3")
    for message in messages:
        assert message in str(error.value)


@pytest.mark.parametrize(("batch", "found"), [
    ({"prompt_input_ids": torch.zeros(2, 5, dtype=torch.int64)}, "a dict with prompt_input_ids ([2, 5] torch.int64)"),
    ({}, "a dict with nothing"),
    ((torch.zeros(4, 7), [1, 2], "x"), "a tuple of 3 parts ([4, 7] torch.float32; list of 2; str)"),
    (torch.zeros(4, 7), "Tensor"),
    ({"input_ids": None, "attention_mask": None, "labels": None}, "labels (NoneType)"),
    (([], []), "list of 0"),
])
def test_unknown_batches_are_described(batch: Any, found: str) -> None:
    refused(batch, "single", "unknown batch layout", found, *LAYOUTS)


def test_first_openrlhf_kto_batches_have_no_border() -> None:
    refused(openrlhf_kto(ROWS, PAD, "left")[:3], "unpaired", "does not say where a prompt ends")


@EACH
def test_batches_of_another_method_are_refused(case: Case) -> None:
    other = "paired" if case.view != "paired" else "single"
    refused(case.collate(ROWS, PAD, "right"), other, case.layout, "the method takes")


@EACH
def test_rows_without_supervised_token(case: Case) -> None:
    batch = case.collate(ROWS, PAD, "right")
    if case.masks:
        names = ("loss_mask", "labels", "sample_labels", "chosen_loss_mask", "chosen_labels")
        part = next(name for name in names if name in batch) if isinstance(batch, dict) else 2
        batch[part][1] = -100 if "labels" in str(part) else 0
    else:
        lengths = batch[0] if isinstance(batch[0], list) else batch[-1]
        lengths[1] = 20
    refused(batch, case.view, "batch 3 row 2", "no supervised token")


@pytest.mark.parametrize("label", [2, -1, 0.5, float("nan"), None, "yes"])
@pytest.mark.parametrize("key", ["label", "preference"])
def test_labels_that_are_none(label: Any, key: str) -> None:
    batch = {**(coati_kto if key == "label" else nemo_kto)(ROWS, PAD, "right"), key: [1, label]}
    refused(batch, "unpaired", key, "" if label in (None, "yes") else "batch 3 row 2")


@pytest.mark.parametrize(("labels", "message"), [
    ([0, -1, -1, 1], "2 of 4 labels are -1"), ([0, 1, 1, -1], "1 of 4 labels are -1"),
    ([-1] * 4, "row 1: labels -1"), ([0, 3, -1, -1], "row 2: labels 3"), ([0, 1], "shape [2]"),
])
def test_labels_of_openrlhf_say_which_rows_are_mismatched(labels: list[int], message: str) -> None:
    ids, mask, _, lengths = openrlhf_kto(ROWS, PAD, "right")
    refused((ids, mask, torch.tensor(labels), lengths), "unpaired", message)


def test_margins_are_no_prompt_lengths() -> None:
    """The reward model's batches have the shape of DPO's."""
    refused((*openrlhf_dpo(ROWS, PAD, "left")[:4], [0.5, 0.0]), "paired", "row 1: prompt_ids_lens 0.5")
    refused((*openrlhf_dpo(ROWS, PAD, "left")[:4], [-1, 0]), "paired", "row 1: prompt_ids_lens -1")


def test_packed_batches_are_refused() -> None:
    """OpenRLHF numbers the packed sequences in the mask."""
    packed = torch.arange(6)[None], torch.tensor([[1, 1, 1, 2, 2, 0]])
    refused(([1], *packed, {"input_length": [3]}), "single", "attention_masks", "turn packing off")
    refused((*packed, [3, 2], [1]), "unpaired", "attention_mask", "turn packing off")


def test_shifted_labels_are_refused() -> None:
    batch = coati_sft(ROWS, PAD, "right")
    refused({**batch, "labels": batch["labels"].roll(-1, 1)}, "single", "batch 3 row 1", "not shifted")


def test_labels_and_loss_mask_must_agree() -> None:
    batch = coati_sft(ROWS, PAD, "right")
    loss_mask = (batch["labels"] != -100).int()
    check(rows_of_batch({**batch, "loss_mask": loss_mask}, "single", number=3), ROWS, CASES[6])
    loss_mask[0, 3] = 0
    refused({**batch, "loss_mask": loss_mask}, "single", "mark different tokens")


def test_padding_inside_a_row_is_refused() -> None:
    """A prompt padded by itself and then a completion: its padding cannot be told from text that a mask leaves out."""
    ids = torch.tensor([[1, 2, 0, 0, 3, 4], [1, 2, 5, 6, 3, 4]])
    mask, counted = ids != 0, torch.tensor([[0, 0, 0, 0, 1, 1]] * 2)
    batch = {"input_ids": ids, "attention_mask": mask, "loss_mask": counted}
    refused(batch, "single", "batch 3 row 1", "excludes 2 tokens (first at column 2)")
    refused(([4, 4], ids, mask, {}), "single", "batch 3 row 1", "Pad at one end only")


def test_supervised_padding_is_refused() -> None:
    batch = coati_dpo(ROWS, PAD, "right")
    batch["chosen_loss_mask"][0] = True
    batch["chosen_loss_mask"][0, :2] = False
    refused(batch, "paired", "batch 3 row 1, chosen", "excludes")


def test_nemo_batches_padded_on_the_left_are_refused() -> None:
    batch = nemo_kto(ROWS, PAD, "right")
    for name in ("samples", "sample_labels"):
        batch[name] = batch[name].roll(1, 1)
    refused(batch, "unpaired", "batch 3 row 1", "padded on the left")


@pytest.mark.parametrize(("changes", "message"), [
    ({"loss_mask": torch.zeros(2, 5)}, "loss_mask has shape [2, 5], but its ids have [2, 24]"),
    ({"attention_mask": torch.ones(2, 1, 24, 24)}, "attention_mask has shape [2, 1, 24, 24], but must be [rows,"),
    ({"input_ids": torch.zeros(2, 24)}, "input_ids must hold integers, not float32"),
    ({"input_ids": [[1, 2], [1]]}, "the rows of input_ids have different lengths"),
    ({"input_ids": torch.zeros(2, 0, dtype=torch.int64)}, "input_ids has shape [2, 0]"),
    ({"label": torch.zeros(3)}, "label has shape [3], but must have one value for each of 2 rows"),
    ({f"kl_{name}": torch.ones(1, 4, dtype=torch.int64) for name in ("input_ids", "attention_mask", "loss_mask")},
     "different numbers of rows: rows 2, mismatched row 1"),
    ({"input_ids": torch.full((2, 24), -7)}, "-7 is not a valid token id"),
    ({"input_ids": torch.full((2, 24), 2**40)}, "1099511627776 is not a valid token id"),
])
def test_parts_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    refused({**coati_kto(ROWS, PAD, "right"), **changes}, "unpaired", message)


# --- mismatched rows that are matched ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("collate", "rows", "first"), [
    (openrlhf_kto, ROWS[:1], 1), (nemo_kto, ROWS[:1], 1), (coati_kto, ROWS[:1], 1),
    (coati_kto, [*ROWS, known([1], [2])], 2), (openrlhf_kto, [ROWS[0], ROWS[0]], 1)])
def test_rows_that_are_their_own_mismatched_row_are_noticed(collate: Any, rows: list[Known], first: int) -> None:
    """A micro-batch of one row in OpenRLHF and NeMo, the middle of an odd one in coati, a row that occurs twice."""
    batch = collate(rows, PAD, "right")
    said, = remarks_on(rows_of_batch(batch, "unpaired", number=3, keep_partners=True).rows)
    assert f"row's own completion (first: batch 3 row {first})" in said
    assert not remarks_on(rows_of_batch(batch, "unpaired", number=3).rows)
    assert not remarks_on(rows_of_batch(collate(ROWS, PAD, "right"), "unpaired", number=3, keep_partners=True).rows)
