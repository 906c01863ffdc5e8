"""Objects that a Python caller passes to a run in place of names."""

from dataclasses import dataclass, field, fields
from typing import Any

from tropism.data.rows import EncodedRow
from tropism.data.schedule import GivenSchedule, Parts
from tropism.data.sources.resolve import DataSource
from tropism.observe.metrics import OtherNames
from tropism.train.optimizer import UpdateRule


@dataclass(frozen=True, eq=False)
class PythonObjects:
    """Objects that a Python caller passes in place of option values.

    Args:
        model, reference, teacher: transformers modules.
        tokenizer: of the policy.
        optimizer, scheduler: over weights of `model`.
        train, evaluation: rows as dicts, or a file.
        rows, eval_rows: rows as token ids.
        steps: which of `rows` each step takes.
        rule: in place of the options of schedule and warmup.
        listener: a `train.listener.Listener`, attached to the training loop.
        eval_parts: the micro-batches of `eval_rows`; None if they are evaluated together.
        other_names: further names of metrics.
        evaluators: functions in place of those that `evaluator` names.
    """

    model: Any = None
    reference: Any = None
    teacher: Any = None
    tokenizer: Any = None
    optimizer: Any = None
    scheduler: Any = None
    train: DataSource | None = None
    evaluation: DataSource | None = None
    rows: list[EncodedRow] | None = None
    eval_rows: list[EncodedRow] = field(default_factory=list)
    steps: GivenSchedule | None = None
    rule: UpdateRule | None = None
    listener: Any = None
    eval_parts: Parts | None = None
    other_names: OtherNames | None = None
    evaluators: list[Any] = field(default_factory=list)

    def __eq__(self, other: object) -> bool:
        """True if all objects are the same ones. Tables and arrays would compare element by element."""
        mine, theirs = ([getattr(one, entry.name, None) for entry in fields(self)] for one in (self, other))
        return isinstance(other, PythonObjects) and all(
            one is another or (isinstance(one, list) and one == another)
            for one, another in zip(mine, theirs, strict=True))

    @property
    def facts(self) -> dict[str, Any]:
        """For the manifest: types of the objects that no option names."""
        given = {name: type(value).__name__ for name in ("optimizer", "scheduler")
                 if (value := getattr(self, name)) is not None}
        return {"given": given} if given else {}
