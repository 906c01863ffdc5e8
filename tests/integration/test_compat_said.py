"""What the published trainers' classes say before, during and after a run over a dataloader of several passes."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from compat_helpers import loader_of, models, optimizer_of, rows_of, strategy_of
from published_batches import coati_kto, nemo_kto, openrlhf_dpo, openrlhf_kto
from tropism.compat.coati import KTOTrainer as CoatiTrainer
from tropism.compat.nemo_aligner import KTOTrainer as NemoTrainer
from tropism.compat.openrlhf import DPOTrainer, KTOTrainer
from tropism.observe.console import Voice


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROPISM_STORE", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)


def openrlhf(kind: Any, directory: Path, rows: Any, collate: Any, held_out: Any = None, **args: Any) -> Any:
    """A trainer over two passes, with what it says in `.said`."""
    policy, frozen = models(directory)
    optimizer, scheduler = optimizer_of(policy)
    trainer = kind(policy, frozen, strategy_of(1, **args), None, optimizer, loader_of(rows, collate),
                   held_out and loader_of(held_out, collate, shuffle=False), scheduler, beta=0.3)
    trainer.said = io.StringIO()
    trainer.door.voice = Voice(console=Console(file=trainer.said, width=10_000))
    return trainer


def test_further_passes_are_no_duplicates(tiny_model_dir: Path) -> None:
    """The audit is about one pass, which has one copy of a row; so are its figures in the run directory."""
    rows = rows_of(12)
    rows[7] = rows[2]
    trainer = openrlhf(KTOTrainer, tiny_model_dir, rows, openrlhf_kto, rows[:3], train_batch_size=3)
    result = trainer.fit(trainer.args)
    said = trainer.said.getvalue()
    assert "contains 1 duplicate row with" in said
    assert "token ids from Python: 12 read, 12 kept" in said
    assert "plan: 24 training rows in 2 passes, 3 held-out rows" in said
    assert json.loads((result.directory / "audit.json").read_text())["rows"]["read"] == 12
    assert re.search(r"contains 3 evaluation prompts.* Remove them from one of the two\.", said)
    assert "--eval-fraction" not in said
    assert "global_step" not in said
    trainer.said.truncate(0)
    trainer.evaluate(loader_of(rows[:4], openrlhf_kto, shuffle=False), steps=8)
    assert trainer.said.getvalue().count("own completion") == 1
    assert "reject_reward" in trainer.said.getvalue()
    assert "global_step" not in trainer.said.getvalue()


def test_a_run_that_begins_within_a_pass_has_no_duplicates(tiny_model_dir: Path) -> None:
    trainer = openrlhf(DPOTrainer, tiny_model_dir, rows_of(12, 2), openrlhf_dpo, train_batch_size=3)
    trainer.fit(trainer.args, 9)
    assert "duplicate" not in trainer.said.getvalue()
    assert "token ids from Python: 3 read, 3 kept" in trainer.said.getvalue()
    assert "plan: 15 training rows in 2 passes" in trainer.said.getvalue()


def test_the_method_names_the_scope_of_the_reference_point(tiny_model_dir: Path, fixture_tokenizer: Any) -> None:
    """Of each published trainer; coati's says what training without a loss mask is."""
    said = io.StringIO()
    voice = Voice(console=Console(file=said, width=10_000))
    policy, frozen = models(tiny_model_dir)
    CoatiTrainer(policy, frozen, None, optimizer_of(policy)[0], None, None, fixture_tokenizer, apply_loss_mask=False,
                 voice=voice).fit(loader_of(rows_of(6), coati_kto))
    assert "kto (KTO with the reference point of each micro-batch)" in said.getvalue()
    assert "apply_loss_mask=False trains on prompts too" in said.getvalue()
    said.truncate(0)
    policy.cfg = {"micro_batch_size": 3, "kto": {"preference_average_log_probs": True}}
    policy.tokenizer = fixture_tokenizer
    NemoTrainer({"max_epochs": 1}, policy, optimizer_of(policy)[0], None, loader_of(rows_of(6), nemo_kto), None, None,
                None, None, None, voice=voice).fit()
    assert "kto (KTO with the reference point of each micro-batch)" in said.getvalue()
    assert "log-probs are means per token" in said.getvalue()
