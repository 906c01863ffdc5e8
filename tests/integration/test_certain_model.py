"""A model that is certain of its completions: log-probs of exactly 0, which are valid everywhere."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from helpers import fixture_parts
from integration.conftest import records
from tropism.commands.scoring import figures, score
from tropism.commands.scoring import records as scored_records
from tropism.config import METHODS, ScoringOptions
from tropism.errors import ReferenceMismatchError
from tropism.runner import RunResult, run
from tropism.train.frozen import reference as references

CERTAIN = {"?": "Y", "Y": "e", "e": "s", "!": "N", "N": "o"}


@pytest.fixture(scope="module")
def certain_dir(tmp_path_factory: pytest.TempPathFactory, fixture_tokenizer: Any) -> Path:
    """A model without attention or MLP that answers `?` with `Yes` and `!` with `No`, each with probability 1."""
    parts = fixture_parts()
    ids, size = parts["ids"], 128
    assert parts["vocab_size"] <= size
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=parts["vocab_size"], hidden_size=size, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=128, tie_word_embeddings=False,
        bos_token_id=ids["bos"], eos_token_id=ids["eos"], pad_token_id=ids["pad"]))
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(parts["vocab_size"], size))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        for one, other in CERTAIN.items():
            before, after = (fixture_tokenizer.convert_tokens_to_ids(name) for name in (one, other))
            model.lm_head.weight[after, before] = 30.0
        for last in "so":
            model.lm_head.weight[ids["eos"], fixture_tokenizer.convert_tokens_to_ids(last)] = 30.0
    path = tmp_path_factory.mktemp("models") / "certain"
    model.save_pretrained(path)
    fixture_tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def data(tmp_path: Path) -> dict[str, str]:
    """Rows of each kind. The last two labeled completions are not certain: without any gradient a run stops."""
    singles = [{"prompt": f"{word}{mark}", "completion": answer, "label": number % 2 == 0}
               for number, word in enumerate(["oak", "elm", "ash", "fir"])
               for mark, answer in (("?", "Yes"), ("!", "No"))]
    singles += [{"prompt": "bay?", "completion": text, "label": text == "No"} for text in ("No", "on")]
    pairs = [{"prompt": f"{word}{mark}", "chosen": answers[0], "rejected": answers[1]}
             for word in ("oak", "elm", "ash", "fir") for mark, answers in (("?", ("Yes", "No")), ("!", ("Yes", "No")))]
    found = {}
    for name, rows in (("single", singles), ("paired", pairs)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        found[name] = str(path)
    return found


def train(method: str, model: Path, data: str, output: Path, **options: Any) -> RunResult:
    return run(METHODS[method](model=str(model), data=data, output=str(output), store=str(output.parent / "store"),
                               batch_size=10, learning_rate=1e-3, samples=0, **options))


@pytest.mark.some(5)
@pytest.mark.parametrize(("method", "options"), [
    *(("kto", {"loss": name}) for name in ("kto", "apo_zero_unpaired", "bco,sft")),
    *(("dpo", {"loss": name}) for name in ("sigmoid", "ipo_mean", "exo_pair", "aot", "simpo", "cpo", "orpo")),
    ("dpo", {"wpo": True}), ("dpo", {"ld_alpha": 0.5}), ("sft", {}), ("kd", {}), ("kd", {"top_k": 4}),
    ("kto", {"precision": "fp64"}), ("kto", {"reference": "live"}), ("kto", {"layout": "padded"})])
def test_it_trains(tmp_path: Path, certain_dir: Path, data: dict[str, str], method: str,
                   options: dict[str, Any]) -> None:
    """N1, R4: every figure is finite, a second run reads the stored zeros, and the guards stay silent about them."""
    if method == "kd":
        options = {**options, "teacher": str(certain_dir)}
    source = data["paired" if method == "dpo" else "single"]
    for number in range(2 if options == {"loss": "kto"} else 1):
        result = train(method, certain_dir, source, tmp_path / str(number), eval_data=source, max_steps=3, **options)
    found = records(result)
    assert all(math.isfinite(value) for record in found for value in record.values() if isinstance(value, float))
    assert all(weight.isfinite().all() for weight in load_file(result.model / "model.safetensors").values())


@pytest.mark.parametrize("reference", [False, True])
def test_it_is_evaluated_and_scored(certain_dir: Path, data: dict[str, str], tmp_path: Path, reference: bool) -> None:
    """Perplexity 1, KL 0, rewards 0: no division by 0 and no -0.0."""
    other = {"reference": str(certain_dir)} if reference else {}
    certain = tmp_path / "certain.jsonl"
    certain.write_text("".join(Path(data["single"]).read_text().splitlines(keepends=True)[:-2]))
    found = score(str(certain_dir), ScoringOptions(data=str(certain), store=str(tmp_path / "store"), **other))
    metrics = figures(found, 0.1)
    assert metrics["perplexity"] == 1.0
    assert all(math.isfinite(value) for value in metrics.values())
    assert all(str(row["logps"]) == "0.0" for row in scored_records(found, 0.1))
    if reference:
        assert {row["reward"] for row in scored_records(found, 0.1)} == {0.0}


@pytest.mark.parametrize(("value", "fine"), [(1e-6, True), (0.5, False), (float("nan"), False), (float("inf"), False)])
def test_only_what_is_above_rounding_is_refused(
        tmp_path: Path, certain_dir: Path, data: dict[str, str], monkeypatch: pytest.MonkeyPatch, value: float,
        fine: bool) -> None:
    """N1, R4: the error names the row, not only ids."""
    real = references._score_pack
    monkeypatch.setattr(references, "_score_pack", lambda *given: [value for _ in real(*given)])
    if not fine:
        with pytest.raises(ReferenceMismatchError, match=r"single\.jsonl:\d+.*the log-prob .*Nothing was trained"):
            train("kto", certain_dir, data["single"], tmp_path / "run", max_steps=1)
        return
    train("kto", certain_dir, data["single"], tmp_path / "run", max_steps=1, allow_reference_mismatch=True)
