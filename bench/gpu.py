"""One command for a machine with a GPU: exactness, time and memory beside TRL, synchronizations, and a profile.

    PYTORCH_ALLOC_CONF=expandable_segments:True python bench/gpu.py --output gpu.jsonl

A exactness of the tree layout in fp32 and bf16 on seven architectures; B time and peak memory of KTO, DPO and KD at the
shapes of Qwen3-0.6B and Llama-3.2-1B with random weights beside tuned TRL, after a check of the work; C a step under
`set_sync_debug_mode("error")`, and its profile. Every result is a line of JSON. No part starts after --limit-s. The
exit code is 1 if a part failed. Without a GPU only --smoke runs.
"""

import argparse
import importlib.util
import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}

CELLS = ["qwen3-0.6b:kto", "qwen3-0.6b:dpo", "llama-1.2b:kto", "llama-1.2b:dpo", "llama-1.2b:kd"]


def exactness(device: Any, smoke: bool) -> list[dict[str, Any]]:
    """For each architecture: log-probs and gradients of both layouts against the model's own, in fp32 and bf16."""
    from transformers import (
        Gemma2Config,
        Gemma3TextConfig,
        GptOssConfig,
        LlamaConfig,
        MistralConfig,
        Qwen2Config,
        Qwen3Config,
    )

    from tropism.data.tree import Completion, PromptTree, token_ids
    from tropism.model import capped_attention

    sizes = {"vocab_size": 2048, "hidden_size": 64 if smoke else 256, "intermediate_size": 128 if smoke else 512,
             "num_hidden_layers": 2 if smoke else 4, "num_attention_heads": 8, "num_key_value_heads": 2,
             "max_position_embeddings": 2048}
    configs = {"llama": LlamaConfig(**sizes), "qwen2": Qwen2Config(**sizes),
               "qwen3": Qwen3Config(**sizes, head_dim=64), "mistral": MistralConfig(**sizes, sliding_window=48),
               "gemma3": Gemma3TextConfig(**sizes, head_dim=64, sliding_window=32),
               "gemma2": Gemma2Config(**sizes, head_dim=64, sliding_window=32),
               "gpt_oss": GptOssConfig(**sizes, head_dim=64, sliding_window=32, num_local_experts=4)}
    generator, most = random.Random(1), 20 if smoke else 200

    def ids() -> Any:
        return token_ids([generator.randrange(5, 2048) for _ in range(generator.randint(2, most))])

    trees = [PromptTree(ids(), tuple(Completion.supervised(ids()) for _ in range(generator.randint(1, 4))))
             for _ in range(8)]
    return [{"kind": "exact", "architecture": name, **_exact(config, trees, device),
             "flex": bool(capped_attention._compiled.cache_info().currsize)} for name, config in configs.items()]


def _exact(config: Any, trees: Any, device: Any) -> dict[str, Any]:
    """Largest differences from the padded layout in fp32: of log-probs in nats per token, of gradients by norm."""
    import torch
    from transformers import AutoModelForCausalLM

    from tropism.data.batching.collate import collate
    from tropism.model.language_model import LanguageModel
    from tropism.model.layout_check import plain_logps

    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device).eval()
    lengths = torch.tensor([one.length for tree in trees for one in tree.completions], device=device)
    pull = torch.randn(len(lengths), generator=torch.Generator().manual_seed(3)).to(device)
    logps, grads, own = {}, {}, None
    for layout, precision in (("padded", "fp32"), ("tree", "fp32"), ("padded", "bf16"), ("tree", "bf16")):
        model = LanguageModel(module, layout, precision, device)  # type: ignore[arg-type]
        module.zero_grad()
        found = model.logps(collate(trees, layout).to(device))  # type: ignore[arg-type]
        (found * pull).sum().backward()
        logps[layout, precision] = found.detach().double()
        grads[layout, precision] = {name: weight.grad.double().clone() for name, weight in module.named_parameters()}
        own = plain_logps(model, trees) if own is None else own
    truth = logps["padded", "fp32"], grads["padded", "fp32"]

    def apart(key: tuple[str, str]) -> float:
        return float(((logps[key] - truth[0]).abs() / lengths).max())

    def bent(key: tuple[str, str]) -> float:
        return max(float((grads[key][name] - grad).norm() / grad.norm().clamp_min(1e-12))
                   for name, grad in truth[1].items())

    tree, narrow, padded = ("tree", "fp32"), ("tree", "bf16"), ("padded", "bf16")
    assert own is not None
    return {"own": float(((own - truth[0]).abs() / lengths).max()), "tree_fp32": apart(tree), "grad_fp32": bent(tree),
            "tree_bf16": apart(narrow), "padded_bf16": apart(padded), "grad_bf16": bent(narrow),
            "grad_padded_bf16": bent(padded),
            "ok": apart(tree) < 1e-4 and bent(tree) < 1e-3 and apart(narrow) < 2 * apart(padded) + 1e-3
                  and bent(narrow) < 1.5 * bent(padded) + 1e-3}


def side_by_side(cell: Any, rivals: list[str], apart: bool) -> list[dict[str, Any]]:
    """A comparison; the other sides take steps in turn with ours."""
    from harness.comparison import compare

    record = compare(cell, rivals, apart=apart)
    return [{"kind": "compared", **record, "ok": record["same_work"]}]


