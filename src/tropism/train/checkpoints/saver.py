"""Keeping a run while it goes on: tensors are copied within a step and written beside the next ones."""

import json
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tropism.distributed.state import TrainingState, check_plain, read_whole
from tropism.distributed.world import World
from tropism.errors import OutputError, TropismError
from tropism.files import write_whole
from tropism.methods import Method
from tropism.model.adapters.structure import learning_names
from tropism.observe.console import Voice
from tropism.observe.lock import lend
from tropism.observe.metrics import direction
from tropism.observe.rundir import RunDirectory
from tropism.train.checkpoints import files as checkpoint
from tropism.train.checkpoints.rng_state import random_state
from tropism.train.engine import Engine
from tropism.train.monitor.early_stopping import check_evaluated
from tropism.train.preemption import Halt
from tropism.train.records import Progress

_SLOWEST_DISK = 100e6
"""Bytes per second that the first save is expected to write, before any was measured."""


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay.

    Args:
        newest: how many of the newest; 0 for all.
        best: metric by which one more stays, if it is not among them: the best of those that were evaluated at their
            own step.
    """

    newest: int = 2
    best: str | None = None

    def kept(self, steps: list[int], best: int | None) -> set[int]:
        """Those that stay, of finished ones."""
        newest = sorted(steps)[-self.newest:] if self.newest else steps
        return {*newest, *([best] if best in steps else [])}


@dataclass
class Notes:
    """What a checkpoint keeps of everything around the loop; plain values.

    Args:
        fixed: fingerprints, options, libraries and world size that it belongs to.
        answers: given before training.
        baselines: of the evaluator.
        evaluation: the last evaluation record.
        guards: state of whatever watches the records, by its name.
        seconds: that earlier sittings took.
        began: when this sitting began, of the monotonic clock.
    """

    fixed: dict[str, Any]
    answers: list[str] = field(default_factory=list)
    baselines: dict[str, float] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)
    guards: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    began: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        """Seconds of the run so far."""
        return self.seconds + time.monotonic() - self.began

    def resume(self, trainer: dict[str, Any]) -> None:
        """Take over what a checkpoint kept."""
        self.answers, self.baselines = list(trainer["answers"]), dict(trainer["baselines"])
        self.evaluation, self.guards = dict(trainer["evaluation"]), dict(trainer["guards"])
        self.seconds = float(trainer["seconds"])

    def state(self) -> dict[str, Any]:
        """What is written down."""
        return {**self.fixed, "answers": list(self.answers), "baselines": dict(self.baselines),
                "evaluation": dict(self.evaluation), "guards": json.loads(json.dumps(self.guards)),
                "seconds": self.elapsed}


class Saver:
    """Writes checkpoints of a run, one at a time. The main rank writes, with all others where the model is sharded.

    Args:
        engine: what is kept.
        directory: of the run.
        notes: what is kept around it; whoever changes them is seen by the next save.
        retention: which checkpoints stay.
        halt: is told how long a save takes.
        voice: says a line for each save.
        model: writes the weights of a state dict as a model directory; None for none.
    """

    def __init__(self, engine: Engine, directory: RunDirectory, notes: Notes, retention: Retention, halt: Halt,
                 voice: Voice, model: Callable[[dict[str, Any], Path], None] | None = None) -> None:
        self.engine = engine
        self.world: World = engine.world
        self.directory = directory
        self.notes = notes
        self.retention = retention
        self.halt = halt
        self.voice = voice
        self.model = model
        self.root = directory.checkpoints
        self.best: tuple[int, float] | None = None
        self._copy: dict[str, Any] = {}
        self._beside = self.world.apart() if self.together else None
        if self.together:
            self.world.together(self._see)
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        halt.took("save", self.estimate_bytes() / _SLOWEST_DISK)
        self.world.on_main(self._begin_with_best)

    @property
    def together(self) -> bool:
        """Whether all ranks write, each its part."""
        return self.world.mesh is not None

    def _see(self) -> None:
        """A part that lay on a disk of its own would be of no use."""
        place = self.directory.path
        if not place.is_dir() or "config.yaml" not in os.listdir(place):
            raise OutputError(f"{place}: not every process sees it; it must lie on a disk that all of them see")

    def estimate_bytes(self) -> int:
        """About what one checkpoint takes, before there is one."""
        names, state = learning_names(self.engine.model.module), self.engine.model.module.state_dict()
        weights = sum(weight.numel() * weight.itemsize for name, weight in state.items()
                      if names is None or name in names)
        per_weight = 2 if "adam" in type(self.engine.updater.optimizer).__name__.lower() else 1
        return weights + per_weight * sum(
            weight.numel() * weight.itemsize for weight in self.engine.updater.owned.weights)

    def finished(self) -> list[checkpoint.Checkpoint]:
        """What is there already."""
        return checkpoint.listed(self.root)

    @property
    def failed(self) -> bool:
        """A save in the background has failed; `wait` says how."""
        return self._failure is not None

    def wants(self, step: int) -> bool:
        """Whether the evaluation of this step is better than that of any checkpoint. All ranks call this together."""
        if self.retention.best is None:
            return False
        own = self.world.is_main and self._beats(step, self.notes.evaluation)
        return bool(self.world.max([int(own)])[0])

    def save(self, progress: Progress) -> None:
        """Copy what is to be kept, and begin to write it. All ranks call this together.

        Raises:
            OutputError: if the save before this one failed, or something cannot be copied.
        """
        self.wait()

        def begin() -> None:
            try:
                self._begin(progress)
            except TropismError:
                raise
            except Exception as error:  # of an optimizer that was given; the other ranks would wait for us
                raise OutputError(f"{self.root}: the state after step {progress.step} cannot be kept: "
                                  f"{type(error).__name__}: {error}") from error

        if self.together:
            self.world.together(begin)
        else:
            self.world.on_main(begin)

    def wait(self) -> None:
        """Come back when the save in hand is on the disk. All ranks call this together.

        Raises:
            OutputError: if it could not be written.
        """
        self.world.together(self._join)

    def leave(self) -> None:
        """Let the save in hand come to its end, where something else has gone wrong: it was begun before that."""
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

    def _begin(self, progress: Progress) -> None:
        began = time.monotonic()
        updater = self.engine.updater
        module = self.engine.model.module
        state = TrainingState.of(module, updater.optimizer, updater.owned, only=learning_names(module))
        tensors = self._copy = state.copied(self._copy, self.world.mesh)
        check_plain([state.groups, state.values], "the optimizer")
        trainer = {
            **progress.state(), **self.notes.state(), "offsets": self.directory.offsets(),
            "shift": self.engine.shift.state(), "random": random_state(), "updater": updater.state(),
            "optimizer": {"groups": state.groups, "values": state.values, "begun": bool(updater.optimizer.state)},
            "saved": datetime.now(UTC).isoformat(timespec="seconds")}
        if self._beats(progress.step, self.notes.evaluation):
            self.best = progress.step, self.notes.evaluation[str(self.retention.best)]
        trainer["stall_s"] = time.monotonic() - began
        # A daemon: whoever leaves the run in a hurry does not wait for it, and what is unfinished does not count.
        self._thread = threading.Thread(target=self._write, args=(progress.step, tensors, state.tied, trainer),
                                        name="checkpoint", daemon=True)
        lend(self.directory.path, self._thread)  # first: an interrupt may come between these two
        self._thread.start()

    def _write(self, step: int, tensors: dict[str, Any], tied: dict[str, str], trainer: dict[str, Any]) -> None:
        """In the background: write, publish, tidy up."""
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
            size = checkpoint.write(self.root, step, tensors, trainer, model, self.directory.logs, self._beside)
            if not self.world.is_main:
                return
            self._publish(step)
        except BaseException as error:  # told at the next step, by whoever asks
            self._failure = error
            return
        seconds = time.monotonic() - began
        self.halt.took("save", trainer["stall_s"] + seconds)
        self.voice.say(f"checkpoint: step {step}, {size / 2**20:.1f} MiB in {seconds:.2f} s beside the training, which "
                       f"stood still for {trainer['stall_s']:.3f} s")

    def _publish(self, step: int) -> None:
        """Say which is the best, and remove those that need not stay."""
        try:
            self._write_best()
            finished = checkpoint.listed(self.root)
            stay = self.retention.kept([one.step for one in finished], self.best[0] if self.best else None) | {step}
            paths = {one.path for one in finished if one.step in stay}
            for path in self.root.iterdir():
                if checkpoint.step_of(path) is not None and path not in paths:
                    checkpoint.remove(path)
        except OSError as error:
            raise OutputError(f"{self.root}: cannot be tidied up: {error.strerror}") from error

    def _write_best(self) -> None:
        if self.best is None:
            (self.root / "best.json").unlink(missing_ok=True)
        else:
            best = {"checkpoint": checkpoint.place_of(self.root, self.best[0]).name, "step": self.best[0],
                    "metric": self.retention.best, "value": self.best[1]}
            write_whole(self.root / "best.json", (json.dumps(best, indent=2) + "\n").encode())

    def _beats(self, step: int, evaluation: dict[str, Any]) -> bool:
        """Whether a checkpoint of this step is better than the best before it. An older evaluation says nothing."""
        metric = self.retention.best
        if metric is None or evaluation.get("step") != step or not math.isfinite(evaluation.get(metric, math.nan)):
            return False
        value = evaluation[metric]
        return self.best is None or (value > self.best[1] if direction(metric) == "higher" else value < self.best[1])

    def _begin_with_best(self) -> None:
        """The best of the checkpoints that are there and count, which need not be those of the last sitting."""
        for one in checkpoint.listed(self.root) if self.retention.best else ():
            try:
                evaluation = json.loads((one.path / "trainer.json").read_text(encoding="utf-8"))["evaluation"]
            except (OSError, ValueError, KeyError):
                continue
            if self._beats(one.step, evaluation):
                self.best = one.step, evaluation[str(self.retention.best)]
        try:
            self._write_best()
        except OSError as error:
            raise OutputError(f"{self.root / 'best.json'}: cannot be written: {error.strerror}") from error


def check_metric(metric: str | None, method: Method, has_evaluation: bool) -> None:
    """Stop before anything is spent where no evaluation could say which checkpoint is the best.

    Raises:
        UsageError: naming the metrics that there are.
    """
    if metric is None:
        return
    check_evaluated("keep_best", metric, method, has_evaluation)
