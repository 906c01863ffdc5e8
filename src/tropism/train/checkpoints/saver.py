"""Saves checkpoints during training: tensors are copied between two steps, and written in the background."""

import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from tropism.distributed.training_state import TrainingState, check_plain, read_whole
from tropism.distributed.world import World
from tropism.errors import CheckpointError, OutputError, TropismError, UsageError, clause
from tropism.files import write_whole
from tropism.model.adapters.parameters import adapter_weight_names
from tropism.model.save import export
from tropism.observe.console import Voice
from tropism.observe.lock import lend
from tropism.observe.metrics import goal
from tropism.observe.rundir import RunDirectory
from tropism.train.adamw8bit import bytes_per_value
from tropism.train.checkpoints import files as checkpoint
from tropism.train.checkpoints.rng_state import random_state
from tropism.train.engine import Engine
from tropism.train.optimizer import why_not_kept
from tropism.train.options import RunOptions
from tropism.train.preemption import Preemption
from tropism.train.run_state import RunState

_SLOWEST_DISK = 100e6
"""Assumed bytes per second of the first save, before one was measured."""


@dataclass(frozen=True)
class Retention:
    """Which checkpoints to keep.

    Args:
        newest: number of newest ones to keep; 0 keeps all.
        best: metric of one more to keep: the best of those that were evaluated at their own step.
    """

    newest: int = 2
    best: str | None = None

    def kept(self, steps: list[int], best: int | None) -> set[int]:
        """The steps to keep, of complete checkpoints."""
        newest = sorted(steps)[-self.newest:] if self.newest else steps
        return {*newest, *([best] if best in steps else [])}


