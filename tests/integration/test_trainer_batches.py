"""Dataloaders of other trainers: the same weights as the same data given as a file, one batch a step."""

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from integration.conftest import assert_same_metrics, records, weights
from published_batches import (
    Known,
    coati_dpo,
    coati_kto,
    coati_sft,
    known,
    mirrored,
    nemo_dpo,
    nemo_kto,
    openrlhf_dpo,
    openrlhf_kto,
    openrlhf_sft,
    openrlhf_sft_with_lengths,
)
from tropism import DPOTrainer, KDTrainer, KTOTrainer, SFTTrainer, run
from tropism.config import METHODS
from tropism.data.dataloaders.steps import rows_per_pass
from tropism.data.read_rows import read_rows
from tropism.data.tokenization.render import Renderer
from tropism.data.tokenization.truncate import Limits
from tropism.errors import DataError, TropismError, UsageError
from tropism.observe.console import Voice
from tropism.trainers import Trainer

PAD = 2
TRAINERS: dict[str, type[Trainer]] = {"kto": KTOTrainer, "dpo": DPOTrainer, "sft": SFTTrainer, "kd": KDTrainer}
Collate = Callable[[Sequence[Known], int, str], Any]


@dataclass(frozen=True)
class Layout:
    """A published layout; `side` is where its trainer pads."""

    method: str
    collate: Collate
    side: str = "right"


LAYOUTS = [
    Layout("kto", openrlhf_kto), Layout("kto", coati_kto, "left"), Layout("kto", nemo_kto),
    Layout("dpo", openrlhf_dpo, "left"), Layout("dpo", coati_dpo), Layout("dpo", nemo_dpo),
    Layout("sft", openrlhf_sft), Layout("sft", openrlhf_sft_with_lengths, "left"), Layout("sft", coati_sft),
    Layout("kd", openrlhf_sft)]


@pytest.fixture(scope="module")
def files(feedback: Path, pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The data of each method."""
    texts = tmp_path_factory.mktemp("data") / "texts.jsonl"
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    texts.write_text("".join(json.dumps({"prompt": row["prompt"], "completion": row["chosen"]}) + "\n" for row in rows))
    return {"kto": feedback, "dpo": pairs, "sft": texts, "kd": texts}


@pytest.fixture
def settings(tiny_model_dir: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Small settings; each call has an output of its own."""
    count = 0

    def make(method: str, **changes: Any) -> dict[str, Any]:
        nonlocal count
        count += 1
        teacher = {"teacher": str(tiny_model_dir), "temperature": 2.0} if method == "kd" else {}
        store = {} if method == "sft" else {"store": str(tmp_path / "store")}
        return {"model": str(tiny_model_dir), "output": str(tmp_path / f"run{count}"), "samples": 0,
                "learning_rate": 1e-3, **store, **teacher, **changes}

    return make


@pytest.fixture
def from_file(settings: Callable[..., Any], files: dict[str, Path]) -> Callable[..., Any]:
    """The run that a dataloader's is compared with: a file in its own order."""
    def go(method: str, **changes: Any) -> Any:
        values = {"data": str(files[method]), "shuffle": False, "batch_size": 8, **changes}
        return run(METHODS[method](**settings(method, **values)), Voice(loud=False))

    return go


@pytest.fixture
def trainer(settings: Callable[..., Any]) -> Callable[..., Trainer]:
    """A trainer over a dataloader."""
    def make(method: str, loader: Any, **changes: Any) -> Trainer:
        return TRAINERS[method](train_dataloader=loader, **{"voice": Voice(loud=False), **settings(method, **changes)})

    return make


@pytest.fixture
def rows_of(files: dict[str, Path], fixture_tokenizer: Any) -> Callable[[str], list[Known]]:
    """The rows of a method's file, as token ids."""
    def read(method: str) -> list[Known]:
        found = read_rows(files[method], Renderer(fixture_tokenizer, Limits(512, None)), METHODS[method].view)
        return [Known(row.prompt_ids.tolist(), tuple(side.ids.tolist() for side in row.completions),
                      tuple(side.loss_mask.astype(int).tolist() for side in row.completions), bool(row.desirable))
                for row in found.rows]

    return read


def batches(rows: Sequence[Known], collate: Collate = openrlhf_kto, size: int = 8, side: str = "right") -> list[Any]:
    return [collate(rows[start : start + size], PAD, side) for start in range(0, len(rows), size)]


def assert_same_weights(one: Any, other: Any) -> None:
    ours, theirs = weights(one.model), weights(other.model)
    assert ours.keys() == theirs.keys()
    assert not [name for name in ours if not torch.equal(ours[name], theirs[name])]


# --- the same run as from a file ------------------------------------------------------------------------------------


@pytest.mark.some(4)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.method} {layout.collate.__name__}")
def test_a_dataloader_trains_to_the_same_weights_as_a_file(layout: Layout, trainer: Any, from_file: Any, rows_of: Any,
                                                           ) -> None:
    """L1: bit for bit, with each record; 43 rows end in a short step."""
    loader = batches(rows_of(layout.method), layout.collate, side=layout.side)
    ours, theirs = trainer(layout.method, loader).fit(), from_file(layout.method)
    assert ours.steps == theirs.steps == 6
    assert_same_weights(ours, theirs)
    assert_same_metrics(records(ours), records(theirs), 0.0, 0.0)


