"""Trainers to hold in Python. They are the command line's runs, with objects where it takes names."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import ValidationError

from tropism.api import Objects, Run, RunResult
from tropism.config import DPOOptions, KDOptions, KTOOptions, MethodOptions, SFTOptions, explain, nearest
from tropism.data.batches import rows_of_batch
from tropism.data.rows import EncodedRow
from tropism.data.schedule import GivenSchedule
from tropism.data.tree import PromptTree
from tropism.data.trees import rows_of_trees
from tropism.dist import connect
from tropism.errors import UsageError
from tropism.observe.console import Voice
from tropism.observe.rundir import free_name

ALIASES: dict[str, str] = {
    "max_norm": "max_grad_norm", "max_epochs": "epochs", "save_dir": "output", "save_interval": "save_every",
    "logging_steps": "log_every", "eval_steps": "eval_every", "save_steps": "save_every", "lr": "learning_rate",
    "lr_scheduler_type": "schedule", "l2": "weight_decay", "num_train_epochs": "epochs", "output_dir": "output",
    "kd_coef": "kd_weight", "max_len": "max_length", "train_batch_size": "batch_size", "loss_type": "loss",
}
"""What other trainers call our options."""


@dataclass(frozen=True)
class EvalResult:
    """An evaluation.

    Args:
        metrics: by their keys in `metrics.jsonl`.
        rows: how many rows were evaluated.
    """

    metrics: dict[str, float]
    rows: int

    def __getitem__(self, key: str) -> float:
        return self.metrics[key]


class Trainer:
    """What the trainers share. Use `KTOTrainer`, `DPOTrainer`, `KDTrainer` or `SFTTrainer`.

    Args:
        model: the policy: a directory, hub id or GGUF file, or a transformers module, which is then trained in place
            (its dropout is off, and its weights are kept in float32).
        ref_model: the reference; by default the policy as it is before step 1. A module is held in memory only while
            its scores are computed; `live` keeps a copy in memory.
        teacher_model: for distillation: a name or a module with the same tokenizer.
        tokenizer: of the model; by default the one that belongs to its name.
        optimizer, scheduler: over weights of the module; they keep their own learning rate. By default AdamW and the
            schedule of the options.
        train_dataset, eval_dataset: a file, a `datasets.Dataset`, rows as dicts, or trees: `PromptTree`s of two
            completions (chosen, rejected) for DPO, of any number for SFT and KD; for KTO pairs of a tree and its
            labels.
        train_dataloader, eval_dataloader: batches in the padded layouts of OpenRLHF, ColossalChat or NeMo-Aligner.
            A batch is a step, in the dataloader's order.
        accumulation_steps: batches of `train_dataloader` that make a step together.
        kl_source: `step` pairs each completion with another row of its step; `batch` takes the mismatched rows that
            the dataloader's batches bring.
        use_wandb: as `track="wandb"`.
        voice: what speaks; `Voice(loud=False)` is silent.
        options: any option of the command line by its name, or by its name elsewhere (see `ALIASES`).

    Raises:
        UsageError: for an unknown option, one given twice, or a combination that cannot work.
    """

    options_class: ClassVar[type[MethodOptions]]

    def __init__(self, model: Any = None, ref_model: Any = None, teacher_model: Any = None, *, tokenizer: Any = None,
                 optimizer: Any = None, scheduler: Any = None, train_dataset: Any = None, eval_dataset: Any = None,
                 train_dataloader: Iterable[Any] | None = None, eval_dataloader: Iterable[Any] | None = None,
                 accumulation_steps: int = 1, kl_source: Literal["step", "batch"] = "step", use_wandb: bool = False,
                 voice: Voice | None = None, **options: Any) -> None:
        values = canonical(options)
        self.voice = voice
        named: dict[str, tuple[str, Any]] = {
            "model": ("model", model), "ref_model": ("reference", ref_model),
            "teacher_model": ("teacher", teacher_model), "train_dataset": ("data", train_dataset),
            "eval_dataset": ("eval_data", eval_dataset)}
        objects: dict[str, Any] = {"tokenizer": tokenizer, "optimizer": optimizer, "scheduler": scheduler}
        for argument, (option, value) in named.items():
            if value is None:
                continue
            if option in values:
                raise UsageError(f"{argument} and {option} are the same; give one of them")
            if isinstance(value, str | Path):
                values[option] = str(value)
            else:
                objects[_OBJECT_OF[option]] = value
                values[option] = _name_of(value)
        if use_wandb:
            values["track"] = ",".join(filter(None, (values.get("track"), "wandb")))
        if "model" not in values:
            raise UsageError("model is missing: name one, or pass a module")
        if optimizer is not None:
            _refuse_with(values, "optimizer", ("learning_rate", "schedule", "warmup_ratio", "weight_decay"))
            if "model" not in objects:
                raise UsageError("optimizer needs the module whose weights it holds: pass the module as model")
        values.setdefault("output", str(free_name(Path("tropism-run"))))
        self._data(values, objects, train_dataloader, eval_dataloader, accumulation_steps, kl_source)
        self.options = make_options(self.options_class, values)
        self.objects = Objects(**objects)
        self._run: Run | None = None
        self._fitted = False

    def _data(self, values: dict[str, Any], objects: dict[str, Any], train: Iterable[Any] | None,
              evaluation: Iterable[Any] | None, accumulation_steps: int, kl_source: str) -> None:
        """Turn what was given into rows as dicts, or rows as token ids with their steps."""
        view = self.options_class.view
        if kl_source not in ("step", "batch"):
            raise UsageError(f"kl_source: {kl_source!r} is not step or batch")
        if train is None:
            for name, value in (("accumulation_steps", accumulation_steps != 1), ("kl_source", kl_source != "step"),
                                ("eval_dataloader", evaluation is not None)):
                if value:
                    raise UsageError(f"{name} has no effect without train_dataloader")
            if "data" not in values:
                raise UsageError("train_dataset is missing: a file, rows, or trees")
            for source in ("train", "evaluation"):
                if isinstance(objects.get(source), Iterator):
                    objects[source] = list(objects[source])
                if (trees := _trees(objects.get(source))) is not None:
                    objects.pop(source)
                    objects["rows" if source == "train" else "eval_rows"] = rows_of_trees(trees, view)
            if "rows" in objects and "evaluation" in objects:
                raise UsageError("train_dataset holds trees and eval_dataset does not; give both in one form")
            return
        if "data" in values:
            raise UsageError("train_dataset and train_dataloader are both given; give one of them")
        _refuse_with(values, "train_dataloader", ("batch_size", "shuffle", "group_prompts", "seed", "eval_fraction",
                                                  "eval_data", "max_prompt_length", "workers"))
        epochs = int(values.get("epochs", 1))
        own = kl_source == "batch"
        rows, schedule = read_batches(train, view, epochs, accumulation_steps, values.get("max_steps"), own, self._say)
        values["data"] = "batches of a dataloader"
        objects |= {"rows": rows, "steps": schedule}
        if evaluation is not None:
            values["eval_data"] = "batches of a dataloader"
            objects["eval_rows"] = read_batches(evaluation, view, 1, 1, None, own, self._say)[0]

    def _say(self, text: str) -> None:
        (self.voice or Voice()).warn(text)

    def _opened(self, world: Any) -> Run:
        if self._run is None:
            self._run = Run(self.options, world, self.voice, self.objects)
        return self._run

    def fit(self) -> RunResult:
        """Train, and leave a run directory with the model.

        Raises:
            TropismError: a subclass that says what is wrong and what to do; before the first step wherever it can be.
        """
        if self._fitted:
            raise UsageError("this trainer has trained already; make a new one from its model")
        with connect() as world:
            run = self._opened(world)
            try:
                result = run.fit()
            finally:
                run.release()
        self._fitted = True
        return result

    def evaluate(self) -> EvalResult:
        """Evaluate the policy as it is now on the held-out rows.

        Raises:
            UsageError: if nothing is held out.
        """
        with connect() as world:
            run = self._opened(world)
            try:
                return EvalResult(run.evaluate(), len(run.data.evaluation))
            finally:
                run.release()


class KTOTrainer(Trainer):
    """KTO and other losses of single completions, each labelled desirable or undesirable. See `Trainer`."""

    options_class = KTOOptions


class DPOTrainer(Trainer):
    """DPO and its family, on pairs of a chosen and a rejected completion. See `Trainer`."""

    options_class = DPOOptions


class SFTTrainer(Trainer):
    """Supervised fine-tuning on completions to imitate. See `Trainer`."""

    options_class = SFTOptions


class KDTrainer(Trainer):
    """Distillation from a teacher with the same tokenizer. See `Trainer`."""

    options_class = KDOptions


_OBJECT_OF = {"model": "model", "reference": "reference", "teacher": "teacher", "data": "train",
              "eval_data": "evaluation"}


def _name_of(value: Any) -> str:
    """How an object is called where options are written down."""
    config = getattr(value, "config", None)
    return getattr(config, "name_or_path", "") or f"a {type(value).__name__} given in Python"


def canonical(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by our names.

    Raises:
        UsageError: where an option is given under two names.
    """
    values: dict[str, Any] = {}
    given: dict[str, str] = {}
    for name, value in options.items():
        ours = ALIASES.get(name, name)
        if ours in given:
            raise UsageError(f"{given[ours]} and {name} are the same option; give one of them")
        given[ours] = name
        if value is not None:
            values[ours] = value
    return values


