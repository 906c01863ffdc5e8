"""The work that all sides of a comparison do: the same rows in the same order, as token ids."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from tropism.config import METHODS, MethodOptions
from tropism.data.rows import EncodedRow
from tropism.distributed import connect
from tropism.observe.console import Voice
from tropism.runner import Run

LEARNING_RATE, MAX_GRAD_NORM, BETA = 1e-6, 1.0, 0.1


@dataclass(frozen=True)
class Cell:
    """One comparison: what is trained on what.

    Args:
        method: `kto`, `dpo` or `kd`.
        model, teacher, data: paths; the teacher is None but for distillation.
        batch_size: rows of a step.
        steps: optimizer steps; the first one is the warm-up.
        grouped: all rows of a prompt are in one step.
        precision: `fp32`, or `bf16` by autocast on all sides.
        max_length: of a prompt with its completion, in tokens.
        threads: of each side.
        microbatch_tokens: Tropism's pack size; None for its choice.
        micro_batch: rows of a micro-batch of the other side; None for the fastest of several.
    """

    method: str
    model: str
    data: str
    teacher: str | None = None
    batch_size: int = 4
    steps: int = 6
    grouped: bool = False
    precision: str = "fp32"
    max_length: int = 2048
    threads: int = 2
    microbatch_tokens: int | None = None
    micro_batch: int | None = None

    def options(self, store: str) -> MethodOptions:
        """The run's options."""
        teacher = {"teacher": self.teacher, "kd_weight": 1.0} if self.teacher else {}
        packs = {"microbatch_tokens": self.microbatch_tokens} if self.microbatch_tokens else {}
        return METHODS[self.method](
            model=self.model, data=self.data, output=str(Path(store) / "unused"), store=store,
            batch_size=self.batch_size, max_steps=self.steps, max_length=self.max_length, group_prompts=self.grouped,
            precision=self.precision, learning_rate=LEARNING_RATE, schedule="constant", warmup_ratio=0.0,
            max_grad_norm=MAX_GRAD_NORM, **teacher, **packs)


@dataclass(frozen=True)
class Job:
    """A cell with its rows.

    Args:
        cell: what is compared.
        steps: the rows of each step, in order.
        known_loss: what the loss of step 1 must be; None if it depends on the model.
    """

    cell: Cell
    steps: list[list[EncodedRow]]
    known_loss: float | None

    @property
    def numbers(self) -> range:
        """Step numbers, from 1."""
        return range(1, len(self.steps) + 1)

    def step(self, number: int) -> list[EncodedRow]:
        """Rows of a step, from 1, in order."""
        return self.steps[number - 1]

    @property
    def timed_tokens(self) -> int:
        """Prompt and completion tokens of all steps but the first, each completion with its own prompt."""
        return sum(row.flat_tokens for number in self.numbers[1:] for row in self.step(number))

    @property
    def device(self) -> torch.device:
        """Where all sides compute."""
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def make_job(cell: Cell) -> Job:
    """Read the data and plan the steps.

    Raises:
        TropismError: if the run could not start.
    """
    with connect() as world, tempfile.TemporaryDirectory() as store:
        run = Run(cell.options(store), world, Voice(loud=False))
        schedule, rows = run.inputs.schedule, run.inputs.data.train
        steps = [[rows[index] for index in schedule.step(number)] for number in range(1, schedule.total_steps + 1)]
        known = (None if cell.method == "kd"
                 else run.inputs.method.loss_at_start([row.desirable for row in steps[0]]))
    return Job(cell, steps, known)
