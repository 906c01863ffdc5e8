"""Compare Tropism with TRL on a CPU: step time and memory, after checking that both do the same work.

    pip install trl -c constraints/tested.txt
    python bench/against_trl.py --model DIR --data FILE --method dpo --batch-size 4

Each side runs in its own process. The sides take steps in turn, on the same rows and the same token ids. Only the
optimizer step is timed. bench/README.md describes the measurement. The exit code is 1 if the sides did different work,
and 2 if the comparison could not start. Linux only.
"""

import argparse
import importlib.metadata
import importlib.util
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sides import Job, Taken  # imports torch: not for --help

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_QUIET = 0.1  # share of the machine that others may use before a round begins, with --patience


@dataclass
class Side:
    """One side of the comparison and its process."""

    name: str
    target: Callable[..., None]
    arguments: tuple[Any, ...] = ()
    steps: "list[Taken]" = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    """Share of the machine that other processes used during each step."""
    logps: list[float] = field(default_factory=list)
    peak_gib: float = 0.0
    changed: float = 0.0

    def start(self, job: "Job") -> str:
        """Start the process and wait until it is ready for step 1; a note about its setup."""
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
        """End the process and collect its peak memory and how far its weights moved."""
        self.pipe.send(None)
        self.peak_gib, self.changed = self.pipe.recv()
        self.process.join()


def busy_s() -> float:
    """CPU seconds used by all processes of the machine so far."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq) / _TICKS_PER_S


def wait_for_quiet(patience_s: float) -> None:
    """Return when the machine has been idle for two seconds, or after `patience_s`."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        before = busy_s()
        time.sleep(2)
        if busy_s() - before < _QUIET * 2 * (os.cpu_count() or 1):
            return


def check(job: "Job", sides: Sequence[Side]) -> bool:
    """Compare the sides' first steps, print what was found, and return whether all did the same work."""
    tolerance = 1e-2 if job.options.precision == "bf16" else 1e-4
    lead, good = sides[0], True
    print(f"\nchecks on step 1 (expected loss {job.known_loss:.6f}, tolerance {tolerance:g}; gradient norm within 2%):")
    for side in sides:
        first = side.steps[0]
        far = max(abs(a - b) / max(abs(a), 1.0) for a, b in zip(lead.logps, side.logps, strict=True))
        norm = first.grad_norm / lead.steps[0].grad_norm - 1
        fine = (math.isclose(first.loss, job.known_loss, abs_tol=tolerance) and far <= tolerance and abs(norm) <= 0.02
                and side.changed > 0)
        print(f"  {side.name}: loss {first.loss:.6f}, log-probs within {far:.1e} of {lead.name}, gradient norm "
              f"{first.grad_norm:.4f} ({norm:+.2%}), weights changed by up to {side.changed:.1e}, loss of the last "
              f"step {side.steps[-1].loss:.5f}: {'ok' if fine else 'DIFFERENT'}")
        good &= fine
    return good


def table(job: "Job", sides: Sequence[Side]) -> None:
    """Print the figures without the warm-up step. Ratios are paired: step k of a side by step k of the first."""
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


def describe(job: "Job") -> None:
    """Print versions, machine and data."""
    cpu = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("model name")), "unknown CPU")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}"
                         for name in ("tropism", "trl", "torch", "transformers", "accelerate")
                         if importlib.util.find_spec(name))
    print(f"{versions}\n{cpu}, {os.cpu_count()} cores, {job.threads} threads, {job.options.precision}, "
          f"load {load_now()}\n"
          f"{job.options.method} on {Path(job.options.data).name}, rows per step "
          f"{[len(job.step(number)) for number in job.numbers]}", flush=True)


def load_now() -> str:
    """The machine's load averages."""
    return " ".join(f"{value:.1f}" for value in os.getloadavg())


def parse_arguments() -> argparse.Namespace:
    """Parse the command line, and exit if TRL is needed and not installed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="model directory in the Hugging Face format")
    parser.add_argument("--data", required=True, help="training data, in any format that Tropism reads")
    parser.add_argument("--method", choices=("dpo", "kto"), required=True, help="method to train with")
    parser.add_argument("--batch-size", type=int, default=4, help="rows per optimizer step (default: 4)")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps; the first is discarded (default: 6)")
    parser.add_argument("--max-length", type=int, default=2048,
                        help="maximum length of a prompt with its completion in tokens (default: 2048)")
    parser.add_argument("--group-prompts", action="store_true",
                        help="put all rows of a prompt in one step, on all sides")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32",
                        help="bf16 uses autocast, on all sides (default: fp32)")
    parser.add_argument("--threads", type=int, help="threads of each side (default: PyTorch's choice)")
    parser.add_argument("--microbatch-tokens", type=int, help="Tropism's microbatch size in tokens (default: 2048)")
    parser.add_argument("--micro-batch", type=int,
                        help="rows of a micro-batch of tuned TRL (default: the fastest of several)")
    parser.add_argument("--settings", nargs="+", choices=("tuned", "defaults"), default=["tuned", "defaults"],
                        help="TRL's settings to compare with (default: both)")
    parser.add_argument("--malloc", nargs="+", choices=("ours", "default"), default=["ours"],
                        help="TRL's memory allocator: with Tropism's settings or the C library's (default: ours)")
    parser.add_argument("--only", choices=("ours", "trl"), help="run one side alone, if memory is short")
    parser.add_argument("--patience", type=float, default=0.0, metavar="S",
                        help="wait up to S seconds for an idle machine before each round of steps (default: 0)")
    given = parser.parse_args()
    if given.only != "ours" and importlib.util.find_spec("trl") is None:
        parser.exit(2, "TRL is not installed: run `pip install trl -c constraints/tested.txt`, or pass `--only ours`\n")
    return given


def main() -> int:
    """Run all sides in turn; 1 if they did different work."""
    args = parse_arguments()
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TQDM_DISABLE": "1",
                   "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore::FutureWarning"}
    from sides import make_job, ours, trl  # imports torch: not for --help

    from tropism.errors import TropismError

    try:
        job = make_job(args)
    except TropismError as error:
        print(error, file=sys.stderr)
        return 2
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