@pytest.mark.parametrize("changes", [{"epochs": 2}, {"max_steps": 8}, {"epochs": 3, "max_steps": 6}], ids=str)
def test_several_passes(changes: dict[str, int], trainer: Any, from_file: Any, rows_of: Any) -> None:
    """As many passes over the dataloader as epochs or steps ask for."""
    ours = trainer("kto", batches(rows_of("kto")), **changes).fit()
    theirs = from_file("kto", **changes)
    assert_same_weights(ours, theirs)
    assert_same_metrics(records(ours), records(theirs), 1e-12, 0.0)  # `epoch` is one division or several


def test_part_of_a_pass(trainer: Any, from_file: Any, rows_of: Any) -> None:
    """`max_steps` reads no further than it needs, and `epoch` still counts whole passes."""
    loader = Counting(batches(rows_of("kto")))
    ours, theirs = trainer("kto", loader, max_steps=2).fit(), from_file("kto", max_steps=2)
    assert loader.read == 2
    assert_same_weights(ours, theirs)
    assert records(ours)[-1]["epoch"] == pytest.approx(2 / 6)
    assert rows_per_pass(iter(()), 16, 2) == 16


class Counting:
    """A dataloader that knows how many of its batches were read."""

    def __init__(self, content: list[Any]) -> None:
        self.content = content
        self.read = 0

    def __len__(self) -> int:
        return len(self.content)

    def __iter__(self) -> Any:
        for batch in self.content:
            self.read += 1
            yield batch


@pytest.mark.parametrize("epochs", [1, 2])
def test_accumulated_batches_are_one_step(epochs: int, trainer: Any, from_file: Any, rows_of: Any) -> None:
    """L1: two batches of 4 are a step of 8, with one reference point; of 11 batches the last stands alone, since no
    step crosses an epoch."""
    ours = trainer("kto", batches(rows_of("kto"), size=4), accumulation_steps=2, epochs=epochs).fit()
    theirs = from_file("kto", epochs=epochs)
    assert_same_weights(ours, theirs)
    assert_same_metrics(records(ours), records(theirs), 1e-12, 0.0)


def test_steps_follow_the_dataloader(trainer: Any, from_file: Any, rows_of: Any, files: dict[str, Path],
                                     tmp_path: Path) -> None:
    """A shuffling DataLoader decides the order, afresh in each of its passes."""
    rows, lines = rows_of("kto"), files["kto"].read_text().splitlines()

    def loader(collate: Any) -> Any:
        return DataLoader(range(len(rows)), batch_size=8, shuffle=True, drop_last=True, collate_fn=collate,
                          generator=torch.Generator().manual_seed(3))

    seen = loader(list)
    order = [index for _ in range(2) for batch in seen for index in batch]
    assert order[:40] != order[40:]
    (tmp_path / "ordered.jsonl").write_text("".join(lines[index] + "\n" for index in order))
    ours = trainer("kto", loader(lambda part: openrlhf_kto([rows[i] for i in part], PAD, "right")), epochs=2).fit()
    assert_same_weights(ours, from_file("kto", data=str(tmp_path / "ordered.jsonl")))


