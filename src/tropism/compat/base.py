"""What the classes of published trainers share: a door to the plain trainers, which do all the work."""

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tropism.data.schedule import MicroBatchRule
from tropism.distributed.world import processes
from tropism.errors import UsageError
from tropism.model.wrapped_module import model_inside
from tropism.observe.console import Voice
from tropism.observe.metrics import OtherNames, renamed
from tropism.observe.rundir import free_name
from tropism.runner import RunResult
from tropism.trainers import Trainer


@dataclass
class Door:
    """A published trainer's objects, and the plain trainer that works with them.

    Args:
        trainer: the plain trainer.
        model: the policy, which is trained in place; it may be wrapped.
        rule: how the published trainer forms steps from micro-batches.
        reference, teacher: other models, wrapped or not.
        tokenizer, optimizer, scheduler: the caller's own.
        names: published names of metrics.
        notes: what differs from the published trainer; said before the first run.
        options: of the plain trainer.
        voice: receives all output, instead of the terminal.
    """

    trainer: type[Trainer]
    model: Any
    rule: MicroBatchRule
    reference: Any = None
    teacher: Any = None
    tokenizer: Any = None
    optimizer: Any = None
    scheduler: Any = None
    names: OtherNames = field(default_factory=dict)
    notes: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    voice: Voice | None = None

    def __post_init__(self) -> None:
        self.optimizer = optimizer_inside(self.optimizer)
        self.model = _model_of(self.model, "model")
        if self.reference is not None:
            self.reference = _model_of(self.reference, "ref_model")
        if self.teacher is not None:
            self.teacher = _model_of(self.teacher, "teacher_model")

    def fit(self, loader: Iterable[Any], evaluation: Iterable[Any] | None, *, output: str | Path, epochs: int,
            accumulation: int = 1, resume: bool = False, rule: MicroBatchRule | None = None,
            environment: Mapping[str, str] | None = None, **options: Any) -> RunResult:
        """Train on a dataloader.

        Args:
            evaluation: the dataloader that is evaluated; None for none.
            output: run directory; the next free name if it exists, unless `resume`.
            epochs: passes over the dataloader.
            accumulation: batches per optimizer step.
            resume: the run in `output`, if there is one.
            rule: in place of the door's own.
            environment: variables for the trackers, while the run lasts. They are not recorded.
            options: further options of the plain trainer.
        """
        self.announce()
        if not resume:
            output = free_name(Path(output))
        with variables(environment or {}):
            trainer = self.plain(rule or self.rule, train_dataloader=loader, eval_dataloader=evaluation,
                                  optimizer=self.optimizer, scheduler=self.scheduler, epochs=epochs,
                                  accumulation_steps=accumulation, output=str(output), **options)
            return trainer.fit(resume=True if resume else None)

    def evaluate(self, loader: Iterable[Any]) -> dict[str, float]:
        """Evaluate the model as it is on a dataloader: the published metrics, and ours."""
        self.announce()
        batches = list(loader)
        trainer = self.plain(replace(self.rule, first_epoch=0, done=0), train_dataloader=batches,
                              eval_dataloader=batches)
        metrics = trainer.evaluate().metrics
        return {**metrics, **renamed(metrics, self.names.get("eval", {}))}

    def announce(self) -> None:
        """Say the notes, once."""
        for note in self.notes:
            self._speaker.warn(note)
        self.notes = ()

    def say(self, text: str) -> None:
        """Print a message, on the main process only."""
        self._speaker.say(text)

    @property
    def _speaker(self) -> Voice:
        return self.voice or Voice(loud=os.environ.get("RANK", "0") == "0")

    def plain(self, rule: MicroBatchRule, **options: Any) -> Trainer:
        """The plain trainer over these objects."""
        objects = {"ref_model": self.reference, "teacher_model": self.teacher}
        defaults: dict[str, Any] = {"samples": 0, "max_grad_norm": 0.0}
        if next(self.model.parameters()).dtype == torch.float64:
            defaults["precision"] = "fp64"
        return self.trainer(self.model, tokenizer=self.tokenizer, reference_point=rule, metric_names=self.names,
                            voice=self.voice, **objects, **{**defaults, **self.options, **options})


def _model_of(model: Any, argument: str) -> Any:
    """The transformers model that an argument is or holds.

    Raises:
        UsageError: for a name.
        ModelError: if it holds no model, or several.
    """
    if isinstance(model, str | Path):
        raise UsageError(f"{argument} is the name {str(model)!r}. Pass the loaded model. The trainers of tropism take "
                         "names.")
    return model_inside(model, argument)


@contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables that are set while the block runs. Variables that the user has set stay."""
    new = {name: value for name, value in values.items() if not os.environ.get(name)}
    before = {name: os.environ.get(name) for name in new}
    os.environ.update(new)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def whole(value: Any, name: str) -> int | None:
    """A whole number of a published trainer; None for infinity and for None.

    Raises:
        UsageError: if it is none.
    """
    if value is None or (isinstance(value, float) and math.isinf(value)):
        return None
    try:
        return int(value)
    except (TypeError, ValueError):
        raise UsageError(f"{name}: must be a whole number (got {value!r})") from None


def interval(value: Any, name: str, otherwise: int | str | None = None) -> int | str | None:
    """An interval of a published trainer: None for 0, infinity and None, `otherwise` for -1 and below.

    Raises:
        UsageError: if it is no number.
    """
    number = whole(value, name)
    return otherwise if number is not None and number < 0 else number or None


def optimizer_inside(optimizer: Any) -> Any:
    """The torch optimizer inside the wrappers of boosters and training frameworks."""
    seen: set[int] = set()
    while not isinstance(optimizer, torch.optim.Optimizer) and id(optimizer) not in seen:
        seen.add(id(optimizer))
        held = (getattr(optimizer, name, None) for name in ("optim", "optimizer"))
        optimizer = next((one for one in held if hasattr(one, "param_groups")), optimizer)
    return optimizer


def given(loader: Any) -> bool:
    """Whether there is a dataloader that is not known to be empty."""
    try:
        return loader is not None and len(loader) > 0
    except TypeError:  # it has no length
        return True


def wandb_variables(use_wandb: Any, **named: Any) -> dict[str, str]:
    """Variables for wandb: the key, if `use_wandb` is one, and WANDB_* for each other name with a value."""
    key = {"api_key": use_wandb} if isinstance(use_wandb, str) and use_wandb.lower() not in ("true", "false") else {}
    return {f"WANDB_{name.upper()}": str(value) for name, value in {**key, **named}.items() if value}


def parallel_note(engine: str) -> list[str]:
    """What takes the place of the caller's parallel engine, if there are several processes."""
    if processes() == 1:
        return []
    return [f"{engine} is not used. Each process holds the whole model, and gradients are summed over the processes. "
            "For FSDP2, which shards it, pass the model by name to the trainers of tropism."]
