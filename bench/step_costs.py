"""Count an optimizer step of known models without a GPU: bytes, FLOPs, launches and live memory.

    python bench/step_costs.py [--smoke] [--only NAME ...] [--json FILE]

The step is the product's own: 32 rows of 400 to 1000 tokens, KTO and DPO, bfloat16, with the settings that `tropism
plan` chooses for the device, on tensors without values. Necessary FLOPs are those of the layers and attention
without recomputation, and of a head that computes its logits once.
"""

import argparse
import json
import random
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, Qwen3Config, Qwen3MoeConfig

from tropism.config import METHODS
from tropism.data.rows import EncodedRow
from tropism.data.schedule import Schedule
from tropism.data.tree import Completion, token_ids
from tropism.distributed.world import World
from tropism.methods.build import build_method
from tropism.model.options import LoraOptions
from tropism.model.source import ModelSource
from tropism.train.planning.blueprint import Blueprint
from tropism.train.planning.choose import candidates, choose, gib
from tropism.train.planning.count import KINDS
from tropism.train.planning.devices import GPUS
from tropism.train.planning.memory import base_bytes
from tropism.train.planning.needs import measure
from tropism.train.setup.models import numerics_of
from tropism.train.setup.planned import tree_and_step
from tropism.train.setup.policy import PolicyBuilder
from tropism.train.step_packs import StepPlanner

_COMMON = {"max_position_embeddings": 8192}
QWEN_06 = Qwen3Config(hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
                      head_dim=128, intermediate_size=3072, vocab_size=151936, tie_word_embeddings=True, **_COMMON)
LLAMA_1 = LlamaConfig(hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
                      intermediate_size=8192, vocab_size=128256, tie_word_embeddings=True, **_COMMON)
QWEN_17 = Qwen3Config(hidden_size=2048, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
                      head_dim=128, intermediate_size=6144, vocab_size=151936, tie_word_embeddings=True, **_COMMON)
LLAMA_8 = LlamaConfig(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
                      intermediate_size=14336, vocab_size=128256, tie_word_embeddings=False, **_COMMON)
QWEN_30 = Qwen3MoeConfig(hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4,
                         head_dim=128, moe_intermediate_size=768, intermediate_size=6144, num_experts=128,
                         num_experts_per_tok=8, vocab_size=151936, tie_word_embeddings=False, **_COMMON)
TINY = LlamaConfig(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
                   intermediate_size=128, vocab_size=1000, tie_word_embeddings=True, **_COMMON)
CASES: dict[str, tuple[Any, LoraOptions, str]] = {
    "Qwen3-0.6B": (QWEN_06, LoraOptions(), "h100-80gb"),
    "Llama-3.2-1B": (LLAMA_1, LoraOptions(), "h100-80gb"),
    "Qwen3-1.7B": (QWEN_17, LoraOptions(), "h100-80gb"),
    "Llama-3.1-8B LoRA 16": (LLAMA_8, LoraOptions(rank=16), "h100-80gb"),
    "Llama-3.1-8B LoRA 16 nf4": (LLAMA_8, LoraOptions(rank=16, quantize="nf4"), "rtx4090"),
    "Qwen3-30B-A3B LoRA 16": (QWEN_30, LoraOptions(rank=16), "h100-80gb"),
}


