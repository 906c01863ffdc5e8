"""The trainer classes for Python. They run what the command line runs, and take objects as well as names."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar, Literal

from tropism.argument_names import arguments, canonical
from tropism.config import DPOOptions, KDOptions, KTOOptions, MethodOptions, SFTOptions
from tropism.data.dataloaders.steps import ReadSteps, read_batches, rule_of
from tropism.data.rows_from_trees import rows_of_trees
from tropism.data.schedule import STEP, MicroBatchRule
from tropism.distributed import connect
from tropism.errors import UsageError
from tropism.model.cpu_products import products_of, use_products
from tropism.model.options import RATE_OF_ADAPTERS
from tropism.model.wrapped_module import uncompiled
from tropism.observe.console import Voice
from tropism.observe.metrics import OtherNames
from tropism.observe.rundir import free_name
from tropism.runner import PythonObjects, Run, RunResult, Steps
from tropism.train.loop import exhaust
from tropism.trainer_arguments import (
    OBJECT_OF,
    RENDERING,
    check_names,
    check_objects,
    find_data,
    make_options,
    modules_inside,
    name_of,
    refuse_with,
    with_evaluators,
    with_lora_options,
)

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
            for the arguments above). `evaluator` also takes a function or a list of functions.

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
        options, notes = with_lora_options(options, model)
        values, evaluators = with_evaluators(canonical(options))
        check_names(self.options_class, self.options_class.flattened(values), _ARGUMENTS)
        if values.get("save_every") and any(name in options for name in _WITH_MODEL):
            values = {"checkpoint_model": True, "keep": 0, **values}
        self.voice = voice or (Voice(loud=False) if quiet else None)
        if isinstance(optimizer, str):  # the option `optimizer`
            values["optimizer"], optimizer = optimizer, None
        objects: dict[str, Any] = {"tokenizer": tokenizer, "optimizer": optimizer, "scheduler": scheduler}
        models = modules_inside({"model": model, "ref_model": ref_model, "teacher_model": teacher_model})
        named: dict[str, tuple[str, Any]] = {
            "model": ("model", models["model"]), "ref_model": ("reference", models["ref_model"]),
            "teacher_model": ("teacher", models["teacher_model"]), "train_dataset": ("data", train_dataset),
            "eval_dataset": ("eval_data", eval_dataset)}
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
                objects[OBJECT_OF[option]] = value
                values[option] = name_of(value)
        if isinstance(use_wandb, str):
            raise UsageError("use_wandb: must be True or False. Set an API key as the variable WANDB_API_KEY.")
        track = values.get("track")
        if use_wandb or isinstance(track, list | tuple):
            names = track if isinstance(track, list | tuple) else [track] if track else []
            values["track"] = ",".join(dict.fromkeys(map(str, [*names, *["wandb"] * use_wandb])))
        if "model" not in values:
            raise UsageError("model is required. Pass a name or a module.")
        check_objects(values, objects)
        if getattr(objects.get("model"), "peft_config", None) and objects["optimizer"] is None:
            values.setdefault("learning_rate", RATE_OF_ADAPTERS)
        values.setdefault("output", str(free_name(Path("tropism-run"))))
        self._check_data(values, objects, train_dataloader, eval_dataloader, accumulation_steps, kl_source,
                         reference_point)
        self.options = make_options(self.options_class, values, _ARGUMENTS)  # before the dataloader is read
        for note in notes:
            self._say(note)
        self._read(objects, train_dataloader, eval_dataloader, accumulation_steps, kl_source == "batch",
                   rule_of(reference_point, self.options_class.view))
        objects |= {"other_names": metric_names, "evaluators": evaluators}
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
            find_data(values, objects)
            return
        if "data" in values:
            raise UsageError("train_dataset and train_dataloader are both set. Pass one of them.")
        if accumulation_steps < 1:
            raise UsageError(f"accumulation_steps: must be at least 1 (got {accumulation_steps})")
        refuse_with(values, "train_dataloader", ("batch_size", "shuffle", "group_prompts", "seed", "eval_fraction",
                                                  "eval_data", "max_prompt_length", "overlong", "workers", *RENDERING))
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
        said: list[str] = []

        def say(text: str) -> None:
            if text not in said:
                self._say(text)
            said.append(text)

        with connect(stay=True) as world:
            how = ReadSteps(view, options.epochs, accumulation_steps, options.max_steps, own_partners, rule,
                            world.gather if rule != STEP and world.size > 1 else None)
            objects["rows"], objects["steps"] = read_batches(train, how, say)
            if evaluation is not None:
                how = replace(how, epochs=1, accumulation_steps=1, max_steps=None, name="eval_dataloader")
                objects["eval_rows"], steps = read_batches(evaluation, how, say)
                objects["eval_parts"] = steps.whole if steps.rule.published else None

    def _say(self, text: str) -> None:
        (self.voice or Voice()).warn(text)

    @contextmanager
    def working(self) -> Iterator[Run]:
        """The run. Afterwards modules that were passed in get their own attention, experts and matrix products back, so
        that they can generate and be stored."""
        objects = self.objects
        given = [module for module in (objects.model, objects.reference, objects.teacher) if module is not None]
        own = [(module.config._attn_implementation, module.config._experts_implementation, products_of(module))
               for module in given]
        with uncompiled(given), connect(stay=True) as world:
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
        return exhaust(self.steps(resume))

    @property
    def run(self) -> Run | None:
        """The run, once it was built."""
        return self._run

    def steps(self, resume: bool | str | Path | None = None) -> Steps:
        """As `fit`, for a caller that acts between optimizer steps."""
        began = time.monotonic()
        if resume is not None:
            given = self.options.model_dump(exclude_unset=True)
            self.options = make_options(self.options_class, given | canonical({"resume": resume}))
        if self.objects.model is not None:  # gradients of an earlier backward pass must not enter step 1
            self.objects.model.zero_grad(set_to_none=True)
        with self.working() as run:
            return (yield from run.steps(began))

    def train(self, resume: bool | str | Path | None = None, *,
              resume_from_checkpoint: bool | str | Path | None = None) -> RunResult:
        """Another name of `fit`. The argument has the name of transformers, too.

        Raises:
            TropismError: as in `fit`.
        """
        if resume is not None and resume_from_checkpoint is not None:
            raise UsageError("resume and resume_from_checkpoint are the same. Pass one of them.")
        return self.fit(resume_from_checkpoint if resume is None else resume)

    def evaluate(self) -> EvalResult:
        """Evaluate the current policy on the held-out rows.

        Raises:
            UsageError: if there are no held-out rows.
        """
        with self.working() as run:
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


_ARGUMENTS = {*signature(Trainer).parameters, "peft_config"} - {"options"}
"""Names that the trainers take besides options."""
