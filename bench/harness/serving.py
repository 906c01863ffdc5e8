"""A side of a comparison inside its process: it takes the steps that it is told to and reports what each took."""

import ctypes
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from harness.flops import synchronize


@dataclass(frozen=True)
class Taken:
    """What one optimizer step took, and its results."""

    wall_s: float
    cpu_s: float
    loss: float
    grad_norm: float


@dataclass(frozen=True)
class Ready:
    """A side before step 1.

    Args:
        note: how it is set up, for people.
        logps: log-prob of each completion of step 1, by its key, in nats.
        state_bytes: weights, gradients and Adam's moments, and models that do not train.
        facts: figures for the record.
    """

    note: str
    logps: Mapping[bytes, float]
    state_bytes: int
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """A side after its last step: the peak of its memory in bytes, and how far a weight moved."""

    peak_bytes: int
    changed: float


def serve(pipe: Connection, ready: Ready, weights: Sequence[torch.Tensor], device: torch.device,
          step: Callable[[int], tuple[float, float]]) -> None:
    """Take the steps whose numbers come through the pipe; None ends the loop."""
    watched = weights[len(weights) // 2]
    before = watched.detach().clone()
    restart_peak(device)
    pipe.send(ready)
    while (number := pipe.recv()) is not None:
        synchronize(device)
        wall, cpu = time.perf_counter(), time.process_time()
        loss, norm = step(number)
        synchronize(device)
        pipe.send(Taken(time.perf_counter() - wall, time.process_time() - cpu, loss, norm))
    pipe.send(Ended(peak_bytes(device), float((watched.detach() - before).abs().max())))


def state_bytes(trained: torch.nn.Module, *frozen: torch.nn.Module) -> int:
    """Bytes that training with AdamW in fp32 holds between steps: four numbers for each weight that trains."""
    own = sum(weight.numel() * (4 * weight.element_size() if weight.requires_grad else weight.element_size())
              for weight in trained.parameters())
    return own + sum(weight.numel() * weight.element_size() for module in frozen for weight in module.parameters())


def restart_peak(device: torch.device) -> None:
    """Return unused memory to the system and reset the peak, so that setup does not count."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform.startswith("linux"):
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def peak_bytes(device: torch.device) -> int:
    """Largest memory since `restart_peak`: of tensors on a GPU, resident on a CPU (0 where the system hides it)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if not sys.platform.startswith("linux"):
        return 0
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))
