"""Runs the sides of a cell in turn, checks that they did the same work, and makes the record of it."""

import importlib.metadata
import importlib.util
import math
import multiprocessing
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from harness.product import product
from harness.rivals import rival
from harness.serving import Ended, Ready, Taken
from harness.work import Cell, Job, make_job

NAMES = {"trl-tuned": "TRL tuned", "trl-defaults": "TRL defaults", "plain": "plain loop"}
"""The other sides, by their option."""

_LIBRARIES = ("tropism", "trl", "torch", "transformers", "accelerate")


@dataclass
class Side:
    """One side of the comparison and its process."""

    name: str
    target: Callable[..., None]
    arguments: tuple[Any, ...] = ()
    steps: list[Taken] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    """Share of the machine that other processes used during each step."""
    began: float = 0.0
    ready: Ready = field(default_factory=lambda: Ready("", {}, 0))
    ended: Ended = field(default_factory=lambda: Ended(0, 0.0))

    def start(self, job: Job, apart: bool) -> None:
        """Start it in a process of its own (or, not `apart`, in a thread) and wait until it is ready for step 1."""
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        kind: Any = context.Process if apart else threading.Thread
        self.worker = kind(target=_work, args=(self.target, theirs, job, *self.arguments), daemon=True)
        self.worker.start()
        if apart:
            theirs.close()  # else the end of the process would go unnoticed
        self.ready = self.pipe.recv()

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
        self.ended = self.pipe.recv()
        self.worker.join()


def _work(target: Callable[..., None], pipe: Connection, *arguments: Any) -> None:
    try:
        target(pipe, *arguments)
    finally:
        pipe.close()


