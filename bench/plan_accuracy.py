"""Compare what `tropism plan` predicts with what a run takes on this machine: peak memory and time of a step.

    python bench/plan_accuracy.py --model M --data-dir D [--only NAME ...] [--json FILE]
    python bench/plan_accuracy.py --smoke

Each configuration runs in a process of its own, so that its peak of resident memory is its own. D has KTO, DPO and
SFT rows in kto.jsonl, pairs.jsonl and sft.jsonl. Time is calibrated once: by the ratio of measured to predicted of
the first configuration.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BASE = ["--batch-size", "4", "--max-steps", "3", "--samples", "0", "--microbatch-tokens", "512"]
CONFIGURATIONS: dict[str, tuple[str, list[str], int]] = {
    "KTO": ("kto", [], 1),
    "DPO": ("dpo", [], 1),
    "DPO, LoRA": ("dpo", ["--lora.rank", "16"], 1),
    "DPO, full checkpointing": ("dpo", ["--checkpointing", "full"], 1),
    "DPO, selective checkpointing": ("dpo", ["--checkpointing", "selective"], 1),
    "KD, teacher in memory": ("kd", [], 1),
    "SFT": ("sft", [], 1),
    "DPO, two processes": ("dpo", ["--parallel.shard", "2"], 2),
}
_DATA = {"kto": "kto.jsonl", "dpo": "pairs.jsonl", "kd": "sft.jsonl", "sft": "sft.jsonl"}


def tropism(command: list[str], processes: int = 1) -> None:
    """Run a command of tropism in processes of its own."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m",
             "tropism"] if processes > 1 else [sys.executable, "-m", "tropism"]
    done = subprocess.run([*start, *command], capture_output=True, text=True, env={**os.environ})
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr[-2000:]}")


def compared(name: str, model: str, data: Path, root: Path, extra: list[str]) -> dict[str, Any]:
    """Predicted and measured peak and time of one configuration."""
    method, options, processes = CONFIGURATIONS[name]
    own = [method, "--model", model, "--data", str(data / _DATA[method]), "--store", str(root / "store"), *BASE,
           *options, *extra, *(["--teacher", model] if method == "kd" else [])]
    place, file = root / name.replace(" ", "-").replace(",", ""), root / "plan.json"
    tropism(["plan", *own, "--device", "cpu", "--json", str(file)])
    plan = json.loads(file.read_text(encoding="utf-8"))
    tropism([*own, "--output", str(place)], processes)
    records = [json.loads(line) for line in (place / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [record for record in records if record.get("split") == "train"]
    peak = max(record["memory/peak_gib"] for record in steps) * 2**30
    seconds = statistics.median(record["step_time"] for record in steps[1:])
    return {"name": name, "predicted_gib": round(plan["peak_bytes"] / 2**30, 3), "measured_gib": round(peak / 2**30, 3),
            "peak_ratio": round(plan["peak_bytes"] / peak, 3), "predicted_s": round(plan["seconds_per_step"], 3),
            "measured_s": round(seconds, 3), "components": plan["components"]}


def smoke(root: Path) -> tuple[str, Path]:
    """A tiny random model with a byte tokenizer, and rows."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(["<eos>", *letters])}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>").save_pretrained(root / "m")
    LlamaForCausalLM(LlamaConfig(
        vocab_size=len(letters) + 1, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
        pad_token_id=0)).save_pretrained(root / "m")
    rows = [{"prompt": f"Question {n}?", "completion": f"Answer {n * n}.", "label": bool(n % 2)} for n in range(12)]
    (root / "kto.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(root / "m"), root


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a tiny model and one configuration, to see that it works")
    parser.add_argument("--model", help="model directory")
    parser.add_argument("--data-dir", type=Path, help="directory of kto.jsonl, pairs.jsonl and sft.jsonl")
    parser.add_argument("--only", nargs="*", help="names of configurations")
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    parser.add_argument("--option", nargs="*", default=[], help="further options of the runs, such as max-length=512")
    given = parser.parse_args()
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        model, data = smoke(root) if given.smoke else (given.model, given.data_dir)
        if model is None or data is None:
            parser.error("--model and --data-dir are required without --smoke")
        names = ["KTO"] if given.smoke else given.only or list(CONFIGURATIONS)
        for name in names:
            began = time.monotonic()
            line = compared(name, model, data, root, [f"--{option}" for option in given.option])
            lines.append(line)
            scale = lines[0]["measured_s"] / lines[0]["predicted_s"]
            line["time_ratio"] = round(scale * line["predicted_s"] / line["measured_s"], 3)
            print(f"{name}: peak {line['predicted_gib']} GiB predicted, {line['measured_gib']} measured "
                  f"({line['peak_ratio']:.2f}); step {line['predicted_s']} s predicted, {line['measured_s']} measured "
                  f"(calibrated {line['time_ratio']:.2f}); {time.monotonic() - began:.0f} s", flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(lines, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