class Saver:
    """Writes checkpoints of a run, one at a time. The main process writes, or all of them if the model is sharded.

    Args:
        engine: to be saved.
        directory: of the run.
        facts: fingerprints, options, libraries and world size of the run.
        retention: which checkpoints to keep.
        preemption: is told how long a save takes.
        voice: logs a line for each save.
        guards: returns the state of the observers.
        model: writes a state dict as a model directory; None to write none.
    """

    def __init__(self, engine: Engine, directory: RunDirectory, facts: Mapping[str, Any], retention: Retention,
                 preemption: Preemption, voice: Voice, guards: Callable[[], dict[str, Any]],
                 model: Callable[[dict[str, Any], Path], None] | None = None) -> None:
        self.engine = engine
        self.world: World = engine.world
        self.directory = directory
        self.facts = facts
        self.retention = retention
        self.metric, self.better = goal(retention.best or "")
        self.preemption = preemption
        self.voice = voice
        self.guards = guards
        self.model = model
        self.root = directory.checkpoints
        self.best: tuple[int, float] | None = None
        self._copy: dict[str, Any] = {}
        self._background = self.world.apart() if self.together else None
        if self.together:
            self.world.together(self._see)
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        preemption.record_time("save", self.estimate_bytes() / _SLOWEST_DISK)
        self.world.on_main(self._begin_with_best)

    @property
    def together(self) -> bool:
        """Whether all processes write, each its part."""
        return self.world.mesh is not None

    def _see(self) -> None:
        """Check that all processes write to the same disk."""
        place = self.directory.path
        if not place.is_dir() or "config.yaml" not in os.listdir(place):
            raise OutputError(f"{place}: not visible to every process. Use an --output on a shared disk.")

    def estimate_bytes(self) -> int:
        """Approximate space of a checkpoint: weights, optimizer state, and the names of both in its metadata."""
        names, state = adapter_weight_names(self.engine.model.module), self.engine.model.module.state_dict()
        weights = sum(weight.numel() * weight.itemsize for name, weight in state.items()
                      if names is None or name in names)
        optimizer, owned = self.engine.updater.optimizer, self.engine.updater.owned
        moments = math.ceil(sum(weight.numel() * bytes_per_value(optimizer, part)
                                for weight, part in zip(owned.weights, owned.parts, strict=True)))
        entries = len(state if names is None else names) + 4 * len(owned.weights)
        return checkpoint.space_of(weights + moments, entries, self.root)

    def finished(self) -> list[checkpoint.Checkpoint]:
        """The complete checkpoints of the run."""
        return checkpoint.listed(self.root)

    @property
    def failed(self) -> bool:
        """Whether a save in the background failed. `wait` raises its error."""
        return self._failure is not None

    def wants(self, state: RunState) -> bool:
        """Whether this step's evaluation is better than that of any checkpoint. All processes call this together."""
        if self.retention.best is None:
            return False
        own = self.world.is_main and self._beats(state.step, state.evaluation)
        return bool(self.world.max([int(own)])[0])

    def save(self, state: RunState) -> None:
        """Copy the state, and start to write it. All processes call this together.

        Raises:
            OutputError: if the save before this one failed, or something cannot be copied.
        """
        self.wait()

        def begin() -> None:
            try:
                self._begin(state)
            except TropismError:
                raise
            except Exception as error:  # from the user's optimizer; the other processes would wait
                raise OutputError(f"{self.root}: the state after step {state.step} cannot be saved: "
                                  f"{type(error).__name__}: {error}") from error

        if self.together:
            self.world.together(begin)
        else:
            self.world.on_main(begin)

    def wait(self) -> None:
        """Wait until the current save is on the disk. All processes call this together.

        Raises:
            OutputError: if it could not be written.
        """
        self.world.together(self._join)

    def leave(self) -> None:
        """Let the current save finish after another error: it was started before that."""
        try:
            self._join()
        except TropismError as error:
            self.voice.warn(str(error))

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure if isinstance(failure, TropismError) else OutputError(
                f"{self.root}: the checkpoint could not be written: {type(failure).__name__}: {failure}")

    def _begin(self, state: RunState) -> None:
        self.directory.check_owned()
        began = time.monotonic()
        updater = self.engine.updater
        module = self.engine.model.module
        weights = TrainingState.of(module, updater.optimizer, updater.owned, only=adapter_weight_names(module))
        tensors = self._copy = weights.copied(self._copy, self.world.mesh)
        check_plain([weights.groups, weights.values], "the optimizer")
        trainer = {
            **state.to_json(), **self.facts, "guards": json.loads(json.dumps(self.guards())),
            "offsets": self.directory.offsets(),
            "shift": self.engine.shift.state(), "random": random_state(), "updater": updater.state(),
            "optimizer": {"groups": weights.groups, "values": weights.values, "begun": bool(updater.optimizer.state)},
            "saved": datetime.now(UTC).isoformat(timespec="seconds")}
        if self._beats(state.step, state.evaluation):
            self.best = state.step, state.evaluation[self.metric]
        trainer["stall_s"] = time.monotonic() - began
        # A daemon: an interrupted run does not wait for it, and an incomplete checkpoint does not count.
        self._thread = threading.Thread(target=self._write, args=(state.step, tensors, weights.tied, trainer),
                                        name="checkpoint", daemon=True)
        lend(self.directory.path, self._thread)  # first: an interrupt may come between these two
        self._thread.start()

    def _write(self, step: int, tensors: dict[str, Any], tied: dict[str, str], trainer: dict[str, Any]) -> None:
        """In the background: write a checkpoint, then remove old ones."""
        began = time.monotonic()
        try:
            write_model = self.model
            model: Callable[[Path], None] | None = None
            if write_model is not None:
                def model(path: Path) -> None:
                    whole = read_whole(tensors, path.parent / "state") if self.together else tensors
                    everything = whole | {name: whole[other] for name, other in tied.items() if other in whole}
                    write_model({name.removeprefix("model/"): tensor for name, tensor in everything.items()
                                 if name.startswith("model/")}, path)
            size = checkpoint.write(self.root, step, tensors, trainer, model, self.directory.logs, self._background,
                                    self.directory.check_owned)
            if not self.world.is_main:
                return
            self._publish(step)
        except BaseException as error:  # raised by the next `wait`
            self._failure = error
            try:
                self.directory.check_owned()
            except OutputError as lost:  # says more
                self._failure = lost
            return
        seconds = time.monotonic() - began
        self.preemption.record_time("save", trainer["stall_s"] + seconds)
        self.voice.say(f"checkpoint: step {step}, {size / 2**20:.1f} MiB, written in the background in {seconds:.2f} "
                       f"s; training paused for {trainer['stall_s']:.3f} s")

    def _publish(self, step: int) -> None:
        """Record the best checkpoint, and remove those that are not kept."""
        self.directory.check_owned()
        try:
            self._write_best()
            finished = checkpoint.listed(self.root)
            stay = self.retention.kept([one.step for one in finished], self.best[0] if self.best else None) | {step}
            paths = {one.path for one in finished if one.step in stay}
            for path in self.root.iterdir():
                if checkpoint.step_of(path) is not None and path not in paths:
                    checkpoint.remove(path)
        except OSError as error:
            raise OutputError(f"{self.root}: old checkpoints cannot be removed: {error.strerror}") from error

    def _write_best(self) -> None:
        if self.best is None:
            (self.root / "best.json").unlink(missing_ok=True)
        else:
            best = {"checkpoint": checkpoint.place_of(self.root, self.best[0]).name, "step": self.best[0],
                    "metric": self.metric, "value": self.best[1]}
            write_whole(self.root / "best.json", (json.dumps(best, indent=2) + "\n").encode())

    def _beats(self, step: int, evaluation: dict[str, Any]) -> bool:
        """Whether a checkpoint of this step is better than the best so far. Needs an evaluation of the same step."""
        if self.retention.best is None or evaluation.get("step") != step or not math.isfinite(
                evaluation.get(self.metric, math.nan)):
            return False
        value = evaluation[self.metric]
        return self.best is None or (value > self.best[1] if self.better == "higher" else value < self.best[1])

    def _begin_with_best(self) -> None:
        """Find the best of the complete checkpoints of the run."""
        for one in checkpoint.listed(self.root) if self.retention.best else ():
            try:
                evaluation = checkpoint.recorded(one.path / "trainer.json")["evaluation"]
                better = self._beats(one.step, evaluation)
            except (CheckpointError, ValueError, KeyError, TypeError, AttributeError):
                continue
            if better:
                self.best = one.step, evaluation[self.metric]
        try:
            self._write_best()
        except OSError as error:
            raise OutputError(f"{self.root / 'best.json'}: cannot be written: {error.strerror}") from error


def make_saver(engine: Engine, directory: RunDirectory, options: RunOptions, facts: Mapping[str, Any],
               preemption: Preemption, voice: Voice, guards: Callable[[], dict[str, Any]],
               tokenizer: Any) -> Saver | None:
    """The saver that the options ask for; None if the optimizer's state cannot be saved.

    Args:
        facts: as in `Saver`; `stop_ids` are the ids that end a completion.
        tokenizer: saved with the weights if `--checkpoint-model` is set.

    Raises:
        UsageError: if checkpoints are asked for and the optimizer's state cannot be saved.
    """
    reason = why_not_kept(engine.updater)
    if reason is not None:
        for name in ("save_every", "keep_best"):
            if getattr(options, name):
                raise UsageError(f"{name}: {clause(reason)}. Remove {name}, or let Tropism create the optimizer.")
        voice.warn(f"a stopped run cannot be resumed: {reason}")
        return None

    def write_model(weights: dict[str, Any], path: Path) -> None:
        export(engine.model.module, tokenizer, path, getattr(torch, options.export_dtype), facts["stop_ids"], weights)

    return Saver(engine, directory, facts, Retention(options.keep, options.keep_best), preemption, voice, guards,
                 write_model if options.checkpoint_model else None)