def busy_s() -> float:
    """CPU seconds used by all processes of the machine so far; 0 where it does not say."""
    try:
        user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:9])
    except OSError:
        return 0.0
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def wait_for_quiet(patience_s: float) -> None:
    """Return when the machine has been idle for two seconds, or after `patience_s`."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        before = busy_s()
        time.sleep(2)
        if busy_s() - before < 0.2 * (os.cpu_count() or 1):
            return


def compare(cell: Cell, rivals: Sequence[str], patience_s: float = 0.0, apart: bool = True,
            say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)) -> dict[str, Any]:
    """Measure a cell; the record has a key `sides` and a key `same_work`.

    Args:
        patience_s: how long to wait for an idle machine before each round of steps.
        apart: each side has its own process; False tries the code fast, and measures nothing.
        say: takes lines for people.

    Raises:
        TropismError: if the run could not start.
    """
    job = make_job(cell)
    sides = [Side("Tropism", product), *(Side(NAMES[name], rival, (name,)) for name in rivals)]
    for side in sides:
        side.start(job, apart)
        say(f"{side.name}: {side.ready.note}")
    load = os.getloadavg()[0]
    for number in job.numbers:
        wait_for_quiet(patience_s)
        for side in sides:
            side.take(number)
            say(f"step {number} {side.name}: {side.steps[-1].wall_s:.2f} s wall, {side.steps[-1].cpu_s:.2f} s CPU, "
                f"others {side.others[-1]:.0%}")
    for side in sides:
        side.stop()
    found = {side.name: gates(job, sides[0], side) for side in sides}
    return {"cell": asdict(cell) | {"model": Path(cell.model).name, "data": Path(cell.data).name}, **machine(),
            "load": [round(load, 2), round(os.getloadavg()[0], 2)], "known_loss": job.known_loss,
            "same_work": all(each["ok"] for each in found.values()),
            "sides": {side.name: figures(job, sides[0], side) | {"gates": found[side.name]} for side in sides}}


def gates(job: Job, lead: Side, side: Side) -> dict[str, Any]:
    """What must agree on step 1 before any time counts."""
    tolerance = 1e-2 if job.cell.precision == "bf16" else 1e-4
    first, expected = side.steps[0], job.known_loss if job.known_loss is not None else lead.steps[0].loss
    far = max((abs(value - side.ready.logps[key]) / max(abs(value), 1.0) for key, value in lead.ready.logps.items()))
    norm = first.grad_norm / lead.steps[0].grad_norm - 1
    moved = side.ended.changed
    fine = (math.isclose(first.loss, expected, abs_tol=tolerance) and far <= tolerance and abs(norm) <= 0.02
            and moved > 0)
    return {"loss": first.loss, "expected_loss": expected, "logps_apart": far, "grad_norm": first.grad_norm,
            "grad_norm_apart": norm, "changed": moved, "last_loss": side.steps[-1].loss, "ok": fine}


def figures(job: Job, lead: Side, side: Side) -> dict[str, Any]:
    """Times without the warm-up step. Ratios are paired: step k of a side by step k of Tropism."""
    pairs = list(zip(side.steps, lead.steps, strict=True))[1:]
    wall = [step.wall_s for step, _ in pairs]
    ratios = [step.wall_s / other.wall_s for step, other in pairs]
    needed = sum(lead.ready.facts["necessary_flops"][1:])
    gib = 2**30
    return {"median_s": statistics.median(wall), "range_s": [min(wall), max(wall)],
            "ratio": statistics.median(ratios), "ratio_range": [min(ratios), max(ratios)],
            "cpu_ratio": statistics.median(step.cpu_s / max(other.cpu_s, 1e-9) for step, other in pairs),
            "tokens_per_s": job.timed_tokens / sum(wall), "mfu": needed / sum(wall) / lead.ready.facts["peak_flops"],
            "peak_gib": side.ended.peak_bytes / gib, "states_gib": side.ready.state_bytes / gib,
            "beyond_states_gib": (side.ended.peak_bytes - side.ready.state_bytes) / gib,
            "others": statistics.median(side.others[1:]), "note": side.ready.note,
            "facts": {key: value for key, value in side.ready.facts.items() if key != "necessary_flops"}}


def machine() -> dict[str, Any]:
    """Machine and versions."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        cpu = next((line.split(":")[1].strip() for line in info.read_text().splitlines()
                    if line.startswith("model name")), cpu)
    versions = {name: importlib.metadata.version(name) for name in _LIBRARIES if importlib.util.find_spec(name)}
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cpu": cpu, "cores": os.cpu_count(), "gpu": card, "versions": versions,
            "date": time.strftime("%Y-%m-%d", time.gmtime())}


HEAD = ("| method | rows | precision | side | median s | ratio | its min-max | CPU ratio | tokens/s | MFU | peak GiB | "
        "beyond states |\n|---|---|---|---|---|---|---|---|---|---|---|---|")


def table_rows(record: dict[str, Any]) -> list[str]:
    """The lines of a record in a table with `HEAD`."""
    cell, lines = record["cell"], []
    for name, side in record["sides"].items():
        low, high = side["ratio_range"]
        verdict = "" if side["gates"]["ok"] else " (DIFFERENT WORK)"
        lines.append(
            f"| {cell['method']} | {record.get('rows', cell['data'])} | {cell['precision']} | {name}{verdict} "
            f"| {side['median_s']:.3g} | {side['ratio']:.2f} | {low:.2f}-{high:.2f} | {side['cpu_ratio']:.2f} "
            f"| {side['tokens_per_s']:.1f} | {side['mfu']:.0%} | {side['peak_gib']:.2f} "
            f"| {side['beyond_states_gib']:.2f} |")
    return lines


def gate_lines(record: dict[str, Any]) -> list[str]:
    """What was checked on step 1, a line for each side."""
    return [f"{name}: loss {got['loss']:.6f} (expected {got['expected_loss']:.6f}), log-probs within "
            f"{got['logps_apart']:.1e}, gradient norm {got['grad_norm']:.4f} ({got['grad_norm_apart']:+.2%}), weights "
            f"changed by up to {got['changed']:.1e}: {'ok' if got['ok'] else 'DIFFERENT'}"
            for name, got in ((name, side["gates"]) for name, side in record["sides"].items())]
