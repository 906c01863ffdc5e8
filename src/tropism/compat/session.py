"""A run that a published trainer drives update by update, with the figures that it would log of each micro-batch."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tropism.compat.base import Door, variables
from tropism.data.batching.pack import mismatched_trees
from tropism.data.rows import EncodedRow
from tropism.data.schedule import Parts
from tropism.errors import UsageError
from tropism.losses.scored import Scored
from tropism.methods import StepInputs
from tropism.observe.rundir import free_name
from tropism.runner import Run, RunResult
from tropism.train.evaluation.evaluator import units_of
from tropism.train.reference_point import pool, reference_moments
from tropism.train.score_packs import silent
from tropism.train.step_log import StepOutcome
from tropism.train.step_packs import users_of_parts
from tropism.trainers import Trainer

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Figures:
    """The rows of a process's part of a micro-batch, under the policy before the update.

    Args:
        losses: `[n]`.
        logratios: `[n]` policy minus reference, in nats.
        desirable: `[n]` labels.
        positive: mean over the rows of their mismatched log-ratios, with 0 for those below 0. Of the whole step in
            training.
    """

    losses: Floats
    logratios: Floats
    desirable: npt.NDArray[np.bool_]
    positive: float

    def mean(self, of_class: bool) -> float:
        """Mean log-ratio of a class; NaN if it is absent."""
        own = self.logratios[self.desirable == of_class]
        return float(own.mean()) if len(own) else float("nan")


MicroBatches = list[list[Figures]]
"""Micro-batches, each with the parts of its processes."""


class Batches:
    """A dataloader whose batches are counted, and perhaps changed.

    It hides the samplers: the published trainers behind it never call `set_epoch`.

    Args:
        loader: the dataloader.
        change: called with each batch; returns the one to use.
        most: batches of each pass.

    Attributes:
        passes: batches of each pass that was begun.
    """

    def __init__(self, loader: Iterable[Any], change: Callable[[Any], Any] = lambda batch: batch,
                 most: int | None = None) -> None:
        self.loader, self.change, self.most = loader, change, most
        self.passes: list[int] = []

    def __len__(self) -> int:
        count = len(self.loader)  # type: ignore[arg-type]
        return count if self.most is None else min(count, self.most)

    def __iter__(self) -> Iterator[Any]:
        number = len(self.passes)
        self.passes.append(0)
        for batch in islice(self.loader, self.most):
            self.passes[number] += 1
            yield self.change(batch)


class Session:
    """A run of a plain trainer, one update at a time.

    Args:
        door: makes the trainer.
        loader, evaluation: the dataloaders; `evaluation` is None for none.
        log: makes the published figures of the micro-batches of an update (`train`) or evaluation (`eval`), which
            `figures` gives to the record.
        output: run directory; the next free name if it exists.
        environment: variables for the trackers, while the run lasts. They are not recorded.
        options: of the plain trainer.

    Attributes:
        done: updates so far.
        result: of the run, after its end.
    """

    def __init__(self, door: Door, loader: Iterable[Any], evaluation: Iterable[Any] | None,
                 log: Callable[[str, MicroBatches], Mapping[str, float]], *, output: Path,
                 environment: Mapping[str, str], **options: Any) -> None:
        door.announce()
        self._log, self._stack = log, ExitStack()
        self.trainer: Trainer = door.plain(
            door.rule, train_dataloader=loader, eval_dataloader=evaluation, optimizer=door.optimizer,
            scheduler=door.scheduler, output=str(free_name(output)), **options)
        self._steps = self.trainer.steps()
        self._stack.enter_context(variables(environment))
        self.done = 0
        self.result: RunResult | None = None
        self._latest: dict[int, Mapping[str, float]] = {}
        self._evaluated: tuple[int, Any, MicroBatches] | None = None

    @property
    def run(self) -> Run:
        """The run, once it has begun."""
        if self.trainer.run is None:
            self.trainer.evaluate()  # builds it, and scores the held-out rows
        assert self.trainer.run is not None
        return self.trainer.run

    def figures(self, record: Mapping[str, float], split: str) -> Mapping[str, float]:
        """The published figures of a record that is being written."""
        if split == "eval":
            return self._log(split, self.evaluation())
        return self._latest.get(int(record["step"]), {})

    def update(self) -> MicroBatches:
        """Do the next update, with its record, evaluation and checkpoint.

        Raises:
            UsageError: if there is none, because the run has ended early.
        """
        try:
            outcome = next(self._steps)
            assert outcome is not None
            self.done = outcome.step
            found = self._of_step(outcome)
            self._latest = {outcome.step: self._log("train", found)}
            self.run.evaluator.found = None
            next(self._steps)
        except StopIteration as end:
            self.result = end.value
            raise UsageError("no update is left: the run has ended") from None
        return found

    def finish(self, reason: str | None = None) -> RunResult:
        """Export the model, and end the run after its last update.

        Args:
            reason: why it ends early.
        """
        if self.result is None:
            try:
                self._steps.send(reason)
            except StopIteration as end:
                self.result = end.value
            self._stack.close()
        assert self.result is not None
        return self.result

    def fail(self, error: BaseException) -> None:
        """End the run with an error from between two updates, which is recorded and raised."""
        with self._stack:
            self._steps.throw(error)

    def evaluation(self) -> MicroBatches:
        """The held-out rows under the policy as it is. Scores that the run has just computed are used."""
        run = self.run
        evaluator, engine = run.evaluator, run.engine
        if evaluator.found is None:
            evaluator.found = evaluator.score(engine, silent)
        if self._evaluated is None or self._evaluated[1] is not evaluator.found:
            self._evaluated = (self.done, evaluator.found, self._of_rows(evaluator.found))
        return self._evaluated[2]

    def _of_step(self, outcome: StepOutcome) -> MicroBatches:
        objects, world = self.trainer.objects, self.run.world
        assert objects.steps is not None
        assert objects.rows is not None
        own = {row: (values[0], values[3]) for table, rows in outcome.losses
               for row, values in zip(rows, table.T.tolist(), strict=True)}
        of_row = {row: values for part in world.of_parts(own) for row, values in part.items()}
        indices = objects.steps.step(outcome.step)
        positive = float(outcome.point.positive) if outcome.point is not None else float("nan")
        table = np.array([of_row[index] for index in indices])
        parts = objects.steps.parts(outcome.step)
        return _divided([objects.rows[index] for index in indices], table[:, 0], table[:, 1], parts,
                        [positive] * parts.number)

    def _of_rows(self, found: Mapping[bytes, Any]) -> MicroBatches:
        run = self.run
        evaluator, method = run.evaluator, run.engine.method
        rows, parts = evaluator.rows, evaluator.parts
        entries = mismatched_trees(rows, range(len(rows)), evaluator.max_length, parts)
        others = method.compared(Scored.join(found[key] for entry in entries for key in entry.tree.score_keys))
        moments = reference_moments(others.logratios, users_of_parts(entries, parts))
        places = parts.micro_batches
        own = torch.tensor([places[number] for number, part in enumerate(parts.ranges()) for _ in part])
        scored = evaluator.own(found)
        values = pool(moments, parts).values
        point = values[own] if len(values) > 1 else values[0]
        losses = torch.stack(method.losses(scored, units_of(rows, scored), StepInputs(point))).sum(0)
        return _divided(rows, losses.numpy(), method.compared(scored).logratios.numpy(), parts,
                        (moments[:, 5] / moments[:, 1]).tolist())


def _divided(rows: Sequence[EncodedRow], losses: Floats, logratios: Floats, parts: Parts,
             positive: Sequence[float]) -> MicroBatches:
    """Figures of the parts of each micro-batch."""
    labels = np.array([bool(row.desirable) for row in rows])
    flat = iter(Figures(losses[own], logratios[own], labels[own], positive[number]) for number, own in enumerate(
        [slice(part.start, part.stop) for part in parts.ranges()]))
    return [[next(flat) for _ in sizes] for sizes in parts.sizes]


def optimizer_inside(optimizer: Any) -> Any:
    """The torch optimizer inside the wrappers of boosters and training frameworks."""
    seen: set[int] = set()
    while not isinstance(optimizer, torch.optim.Optimizer) and id(optimizer) not in seen:
        seen.add(id(optimizer))
        held = (getattr(optimizer, name, None) for name in ("optim", "optimizer"))
        optimizer = next((one for one in held if hasattr(one, "param_groups")), optimizer)
    return optimizer
