"""Train a set of small runs and print the SHA-256 of each result's weights.

A change that only moves code must not change a weight. Run this before and after the change, on the same machine:

    python tools/golden_runs.py --output before.json
    python tools/golden_runs.py --compare before.json

Hashes depend on the machine and the version of PyTorch, so they are not kept in the repository.
"""

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

WORDS = ["oak", "elm", "ash", "fir", "yew", "bay", "box", "fig", "may", "sea", "sky", "sun"]
SHARED = ["--batch-size", "8", "--epochs", "2", "--learning-rate", "1e-3", "--seed", "7", "--eval-fraction", "0.2",
          "--samples", "0"]
TEACHER = ["--teacher", "{other}", "--kd-weight", "0.3", "--divergence", "js"]

RUNS: dict[str, list[str]] = {
    "kto-one-pack": ["kto", "--data", "{feedback}"],
    "kto-many-packs": ["kto", "--data", "{feedback}", "--microbatch-tokens", "48"],
    "kto-padded": ["kto", "--data", "{feedback}", "--layout", "padded", "--microbatch-tokens", "64"],
    "kto-live": ["kto", "--data", "{feedback}", "--reference", "live", "--microbatch-tokens", "64"],
    "kto-workers": ["kto", "--data", "{feedback}", "--workers", "2", "--prefetch", "2", "--group-prompts", "true"],
    "bco-sft": ["kto", "--data", "{feedback}", "--loss", "bco,sft", "--loss-weights", "1,0.3",
                "--microbatch-tokens", "64"],
    "aot": ["dpo", "--data", "{pairs}", "--loss", "aot", "--microbatch-tokens", "64"],
    "dpo-teacher-ld": ["dpo", "--data", "{pairs}", "--ld-alpha", "0.5", *TEACHER, "--microbatch-tokens", "64"],
    "dpo-lora": ["dpo", "--data", "{pairs}", "--lora.rank", "4"],
    "simpo": ["dpo", "--data", "{pairs}", "--loss", "simpo", "--precision", "fp64"],
    "kd-live": ["kd", "--data", "{texts}", "--teacher", "{other}", "--microbatch-tokens", "64"],
    "kd-top-k": ["kd", "--data", "{texts}", "--teacher", "{other}", "--top-k", "4"],
    "sft": ["sft", "--data", "{texts}", "--microbatch-tokens", "64"],
    "moe-router": ["kto", "--model", "{moe}", "--data", "{feedback}", "--router-aux-weight", "0.02",
                   "--microbatch-tokens", "64"],
    "kto-two-ranks": ["2", "kto", "--data", "{feedback}", "--microbatch-tokens", "64"],
    "aot-two-ranks": ["2", "dpo", "--data", "{pairs}", "--loss", "aot"],
    "bco-two-ranks": ["2", "kto", "--data", "{feedback}", "--loss", "bco"],
    "kto-resumed": ["resume", "kto", "--data", "{feedback}", "--microbatch-tokens", "64", "--save-every", "3"],
}
"""Arguments of each run; a leading "2" starts two processes, "resume" stops after 4 steps and resumes."""


def make_inputs(folder: Path) -> dict[str, str]:
    """Write three small random models with one tokenizer, and rows for each method; their paths by name."""
    import torch  # not for --help
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

    names = ["<unk>", "<s>", "</s>", "?", ".", *WORDS]
    backend = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>",
                                        eos_token="</s>", pad_token="</s>")
    sizes = {"vocab_size": len(names), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1,
             "eos_token_id": 2, "pad_token_id": 2}
    made = {"model": (LlamaForCausalLM, LlamaConfig(**sizes)), "other": (LlamaForCausalLM, LlamaConfig(**sizes)),
            "moe": (MixtralForCausalLM, MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2))}
    for seed, (name, (kind, config)) in enumerate(made.items()):
        torch.manual_seed(seed)
        kind(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    generator = random.Random(0)

    def words(most: int) -> str:
        return " ".join(generator.choices(WORDS, k=generator.randint(1, most)))

    prompts = [words(12) + " ? " for _ in range(18)]
    rows = {"feedback": [{"prompt": generator.choice(prompts), "completion": words(10),
                          "label": generator.random() < 0.5} for _ in range(43)],
            "pairs": [{"prompt": generator.choice(prompts), "chosen": words(10) + " .", "rejected": words(10)}
                      for _ in range(43)],
            "texts": [{"prompt": generator.choice(prompts), "completion": words(10)} for _ in range(43)]}
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return {name: str(folder / name) for name in made} | {name: str(folder / f"{name}.jsonl") for name in rows}


def weights_hash(model: Path) -> str:
    """SHA-256 over every weights file of a model or adapter directory."""
    found = hashlib.sha256()
    for file in sorted(model.glob("*.safetensors")):
        found.update(file.read_bytes())
    return found.hexdigest()


def train(name: str, inputs: dict[str, str], folder: Path) -> str:
    """Train one run in its own processes and hash its weights."""
    first, *rest = (argument.format(**inputs) for argument in RUNS[name])
    arguments, output = [first, *rest], folder / name
    launcher = [sys.executable, "-m", "tropism"]
    if first == "2":
        arguments = rest
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "tropism"]
    elif first == "resume":
        arguments = rest
    model = [] if "--model" in arguments else ["--model", inputs["model"]]
    command = [*launcher, *arguments, *model, *SHARED, "--output", str(output), "--store", str(folder / "store" / name)]
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    if first == "resume":
        _run([*command, "--max-steps", "4"], settings)
        _run([*launcher, "resume", str(output), "--max-steps", "9"], settings)
    else:
        _run(command, settings)
    return weights_hash(output / "model")


def _run(command: list[str], settings: dict[str, str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env=settings, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def main() -> None:
    """Train the runs, then write or compare the hashes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of runs, comma-separated (default: all)")
    parser.add_argument("--output", type=Path, help="JSON file to write the hashes to")
    parser.add_argument("--compare", type=Path, help="JSON file of an earlier call to compare with")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(RUNS)
    if unknown := [name for name in names if name not in RUNS]:
        parser.error(f"unknown run {unknown[0]}. Known: {', '.join(RUNS)}")
    before = json.loads(options.compare.read_text(encoding="utf-8")) if options.compare else {}
    found, changed = {}, []
    with tempfile.TemporaryDirectory() as made:
        inputs = make_inputs(Path(made))
        for name in names:
            found[name] = train(name, inputs, Path(made))
            verdict = "" if name not in before else "  same" if before[name] == found[name] else "  CHANGED"
            changed += [name] if verdict.strip() == "CHANGED" else []
            print(f"{found[name][:16]}  {name}{verdict}", flush=True)
    if options.output:
        options.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if changed:
        sys.exit(f"weights changed: {', '.join(changed)}")


if __name__ == "__main__":
    main()
