"""A teacher in the store: the live teacher's equal, asked once, and never mistaken for another."""

import gc
import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers import case_yaml
from integration import distillation
from integration.conftest import assert_same_metrics, distance, records, weights
from integration.distillation import VOCABULARY, WHOLE, WORLD, Said, first
from tropism.errors import OutputError
from tropism.runner import Run
from tropism.train.frozen import teacher as teachers
from tropism.train.frozen.score_store import entries
from tropism.train.setup import models

options, distill, passes = distillation.options, distillation.distill, distillation.passes
teacher_dir, texts = distillation.teacher_dir, distillation.texts


# --- live and stored --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "changes"), [
    ("kd", {}), ("kd", {"temperature": 2.0, "divergence": "js"}), ("dpo", {"divergence": "reverse_kl"}),
    ("kto", {"temperature": 0.5})])
def test_all_tokens_but_one_stored_are_the_live_teacher(distill: Callable[..., Any], tiny_model_dir: Path, method: str,
                                                        changes: dict[str, Any]) -> None:
    """R4, L4: every record, evaluation included, and the weights after three steps."""
    how = {"precision": "fp64", "export_dtype": "float64", "eval_fraction": 0.3, **changes}
    live, stored = distill(method, **how), distill(method, **how, top_k=VOCABULARY - 1)
    assert_same_metrics(records(stored), records(live), 1e-8, 1e-8)
    traveled = distance(weights(live.model), weights(tiny_model_dir))
    assert traveled > 1e-3
    assert distance(weights(stored.model), weights(live.model)) < 1e-6 * traveled


def test_more_tokens_see_more(distill: Callable[..., Any]) -> None:
    """L4: the divergence grows with k, and never beyond the exact one."""
    seen = [first(distill(**WHOLE, top_k=k))["kd/divergence"] for k in (1, 4, 16, 64)]
    assert seen[0] > 0
    assert seen == sorted(seen)
    assert seen[-1] <= first(distill(**WHOLE))["kd/divergence"]


def test_a_warm_store_needs_no_pass(distill: Callable[..., Any], passes: list[int], tmp_path: Path) -> None:
    """R4: the same bits without the teacher; nor does a run that compares otherwise need it again."""
    cold = distill(top_k=4)
    assert passes
    passes.clear()
    warm = distill(top_k=4)
    distill(top_k=4, learning_rate=1e-2, kd_weight=1.0, divergence="js")
    assert passes == []
    assert distance(weights(warm.model), weights(cold.model)) == 0.0
    assert len(entries(tmp_path / "store")) == 1
    said = Said()
    distill(voice=said, top_k=4)
    assert "MiB" not in said.text


@pytest.mark.parametrize("changes", [{"top_k": 5}, {"temperature": 2.0}, {"precision": "fp64"}, {"other": True}])
def test_another_question_is_another_entry(distill: Callable[..., Any], passes: list[int], tiny_model_dir: Path,
                                           tmp_path: Path, changes: dict[str, Any]) -> None:
    """R4: k, temperature, numerics and the teacher's weights are part of the key."""
    distill(top_k=4)
    known, done = entries(tmp_path / "store"), len(passes)
    changes = {"teacher": str(tiny_model_dir)} if "other" in changes else changes
    again = distill(**{"top_k": 4, **changes})
    assert len(passes) == 2 * done
    assert len(entries(tmp_path / "store")) == len(known) + 1 == 2
    fresh = distill(**{"top_k": 4, **changes, "store": str(tmp_path / "fresh")})
    assert first(again)["kd/divergence"] == first(fresh)["kd/divergence"]


