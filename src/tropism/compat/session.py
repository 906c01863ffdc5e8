"""A run that a published trainer drives update by update, with the figures that it would log of each micro-batch."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tropism.compat.base import Door, variables
from tropism.data.batching.pack import mismatched_trees
from tropism.data.dataloaders.steps import ReadSteps, read_batches
from tropism.data.rows import EncodedRow
from tropism.data.schedule import MICRO_BATCH, GivenSchedule, MicroBatchRule, Parts
from tropism.errors import ReferenceMismatchError, UsageError
from tropism.losses.scored import Scored
from tropism.methods import StepInputs
from tropism.observe.rundir import free_name
from tropism.runner import Run, RunResult
from tropism.train.engine import Engine
from tropism.train.evaluation.evaluator import Evaluator, units_of
from tropism.train.frozen.reference import LiveReference, StoredReference
from tropism.train.reference_point import pool, reference_moments
from tropism.train.score_packs import silent
from tropism.train.setup.checks import probe_trees
from tropism.train.step import train_step
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

    Args:
        loader: the dataloader.
        change: called with each batch; returns the one to use.
        most: batches of each pass, at most.
        announce: let `set_epoch` of its samplers be called. Some published trainers never do.

    Attributes:
        passes: batches of each pass that was begun.
    """

    def __init__(self, loader: Iterable[Any], change: Callable[[Any], Any] = lambda batch: batch,
                 most: Sequence[int] | None = None, announce: bool = False) -> None:
        self.loader, self.change, self.most = loader, change, most
        self.passes: list[int] = []
        if announce:
            self.sampler, self.batch_sampler = (getattr(loader, name, None) for name in ("sampler", "batch_sampler"))

    def __len__(self) -> int:
        count = len(self.loader)  # type: ignore[arg-type]
        return count if self.most is None else min(count, self.most[0])

    def __iter__(self) -> Iterator[Any]:
        number = len(self.passes)
        self.passes.append(0)
        most = None if self.most is None else self.most[number]
        if most is not None and most >= len(self.loader):  # type: ignore[arg-type]
            most = None  # a pass to its end: some samplers draw their next order there
        for batch in islice(self.loader, most):
            self.passes[number] += 1
            yield self.change(batch)


