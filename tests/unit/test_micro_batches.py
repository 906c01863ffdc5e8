"""Batches of a dataloader as micro-batches: steps, epochs, processes, shares of the loss, and reference points."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch

from published_batches import Known, known, mismatched, openrlhf_dpo, openrlhf_kto, openrlhf_sft, pad
from tropism.data.dataloaders.steps import ReadSteps, announce_epoch, read_batches, rule_of
from tropism.data.schedule import MICRO_BATCH, PUBLISHED, STEP, GivenSchedule, MicroBatchRule, Parts
from tropism.data.tree import Unsupervised
from tropism.errors import UsageError
from tropism.methods.build import build_method
from tropism.train.reference_point import pool, reference_moments
from tropism.train.step_packs import shares_of_parts

OPENRLHF, COATI, NEMO = (PUBLISHED[name] for name in ("OpenRLHF", "coati", "NeMo-Aligner"))


def some(count: int, first: int = 0) -> list[Known]:
    return [known([3, 10 + number], [20 + number, 4], label=number % 2 == 0) for number in range(first, first + count)]


def batches(*sizes: int) -> list[Any]:
    firsts = itertools.accumulate((0, *sizes))
    return [openrlhf_kto(some(size, first), 2, "right") for size, first in zip(sizes, firsts, strict=False)]


class Loader:
    """Batches that know which epoch they were told."""

    def __init__(self, found: Sequence[Any]) -> None:
        self.found, self.epochs, self.sampler = found, [], self

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Any:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)


def read(loader: Any, **how: Any) -> tuple[list[Any], GivenSchedule, list[str]]:
    said: list[str] = []
    rows, steps = read_batches(loader, ReadSteps("unpaired", **how), said.append)
    return rows, steps, said


@pytest.mark.parametrize(("rule", "sizes"), [
    (replace(OPENRLHF, leftover="close"), [[2, 2], [2, 2], [1], [2, 2], [2, 2], [1]]),
    (OPENRLHF, [[2, 2], [2, 2], [1, 2], [2, 2], [2, 1]]),
])
def test_leftover_micro_batches(rule: MicroBatchRule, sizes: list[list[int]]) -> None:
    """They close the epoch, or are carried into the next step; of the last epoch they are then left out."""
    rows, steps, _ = read(batches(2, 2, 2, 2, 1), epochs=2, accumulation_steps=2, rule=rule)
    assert [[part for part, in step] for step in steps.sizes] == sizes
    assert [len(own) for own in steps.steps] == [sum(step) for step in sizes]
    assert [row for own in steps.steps for row in own] == list(range(len(rows)))
    assert len(rows) == sum(map(sum, sizes))
    assert steps.epochs_after(2) == pytest.approx(8 / 9)


def test_carried_micro_batches_need_no_full_epoch() -> None:
    """Two batches per epoch and five per step: the steps span epochs."""
    _, steps, _ = read(batches(2, 2), epochs=5, accumulation_steps=5, rule=OPENRLHF)
    assert steps.total_steps == 2
    _, steps, _ = read(batches(2, 2), max_steps=3, accumulation_steps=5, rule=OPENRLHF)
    assert steps.total_steps == 3
    with pytest.raises(UsageError, match=r"no optimizer step: 2 batches are fewer than accumulation_steps 5\. Lower"):
        read(batches(2, 2), epochs=1, accumulation_steps=5, rule=OPENRLHF)


def test_a_batch_is_split_into_micro_batches() -> None:
    """NeMo-Aligner's batch is a step; the last micro-batch may be smaller."""
    _, steps, _ = read(batches(5, 4), rule=replace(NEMO, size=2))
    assert steps.sizes == (((2,), (2,), (1,)), ((2,), (2,)))
    _, steps, _ = read(batches(5, 4, 5), accumulation_steps=2, rule=replace(NEMO, size=4))
    assert steps.sizes == (((4,), (1,), (4,)), ((4,), (1,)))


def test_steps_that_were_done_before_are_skipped() -> None:
    rows, steps, _ = read(batches(2, 3, 4), epochs=2, rule=replace(OPENRLHF, done=4))
    assert steps.sizes == (((3,),), ((4,),))
    assert [row.place for row in rows][:1] == ["batch 5 row 1"]
    with pytest.raises(UsageError, match="nothing to train: 6 of 6 optimizer steps were done before"):
        read(batches(2, 3, 4), epochs=2, rule=replace(OPENRLHF, done=6))


