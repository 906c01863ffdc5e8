"""An adapter on a GGUF file: no server loads the pair, which the run and its export say, and merging makes a model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from helpers import kind_of_tokenizer
from tropism.cli.app import main

pytest.importorskip("gguf", reason="the extra gguf is not installed")
NOTE = "No server loads an adapter on a GGUF file: `tropism export RUN --to DIR --merge` writes a plain model."


def test_from_training_to_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = kind_of_tokenizer("byte level")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=96, tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id)).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    gguf = tmp_path / "base.gguf"
    script = Path(__file__).parents[1] / "gguf_writing.py"
    subprocess.run([sys.executable, script, tmp_path / "base", f"--outfile={gguf}", "--outtype=f32", "--model-name=b"],
                   check=True)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": "Name a", "completion": " lamp"}) + "\n" for _ in range(4)))
    run = tmp_path / "run"
    assert main(["sft", "--model", str(gguf), "--data", str(data), "--output", str(run), "--lora.rank", "2",
                 "--max-steps", "1", "--batch-size", "4", "--learning-rate", "0.1"]) == 0
    said = capsys.readouterr().out
    assert said.count(NOTE) == 2
    assert said.rindex(NOTE) > said.index("next:") > said.index(NOTE)
    assert main(["export", str(run), "--to", str(tmp_path / "alone")]) == 0
    assert NOTE in capsys.readouterr().out
    card = (tmp_path / "alone" / "README.md").read_text()
    assert "No server loads an adapter on a GGUF file" in card
    assert "vllm serve" not in card
    assert main(["export", str(run), "--to", str(tmp_path / "out"), "--merge"]) == 0
    assert NOTE not in capsys.readouterr().out
    assert "vllm serve ./out" in (tmp_path / "out" / "README.md").read_text()
    merged, base = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("out", "base"))
    assert not torch.equal(merged.model.layers[0].mlp.up_proj.weight, base.model.layers[0].mlp.up_proj.weight)
    for option in ("--gguf=q8_0", "--ollama"):
        assert main(["export", str(run), "--to", str(tmp_path / "no"), option]) == 2
        assert f"{option.split('=')[0]}: {run} trained an adapter, and only a plain model" in capsys.readouterr().err
