"""The content-addressed store of reference scores."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers import tree
from integration.conftest import records
from tropism.distributed import World
from tropism.errors import ReferenceMismatchError
from tropism.model.language_model import LanguageModel
from tropism.train.frozen import reference as references
from tropism.train.frozen.score_store import ScoreStore, entries

WORLD = World(0, 1, torch.device("cpu"))


@pytest.fixture
def model(tiny_model_dir: Path) -> LanguageModel:
    return LanguageModel(AutoModelForCausalLM.from_pretrained(tiny_model_dir).eval(), "tree", "fp32",
                         torch.device("cpu"))


TREES = [tree([3, 9, 8, 7], [10, 11, 1], [12, 1], [13, 14, 15, 1]), tree([3, 20], [10, 11, 1]),
         tree([3, 21, 22], [30, 31, 32, 33, 1])]


class Counter:
    """Counts the forward passes of a build."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes = 0
        real = LanguageModel.logps

        def counted(model: LanguageModel, *args: Any) -> torch.Tensor:
            self.passes += 1
            return real(model, *args)

        monkeypatch.setattr(LanguageModel, "logps", counted)


def test_a_second_build_computes_nothing(model: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = Counter(monkeypatch)
    first = references.build(model, TREES, 8, tmp_path, WORLD)
    assert counter.passes > 1
    counter.passes = 0
    second = references.build(model, TREES, 8, tmp_path, WORLD)
    assert counter.passes == 0
    assert first.scores == second.scores
    assert len(first.scores) == 5
    assert all(value < 0 for value in first.scores.values())


def test_a_half_built_store_continues(model: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that is killed in the middle keeps what it wrote, and the rest is computed, to the same bits."""
    whole = references.build(model, TREES, 8, tmp_path / "whole", WORLD)
    monkeypatch.setattr(references, "_WRITE_EVERY_S", -1.0)  # write after every pack
    real, calls = references._score_pack, 0

    def killed(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(references, "_score_pack", killed)
    with pytest.raises(KeyboardInterrupt):
        references.build(model, TREES, 8, tmp_path / "half", WORLD)
    assert 0 < sum(entry.scores for entry in entries(tmp_path / "half")) < 5
    monkeypatch.setattr(references, "_score_pack", real)
    counter = Counter(monkeypatch)
    again = references.build(model, TREES, 8, tmp_path / "half", WORLD)
    assert 0 < counter.passes < 4
    assert again.scores == whole.scores


def test_other_weights_config_or_numerics_never_hit(model: LanguageModel, tmp_path: Path) -> None:
    """R4: the fingerprint covers weights, config, dtype and layout."""
    prints = {references.fingerprint(model)}
    assert references.fingerprint(model) in prints
    with torch.no_grad():
        model.module.model.layers[1].mlp.up_proj.weight[0, 0] += 1e-7
    prints.add(references.fingerprint(model))
    model.module.model.register_buffer("correction", torch.zeros(1))  # routers of some MoE models have one
    prints.add(references.fingerprint(model))
    model.module.config.rms_norm_eps *= 2
    prints.add(references.fingerprint(model))
    for layout, precision in (("padded", "fp32"), ("tree", "bf16")):
        prints.add(references.fingerprint(LanguageModel(model.module, layout, precision, model.device)))
    assert len(prints) == 6


def test_keys_are_prompt_and_completion_ids() -> None:
    """H1, R4: any other prompt, completion or mask is another entry; where the border lies matters."""
    one = tree([3, 4, 5], [6, 7])
    assert one.score_keys[0] == tree([3, 4, 5], [9], [6, 7]).score_keys[1]
    keys = {t.score_keys[0] for t in (one, tree([3, 4], [5, 6, 7]), tree([3, 4, 5], [6, 8]),
                                                    tree([3, 4, 6], [6, 7]), tree([3, 4, 5, 6], [7]))}
    assert len(keys) == 5


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3.0, 0.11])
def test_an_impossible_entry_stops_the_run(tmp_path: Path, value: float) -> None:
    """R4: a NaN, an infinite or a positive log-prob in an intact file is an error, with the remedy."""
    store = ScoreStore(tmp_path, "f", {})
    store.add({b"k" * 16: value})
    with pytest.raises(ReferenceMismatchError, match="tropism store clean"):
        store.load()


@pytest.mark.parametrize(("value", "fine"), [(0.0, True), (-0.0, True), (5e-5, True), (0.05, False)])
def test_a_stored_score_is_at_most_0_but_for_rounding(model: LanguageModel, tmp_path: Path, value: float, fine: bool,
                                                      ) -> None:
    """R4, N1: 3e-5 nats per token are rounding; this completion has two."""
    key = TREES[0].score_keys[1]
    ScoreStore(tmp_path, references.fingerprint(model), {}).add({key: value})
    if fine:
        assert references.build(model, TREES, 100, tmp_path, WORLD).scores[key] == value
        return
    with pytest.raises(ReferenceMismatchError, match=r"^prompt with ids \[3, 9, 8, 7\]: the reference gives this "
                                                     r"completion the log-prob 0\.05.* tropism store clean --store"):
        references.build(model, TREES, 100, tmp_path, WORLD)


def test_a_damaged_file_is_computed_again(model: LanguageModel, tmp_path: Path) -> None:
    whole = references.build(model, TREES, 100, tmp_path, WORLD)
    file, = (tmp_path / references.fingerprint(model)).glob("*.npz")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))
    assert references.build(model, TREES, 100, tmp_path, WORLD).scores == whole.scores
    file.write_bytes(b"")
    assert references.build(model, TREES, 100, tmp_path, WORLD).scores == whole.scores


def test_entries_of_one_file_round_trip(tmp_path: Path) -> None:
    store = ScoreStore(tmp_path, "f", {"model": "m"})
    values = {bytes([i] * 16): -float(i) - 0.5 for i in range(40)}
    store.add(values)
    store.add({})
    assert store.load() == values
    assert not list((tmp_path / "f").glob(".*"))
    with np.load(next((tmp_path / "f").glob("*.npz")), allow_pickle=False) as content:
        assert content["keys"].shape == (40, 16)


def test_a_missing_score_is_an_error(model: LanguageModel, tmp_path: Path) -> None:
    from tropism.data.batching.collate import collate

    built = references.build(model, TREES, 100, tmp_path, WORLD)
    unknown = [tree([3, 9], [10, 1])]
    with pytest.raises(ReferenceMismatchError, match="no reference score"):
        built.score(unknown, collate(unknown, "tree"))


def test_another_learning_rate_costs_nothing(train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedule decides what is scored, so runs that differ in other options share all scores."""
    first = train("kto", max_steps=4)
    monkeypatch.setattr(references, "_score_pack", lambda *args: pytest.fail("scored again"))
    second = train("kto", max_steps=4, learning_rate=1e-2, beta=0.3)
    assert records(first)[0]["loss"] == records(second)[0]["loss"]


def test_a_changed_tokenizer_text_gives_other_scores(train: Callable[..., Any], tmp_path: Path, feedback: Path) -> None:
    """H1: one more space in a row is another row; nothing stale is found for it."""
    changed = tmp_path / "changed.jsonl"
    changed.write_text(feedback.read_text().replace("oak elm", "oak  elm"))
    shutil.rmtree(tmp_path / "store", ignore_errors=True)
    one = records(train("kto", max_steps=1, batch_size=43))
    two = records(train("kto", max_steps=1, batch_size=43, data=str(changed)))
    assert two[0]["logps/chosen"] != one[0]["logps/chosen"]
    assert two[0]["loss"] == pytest.approx(one[0]["loss"], abs=1e-6)


def test_a_store_with_damaged_facts_is_still_listed_and_cleaned(tmp_path: Path) -> None:
    """Whatever else lies in the directory is left alone."""
    from tropism.train.frozen.score_store import clean

    name = "0" * 32
    ScoreStore(tmp_path, name, {"model": "m"}).add({b"k" * 16: -1.0})
    (tmp_path / name / "meta.json").write_text("")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "meta.json").write_text("{}")
    assert [entry.scores for entry in entries(tmp_path)] == [1]
    assert clean(tmp_path) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
