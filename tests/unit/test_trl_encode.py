"""Token ids, order and blocks are those of TRL."""

import random
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from trl_data import rows_for
from tropism.compat.trl.encode import Rules, encode
from tropism.compat.trl.order import Batches, packed, schedule_of, with_partners
from tropism.data.rows import EncodedRow
from tropism.data.schedule import MicroBatchRule
from tropism.errors import DataError, UsageError
from tropism.model.load import load_tokenizer
from tropism.model.source import ModelSource

KINDS = {"dpo": ("dpo", "implicit", "dpo_chat", "implicit_chat"), "kto": ("kto", "kto_chat", "dpo", "implicit_chat"),
         "sft": ("sft", "text", "sft_chat", "chat", "sharegpt"), "gkd": ("gkd",)}


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Any:
    return load_tokenizer(ModelSource.of(str(tiny_model_dir)))


def whole(row: EncodedRow, side: int = 0) -> list[int]:
    return [*row.prompt_ids.tolist(), *row.completions[side].ids.tolist()]


@pytest.mark.parametrize("kind", ["dpo", "dpo_chat"])
def test_sides_are_encoded_with_their_prompt_and_end_alike(tokenizer: Any, kind: str) -> None:
    records = rows_for(kind, 6)
    rows, dropped = encode(records, tokenizer, Rules("dpo", None), "train_dataset")
    assert dropped == 0
    for record, row in zip(records, rows, strict=True):
        for index, side in enumerate(("chosen", "rejected")):
            expected = (tokenizer(record["prompt"] + record[side] + tokenizer.eos_token)["input_ids"]
                        if kind == "dpo" else
                        tokenizer.apply_chat_template(record["prompt"] + record[side], return_dict=False))
            assert whole(row, index) == expected


@pytest.mark.parametrize("method", ["dpo", "kto"])
@pytest.mark.parametrize("kind", ["", "_chat"])
def test_the_prompt_that_both_sides_begin_with_is_found(tokenizer: Any, method: str, kind: str) -> None:
    given = encode(rows_for("dpo" + kind, 5), tokenizer, Rules(method, None), "train_dataset")[0]
    found = encode(rows_for("implicit" + kind, 5), tokenizer, Rules(method, None), "train_dataset")[0]
    assert [whole(row) for row in found] == [whole(row) for row in given]
    if kind:
        assert [row.prompt_ids.tolist() for row in found] == [row.prompt_ids.tolist() for row in given]


def test_one_side_that_begins_the_other_keeps_a_completion(tokenizer: Any) -> None:
    rows, _ = encode([{"chosen": "oak elm", "rejected": "oak elm ash"}], tokenizer, Rules("dpo", None), "train_dataset")
    assert all(side.length > 0 for side in rows[0].completions)


def test_pairs_become_labeled_completions_chosen_first(tokenizer: Any) -> None:
    rows, _ = encode(rows_for("dpo", 3), tokenizer, Rules("kto", None), "train_dataset")
    assert [row.desirable for row in rows] == [True] * 3 + [False] * 3
    assert [row.place for row in rows[:2]] == ["train_dataset row 1", "train_dataset row 2"]


def test_rows_are_cut_at_the_end_and_dropped_without_room(tokenizer: Any) -> None:
    full, _ = encode(rows_for("dpo", 20), tokenizer, Rules("dpo", None), "train_dataset")
    limit = int(np.median([len(row.prompt_ids) for row in full]))
    rows, dropped = encode(rows_for("dpo", 20), tokenizer, Rules("dpo", limit), "train_dataset")
    assert dropped == sum(len(row.prompt_ids) >= limit for row in full) > 0
    assert len(rows) == 20 - dropped
    kept = [row for row in full if len(row.prompt_ids) < limit]
    assert [whole(row) for row in rows] == [whole(row)[:limit] for row in kept]


def supervised(row: EncodedRow) -> list[int]:
    """Ids of the supervised tokens."""
    return row.completions[0].ids[row.completions[0].loss_mask].tolist()


def test_sft_supervises_completions_or_everything(tokenizer: Any) -> None:
    record = rows_for("sft", 1)
    ids = tokenizer(record[0]["prompt"] + record[0]["completion"] + tokenizer.eos_token)["input_ids"]
    end = tokenizer(record[0]["completion"] + tokenizer.eos_token)["input_ids"]
    (row,), _ = encode(record, tokenizer, Rules("sft", None), "train_dataset")
    assert supervised(row) == [token for token in end if token != tokenizer.bos_token_id]
    (row,), _ = encode(record, tokenizer, Rules("sft", None, completion_only=False), "train_dataset")
    assert supervised(row) == ids[1:]
    text = {"text": record[0]["prompt"] + record[0]["completion"]}
    (row,), _ = encode([text], tokenizer, Rules("sft", None), "train_dataset")
    assert supervised(row) == ids[1:]
    (row,), _ = encode([{"a": "x"}], tokenizer, Rules("sft", None, formatting=lambda one: text["text"]), "data")
    assert supervised(row) == ids[1:]