def test_what_is_announced_is_what_it_takes(distill: Callable[..., Any], options: Callable[..., Any], tmp_path: Path,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """R4: tokens and bytes are said before the pass, and nothing else is stored."""
    monkeypatch.setattr("tropism.observe.console._PAUSE_S", 0.0)  # also a pass of less than seconds has lines
    said, rows = Said(), Run(options(), WORLD, Said()).inputs.data.train
    distill(voice=said, top_k=4)
    distinct = {(row.prompt_key, row.completions[0].key): row.completions[0].length for row in rows}
    tokens = sum(distinct.values())
    assert f"top 4 of {tokens} tokens, 28 bytes each" in said.text
    assert said.text.index("28 bytes each") < said.text.index("teacher 1/")
    found, = entries(tmp_path / "store")
    assert found.scores == len(distinct) == 21
    assert 0 < found.size_bytes - 28 * tokens < 2048


def test_a_full_disk_is_noticed_before_the_pass(distill: Callable[..., Any], passes: list[int],
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    with pytest.raises(OutputError, match=r"the teacher's top-k tokens need .* KiB, but only 0 KiB are free"):
        distill(top_k=4)
    assert passes == []


def test_a_damaged_store_is_repaired(distill: Callable[..., Any], passes: list[int], tmp_path: Path) -> None:
    """R4: the damage is said, the teacher asked again, and the result is the same to the bit."""
    whole = distill(top_k=4)
    file, = (tmp_path / "store").glob("*/*.safetensors")
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(bytes(content))
    done, said = len(passes), Said()
    repaired = distill(voice=said, top_k=4)
    assert len(passes) == 2 * done
    assert "the teacher store has 1 unusable file (first: " in said.text
    assert distance(weights(repaired.model), weights(whole.model)) == 0.0
    distill(voice=(quiet := Said()), top_k=4)
    assert len(passes) == 2 * done
    assert "unusable file" not in quiet.text


def test_a_half_filled_store_continues(distill: Callable[..., Any], passes: list[int], tmp_path: Path,
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """R4: what a killed pass wrote is kept, the rest is computed, and the result is the same to the bit."""
    small = {"top_k": 4, "microbatch_tokens": 64}
    whole, planned = distill(**small, store=str(tmp_path / "whole")), len(passes)
    assert planned > 3
    counted = teachers._top_k_of

    def killed(*args: Any) -> Any:
        if len(passes) == planned + 2:
            raise KeyboardInterrupt
        return counted(*args)

    monkeypatch.setattr(teachers, "_WRITE_EVERY_S", -1.0)
    monkeypatch.setattr(teachers, "_top_k_of", killed)
    with pytest.raises(KeyboardInterrupt):
        distill(**small)
    monkeypatch.setattr(teachers, "_top_k_of", counted)
    passes.clear()
    again = distill(**small)
    assert len(passes) == planned - 2
    assert distance(weights(again.model), weights(whole.model)) == 0.0


def test_case_23_stale_cache(distill: Callable[..., Any], passes: list[int], tmp_path: Path) -> None:
    """H1, R4: a text with one more space has other ids, and so another key: what is stored is never taken for it."""
    case = case_yaml("23-kd-topk-tail.yaml")["stale_cache"]
    results = []
    for text in (case["cached_for_text"], case["row_now"]):
        file = tmp_path / "row.jsonl"
        file.write_text(json.dumps({"prompt": "say it: ", "completion": text}) + "\n")
        results.append(distill(data=str(file), top_k=4, max_steps=1))
    assert len(passes) == 2
    fresh = distill(data=str(tmp_path / "row.jsonl"), top_k=4, max_steps=1, store=str(tmp_path / "fresh"))
    assert first(results[1])["loss"] == first(fresh)["loss"] != first(results[0])["loss"]
    assert [entry.scores for entry in entries(tmp_path / "store")] == [2]


@pytest.mark.parametrize("top_k", [None, 4])
def test_a_stored_teacher_leaves_the_memory(options: Callable[..., Any], monkeypatch: pytest.MonkeyPatch,
                                            top_k: int | None) -> None:
    """O1: with top_k nobody holds the teacher once the store is filled."""
    held: list[weakref.ref[Any]] = []
    real = models.Numerics.module

    def watched(numerics: models.Numerics, named: Any) -> Any:
        module = real(numerics, named)
        held.append(weakref.ref(module))
        return module

    monkeypatch.setattr(models.Numerics, "module", watched)
    engine = Run(options(top_k=top_k), WORLD, Said()).build()
    gc.collect()
    assert engine.model.module is held[0]()
    assert (held[1]() is None) == (top_k is not None)