def test_figures_of_an_eval_dataloader(trainer: Any, from_file: Any, rows_of: Any, files: dict[str, Path],
                                       tmp_path: Path) -> None:
    """L5: held-out batches are pooled: the figures are those of the same rows in a file."""
    held_out = batches(rows_of("kto")[:20], nemo_kto, size=3)
    made = trainer("kto", batches(rows_of("kto")), eval_dataloader=held_out, max_steps=2)
    (tmp_path / "held.jsonl").write_text("".join(files["kto"].read_text().splitlines(keepends=True)[:20]))
    theirs = from_file("kto", eval_data=str(tmp_path / "held.jsonl"), max_steps=2)
    ours = made.fit()
    assert ours.before == theirs.before
    assert ours.after == theirs.after
    assert made.evaluate().rows == 20


# --- mismatched rows ------------------------------------------------------------------------------------------------

SIX = [known([7, 8, 9 + n], [20 + n, 21, 22, 1][: 2 + n % 3], label=n % 2 == 0) for n in range(6)]


def test_the_reference_point_of_brought_rows_by_hand(trainer: Any, tiny_model_dir: Path) -> None:
    """K1, K2: kl_source='batch' pairs as the batch does (coati: mirrored), 'step' with the next row; max(0, mean)."""
    policy, reference = (AutoModelForCausalLM.from_pretrained(tiny_model_dir) for _ in range(2))
    with torch.no_grad():
        reference.model.embed_tokens.weight.mul_(1.1)

    def logp(model: Any, prompt: list[int], completion: list[int]) -> float:
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].double()
        return float(logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None]).sum())

    loader = [coati_kto(SIX, PAD, "right")]
    for source, partners in (("batch", mirrored(6)), ("step", [(n + 1) % 6 for n in range(6)])):
        pairs = [(SIX[n].prompt, SIX[other].completions[0]) for n, other in enumerate(partners)]
        by_hand = sum(logp(policy, *pair) - logp(reference, *pair) for pair in pairs) / 6
        first = records(trainer("kto", loader, ref_model=reference, kl_source=source).fit())[0]
        assert first["kl/raw"] == pytest.approx(by_hand, abs=1e-5)
        assert first["kl"] == pytest.approx(max(0.0, by_hand), abs=1e-5)


@pytest.mark.parametrize("collate", [openrlhf_kto, coati_kto, nemo_kto])
def test_brought_rows_are_left_out_with_a_notice(collate: Collate, trainer: Any, rows_of: Any) -> None:
    """L3: unless they are asked for; then nothing is said of them."""
    for source, count in (("step", 1), ("batch", 0)):
        voice = Voice(console=Console(file=io.StringIO(), soft_wrap=True))
        trainer("kto", batches(rows_of("kto")[:16], collate), kl_source=source, voice=voice)
        said = voice.console.file.getvalue()
        assert said.count("the mismatched (kl) rows of 2 batches are not used") == count
        assert said.count("kl_source='batch'") == count


ONE_PROMPT = [known([7, 8, 9], [20 + n, 1], label=n % 2 == 0) for n in range(4)]


def test_a_batch_of_one_prompt(trainer: Any) -> None:
    """K4: refused with the batch's number before anything is spent; taken with rows of its own."""
    loader = [openrlhf_kto(SIX, PAD, "right"), openrlhf_kto(ONE_PROMPT, PAD, "right")]
    with pytest.raises(UsageError, match=r"step 2: all 4 rows have the same prompt.*kl_source='batch'"):
        trainer("kto", loader).fit()
    assert trainer("kto", loader, kl_source="batch").fit().steps == 2
    assert trainer("kto", loader, accumulation_steps=2).fit().steps == 1


