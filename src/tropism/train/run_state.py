"""The state of a run between two optimizer steps: everything in a checkpoint except the tensors."""

import time
from dataclasses import dataclass, field
from typing import Any

from tropism.observe.metrics import BASELINES
from tropism.train.monitor.nonfinite import Tolerance
from tropism.train.records import Record, Window
from tropism.train.settings import Settings
from tropism.train.step_log import StepOutcome
from tropism.train.step_packs import StepPacks


@dataclass
class RunState:
    """The progress of a run. Only the loop changes it while it runs.

    Args:
        step: the last optimizer step that was done.
        totals: `examples`, `tokens` and `tokens/computed` so far.
        window: the steps since the last train record.
        evaluation_due: the evaluation after this step has not been recorded yet.
        samples_due: the samples after this step have not been written yet.
        learning_rate: of the last step.
        tolerance: of steps that are not finite.
        samples_before: completions sampled before training.
        baselines: of the initial policy, as the first evaluation found them.
        evaluation: the last evaluation record, with its step.
        earlier_s: seconds that earlier processes of the run took.
        began: when this process began, by the monotonic clock.
        ending: why the run ends with the current step; None while it continues.
        settings: how the steps are computed. Whoever builds the engine restores them.
    """

    step: int = 0
    totals: dict[str, int] = field(default_factory=lambda: {"examples": 0, "tokens": 0, "tokens/computed": 0})
    window: Window = field(default_factory=Window)
    evaluation_due: bool = True
    samples_due: bool = False
    learning_rate: float = 0.0
    tolerance: Tolerance = field(default_factory=Tolerance)
    samples_before: list[str] = field(default_factory=list)
    baselines: dict[str, float] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)
    earlier_s: float = 0.0
    began: float = field(default_factory=time.monotonic)
    ending: str | None = None
    settings: Settings = field(default_factory=Settings)

    @property
    def elapsed_s(self) -> float:
        """Seconds of the run so far."""
        return self.earlier_s + time.monotonic() - self.began

    def add(self, outcome: StepOutcome, packs: StepPacks) -> None:
        """Count one more step."""
        self.step, self.learning_rate = outcome.step, outcome.learning_rate
        self.window.add(outcome, packs.flat_tokens)
        for key, count in (("examples", packs.units), ("tokens", packs.flat_tokens),
                           ("tokens/computed", packs.computed_tokens)):
            self.totals[key] += count

    def see(self, record: Record) -> None:
        """Remember an evaluation, and the baselines of the first one."""
        if record.split == "eval":
            self.evaluation = {"step": record.step, **record.metrics}
            self.baselines = self.baselines or {name: value for name, value in record.metrics.items()
                                                if name.startswith(BASELINES)}

    def to_json(self) -> dict[str, Any]:
        """Plain values that `restore` takes; the window must have been read."""
        return {"step": self.step, "settings": self.settings.state(), "totals": dict(self.totals),
                "window": self.window.state(), "evaluation_due": self.evaluation_due, "samples_due": self.samples_due,
                "learning_rate": self.learning_rate, "tolerance": self.tolerance.state(),
                "answers": list(self.samples_before),
                "baselines": dict(self.baselines), "evaluation": dict(self.evaluation), "seconds": self.elapsed_s}

    def restore(self, trainer: dict[str, Any]) -> None:
        """Continue from `to_json()`."""
        self.step, self.evaluation_due = int(trainer["step"]), bool(trainer["evaluation_due"])
        self.samples_due = bool(trainer.get("samples_due", False))
        self.learning_rate = float(trainer.get("learning_rate", 0.0))
        self.totals = {key: int(count) for key, count in trainer["totals"].items()}
        self.window = Window.restored(trainer["window"])
        self.tolerance.restore(trainer["tolerance"])
        self.samples_before, self.baselines = list(trainer["answers"]), dict(trainer["baselines"])
        self.evaluation, self.earlier_s = dict(trainer["evaluation"]), float(trainer["seconds"])
