"""`tropism evaluate` and `tropism score`: what a model thinks of rows, without training."""

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import parquet
from transformers import AutoModelForCausalLM

from processes import run_ranks
from tropism.cli.app import main
from tropism.commands.scoring import figures, score
from tropism.config import ScoringOptions


@pytest.fixture(scope="module")
def other_model_dir(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory, fixture_tokenizer: Any) -> Path:
    """The tiny model with its weights moved a little."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * torch.randn_like(weight)
    path = tmp_path_factory.mktemp("other") / "model"
    model.save_pretrained(path)
    fixture_tokenizer.save_pretrained(path)
    return path


def naive(directory: Path, prompt: str, completion: str, tokenizer: Any) -> tuple[float, int, torch.Tensor]:
    """Summed log-prob, tokens, and next-token log-probs of a completion and EOS, by plain transformers."""
    model = AutoModelForCausalLM.from_pretrained(directory).double().eval()
    lead = tokenizer(prompt)["input_ids"]
    rest = [*tokenizer(completion)["input_ids"], tokenizer.eos_token_id]
    with torch.no_grad():
        logits = model(torch.tensor([lead + rest])).logits[0]
    logps = torch.log_softmax(logits[len(lead) - 1 : -1], dim=-1)
    return float(logps.gather(1, torch.tensor(rest)[:, None]).sum()), len(rest), logps


def test_scores_equal_plain_transformers(tiny_model_dir: Path, other_model_dir: Path, tmp_path: Path,
                                         fixture_tokenizer: Any) -> None:
    """Log-probs of both models and the exact KL between them, row by row."""
    rows = [{"id": "a", "prompt": "Add a fruit: ", "chosen": "plum", "rejected": "brick"},
            {"id": "b", "prompt": "Add a tool: ", "chosen": "plane", "rejected": "soup"}]
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = tmp_path / "scores.jsonl"
    assert main(["score", str(tiny_model_dir), "--data", str(data), "--reference", str(other_model_dir),
                 "--output", str(output), "--beta", "0.5", "--precision", "fp64"]) == 0
    for row, found in zip(rows, map(json.loads, output.read_text().splitlines()), strict=True):
        assert found["id"] == row["id"]
        for side in ("chosen", "rejected"):
            ours, tokens, policy = naive(tiny_model_dir, row["prompt"], row[side], fixture_tokenizer)
            theirs, _, reference = naive(other_model_dir, row["prompt"], row[side], fixture_tokenizer)
            assert found[f"{side}_tokens"] == tokens
            assert found[f"{side}_logps"] == pytest.approx(ours, abs=1e-5)
            assert found[f"{side}_reference_logps"] == pytest.approx(theirs, abs=1e-5)
            assert found[f"{side}_reward"] == pytest.approx(0.5 * (ours - theirs), abs=1e-5)
            assert found[f"{side}_kl"] == pytest.approx(float((policy.exp() * (policy - reference)).sum()), abs=1e-5)
        assert found["margin"] == pytest.approx(found["chosen_reward"] - found["rejected_reward"])


def test_evaluating_agrees_with_the_evaluation_of_a_run(train: Callable[..., Any], data_of: dict[str, Path],
                                                        tiny_model_dir: Path, tmp_path: Path) -> None:
    """L5: the last evaluation of a run, found again from its directory; KTO rows and pairs."""
    for method in ("kto", "dpo"):
        held_out = str(data_of[method])
        again = train(method, max_steps=3, learning_rate=1e-2, eval_data=held_out)
        out = tmp_path / f"{method}.json"
        assert main(["evaluate", str(again.directory), "--data", held_out, "--reference", str(tiny_model_dir),
                     "--json", str(out)]) == 0
        found = json.loads(out.read_text())["metrics"]
        key = "rewards/auc" if method == "kto" else "rewards/accuracies"
        for name in (key, f"{key}_low", f"{key}_high", "rewards/chosen", "rewards/rejected", "logps/chosen",
                     "logps/rejected", "rewards/margins", "baselines/length"):
            assert found[name] == pytest.approx(again.after[name], rel=1e-4, abs=1e-5), name


def test_a_model_against_itself(tiny_model_dir: Path, feedback: Path) -> None:
    """Rewards and KL are 0, and the ranking is a coin's."""
    scores = score(str(tiny_model_dir), ScoringOptions(data=str(feedback), reference=str(tiny_model_dir)))
    found = figures(scores, 0.1)
    assert found["rewards/auc"] == 0.5
    assert found["rewards/chosen"] == found["rewards/rejected"] == 0.0
    assert found["kl/token"] == pytest.approx(0.0, abs=1e-7)


def test_perplexity_of_single_completions(tiny_model_dir: Path, tmp_path: Path, fixture_tokenizer: Any) -> None:
    """Per supervised token of the whole set, terminators included; no rewards without labels."""
    rows = [("Add a fruit: ", "plum"), ("Add a tool: ", "a very long plane")]
    data = tmp_path / "sft.jsonl"
    data.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in rows))
    plain = [naive(tiny_model_dir, *row, fixture_tokenizer) for row in rows]
    found = figures(score(str(tiny_model_dir), ScoringOptions(data=str(data))), 0.1)
    expected = math.exp(-sum(total for total, _, _ in plain) / sum(tokens for _, tokens, _ in plain))
    assert found["perplexity"] == pytest.approx(expected, rel=1e-5)
    assert not [key for key in found if key.startswith(("rewards", "kl", "baselines"))]


def test_parquet_with_the_columns_of_the_rows(tiny_model_dir: Path, feedback: Path, tmp_path: Path) -> None:
    output = tmp_path / "scores.parquet"
    assert main(["score", str(tiny_model_dir), "--data", str(feedback), "--output", str(output),
                 "--keep-columns"]) == 0
    table = parquet.read_table(output).to_pylist()
    rows = [json.loads(line) for line in feedback.read_text().splitlines()]
    assert [row["completion"] for row in table] == [row["completion"] for row in rows]
    assert all(row["logps"] < 0 < row["tokens"] for row in table)


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["--output", "scores.csv"], "scores are written as .jsonl or .parquet"),
    (["--output", "there.jsonl"], "there.jsonl already exists"),
    (["--output", "new.jsonl", "--reference", "/nowhere/model"], "directory not found"),
    (["--output", "new.jsonl", "--beta", "0"], "--beta"),
])
def test_refusals_cost_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, feedback: Path,
                               tiny_model_dir: Path, tmp_path: Path, arguments: list[str], sentence: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.jsonl").write_text("kept\n")
    assert main(["score", str(tiny_model_dir), "--data", str(feedback), *arguments]) == 2
    assert sentence in capsys.readouterr().err
    assert Path("there.jsonl").read_text() == "kept\n"
    assert not Path("new.jsonl").exists()


def _score(rank: int, size: int, port: int, arguments: list[str]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port)}
    sys.exit(main(["score", *arguments]))


def test_several_processes_write_once(tiny_model_dir: Path, feedback: Path, tmp_path: Path) -> None:
    """X1: the packs are shared, the main process alone writes, and none fails for what it has written."""
    assert run_ranks(2, _score, [str(tiny_model_dir), "--data", str(feedback), "--output", str(tmp_path / "two.jsonl")],
                     ) == [0, 0]
    assert main(["score", str(tiny_model_dir), "--data", str(feedback), "--output", str(tmp_path / "one.jsonl")]) == 0
    one, two = ([json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
                for name in ("one.jsonl", "two.jsonl"))
    assert [row["id"] for row in one] == [row["id"] for row in two]
    assert [row["logps"] for row in two] == pytest.approx([row["logps"] for row in one], rel=1e-6)