def rows_of(method: str, vocabulary: int, longest: int, count: int) -> list[EncodedRow]:
    """Rows of random ids: the lengths of public feedback data, 40% prompt."""
    drawn = random.Random(0)

    def ids(length: int) -> list[int]:
        return [drawn.randrange(3, vocabulary) for _ in range(length)]

    found = []
    for number in range(count):
        length = drawn.randrange(longest * 2 // 5, longest)
        prompt = token_ids(ids(length * 2 // 5))
        sides = tuple(Completion.supervised(ids(length - len(prompt))) for _ in range(2 if method == "dpo" else 1))
        found.append(EncodedRow(str(number), f"row {number}", prompt, sides,
                                bool(number % 2) if method == "kto" else None, prompt.tobytes()))
    return found


def counted(name: str, config: Any, lora: LoraOptions, device: str, method: str, longest: int,
            rows: int) -> dict[str, Any]:
    """One line of the table."""
    gpu = GPUS[device]
    with tempfile.TemporaryDirectory() as directory:
        config.architectures = [{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM",
                                 "qwen3_moe": "Qwen3MoeForCausalLM"}[config.model_type]]
        config.save_pretrained(directory)
        options = METHODS[method](model=directory, data="d", output="o", batch_size=rows, lora=lora)
        numerics = numerics_of(options, World(0, 1, torch.device("cuda")))
        policy = PolicyBuilder(ModelSource(directory), lora)
        module = policy.skeleton(numerics)
        plain = tuple(policy.plain_names(False)) if lora.quantize else ()
    data = rows_of(method, config.vocab_size, longest, rows)
    plan = build_method(options.view, options.values, [row.desirable for row in data], False)
    schedule = Schedule(tuple(range(rows)), rows, 0, 1, None, False, False, plan.needs_reference_point)
    tried = candidates(options, "cuda", None)
    planner = StepPlanner(data, schedule, plan, "tree", tried[0].microbatch_tokens, 2 * longest,
                          World(0, 1, torch.device("cpu")))
    blueprint = Blueprint(options, module, "tree", numerics.precision, plan, "stored", gpu=True, narrows=policy.adapts,
                          bits=4 if lora.quantize else 0, plain=plain)
    base = base_bytes(torch.device("cuda"), 0)
    choice = choose(tried, gpu.memory_bytes, False,
                    lambda settings: measure(blueprint, planner, tried[0].microbatch_tokens, base, settings),
                    *tree_and_step(planner), "cuda")
    step = replace(planner, microbatch_tokens=choice.settings.microbatch_tokens).packs_of(1)
    count = blueprint.count([step], choice.settings.checkpointing, gpu.clock)
    least = count if choice.settings.checkpointing == "none" else blueprint.count([step])
    supervised = sum(len(pack.batch.target_ids) for pack in step.packs)
    looked = sum(len(pack.batch.target_ids) for pack in (*step.mismatched, *step.leaves))
    head = 2 * config.hidden_size * config.vocab_size * ((2 if policy.adapts else 3) * supervised + looked)
    necessary = least.costs["products"].flops + least.costs["attention"].flops + head
    total = count.total()
    return {"model": name, "method": method, "device": device, "settings": choice.settings.state(), "fits": choice.fits,
            "peak_gib": round((count.peak + base) / 2**30, 2),
            "predicted_gib": round(sum(choice.components.values()) / 2**30, 2),
            "tflop": round(total.flops / 1e12, 2), "necessary_over_executed": round(necessary / total.flops, 3),
            "launches": round(total.launches), "waits": round(count.waits), "seconds": round(gpu.seconds(count), 3),
            **{f"{kind}_gb": round(count.costs[kind].bytes / 1e9, 1) for kind in KINDS},
            "components_gib": {key: round(size / 2**30, 2) for key, size in choice.components.items()}}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a tiny model, to see that the script works")
    parser.add_argument("--only", nargs="*", help="parts of names of models")
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    given = parser.parse_args()
    cases = {"tiny": (TINY, LoraOptions(), "rtx4090"), "tiny LoRA nf4": (TINY, LoraOptions(rank=4, quantize="nf4"),
                                                                       "rtx4090")} if given.smoke else CASES
    lines = []
    for name, case in cases.items():
        if given.only and not any(part in name for part in given.only):
            continue
        for method in ("kto", "dpo"):
            began = time.monotonic()
            line = counted(name, *case, method, *((60, 3) if given.smoke else (1000, 32)))
            lines.append(line)
            settings = line["settings"]
            print(f"{name}, {method}: {line['peak_gib']} GiB of {gib(GPUS[case[2]].memory_bytes)} "
                  f"({settings['microbatch_tokens']} tokens, {settings['checkpointing']}), {line['tflop']} TFLOP "
                  f"({line['necessary_over_executed']:.2f} necessary), GB: "
                  + ", ".join(f"{kind} {line[f'{kind}_gb']}" for kind in KINDS)
                  + f"; {line['launches']:,} launches, {line['waits']} waits, {line['seconds']} s "
                  f"(counted in {time.monotonic() - began:.0f} s)", flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(lines, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
