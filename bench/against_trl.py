"""Tropism against TRL, side by side on a CPU: step time, memory, and the proof that both do the same work.

    python bench/against_trl.py --model DIR --data FILE --method dpo --batch-size 4

Each side lives in a process of its own and takes its steps in turn with the others (ours, TRL, ours, TRL, ...), on
the same token ids and the same rows. Only the optimizer step is timed. bench/README.md says what exactly.
"""

import argparse
import importlib.metadata
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from sides import Job, Taken, ours, trl

from tropism.config import METHODS
from tropism.methods import LOSSES
from tropism.model import load
from tropism.model.source import ModelSource
from tropism.train.setup.data import build_method, make_schedule, prepare_data

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_QUIET = 0.1  # share of the machine that others may use before a round begins, with --patience


@dataclass
class Side:
    """A participant, run by a process of its own."""

    name: str
    target: Callable[..., None]
    arguments: tuple[Any, ...] = ()
    steps: list[Taken] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    """Share of the machine that other processes used during each step."""
    logps: list[float] = field(default_factory=list)
    peak_gib: float = 0.0
    changed: float = 0.0

    def start(self, job: Job) -> str:
        """Set up; returns what to know about it when the first step may begin."""
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=self.target, args=(theirs, job, *self.arguments), daemon=True)
        self.process.start()
        theirs.close()
        note, self.logps = self.pipe.recv()
        return note

    def take(self, number: int) -> None:
        """One step."""
        busy, began = busy_s(), time.perf_counter()
        self.pipe.send(number)
        self.steps.append(self.pipe.recv())
        capacity = (time.perf_counter() - began) * (os.cpu_count() or 1)
        self.others.append(max(0.0, busy_s() - busy - self.steps[-1].cpu_s) / capacity)

    def stop(self) -> None:
        """Collect what is known at the end."""
        self.pipe.send(None)
        self.peak_gib, self.changed = self.pipe.recv()
        self.process.join()


def busy_s() -> float:
    """CPU seconds that all processes of the machine have used so far."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq) / _TICKS_PER_S


def wait_for_quiet(patience_s: float) -> None:
    """Return once others have left the machine alone for two seconds, or patience has run out."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        before = busy_s()
        time.sleep(2)
        if busy_s() - before < _QUIET * 2 * (os.cpu_count() or 1):
            return


def check(job: Job, sides: Sequence[Side]) -> bool:
    """Print whether all sides did the same work in step 1; whether they did."""
    tolerance = 1e-2 if job.precision == "bf16" else 1e-4
    method = build_method(LOSSES[job.options.loss], job.options.model_dump(), job.rows)  # type: ignore[attr-defined]
    known = method.row.at_start(method.options, torch.tensor([bool(row.desirable) for row in job.step(1)]))
    lead, good = sides[0], True
    print(f"\nchecks on step 1 (the loss must be {known:.6f}; tolerance {tolerance:g}, gradient norm 2 %):")
    for side in sides:
        first = side.steps[0]
        far = max(abs(a - b) / max(abs(a), 1.0) for a, b in zip(lead.logps, side.logps, strict=True))
        norm = first.grad_norm / lead.steps[0].grad_norm - 1
        fine = (math.isclose(first.loss, known, abs_tol=tolerance) and far <= tolerance and abs(norm) <= 0.02
                and side.changed > 0)
        print(f"  {side.name}: loss {first.loss:.6f}, log-probs within {far:.1e} of {lead.name}, gradient norm "
              f"{first.grad_norm:.4f} ({norm:+.2%}), weights changed by up to {side.changed:.1e}, loss of the last "
              f"step {side.steps[-1].loss:.5f}: {'ok' if fine else 'NOT THE SAME'}")
        good &= fine
    return good


def table(job: Job, sides: Sequence[Side]) -> None:
    """Print the figures, warm-up step left out. Ratios are paired: step k of a side by step k of the first."""
    tokens = sum(row.flat_tokens for number in job.numbers[1:] for row in job.step(number))
    print("\n| side | median s | min-max s | flat tokens/s | ratio | its min-max | CPU s | CPU ratio | others | peak "
          "GiB |\n|---|---|---|---|---|---|---|---|---|---|")
    for side in sides:
        pairs = list(zip(side.steps, sides[0].steps, strict=True))[1:]
        wall = [step.wall_s for step, _ in pairs]
        ratios = [step.wall_s / lead.wall_s for step, lead in pairs]
        print(f"| {side.name} | {statistics.median(wall):.2f} | {min(wall):.2f}-{max(wall):.2f} "
              f"| {tokens / sum(wall):.1f} | {statistics.median(ratios):.2f} | {min(ratios):.2f}-{max(ratios):.2f} "
              f"| {statistics.median(step.cpu_s for step, _ in pairs):.2f} "
              f"| {statistics.median(step.cpu_s / lead.cpu_s for step, lead in pairs):.2f} "
              f"| {statistics.median(side.others[1:]):.0%} | {side.peak_gib:.2f} |")