@pytest.mark.parametrize("rule", [STEP, MICRO_BATCH, OPENRLHF, replace(OPENRLHF, first_epoch=3)])
def test_every_pass_is_announced(rule: MicroBatchRule) -> None:
    loader = Loader(batches(2, 2))
    read(loader, epochs=3, rule=rule)
    assert list(dict.fromkeys(loader.epochs)) == [rule.first_epoch + number for number in range(3)]


@pytest.mark.parametrize("place", ["sampler", "batch_sampler", "dataset", "inner"])
def test_an_epoch_is_announced_wherever_it_is_shuffled(place: str) -> None:
    shuffled = Loader([])
    nothing = type("Nothing", (), {})()
    outer = type("Loader", (), {"sampler": None, "batch_sampler": nothing, "dataset": nothing})()
    setattr(nothing if place == "inner" else outer, "sampler" if place == "inner" else place, shuffled)
    announce_epoch(outer, 7)
    assert shuffled.epochs == [7]


def in_ranks(ranks: Sequence[Any], **how: Any) -> list[tuple[list[Any], GivenSchedule, list[str]]]:
    """What each of some processes reads, given what the others hand in."""
    handed: list[Any] = []
    for loader in ranks:
        read(loader, gather=lambda own: handed.append(own) or [own], **how)
    return [read(loader, gather=lambda own: handed, **how) for loader in ranks]


def test_processes_contribute_parts_of_micro_batches() -> None:
    """Micro-batch j of each process is a part of micro-batch j, whatever it has of rows."""
    ranks = [batches(2, 3), [openrlhf_kto(some(size, first), 2, "right") for size, first in ((1, 50), (2, 60))]]
    for rows, steps, _ in in_ranks(ranks, accumulation_steps=2, rule=OPENRLHF):
        assert steps.sizes == (((2, 1), (3, 2)),)
        assert [int(row.prompt_ids[1]) - 10 for row in rows] == [0, 1, 50, 2, 3, 4, 60, 61]
        assert [row.place for row in rows][1:4] == ["process 0 batch 1 row 2", "process 1 batch 1 row 1",
                                                    "process 0 batch 2 row 1"]
        assert len({row.id for row in rows}) == len(rows)
        assert steps.epochs_after(1) == 1
    (_, pooled, _), _ = in_ranks(ranks, accumulation_steps=2, rule=replace(MICRO_BATCH, published=True))
    assert pooled.sizes == (((3,), (5,)),)  # our own scope: the processes only share the work
    (rows, same, _), _ = in_ranks([batches(2, 3)] * 2, accumulation_steps=2, rule=OPENRLHF)
    assert same.sizes == (((2,), (3,)),)  # each has all rows: one part
    assert rows[0].place == "batch 1 row 1"


def test_processes_that_do_not_fit_together() -> None:
    with pytest.raises(UsageError, match="different numbers of micro-batches: process 0 2, process 1 1"):
        in_ranks([batches(2, 2), [openrlhf_kto(some(2, 50), 2, "right")]], rule=OPENRLHF)
    with pytest.raises(UsageError, match="some processes read the same batches"):
        in_ranks([batches(2), batches(2), [openrlhf_kto(some(2, 50), 2, "right")]], rule=OPENRLHF)


def test_a_row_that_is_its_own_mismatched_row_is_noticed_once() -> None:
    *_, said = read(batches(1, 1, 1), epochs=2, rule=OPENRLHF)
    assert len(said) == 1
    assert said[0].startswith("6 rows whose mismatched row is the row's own completion")
    assert read(batches(1, 2), own_partners=True)[2][0].startswith("1 row whose mismatched row is the row's own")
    assert read(batches(2, 2), rule=OPENRLHF)[2] == []


def test_rows_without_supervised_token_are_kept() -> None:
    """NeMo-Aligner cuts a row that is too long and masks all of it. Its mismatched row still counts."""
    rows = some(3)
    ids = pad([row.text() for row in [*rows, *mismatched(rows, [1, 2, 0])]], 2)
    labels = pad([row.labels() for row in [*rows, *mismatched(rows, [1, 2, 0])]], -100)
    labels[1] = labels[5] = -100  # row 2, and the mismatched row of row 3
    ids[1] = 7  # its text is another one's
    batch = {"samples": ids[:3], "kl_samples": ids[3:], "sample_labels": labels[:3], "kl_sample_labels": labels[3:],
             "preference": torch.tensor([1, 0, 1]), "sample_length": torch.tensor([4, 4, 4])}
    found, _, said = read([batch], rule=NEMO)
    assert [isinstance(row.completions[0], Unsupervised) for row in found] == [False, True, False]
    assert [isinstance(row.partner, Unsupervised) for row in found] == [False, False, True]
    assert [row.prompt_ids.tolist() for row in found] == [row.prompt for row in rows]
    assert found[1].partner.ids.tolist() == rows[2].completions[0]
    assert "completions without a supervised token: 1. They count" in said[0]
    with pytest.raises(Exception, match="batch 1 row 2: no supervised token"):
        read([batch], own_partners=True)