def test_rows_that_are_not_brought_cannot_be_taken(trainer: Any) -> None:
    ids, mask, labels, lengths = openrlhf_kto(SIX, PAD, "right")
    loader = [openrlhf_kto(SIX, PAD, "right"), (ids[:6], mask[:6], labels[:6], lengths[:6])]
    with pytest.raises(UsageError, match="kl_source='batch' needs mismatched rows, but batch 2"):
        trainer("kto", loader, kl_source="batch")
    assert trainer("kto", loader).fit().steps == 2


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "message"), [
    ({"batch_size": 4}, "batch_size has no effect with train_dataloader"),
    ({"train_batch_size": 4}, "batch_size has no effect with train_dataloader"),
    ({"shuffle": True}, "shuffle has no effect"), ({"group_prompts": True}, "group_prompts has no effect"),
    ({"seed": 3}, "seed has no effect"), ({"eval_fraction": 0.2}, "eval_fraction has no effect"),
    ({"max_prompt_length": 8}, "max_prompt_length has no effect"), ({"workers": 1}, "workers has no effect"),
    ({"eval_dataset": [{}]}, "eval_data has no effect"),
    ({"train_dataset": [{}]}, "train_dataset and train_dataloader"),
    ({"accumulation_steps": 0}, "accumulation_steps: .*0"),
    ({"kl_source": "mine"}, "kl_source: .*step or batch.*'mine'"),
    ({"epochs": "many"}, "epochs: "), ({"max_steps": 0}, "max_steps: "), ({"betta": 1}, "Did you mean beta"),
])
def test_options_that_a_dataloader_decides(changes: dict[str, Any], message: str, trainer: Any) -> None:
    """L3, H2: refused by name, and before the dataloader is gone through."""
    loader = Counting([openrlhf_kto(SIX, PAD, "right")])
    with pytest.raises(UsageError, match=message):
        trainer("kto", loader, **changes)
    assert loader.read == 0


@pytest.mark.parametrize(("loader", "changes", "message"), [
    ([], {}, "the dataloader yielded no batch$"),
    (lambda: iter([openrlhf_kto(SIX, PAD, "right")]), {"epochs": 2}, "no batch in its second pass"),
    (lambda: iter([openrlhf_kto(SIX, PAD, "right")]), {"max_steps": 2}, "no batch in its second pass"),
    ([openrlhf_kto(SIX, PAD, "right"), coati_kto(SIX[:1], PAD, "right") | {"label": torch.tensor([3])}], {},
     "batch 2 row 1: label 3"),
    ([openrlhf_kto(SIX, PAD, "right"), {key: part[:0] for key, part in nemo_kto(SIX, PAD, "right").items()}], {},
     "batch 2: no rows"),
    ([openrlhf_dpo([known([5], [6], [7])], PAD, "right")], {}, "batch 1: this is a batch of OpenRLHF DPO"),
    ([openrlhf_kto([*SIX, known([5], [999])], PAD, "right")], {}, "batch 1 row 7: token .* has id 999"),
    ([openrlhf_kto([*SIX, known([5] * 600, [6])], PAD, "right")], {}, "batch 1 row 7: 601 tokens.*512 tokens"),
    ([openrlhf_kto(SIX[::2], PAD, "right")], {}, "3 desirable / 0 undesirable"),
])
def test_batches_that_cannot_be_trained_on(loader: Any, changes: dict[str, Any], message: str, trainer: Any,
                                           tmp_path: Path) -> None:
    """K3, K4, H5: batch and row are named, and nothing is written."""
    with pytest.raises(TropismError, match=message) as error:
        trainer("kto", loader() if callable(loader) else loader, output=str(tmp_path / "never"), **changes).fit()
    assert isinstance(error.value, DataError | UsageError)
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize("name", ["accumulation_steps", "kl_source", "eval_dataloader"])
def test_arguments_of_dataloaders_without_one(name: str, settings: Any, feedback: Path) -> None:
    """L3: they have no effect on a dataset, and say so."""
    value = {"accumulation_steps": 2, "kl_source": "batch", "eval_dataloader": []}[name]
    with pytest.raises(UsageError, match=f"{name} has no effect without train_dataloader"):
        KTOTrainer(train_dataset=feedback, **settings("kto", **{name: value}))