def describe(job: Job) -> None:
    """What runs where."""
    cpu = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("model name")), "unknown CPU")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}"
                         for name in ("tropism", "trl", "torch", "transformers", "accelerate"))
    print(f"{versions}\n{cpu}, {os.cpu_count()} cores, {job.threads} threads, {job.precision}, load {load_now()}\n"
          f"{job.options.method} on {Path(job.options.data).name}, rows per step "
          f"{[len(job.step(number)) for number in job.numbers]}", flush=True)


def load_now() -> str:
    """The machine's load averages."""
    return " ".join(f"{value:.1f}" for value in os.getloadavg())


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a Hugging Face directory")
    parser.add_argument("--data", required=True, help="rows as Tropism reads them")
    parser.add_argument("--method", choices=sorted(METHODS), required=True)
    parser.add_argument("--batch-size", type=int, default=4, help="rows per optimizer step")
    parser.add_argument("--steps", type=int, default=6, help="the first is thrown away")
    parser.add_argument("--max-length", type=int, default=2048, help="tokens of a prompt with its completion")
    parser.add_argument("--group-prompts", action="store_true", help="all rows of a prompt in one step, on all sides")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="bf16: autocast, on all sides")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of each side")
    parser.add_argument("--microbatch-tokens", type=int, help="our packs; by default what the product takes")
    parser.add_argument("--micro-batch", type=int, help="TRL's, tuned; by default the fastest of a few")
    parser.add_argument("--settings", nargs="+", choices=("tuned", "defaults"), default=["tuned", "defaults"])
    parser.add_argument("--malloc", nargs="+", choices=("ours", "default"), default=["ours"],
                        help="TRL's allocator: as Tropism sets it for itself, or as a TRL user has it")
    parser.add_argument("--only", choices=("ours", "trl"), help="one side alone, where memory is short")
    parser.add_argument("--patience", type=float, default=0.0, metavar="S",
                        help="wait so long for others to leave the machine alone before a round of steps")
    return parser.parse_args()


def make_job(args: argparse.Namespace) -> Job:
    """Rows, order and options of all sides."""
    options = METHODS[args.method](
        model=args.model, data=args.data, output="unused", batch_size=args.batch_size, max_steps=args.steps,
        max_length=args.max_length, group_prompts=args.group_prompts, microbatch_tokens=args.microbatch_tokens)
    source, row = ModelSource.of(args.model), LOSSES[options.loss]  # type: ignore[attr-defined]
    rows = prepare_data(options, load.load_tokenizer(source), load.load_config(source), row.view).train
    schedule = make_schedule(options, options, rows, row.needs_reference_point)
    return Job(options, args.precision, rows, schedule, args.micro_batch, args.threads)


def main() -> int:
    """Run all sides in turn; 1 if they did not do the same work."""
    args = arguments()
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TQDM_DISABLE": "1",
                   "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore::FutureWarning"}
    job = make_job(args)
    describe(job)
    sides = [] if args.only == "trl" else [Side("Tropism", ours)]
    if args.only != "ours":
        sides += [Side(f"TRL {setting}" + (", default malloc" if malloc == "default" else ""), trl,
                       (setting == "tuned", malloc)) for malloc in args.malloc for setting in args.settings]
    for side in sides:
        print(f"{side.name}: {side.start(job)}", flush=True)
    for number in job.numbers:
        wait_for_quiet(args.patience)
        for side in sides:
            side.take(number)
            print(f"step {number} {side.name}: {side.steps[-1].wall_s:.2f} s wall, {side.steps[-1].cpu_s:.2f} s CPU, "
                  f"others {side.others[-1]:.0%}", file=sys.stderr, flush=True)
    for side in sides:
        side.stop()
    good = check(job, sides)
    table(job, sides)
    print(f"load {load_now()}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
