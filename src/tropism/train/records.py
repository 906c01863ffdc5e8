"""Records of `metrics.jsonl`, and the window of steps that the next train record summarizes."""

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tropism.observe.metrics import means
from tropism.train.engine import Engine
from tropism.train.memory import peak_gib
from tropism.train.monitor.nonfinite import BadStep, Tolerance
from tropism.train.reference_point import point_record
from tropism.train.step_log import StepOutcome


@dataclass(frozen=True, slots=True)
class Record:
    """One line of `metrics.jsonl`."""

    step: int
    split: str
    metrics: dict[str, float]
    skipped: tuple[BadStep, ...] = ()
    """Steps of its window that were not finite and were skipped."""

    def to_json(self) -> dict[str, Any]:
        """The line as it is written."""
        return {"step": self.step, "split": self.split, **self.metrics}


@dataclass
class Window:
    """The steps since the last record.

    Args:
        rows: `[keys, 2]` sums and counts of each step over all processes, on the host. A record that spans a stop and
            a resume adds the same numbers in the same order. Zeros for a skipped step.
        skipped: steps that were not finite.
        last: gradient norm and reference point of the last step that was applied.
        pending: steps that the host has not read yet.
        tokens: of all steps, as if each row were computed alone.
        seconds: time of the steps before `began`.
        began: when this process began to count, by the monotonic clock.
    """

    rows: list[Tensor] = field(default_factory=list)
    skipped: list[BadStep] = field(default_factory=list)
    last: dict[str, float] = field(default_factory=dict)
    pending: list[StepOutcome] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    began: float = field(default_factory=time.monotonic)

    def add(self, outcome: StepOutcome, tokens: int) -> None:
        """One more step."""
        self.pending.append(outcome)
        self.tokens += tokens

    def pause(self, seconds: float) -> None:
        """Exclude time that was not spent in a step."""
        self.began += seconds

    @property
    def steps(self) -> int:
        """How many steps it has."""
        return len(self.rows) + len(self.pending)

    @property
    def elapsed(self) -> float:
        """Seconds of its steps."""
        return self.seconds + time.monotonic() - self.began

    def settle(self, engine: Engine, rows: Any, tolerance: Tolerance) -> None:
        """Read the pending steps. Only here the host waits for the device. All processes call this together.

        Raises:
            NonFiniteError: if a step was not finite and the run must stop. It names the rows. The step changed nothing.
        """
        if not self.pending:
            return
        keys, device = engine.metric_keys, engine.model.device
        own = torch.stack([outcome.tally.stacked(keys, device) for outcome in self.pending])
        pooled = engine.world.sum(own)
        finite = torch.stack([outcome.finite for outcome in self.pending]).tolist()
        self.skipped += tolerance.check(engine.world, self.pending, finite, rows)
        for row, fine in zip(pooled.cpu().unbind(), finite, strict=True):
            self.rows.append(row if fine else torch.zeros_like(row))
        applied = [outcome for outcome, fine in zip(self.pending, finite, strict=True) if fine]
        if applied:
            self.last = {} if applied[-1].point is None else point_record(applied[-1].point)
            self.last["grad_norm"] = float(applied[-1].grad_norm)
        self.pending = []

    def read(self, engine: Engine, rows: Any, tolerance: Tolerance) -> dict[str, float]:
        """The metrics of all its steps. Settles first."""
        self.settle(engine, rows, tolerance)
        metrics = engine.method.combine(means(engine.metric_keys, torch.stack(self.rows).sum(0)))
        if engine.router_loss is not None:
            metrics = engine.router_loss.with_loss(metrics)
        metrics |= self.last
        if self.skipped:
            metrics["skipped"] = len(self.skipped)
        seconds = max(self.elapsed, 1e-9)
        metrics["step_time"] = seconds / len(self.rows)
        metrics["tokens_per_second"] = self.tokens / seconds
        metrics["memory/peak_gib"] = peak_gib(engine.model.device)
        if engine.model.compiled is not None:
            metrics["compile/recompiles"] = engine.model.compiled.recompiles
        return metrics

    def state(self) -> dict[str, Any]:
        """Plain values that `restored` takes; nothing may be pending."""
        assert not self.pending
        return {"rows": [row.tolist() for row in self.rows], "skipped": [bad.to_json() for bad in self.skipped],
                "last": dict(self.last), "tokens": self.tokens, "seconds": self.elapsed}

    @classmethod
    def restored(cls, state: dict[str, Any]) -> "Window":
        """The window that a state describes."""
        return cls([torch.tensor(row, dtype=torch.float64) for row in state["rows"]],
                   [BadStep.from_json(line) for line in state["skipped"]], dict(state["last"]), [],
                   int(state["tokens"]), float(state["seconds"]))
