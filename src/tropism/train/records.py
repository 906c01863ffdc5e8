"""The log window: the steps since the last train record, and what they add up to."""

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tropism.observe.metrics import means
from tropism.train.engine import Engine
from tropism.train.memory import peak_gib
from tropism.train.monitor.nonfinite import BadStep, Tolerance
from tropism.train.step import StepOutcome
from tropism.train.step_statistics import point_record


@dataclass
class Window:
    """The steps since the last record.

    Args:
        rows: `[keys, 2]` sums and counts of each step over all ranks, on the host: a record that spans a stop and a
            resume adds up the same numbers in the same order. Zeros for a step that was left out.
        skipped: steps that were left out.
        last: what a record takes from its last step alone, of those that were not left out: gradient norm and
            reference point.
        pending: steps that the host has not read yet.
        tokens: as if flat, of all of them.
        seconds: that they took before `began`.
        began: when this sitting began with the window.
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
        """Leave out time that was no step's."""
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
        """Read what is pending: the one place where the host waits for the device. All ranks call it together.

        Raises:
            NonFiniteError: if a step was not finite and is not tolerated; it changed nothing. Its rows are named.
        """
        if not self.pending:
            return
        keys, device = engine.metric_keys, engine.model.device
        own = torch.stack([outcome.tally.stacked(keys, device) for outcome in self.pending])
        pooled = engine.world.sum(own)
        finite = torch.stack([outcome.finite for outcome in self.pending]).tolist()
        self.skipped += tolerance.see(engine.world, self.pending, finite, rows)
        for row, fine in zip(pooled.cpu().unbind(), finite, strict=True):
            self.rows.append(row if fine else torch.zeros_like(row))
        applied = [outcome for outcome, fine in zip(self.pending, finite, strict=True) if fine]
        if applied:
            self.last = {} if applied[-1].point is None else point_record(applied[-1].point)
            self.last["grad_norm"] = float(applied[-1].grad_norm)
        self.pending = []

    def read(self, engine: Engine, rows: Any, tolerance: Tolerance) -> dict[str, float]:
        """The metrics of all its steps, as `settle` says."""
        self.settle(engine, rows, tolerance)
        metrics = engine.method.combine(means(engine.metric_keys, torch.stack(self.rows).sum(0)))
        if engine.balance is not None:
            metrics = engine.balance.with_loss(metrics)
        metrics |= self.last
        if self.skipped:
            metrics["skipped"] = len(self.skipped)
        seconds = max(self.elapsed, 1e-9)
        metrics["step_time"] = seconds / len(self.rows)
        metrics["tokens_per_second"] = self.tokens / seconds
        metrics["memory/peak_gib"] = peak_gib(engine.model.device)
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


@dataclass
class Progress:
    """Where a run stands between two steps: what a checkpoint keeps of the loop.

    Args:
        step: the last step that was done.
        totals: `examples`, `tokens` and `tokens/computed` so far.
        window: the steps since the last record.
        evaluation_due: the evaluation that belongs to this step has not been recorded yet.
        learning_rate: of the last step.
        tolerance: of steps that are not finite.
    """

    step: int = 0
    totals: dict[str, int] = field(default_factory=lambda: {"examples": 0, "tokens": 0, "tokens/computed": 0})
    window: Window = field(default_factory=Window)
    evaluation_due: bool = True
    learning_rate: float = 0.0
    tolerance: Tolerance = field(default_factory=Tolerance)

    def add(self, outcome: StepOutcome, units: int, flat_tokens: int, computed_tokens: int) -> None:
        """One more step."""
        self.step, self.learning_rate = outcome.step, outcome.learning_rate
        self.window.add(outcome, flat_tokens)
        for key, count in (("examples", units), ("tokens", flat_tokens), ("tokens/computed", computed_tokens)):
            self.totals[key] += count

    def state(self) -> dict[str, Any]:
        """Plain values that `restore` takes."""
        return {"step": self.step, "totals": dict(self.totals), "window": self.window.state(),
                "evaluation_due": self.evaluation_due, "learning_rate": self.learning_rate,
                "tolerance": self.tolerance.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state()`."""
        self.step, self.evaluation_due = int(state["step"]), bool(state["evaluation_due"])
        self.learning_rate = float(state.get("learning_rate", 0.0))
        self.totals = {key: int(count) for key, count in state["totals"].items()}
        self.window = Window.restored(state["window"])
        self.tolerance.restore(state["tolerance"])


@dataclass(frozen=True, slots=True)
class Record:
    """One line of `metrics.jsonl`."""

    step: int
    split: str
    metrics: dict[str, float]
    skipped: tuple[BadStep, ...] = ()
    """Steps of its window that were not finite and left out."""

    def to_json(self) -> dict[str, Any]:
        """The line as it is written."""
        return {"step": self.step, "split": self.split, **self.metrics}
