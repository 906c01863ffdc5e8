"""Memory of this machine, and what a run needs of it."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tropism.model.weights_check import machine_memory

HELD = ("weights", "gradients", "optimizer", "reference", "teacher")
"""Components that do not depend on the pack."""
BASE = "program"
"""Component of the interpreter and its libraries; on a GPU its context."""
_CONTEXT_BYTES = 600 * 2**20
KEPT = "kept"
"""Phase between the forward and the backward pass of a pack."""
_SPARE = 1.04
"""Gaps between tensors, and buffers of the libraries."""


def resident() -> int:
    """Resident memory of this process in bytes; 0 if the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def available(device: torch.device, processes: int = 1) -> int:
    """Bytes that this process may use, with those that it uses already.

    Args:
        processes: that share the machine's memory.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    there = machine_memory()
    if sys.platform.startswith("linux"):
        try:
            lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
            free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
            there = min(there, free + resident() * processes)
        except (OSError, ValueError, StopIteration):
            pass
    return there // processes


def base_bytes(device: torch.device, before: int) -> int:
    """Memory of the program itself.

    Args:
        before: resident bytes before a model was loaded.
    """
    return _CONTEXT_BYTES if device.type == "cuda" else before


@dataclass(frozen=True)
class Pass:
    """What the passes over one pack need at each phase, beside what does not depend on it.

    Args:
        tokens: of the pack.
        phases: bytes by component for each phase; `gradients` are those that exist by then if it is the first pack.
    """

    tokens: int
    phases: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Needs:
    """Memory that a run needs, as a function of its pack.

    Args:
        base: of the program.
        held: bytes of weights, gradients, optimizer, reference and teacher of this process.
        small, large: what two packs need.
    """

    base: float
    held: Mapping[str, float]
    small: Pass
    large: Pass

    def without(self, component: str) -> "Needs":
        """The same without a component of the packs."""
        small, large = (replace(one, phases={phase: {name: size for name, size in held.items() if name != component}
                                             for phase, held in one.phases.items()})
                        for one in (self.small, self.large))
        return replace(self, small=small, large=large)

    @property
    def kept_per_token(self) -> float:
        """Bytes that a forward pass keeps for the backward pass, per token."""
        held = self.large.phases.get(KEPT, {})
        return _SPARE * sum(size for name, size in held.items() if name not in HELD) / self.large.tokens

    def components(self, tokens: float, several: bool = True, waiting: float = 0.0) -> dict[str, float]:
        """Bytes by component at the peak of a step.

        Args:
            tokens: of its largest pack.
            several: the step has several packs, so gradients exist from the second one on.
            waiting: tokens of its other packs whose forward passes are done and whose backward passes are not.
        """
        span = self.large.tokens - self.small.tokens
        share = (tokens - self.small.tokens) / span if span > 0 else 0.0
        best: dict[str, float] = {}
        for phase in {**self.small.phases, **self.large.phases}:
            small, large = self.small.phases.get(phase, {}), self.large.phases.get(phase, {})
            found = {BASE: self.base, **self.held}
            if not several:
                found["gradients"] *= min(1.0, large.get("gradients", 0.0) / max(self.held["gradients"], 1.0))
            for name in {**small, **large}.keys() - {*HELD}:
                low, high = small.get(name, 0.0), large.get(name, 0.0)
                found[name] = max(0.0, low + share * (high - low)) if high >= low else high
            if sum(found.values()) > sum(best.values()):
                best = found
        best = {name: _SPARE * size if name not in (BASE, *HELD) else size for name, size in best.items() if size > 0}
        if waiting:
            best["activations"] = best.get("activations", 0.0) + self.kept_per_token * waiting
        return best

    def peak(self, tokens: float, several: bool = True) -> float:
        """Bytes at the peak of a step."""
        return sum(self.components(tokens, several).values())

    @property
    def least(self) -> float:
        """Bytes without any pass."""
        return self.base + sum(self.held.values())