def test_sft_takes_token_ids_with_labels(tokenizer: Any) -> None:
    rows, dropped = encode([{"input_ids": [5, 6, 7, 8], "labels": [-100, 6, -100, 8]},
                            {"input_ids": [5, 6], "labels": [5, -100]}], tokenizer, Rules("sft", 8), "train_dataset")
    assert (supervised(rows[0]), rows[0].prompt_ids.tolist(), dropped) == ([6, 8], [5], 1)


def test_conversations_in_both_spellings_are_the_same(tokenizer: Any) -> None:
    one, other = (encode(rows_for(kind, 4), tokenizer, Rules("sft", None), "data")[0] for kind in ("chat", "sharegpt"))
    assert [whole(row) for row in one] == [whole(row) for row in other]


def test_gkd_supervises_the_last_message_and_loses_the_beginning(tokenizer: Any) -> None:
    record = rows_for("gkd", 1)
    ids = tokenizer(tokenizer.apply_chat_template(record[0]["messages"], tokenize=False),
                    add_special_tokens=False)["input_ids"]
    (row,), _ = encode(record, tokenizer, Rules("gkd", None), "train_dataset")
    assert whole(row) == ids
    assert tokenizer.decode(supervised(row)).startswith(record[0]["messages"][1]["content"])
    (row,), _ = encode(record, tokenizer, Rules("gkd", len(ids) - 3), "train_dataset")
    assert whole(row) == ids[3:]


@pytest.mark.parametrize(("data", "method", "text"), [
    ({"train": [], "test": []}, "dpo", r"several datasets \(train, test\).*dataset\['train'\]"),
    ("file.jsonl", "dpo", r"must be a dataset or a list of rows, not str"),
    ([], "dpo", r"train_dataset has no rows"),
    (["text"], "dpo", r"row 1: must be a dict, not str"),
    ([{"prompt": "a", "chosen": "b"}], "dpo", r"row 1: no column 'rejected'. DPO needs chosen and rejected"),
    ([{"prompt": "a", "completion": "b"}], "kto", r"row 1: no column 'label'"),
    ([{"prompt": "a", "completion": "b", "label": "good"}], "kto", r"row 1: label 'good' is not True or False"),
    ([{"words": "a"}], "sft", r"row 1: no column 'text'. SFT needs text, messages"),
])
def test_bad_data_is_named(tokenizer: Any, data: Any, method: str, text: str) -> None:
    with pytest.raises((UsageError, DataError), match=text):
        encode(data, tokenizer, Rules(method, None), "train_dataset")


