"""Resident memory of a run with `--memory-limit`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

MIB = 2**20
SPACE = 200
"""MiB that the run may use beside the program."""
_CHILD = """
import re, sys
from pathlib import Path
import tropism.train.setup.build, transformers.models.llama.modeling_llama
from tropism.cli.app import main

def kib(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text()).group(1))

limit = kib("VmRSS") // 1024 + int(sys.argv[1])
given = sys.argv[2:]
assert main([*given, "--output=kept", f"--memory-limit={limit}MiB"]) == 0
print("KEPT", kib("VmHWM") / 1024, limit)
assert main([*given, "--output=large", "--microbatch-tokens=2048", "--checkpointing=none"]) == 0
print("LARGE", kib("VmHWM") / 1024, limit)
"""


@pytest.fixture
def wide_model(tmp_path: Path, fixture_tokenizer: Any) -> Path:
    """A random Llama whose activations of 2,048 tokens take far more than its weights."""
    torch.manual_seed(0)
    path = tmp_path / "wide"
    LlamaForCausalLM(LlamaConfig(
        vocab_size=len(fixture_tokenizer), hidden_size=128, intermediate_size=1024, num_hidden_layers=8,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=512)).save_pretrained(path)
    fixture_tokenizer.save_pretrained(path)
    return path


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_resident_memory_keeps_to_the_limit(wide_model: Path, tmp_path: Path) -> None:
    """A limit that large packs exceed by a third."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n}" * 4, "completion": "ab" * 90}) + "\n" for n in range(12)),
                    encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(SPACE), "sft", f"--model={wide_model}", f"--data={rows}", "--store=store",
         "--batch-size=12", "--max-steps=1"], capture_output=True, text=True, check=False, cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    found = {line.split()[0]: [float(word) for word in line.split()[1:]]
             for line in done.stdout.splitlines() if line.startswith(("KEPT", "LARGE"))}
    assert "predicted of the limit" in done.stdout + done.stderr
    (kept, limit), (large, _) = found["KEPT"], found["LARGE"]
    assert kept <= limit < large, (kept, limit, large)
