"""Callbacks of transformers, called by our loop. They read, and may ask to log, evaluate, save or stop."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from transformers import TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

from tropism.distributed import World
from tropism.errors import UsageError
from tropism.observe.rundir import RunDirectory
from tropism.train.listener import Asked, Listener
from tropism.train.records import Record
from tropism.train.run_state import RunState

_STOPPED = "a callback asked to stop"


class Events(Listener):
    """Keeps the trainer's state, and calls the callbacks.

    Args:
        args: the config.
        directory: of the run.
        callbacks: instances or classes.
        processing_class: the tokenizer.
        steps: optimizer steps of the run.

    `module` returns the module that is trained, for callbacks.
    """

    def __init__(self, args: Any, directory: RunDirectory, callbacks: Sequence[Any], processing_class: Any,
                 steps: int) -> None:
        self.args, self.directory = args, directory
        self.state, self.control = TrainerState(), TrainerControl()
        self.state.compute_steps(args, steps)
        self.state.max_steps, self.state.num_train_epochs = steps, int(np.ceil(args.num_train_epochs))
        self.state.train_batch_size = args.per_device_train_batch_size
        # transformers' handler wants its flow callback. It is not called: our plan decides when to log and save.
        self.handler = CallbackHandler([DefaultFlowCallback], None, processing_class, None, None)
        self.handler.pop_callback(DefaultFlowCallback)
        for callback in callbacks:
            self.handler.add_callback(callback)
        self.requested = -1  # step whose evaluation a callback asked for
        self.module: Callable[[], Any] = lambda: None
        self.window, self.within_epoch = 0, False
        self.losses: list[tuple[int, float]] = []

    def of_process(self, world: World) -> None:
        """Tell callbacks which process this is."""
        self.state.is_world_process_zero = self.state.is_local_process_zero = world.is_main

    @property
    def follows_saves(self) -> bool:  # type: ignore[override]
        """As `Listener` says: only with callbacks."""
        return bool(self.handler.callbacks)

    def call(self, event: str, **more: Any) -> None:
        """Call an event of every callback."""
        self.handler.model = self.module()
        self.control = getattr(self.handler, event)(self.args, self.state, self.control, **more)

    def begins(self, state: RunState) -> None:
        """As `Listener` says."""
        self.state.log_history = []
        self.state.global_step = state.step
        self.window = 0
        for line in self.directory.records() if state.step else []:
            self.replay(line)
        self.call("on_train_begin")

    def replay(self, line: dict[str, Any]) -> None:
        """Remember a line of `metrics.jsonl`, of an earlier part of the run."""
        metrics = {name: value for name, value in line.items() if name not in ("step", "split")}
        entry = self._remember(Record(line["step"], line["split"], metrics))
        if entry is not None and line["split"] == "eval":
            self._compare(entry, line["step"])

    def step_begins(self, state: RunState) -> None:
        """As `Listener` says."""
        if not self.within_epoch:
            self.call("on_epoch_begin")
            self.within_epoch = True
        self.call("on_step_begin")

    def step_ended(self, state: RunState, epoch: float) -> Asked:
        """As `Listener` says. An epoch ends with the step that completes it."""
        before, self.state.epoch = float(self.state.epoch or 0.0), epoch
        self.state.global_step = state.step
        self.call("on_step_end")
        if int(epoch + 1e-9) > int(before + 1e-9):
            self.call("on_epoch_end")
            self.within_epoch = False
        control = self.control
        if control.should_evaluate:
            self.requested = state.step
        if control.should_epoch_stop:
            raise UsageError("a callback set should_epoch_stop, which is not supported. Set should_training_stop to "
                             "end the run.")
        first = state.step == 1 and bool(self.args.logging_first_step)
        return Asked(bool(control.should_log or first), control.should_evaluate, control.should_save,
                     control.should_training_stop)

    def recorded(self, record: Record) -> str | None:
        """As `Listener` says."""
        entry = self._remember(record)
        if entry is None:
            return None
        self.call("on_log", logs=entry)
        if record.split == "eval":
            self.call("on_evaluate", metrics=entry)
            self._compare(entry, record.step)
        return _STOPPED if self.control.should_training_stop else None

    def saved(self, state: RunState) -> None:
        """As `Listener` says."""
        self.call("on_save")

    def finish(self, metrics: Mapping[str, float]) -> None:
        """The run is over: log its summary."""
        entry = {**metrics, "step": self.state.global_step}
        self.state.log_history.append(entry)
        self.call("on_log", logs=dict(metrics))
        self.call("on_train_end")

    @property
    def training_loss(self) -> float:
        """Mean loss of all steps."""
        steps = sum(count for count, _ in self.losses)
        return sum(count * loss for count, loss in self.losses) / steps if steps else 0.0

    def _remember(self, record: Record) -> dict[str, float] | None:
        """Add a record to the history; None for an evaluation that TRL would not do."""
        if record.split == "eval":
            strategy = str(getattr(self.args.eval_strategy, "value", self.args.eval_strategy))
            if not (self.args.eval_on_start if record.step == 0 else strategy != "no" or record.step == self.requested):
                return None
            entry = prefixed(record.metrics, "eval")
        else:
            entry = dict(record.metrics)
            if "loss" in entry:
                self.losses.append((record.step - self.window, entry["loss"]))
            self.window = record.step
            self.state.epoch = max(float(self.state.epoch or 0.0), entry.get("epoch", 0.0))
        entry.setdefault("epoch", float(self.state.epoch or 0.0))
        self.state.log_history.append({**entry, "step": record.step})
        return entry

    def _compare(self, metrics: Mapping[str, float], step: int) -> None:
        """Note whether this evaluation is the best."""
        if not self.args.metric_for_best_model:
            return
        value = metrics.get(f"eval_{self.args.metric_for_best_model.removeprefix('eval_')}")
        best = self.state.best_metric
        better = np.greater if self.args.greater_is_better else np.less
        if value is not None and (best is None or better(value, best)):
            self.state.best_metric, self.state.best_global_step = value, step


def prefixed(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Metrics of an evaluation by TRL's names."""
    return {f"{prefix}_{name}": value for name, value in metrics.items()}