class Session:
    """A run of a plain trainer, one update at a time.

    Args:
        door: makes the trainer.
        loader, evaluation: the dataloaders; `evaluation` is None for none.
        log: makes the published figures of the micro-batches of an update (`train`) or evaluation (`eval`), which
            `figures` gives to the record.
        output: run directory, unless the options of the door have one; the next free name if it exists.
        environment: variables for the trackers, while the run lasts. They are not recorded.
        options: of the plain trainer.

    Attributes:
        done: updates so far.
        grad_norm, learning_rate: of the last update.
        seconds: that the last evaluation took.
        result: of the run, after its end.
    """

    def __init__(self, door: Door, loader: Iterable[Any], evaluation: Iterable[Any] | None,
                 log: Callable[[str, MicroBatches], Mapping[str, float]], *, output: Path,
                 environment: Mapping[str, str], **options: Any) -> None:
        door.announce()
        self._door, self._log, self._stack = door, log, ExitStack()
        chosen = door.options.get("output") or free_name(output)
        self.trainer: Trainer = door.plain(
            door.rule, train_dataloader=loader, eval_dataloader=evaluation, optimizer=door.optimizer,
            scheduler=door.scheduler, **{**options, "output": str(chosen)})
        self._steps = self.trainer.steps()
        self._stack.enter_context(variables(environment))
        self.done = 0
        self.grad_norm = self.learning_rate = self.seconds = 0.0
        self.result: RunResult | None = None
        self._begun = False
        self._latest: dict[int, Mapping[str, float]] = {}
        self._evaluated: tuple[Any, MicroBatches] | None = None
        self._reference: LiveReference | None = None

    @property
    def run(self) -> Run:
        """The run, once it has begun."""
        if self.trainer.run is None:
            with self._working() as run:
                run.build()
        assert self.trainer.run is not None
        return self.trainer.run

    @property
    def steps(self) -> GivenSchedule:
        """The steps of the run."""
        assert self.trainer.objects.steps is not None
        return self.trainer.objects.steps

    def batch(self, number: int) -> dict[str, Tensor]:
        """The rows of a step, from 1, as a batch in NeMo-Aligner's layout."""
        assert self.trainer.objects.rows is not None
        rows = [self.trainer.objects.rows[index] for index in self.steps.step(number)]
        return as_batch(rows)

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
            self._begun = True
            outcome = next(self._steps)
            assert outcome is not None
            assert self.trainer.objects.rows is not None
            self.done = outcome.step
            found = self._of_step(outcome, self.trainer.objects.rows, self.steps)
            self._latest = {outcome.step: self._log("train", found)}
            self.run.evaluator.found = None
            began = time.monotonic()
            next(self._steps)
            self.seconds = time.monotonic() - began
        except StopIteration as end:
            self.result = end.value
            raise UsageError("no update is left: the run has ended") from None
        return found

    def update_on(self, batch: Any) -> MicroBatches:
        """An update on any batch, outside the steps of the run. The reference must be in memory."""
        with self._working() as run:
            rows, steps = self._read(batch, run)
            engine = self._engine(run)
            reuse = run.planner.reuse_prompts and engine is run.engine  # another reference has no prompts to continue
            planner = replace(run.planner, rows=rows, schedule=steps, reuse_prompts=reuse)
            return self._of_step(train_step(engine, planner.packs_of(1)), rows, steps)

    def evaluation_of(self, batch: Any) -> MicroBatches:
        """The rows of a batch under the policy as it is.

        Raises:
            UsageError: if the reference is not in memory, and has no scores of these rows.
        """
        with self._working() as run:
            rows, steps = self._read(batch, run)
            evaluator = Evaluator(rows, run.inputs.numerics.microbatch_tokens, run.inputs.data.max_length, steps.whole)
            try:
                found = evaluator.score(self._engine(run), silent)
            except ReferenceMismatchError:
                raise UsageError("the reference scores of this batch are not known: only those of the dataloaders are "
                                 "computed before training. Pass reference='live', or a reference model.") from None
            return self._of_rows(evaluator, found)

    def _read(self, batch: Any, run: Run) -> tuple[list[EncodedRow], GivenSchedule]:
        gather = run.world.gather if run.world.size > 1 else None
        rule: Any = self._door.rule
        how = ReadSteps("unpaired", rule=rule if isinstance(rule, MicroBatchRule) else MICRO_BATCH, gather=gather)
        return read_batches([batch], how, lambda text: None)

    @contextmanager
    def _working(self) -> Iterator[Run]:
        """The run with its engine, between two updates of it or outside of them."""
        if self._begun and self.result is None:
            assert self.trainer.run is not None
            yield self.trainer.run
            return
        with self.trainer.working() as run:
            run.build()
            yield run

    def _engine(self, run: Run) -> Engine:
        """The engine, with the caller's reference in memory, which can score any batch."""
        engine = run.engine
        if self._door.reference is None or not isinstance(engine.reference, StoredReference):
            return engine
        if self._reference is None:
            numerics = run.inputs.numerics
            probes = probe_trees(run.inputs.data.train, numerics.microbatch_tokens)
            self._reference = LiveReference(numerics.frozen(self._door.reference, probes, "auto", "reference"))
        return replace(engine, reference=self._reference)

    def leave(self) -> None:
        """End without a result."""
        self._steps.close()
        self._stack.close()

    def finish(self, reason: str | None = None) -> RunResult | None:
        """Export the model, and end the run after its last update. None if there was no update.

        Args:
            reason: why it ends early.
        """
        if not self.done:
            self.leave()
            return None
        if self.result is None:
            try:
                self._steps.send(reason)
            except StopIteration as end:
                self.result = end.value
            self._stack.close()
        return self.result

    def fail(self, error: BaseException) -> None:
        """End the run with an error from between two updates, which is recorded and raised."""
        with self._stack:
            self._steps.throw(error)

    def evaluation(self) -> MicroBatches:
        """The held-out rows under the policy as it is. Scores that the run has just computed are used."""
        with self._working() as run:
            evaluator = run.evaluator
            if evaluator.found is None:
                began = time.monotonic()
                evaluator.found = evaluator.score(run.engine, silent)
                self.seconds = time.monotonic() - began
            if self._evaluated is None or self._evaluated[0] is not evaluator.found:
                self._evaluated = (evaluator.found, self._of_rows(evaluator, evaluator.found))
            return self._evaluated[1]

    def _of_step(self, outcome: StepOutcome, rows: Sequence[EncodedRow], steps: GivenSchedule) -> MicroBatches:
        world = self.run.world
        self.grad_norm, self.learning_rate = float(outcome.grad_norm), outcome.learning_rate
        own = {row: (values[0], values[3]) for table, members in outcome.losses
               for row, values in zip(members, table.T.tolist(), strict=True)}
        of_row = {row: values for part in world.of_parts(own) for row, values in part.items()}
        indices = steps.step(outcome.step)
        positive = float(outcome.point.positive) if outcome.point is not None else float("nan")
        table = np.array([of_row[index] for index in indices])
        parts = steps.parts(outcome.step)
        return _divided([rows[index] for index in indices], table[:, 0], table[:, 1], parts,
                        [positive] * parts.number)

    def _of_rows(self, evaluator: Evaluator, found: Mapping[bytes, Any]) -> MicroBatches:
        method = self.run.engine.method
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


def as_batch(rows: Sequence[EncodedRow]) -> dict[str, Tensor]:
    """Rows of token ids as a batch in NeMo-Aligner's layout, all padded to one length with 0 and -100."""
    tokens: list[Tensor] = []
    labels: list[Tensor] = []
    for row, side in [(row, row.completions[0]) for row in rows] + [(row, row.partner) for row in rows]:
        if side is None:  # the batch had no mismatched rows
            continue
        prompt, own = (torch.from_numpy(part.astype(np.int64)) for part in (row.prompt_ids, side.ids))
        tokens.append(torch.cat((prompt, own)))
        marked = own.masked_fill(~torch.tensor(side.loss_mask), -100)
        labels.append(torch.cat((torch.full_like(prompt, -100), marked)))
    count = len(rows)
    ids, marks = pad_sequence(tokens, batch_first=True), pad_sequence(labels, batch_first=True, padding_value=-100)
    batch = {"samples": ids[:count], "sample_labels": marks[:count],
             "sample_length": torch.tensor([len(text) for text in tokens[:count]]),
             "preference": torch.tensor([int(bool(row.desirable)) for row in rows])}
    return batch | ({"kl_samples": ids[count:], "kl_sample_labels": marks[count:]} if len(ids) > count else {})
