"""The trainer classes for Python. They run what the command line runs, and take objects as well as names."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import ValidationError

from tropism.argument_names import ALIASES, arguments, canonical
from tropism.config import (
    DPOOptions,
    KDOptions,
    KTOOptions,
    MethodOptions,
    SFTOptions,
    check_name,
    explain,
    place_of,
    takes_bool,
)
from tropism.data.dataloaders.steps import ReadSteps, read_batches, rule_of
from tropism.data.formats.options import FormatOptions
from tropism.data.rows_from_trees import rows_of_trees
from tropism.data.schedule import STEP, MicroBatchRule
from tropism.data.tokenization.chat_template import TemplateOptions
from tropism.data.tree import PromptTree
from tropism.distributed import connect
from tropism.errors import UsageError
from tropism.model.cpu_products import products_of, use_products
from tropism.model.options import RATE_OF_ADAPTERS
from tropism.observe.console import Voice
from tropism.observe.metrics import OtherNames
from tropism.observe.rundir import free_name
from tropism.runner import PythonObjects, Run, RunResult

_RENDERING = (*FormatOptions.model_fields, *TemplateOptions.model_fields)
"""Options that control how text becomes token ids."""

_WITH_MODEL = ("save_interval", "save_steps")
"""Option names of trainers that save a loadable model in every checkpoint, and keep all checkpoints."""


@dataclass(frozen=True)
class EvalResult:
    """The result of an evaluation.

    Args:
        metrics: by their keys in `metrics.jsonl`.
        rows: number of rows that were evaluated.
    """

    metrics: dict[str, float]
    rows: int

    def __getitem__(self, key: str) -> float:
        return self.metrics[key]


class Trainer:
    """The base of all trainers. Use `KTOTrainer`, `DPOTrainer`, `KDTrainer` or `SFTTrainer`.

    Args:
        model: the policy: a directory, Hub id or GGUF file, or a transformers module. A module is trained in place,
            with dropout off and its weights in float32.
        ref_model: the reference. Default: the policy before step 1. `live` keeps a copy of it in memory.
        teacher_model: the teacher for distillation, a name or a module with the same tokenizer. Modules passed as
            reference or teacher are frozen and converted in place to the dtype and device of the run, and stay so.
        tokenizer: of the model. Default: the one that comes with its name.
        optimizer, scheduler: over weights of the module. They keep their own learning rate. Default: AdamW and the
            schedule of the options.
        train_dataset, eval_dataset: a file, a `datasets.Dataset`, a table, rows as dicts, or trees: `PromptTree`s of
            two completions (chosen, rejected) for DPO, of any number for SFT and KD; for KTO pairs of a tree and its
            labels.
        train_dataloader, eval_dataloader: batches in the padded layouts of OpenRLHF, ColossalChat or NeMo-Aligner.
            Each batch is one optimizer step, in the order of the dataloader.
        accumulation_steps: batches of `train_dataloader` per optimizer step.
        kl_source: `step` pairs each completion with another row of its step; `batch` uses the mismatched rows in the
            batches of the dataloader.
        reference_point: scope of KTO's reference point with a dataloader. `step` pools it over the optimizer step,
            `micro_batch` over each batch. `published` does what the trainer did whose layout the batches have: it pairs
            completions as the batch does, pools and divides per micro-batch, and accumulates as that trainer did.
            Or the rule itself.
        use_wandb: same as `track="wandb"`.
        quiet: print nothing.
        voice: receives all output, instead of the terminal.
        metric_names: further names of metrics in `train` and `eval` records, each with ours or with a function of the
            record.
        options: any option of the command line, by its name or by its name in other trainers (`ALIASES`; `ARGUMENTS`
            for the arguments above).

    Raises:
        UsageError: for an unknown option, a duplicate one, or a combination that cannot work.
    """

    options_class: ClassVar[type[MethodOptions]]

    def __init__(self, model: Any = None, ref_model: Any = None, teacher_model: Any = None, *, tokenizer: Any = None,
                 optimizer: Any = None, scheduler: Any = None, train_dataset: Any = None, eval_dataset: Any = None,
                 train_dataloader: Iterable[Any] | None = None, eval_dataloader: Iterable[Any] | None = None,
                 accumulation_steps: int = 1, kl_source: Literal["step", "batch"] = "step",
                 reference_point: Literal["step", "micro_batch", "published"] | MicroBatchRule = "step",
                 use_wandb: bool = False, quiet: bool = False, voice: Voice | None = None,
                 metric_names: OtherNames | None = None, **options: Any) -> None:
        given = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "tokenizer": tokenizer}
        model, optimizer, scheduler, tokenizer = arguments(given, options).values()
        values = canonical(options)
        if values.get("save_every") and any(name in options for name in _WITH_MODEL):
            values = {"checkpoint_model": True, "keep": 0, **values}
        self.voice = voice or (Voice(loud=False) if quiet else None)
        named: dict[str, tuple[str, Any]] = {
            "model": ("model", model), "ref_model": ("reference", ref_model),
            "teacher_model": ("teacher", teacher_model), "train_dataset": ("data", train_dataset),
            "eval_dataset": ("eval_data", eval_dataset)}
        if isinstance(optimizer, str):  # the option `optimizer`
            values["optimizer"], optimizer = optimizer, None
        objects: dict[str, Any] = {"tokenizer": tokenizer, "optimizer": optimizer, "scheduler": scheduler}
        if ref_model is not None and ref_model is model:
            raise UsageError("ref_model is the model that is trained. Omit it: the reference is then the model before "
                             "step 1.")
        if teacher_model is not None and teacher_model is model:
            raise UsageError("teacher_model is the model that is trained. Pass a copy of it.")
        for argument, (option, value) in named.items():
            if value is None:
                continue
            if option not in self.options_class.model_fields:
                raise UsageError(f"{argument} has no effect on {self.options_class.method}. Remove it.")
            if option in values:
                raise UsageError(f"{argument} and {option} are the same. Pass one of them.")
            if isinstance(value, str | Path):
                values[option] = str(value)
            else:
                objects[_OBJECT_OF[option]] = value
                values[option] = _name_of(value)
        track = values.get("track")
        if use_wandb or isinstance(track, list | tuple):
            names = track if isinstance(track, list | tuple) else [track] if track else []
            values["track"] = ",".join(dict.fromkeys(map(str, [*names, *["wandb"] * use_wandb])))
        if "model" not in values:
            raise UsageError("model is required. Pass a name or a module.")
        _check_objects(values, objects)
        if getattr(objects.get("model"), "peft_config", None) and objects["optimizer"] is None:
            values.setdefault("learning_rate", RATE_OF_ADAPTERS)
        values.setdefault("output", str(free_name(Path("tropism-run"))))
        self._check_data(values, objects, train_dataloader, eval_dataloader, accumulation_steps, kl_source,
                         reference_point)
        self.options = make_options(self.options_class, values)  # before the dataloader is read
        self._read(objects, train_dataloader, eval_dataloader, accumulation_steps, kl_source == "batch",
                   rule_of(reference_point, self.options_class.view))
        objects["other_names"] = metric_names
        self.objects = PythonObjects(**objects)
        self._run: Run | None = None

    def _check_data(self, values: dict[str, Any], objects: dict[str, Any], train: Iterable[Any] | None,
                    evaluation: Iterable[Any] | None, accumulation_steps: int, kl_source: str,
                    reference_point: Any) -> None:
        """Find where the data comes from, and check that the options for it have an effect."""
        if kl_source not in ("step", "batch"):
            raise UsageError(f"kl_source: must be step or batch (got {kl_source!r})")
        if train is None:
            for name, value in (("accumulation_steps", accumulation_steps != 1), ("kl_source", kl_source != "step"),
                                ("reference_point", reference_point != "step"),
                                ("eval_dataloader", evaluation is not None)):
                if value:
                    raise UsageError(f"{name} has no effect without train_dataloader")
            if "data" not in values:
                raise UsageError("train_dataset is required. Pass a file, rows or trees.")
            _find_trees(values, objects)
            return
        if "data" in values:
            raise UsageError("train_dataset and train_dataloader are both set. Pass one of them.")
        if accumulation_steps < 1:
            raise UsageError(f"accumulation_steps: must be at least 1 (got {accumulation_steps})")
        _refuse_with(values, "train_dataloader", ("batch_size", "shuffle", "group_prompts", "seed", "eval_fraction",
                                                  "eval_data", "max_prompt_length", "workers", *_RENDERING))
        values["data"] = "batches of a dataloader"
        if evaluation is not None:
            values["eval_data"] = "batches of a dataloader"

    def _read(self, objects: dict[str, Any], train: Iterable[Any] | None, evaluation: Iterable[Any] | None,
              accumulation_steps: int, own_partners: bool, rule: MicroBatchRule | Literal["published"]) -> None:
        """Read batches and trees as rows of token ids, batches with their steps."""
        options, view = self.options, self.options_class.view
        for source, name in (("train", "rows"), ("evaluation", "eval_rows")):
            if (trees := objects.pop(f"{source}_trees", None)) is not None:
                objects[name] = rows_of_trees(trees, view)
        if train is None:
            return
        with connect(stay=True) as world:
            how = ReadSteps(view, options.epochs, accumulation_steps, options.max_steps, own_partners, rule,
                            world.gather if rule != STEP and world.size > 1 else None)
            objects["rows"], objects["steps"] = read_batches(train, how, self._say)
            if evaluation is not None:
                how = replace(how, epochs=1, accumulation_steps=1, max_steps=None)
                objects["eval_rows"], steps = read_batches(evaluation, how, self._say)
                objects["eval_parts"] = steps.whole if steps.rule.published else None

    def _say(self, text: str) -> None:
        (self.voice or Voice()).warn(text)

    @contextmanager
    def _working(self) -> Iterator[Run]:
        """The run. Afterwards modules that were passed in get their own attention, experts and matrix products back, so
        that they can generate and be stored."""
        objects = self.objects
        given = [module for module in (objects.model, objects.reference, objects.teacher) if module is not None]
        own = [(module.config._attn_implementation, module.config._experts_implementation, products_of(module))
               for module in given]
        with connect(stay=True) as world:
            if self._run is None:
                self._run = Run(self.options, world, self.voice, objects)
            self._run.options = self.options
            if (in_use := self._run.products) is not None:
                for module in given:
                    use_products(module, in_use)
            try:
                yield self._run
            finally:
                self._run.release()
                for module, (attention, experts, products) in zip(given, own, strict=True):
                    use_products(module, products)
                    module.set_attn_implementation(attention)
                    if module.config._experts_implementation != experts:
                        module.set_experts_implementation(experts)

    def fit(self, resume: bool | str | Path | None = None) -> RunResult:
        """Train, and write a run directory with the model.

        Args:
            resume: as the option `resume`; True means `auto`, which resumes the run in `output` if there is one. Pass
                modules in the state in which the run started; if the run is done they get its result.

        Raises:
            TropismError: a subclass that names the problem and the remedy, before the first step where possible.
                `StoppedEarly` if the run was stopped and can be resumed.
        """
        began = time.monotonic()
        if resume is not None:
            given = self.options.model_dump(exclude_unset=True)
            self.options = make_options(self.options_class, given | canonical({"resume": resume}))
        if self.objects.model is not None:  # gradients of an earlier backward pass must not enter step 1
            self.objects.model.zero_grad(set_to_none=True)
        with self._working() as run:
            return run.fit(began)

    def evaluate(self) -> EvalResult:
        """Evaluate the current policy on the held-out rows.

        Raises:
            UsageError: if there are no held-out rows.
        """
        with self._working() as run:
            return EvalResult(run.evaluate(), len(run.inputs.held_out))


class KTOTrainer(Trainer):
    """KTO and other losses of single completions, each labeled desirable or undesirable. See `Trainer`."""

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
    """The name of an object in config.yaml."""
    origin = f" (from {_origin(value)})" if _origin(value) else ""  # not a path: the module may have been trained since
    return f"a {type(value).__name__} given in Python{origin}"


def _origin(module: Any) -> str:
    """The name that a module was loaded from, or an empty string."""
    return str(getattr(getattr(module, "config", None), "name_or_path", "") or "")


def make_options(options: type[MethodOptions], values: Mapping[str, Any]) -> MethodOptions:
    """Typed options.

    Raises:
        UsageError: for an unknown name, with the closest known one, or an invalid value.
    """
    fields = options.flat_fields()
    values = options.flattened(values)
    aliases = {name for name, ours in ALIASES.items() if ours in fields}
    known = {*fields, *aliases, *signature(Trainer).parameters} - {"options"}
    for name, value in values.items():
        if name not in fields:
            check_name(options, name, known)
        elif isinstance(value, bool) and not takes_bool(fields[name].annotation):
            raise UsageError(f"{name}: {value} is not a valid value")
    try:
        return options.model_validate(options.nested(values))
    except ValidationError as error:
        problem = error.errors()[0]
        name = place_of(problem, fields)
        if problem["type"] == "missing":
            raise UsageError(f"{name} is required") from None
        raise UsageError(f"{name}: {explain(problem)}") from None


def _refuse_with(values: Mapping[str, Any], owner: str, names: Sequence[str]) -> None:
    for name in names:
        if name in values:
            raise UsageError(f"{name} has no effect with {owner}, which sets it. Remove one of them.")


def _check_objects(values: Mapping[str, Any], objects: Mapping[str, Any]) -> None:
    """Check that objects that need each other are passed together.

    Raises:
        UsageError: for a missing object, or an option without effect.
    """
    if objects["optimizer"] is not None:
        _refuse_with(values, "optimizer", ("learning_rate", "schedule", "warmup_ratio", "weight_decay"))
        if "model" not in objects:
            raise UsageError("optimizer requires the module that it optimizes. Pass it as model.")
    elif objects["scheduler"] is not None:
        raise UsageError("scheduler requires its optimizer. Pass both, or set schedule and learning_rate instead.")
    if "model" in objects and objects["tokenizer"] is None and not _origin(objects["model"]):
        raise UsageError("tokenizer is required, because the module has no name to load it from. Pass its tokenizer.")


def _find_trees(values: dict[str, Any], objects: dict[str, Any]) -> None:
    """Separate trees from rows as dicts, in place.

    Raises:
        UsageError: if only one dataset holds trees, or an option has no effect on them.
    """
    for source in ("train", "evaluation"):
        if isinstance(objects.get(source), Iterator):  # looking at the first entry must not consume it
            first = list(islice(objects[source], 1))
            objects[source] = first + list(objects[source]) if _trees(first) else chain(first, objects[source])
        if (trees := _trees(objects.get(source))) is not None:
            objects.pop(source)
            objects[f"{source}_trees"] = trees
        elif objects.get(source) is not None and not isinstance(objects[source], Sized):
            if source == "evaluation":
                raise UsageError("eval_dataset is a stream without a length. Pass a list of its rows.")
            values["streaming"] = True
    if "eval_data" in values and ("train_trees" in objects) != ("evaluation_trees" in objects):
        raise UsageError("only one of train_dataset and eval_dataset holds trees. Pass both as trees or both as rows.")
    for name in ("eval_fraction", "max_prompt_length", *_RENDERING):
        if "train_trees" in objects and name in values:
            raise UsageError(f"{name} has no effect on trees, which are already token ids. Remove it"
                             + (" and pass eval_dataset." if name == "eval_fraction" else "."))


def _trees(source: Any) -> list[Any] | None:
    """The trees, or trees with labels, in a source; None if it holds something else."""
    if source is None or isinstance(source, str | Path | Mapping):
        return None
    if isinstance(source, Iterator):
        return None
    first = next(iter(source), None)
    is_tree = isinstance(first, PromptTree) or (
        isinstance(first, tuple) and len(first) == 2 and isinstance(first[0], PromptTree))
    return list(source) if is_tree else None