def where_it_goes(cell: Any, folder: Path) -> list[dict[str, Any]]:
    """A step that may not wait for the device, and the operations of a step by their own time."""
    import torch
    from harness.work import make_job

    from tropism.distributed import connect
    from tropism.observe.console import Voice
    from tropism.runner import Run
    from tropism.train.step import train_step

    job = make_job(cell)
    cuda = torch.cuda.is_available()
    with connect() as world, tempfile.TemporaryDirectory() as store:
        run = Run(cell.options(store), world, Voice(loud=False))
        engine = run.build()
        packs = [run.planner.packs_of(number) for number in job.numbers]
        train_step(engine, packs[0])
        waits = ""
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                train_step(engine, packs[1])
            except RuntimeError:
                waits = traceback.format_exc(limit=-4)
            torch.cuda.set_sync_debug_mode("default")
        kinds = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if cuda else [])]
        with torch.profiler.profile(activities=kinds) as profile:
            train_step(engine, packs[-1])
            if cuda:
                torch.cuda.synchronize()
        table = profile.key_averages().table(sort_by=f"self_{'cuda' if cuda else 'cpu'}_time_total", row_limit=40)
        (folder / "profile.txt").write_text(table, encoding="utf-8")
    print("\n".join(line[:150] for line in table.splitlines()[:24]))
    return [{"kind": "syncs", "ok": not waits, "waits": waits},
            {"kind": "profile", "file": str(folder / "profile.txt")}]


def card() -> list[dict[str, Any]]:
    """What the card does at best: a large product, and a copy."""
    import torch
    from harness.comparison import machine
    from harness.flops import measured_peak

    device = torch.device("cuda", 0)
    source = torch.empty(2**30, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(10):
        target.copy_(source)
    torch.cuda.synchronize()
    speed = 20 * source.nbytes / (time.perf_counter() - began)
    return [{"kind": "card", **machine(), "bf16_tflops": measured_peak(device, torch.bfloat16) / 1e12,
             "copy_tb_per_s": speed / 1e12}]


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="ABC", help="parts to run (default: ABC)")
    parser.add_argument("--cells", nargs="+", default=CELLS,
                        help=f"model:method of part B (default: {' '.join(CELLS)})")
    parser.add_argument("--data-dir", type=Path, help="directory of real rows (default: $TROPISM_TEST_DATA)")
    parser.add_argument("--batch-size", type=int, default=32, help="rows of a step (default: 32)")
    parser.add_argument("--steps", type=int, default=8, help="steps of a comparison (default: 8)")
    parser.add_argument("--limit-s", type=float, default=450.0, help="start no part after this (default: 450)")
    parser.add_argument("--output", type=Path, default=Path("gpu.jsonl"), help="file to add to (default: gpu.jsonl)")
    parser.add_argument("--smoke", action="store_true", help="try it on a CPU: a tiny random model, without TRL")
    return parser.parse_args()


def main() -> int:
    """Run the parts; 1 if one failed."""
    args = parse_arguments()
    import torch
    from harness import inputs
    from harness.work import Cell

    if not torch.cuda.is_available() and not args.smoke:
        print("there is no GPU: run `python bench/table.py` on a CPU, or pass --smoke", file=sys.stderr)
        return 2
    rivals = ["trl-tuned"] if importlib.util.find_spec("trl") and not args.smoke else ["plain"]
    began, good = time.monotonic(), True
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

    def do(part: Callable[[], list[dict[str, Any]]], what: str) -> None:
        nonlocal good
        lines: list[dict[str, Any]] = [{"kind": "skipped", "what": what}]
        if time.monotonic() - began < args.limit_s:
            try:
                lines = part()
            except Exception as error:  # the other parts still run
                traceback.print_exc()
                lines = [{"kind": "failed", "what": what, "error": repr(error), "ok": False}]
        good &= all(line.get("ok", True) for line in lines)
        with args.output.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        print("\n".join(json.dumps(line)[:1000] for line in lines), flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if args.smoke:
            args.output, args.cells, args.batch_size, args.steps = folder / "gpu.jsonl", ["tiny:kto"], 4, 2

        def cell(name: str) -> Cell:
            shape, method = name.split(":")
            if args.smoke:
                model, data = inputs.tiny_model(folder / shape), inputs.tiny_rows(method, folder)
            else:
                model = inputs.model_directory(shape)
                data = inputs.rows_of(method, "short", inputs.data_directory(args.data_dir), folder)
            teacher = str(inputs.teacher_directory(model)) if method == "kd" else None
            return Cell(method, str(model), str(data), teacher, args.batch_size, args.steps,
                        precision="fp32" if args.smoke else "bf16", max_length=4096, threads=torch.get_num_threads(),
                        micro_batch=2 if args.smoke else None)

        if not args.smoke:
            do(card, "card")
        if "A" in args.parts:
            do(lambda: exactness(device, args.smoke), "exactness")
        for name in args.cells if "B" in args.parts else ():
            do(lambda name=name: side_by_side(cell(name), rivals, not args.smoke), name)  # type: ignore[misc]
        if "C" in args.parts:
            do(lambda: where_it_goes(cell(args.cells[0]), folder if args.smoke else args.output.parent), "profile")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