def test_a_template_without_marks_cannot_say_what_an_assistant_wrote(tokenizer: Any) -> None:
    with pytest.raises(DataError, match="generation"):
        encode(rows_for("chat", 1), tokenizer, Rules("sft", None, assistant_only=True), "train_dataset")


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
def test_the_order_is_that_of_the_trainer_of_transformers(shuffle: bool, drop_last: bool) -> None:
    """Its sampler, as accelerate replaces and seeds it, cut into micro-batches and steps."""
    batches = Batches(3, 1, 2, shuffle, 42, drop_last)
    rows = list(range(23))
    sampler = SeedableRandomSampler(rows, data_seed=42) if shuffle else SequentialSampler(rows)
    expected: list[list[int]] = []
    for epoch in range(3):
        if shuffle:
            sampler.set_epoch(epoch)
        micro = list(BatchSampler(sampler, 3, drop_last))
        expected += [list(chain(*micro[start : start + 2])) for start in range(0, len(micro), 2)]
    assert batches.steps(23, 3, None) == expected
    assert batches.steps(23, 2.5, None) == expected[: -(-len(expected) * 5 // 6)]
    assert batches.steps(23, 1, 7) == expected[:7]
    assert isinstance(RandomSampler(rows).generator, type(None))


def test_steps_and_micro_batches_of_several_processes() -> None:
    batches = Batches(2, 2, 2, False, 0, False)
    assert batches.steps(11, 1, None) == [list(range(8)), [8, 9, 10]]
    assert [batches.sizes(step) for step in batches.steps(11, 1, None)] == [((2, 2), (2, 2)), ((2, 1),)]
    with pytest.raises(UsageError, match="leaves no batch of 4 among 3 rows"):
        Batches(2, 2, 1, False, 0, True).steps(3, 1, None)


def test_a_kto_step_of_one_prompt_joins_the_one_before(tokenizer: Any) -> None:
    records = [{"prompt": prompt, "completion": " elm", "label": True} for prompt in "aabbbcc"]
    rows, _ = encode(records, tokenizer, Rules("kto", None), "train_dataset")
    steps = schedule_of(rows, Batches(2, 1, 1, False, 0, False), 1, None, needs_partners=True)
    assert sorted(row for step in steps.steps for row in step) == list(range(7))
    assert all(len({rows[row].prompt_key for row in step}) > 1 for step in steps.steps)


def test_partners_are_those_of_trl(tokenizer: Any) -> None:
    rows, _ = encode(rows_for("kto", 5), tokenizer, Rules("kto", None), "train_dataset")
    partners = [row.partner.ids.tolist() for row in with_partners(rows, 2, None) if row.partner is not None]
    assert partners == [rows[index].completions[0].ids.tolist() for index in (1, 0, 3, 2, 4)]


def test_blocks_hold_every_row_once_within_their_size() -> None:
    generator = random.Random(0)
    for size in (10, 37):
        lengths = [generator.randint(1, size) for _ in range(60)]
        blocks = packed(lengths, size)
        assert sorted(row for block in blocks for row in block) == list(range(60))
        assert all(sum(lengths[row] for row in block) <= size for block in blocks)
    steps = schedule_of([None] * 60, Batches(2, 1, 1, False, 0, False), 1, None, blocks=blocks)  # type: ignore[list-item]
    assert [set(step) for step in steps.steps] == [
        {row for block in blocks[start : start + 2] for row in block} for start in range(0, len(blocks), 2)]


def test_micro_batches_decide_only_where_a_rule_says_so(tokenizer: Any) -> None:
    rows, _ = encode(rows_for("dpo", 5), tokenizer, Rules("dpo", None), "train_dataset")
    batches = Batches(2, 1, 2, False, 0, False)
    assert schedule_of(rows, batches, 1, None).sizes == ()
    assert schedule_of(rows, batches, 1, None, MicroBatchRule("step", "mean")).sizes == (((2,), (2,)), ((1,),))


# With TRL


def trl_rows(tokenizer: Any, method: str, kind: str, limit: int | None, directory: Path, model: str,
             **changes: Any) -> Any:
    """The data set that TRL's trainer prepares."""
    trl = pytest.importorskip("trl", reason="TRL is not installed, so its token ids cannot be compared")
    datasets = pytest.importorskip("datasets")
    config, trainer = getattr(trl, f"{method.upper()}Config"), getattr(trl, f"{method.upper()}Trainer")
    args = config(output_dir=str(directory), bf16=False, use_cpu=True, report_to="none", max_length=limit,
                  per_device_train_batch_size=2, **changes)
    return trainer(model=model, args=args, processing_class=tokenizer,
                   train_dataset=datasets.Dataset.from_list(rows_for(kind, 12))).train_dataset


@pytest.mark.parametrize(("method", "kind", "limit"), [
    (method, kind, limit) for method in ("dpo", "kto", "sft") for kind in KINDS[method] for limit in (None, 40)])
def test_token_ids_are_those_that_trl_prepares(tokenizer: Any, tiny_model_dir: Path, tmp_path: Path, method: str,
                                               kind: str, limit: int | None) -> None:
    theirs = trl_rows(tokenizer, method, kind, limit, tmp_path, str(tiny_model_dir))
    rows, _ = encode(rows_for(kind, 12), tokenizer, Rules(method, limit), "train_dataset")
    if method == "sft":
        expected = [[token for token in entry["labels"][1:] if token != -100] for entry in theirs]
        assert [supervised(row) for row in rows] == [ids for ids in expected if ids]
        return
    sides = ("chosen_ids", "rejected_ids") if method == "dpo" else ("completion_ids",)
    assert len(rows) == len(theirs)
    for row, entry in zip(rows, theirs, strict=True):
        assert [whole(row, side) for side in range(len(sides))] == [
            (entry["prompt_ids"] + entry[name])[:limit] for name in sides]
        assert max(1, len(entry["prompt_ids"])) == len(row.prompt_ids)
        assert row.desirable == entry.get("label")
    if method == "kto":
        assert [row.partner.ids.tolist() for row in with_partners(rows, 2, None) if row.partner is not None] == [
            entry["KL_completion_ids"] for entry in theirs] or limit is not None


def test_blocks_are_those_that_trl_packs(tokenizer: Any, tiny_model_dir: Path, tmp_path: Path) -> None:
    theirs = trl_rows(tokenizer, "sft", "sft", 200, tmp_path, str(tiny_model_dir), packing=True)
    rows, _ = encode(rows_for("sft", 12), tokenizer, Rules("sft", 200), "train_dataset")
    blocks = packed([row.flat_tokens for row in rows], 200)
    assert [entry["input_ids"] for entry in theirs] == [[token for row in block for token in whole(rows[row])]
                                                        for block in blocks]