def make_options(options: type[MethodOptions], values: Mapping[str, Any]) -> MethodOptions:
    """Typed options.

    Raises:
        UsageError: for an unknown name, with the nearest known one, or an ill-typed value.
    """
    for name in values:
        if name not in options.model_fields:
            raise UsageError(f"{name}: unknown{nearest(name, options.model_fields)}")
    try:
        return options.model_validate(dict(values))
    except ValidationError as error:
        problem = error.errors()[0]
        name = str(problem["loc"][0])
        if problem["type"] == "missing":
            raise UsageError(f"{name} is missing") from None
        raise UsageError(f"{name}: {explain(problem)}") from None


def _refuse_with(values: Mapping[str, Any], owner: str, names: Sequence[str]) -> None:
    for name in names:
        if name in values:
            raise UsageError(f"{name} has no effect with {owner}, which decides it; leave one of them out")


def _trees(source: Any) -> list[Any] | None:
    """Trees, or trees with labels, if that is what a source holds."""
    if source is None or isinstance(source, str | Path | Mapping):
        return None
    first = next(iter(source), None)
    is_tree = isinstance(first, PromptTree) or (
        isinstance(first, tuple) and len(first) == 2 and isinstance(first[0], PromptTree))
    return list(source) if is_tree else None


def read_batches(loader: Iterable[Any], view: Any, epochs: int, accumulation_steps: int, max_steps: int | None,
                 own_partners: bool, say: Any) -> tuple[list[EncodedRow], GivenSchedule]:
    """Rows of a dataloader's batches, and which of them each step takes.

    Args:
        epochs: passes over the dataloader; with `max_steps` as many as that takes.
        accumulation_steps: batches per step.
        own_partners: take the mismatched rows that the batches bring.
        say: takes a notice.

    Raises:
        DataError: for a batch that cannot be understood.
        UsageError: if there is none, or mismatched rows are asked for that are not there.
    """
    rows: list[EncodedRow] = []
    batches: list[tuple[int, ...]] = []
    ignored = number = epoch = first_pass = 0
    while epoch < epochs if max_steps is None else len(batches) < max_steps * accumulation_steps:
        before = number
        for batch in loader:
            number += 1
            read = rows_of_batch(batch, view, number=number, keep_partners=own_partners)
            if own_partners and not read.has_partners:
                raise UsageError(f"kl_source is batch, and batch {number} brings no mismatched rows")
            ignored += read.has_partners and not own_partners
            batches.append(tuple(range(len(rows), len(rows) + len(read.rows))))
            rows += read.rows
            if max_steps is not None and len(batches) == max_steps * accumulation_steps:
                break
        if number == before:
            raise UsageError("the dataloader gave no batch" + (" in its second pass; it must be readable again"
                                                               if epoch else ""))
        epoch += 1
        first_pass = first_pass or len(rows)
    if ignored:
        say(f"the mismatched (kl) rows of {ignored} batches are not used: each completion is paired within its step; "
            "kl_source='batch' takes them")
    steps = [sum(batches[start : start + accumulation_steps], ()) for start in range(0, len(batches),
                                                                                     accumulation_steps)]
    return rows, GivenSchedule(tuple(steps), first_pass)