def test_the_rule_is_that_of_the_layout() -> None:
    assert read(batches(2, 2), rule="published")[1].rule == OPENRLHF
    assert rule_of("step", "paired") == STEP
    assert rule_of("micro_batch", "unpaired") == MICRO_BATCH
    assert rule_of(COATI, "paired") is COATI
    for name, view, message in (("batch", "unpaired", "must be step, micro_batch or published .got 'batch'"),
                                ("micro_batch", "paired", "only KTO has a reference point")):
        with pytest.raises(UsageError, match=message):
            rule_of(name, view)
    bare = [part[:2] for part in batches(2)[0]]
    with pytest.raises(UsageError, match="reference_point='published' needs mismatched rows, but batch 1 has none"):
        read([tuple(bare)], rule="published")


def test_reference_points_of_micro_batches() -> None:
    """Averaged over processes and then clamped (OpenRLHF, coati), or clamped and then averaged (NeMo-Aligner)."""
    ratios = torch.tensor([1.0, 3.0, -4.0, 5.0, -1.0, -2.0], dtype=torch.float64)
    sizes = ((2, 1), (1, 2))
    counts = torch.tensor([[1, 1, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 1, 1]]).double()
    moments = reference_moments(ratios, counts)
    for rule, values in ((OPENRLHF, [0.0, 1.75]), (NEMO, [1.0, 2.5]), (STEP, [2 / 6])):
        point = pool(moments, Parts(sizes, rule))
        assert point.values.tolist() == pytest.approx(values)
        assert float(point.value) == pytest.approx(sum(values) / len(values))
        assert float(point.raw) == pytest.approx(2 / 6)
    whole = pool(reference_moments(ratios, torch.ones(6).double()))
    assert float(whole.stderr) == pytest.approx(float(pool(moments, Parts(sizes, NEMO)).stderr))


def rows_as(view: Any, collate: Any, completions: int) -> list[Any]:
    rows = [known([3, 10 + n], *([5 + n + side] * (1 + (n + side) % 3) for side in range(completions)))
            for n in range(6)]
    how = ReadSteps(view, own_partners=view == "unpaired")
    return read_batches([collate(rows, 2, "right")], how, lambda text: None)[0]


@pytest.mark.parametrize(("rule", "micro"), [(OPENRLHF, Fraction(1, 2)), (COATI, Fraction(1))])
def test_each_micro_batch_divides_by_its_own_count(rule: MicroBatchRule, micro: Fraction) -> None:
    """Rows by rows, tokens of one completion by tokens, the likelihood of a pair by its own tokens first."""
    parts, places = Parts(((2, 1), (1, 2)), rule), [[0, 1], [2], [3], [4, 5]]
    kto = build_method("unpaired", {"loss": "kto"}, [])
    rows = rows_as("unpaired", openrlhf_kto, 1)
    found = shares_of_parts(rows, range(6), parts, kto)
    assert [number for number, _ in found.values()] == [0, 0, 0, 1, 1, 1]
    assert [share for _, (share,) in found.values()] == pytest.approx(
        [float(micro / 2 / len(own)) for own in places for _ in own])
    pairs = rows_as("paired", openrlhf_dpo, 2)
    both = build_method("paired", {"loss": "sigmoid,sft", "loss_weights": "1,0.3"}, [])
    lengths = [row.completions[0].length for row in pairs]
    assert [share[1] for _, share in shares_of_parts(pairs, range(6), parts, both).values()] == pytest.approx(
        [float(micro / 2 / len(own) / lengths[row]) for own in places for row in own])
    texts = rows_as("single", openrlhf_sft, 1)
    lengths = [row.completions[0].length for row in texts]
    found = shares_of_parts(texts, range(6), parts, build_method("single", {"loss": "sft"}, []))
    assert [share for _, (share,) in found.values()] == pytest.approx(
        [float(micro / 2 / sum(lengths[row] for row in own)) for own in places for _ in own])


def test_a_step_without_micro_batches_has_no_shares() -> None:
    assert shares_of_parts([], [], Parts(((6,),)), build_method("unpaired", {"loss": "kto"}, [])) == {}
    scope = shares_of_parts(rows_as("unpaired", openrlhf_kto, 1), range(6), Parts(((2,), (4,)), MICRO_BATCH),
                            build_method("unpaired", {"loss": "kto"}, []))
    assert scope == {0: (0, None), 1: (0, None), **dict.fromkeys(range(2, 6), (1, None))}
