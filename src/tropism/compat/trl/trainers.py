"""TRL's trainers, run by ours."""

import shutil
import time
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Self

import numpy as np
import torch
from transformers.trainer_utils import PredictionOutput, TrainOutput

from tropism import trainers as ours
from tropism.compat.trl.config import config_of
from tropism.compat.trl.encode import encode
from tropism.compat.trl.events import prefixed
from tropism.compat.trl.older import check_names
from tropism.compat.trl.options import resume_of
from tropism.compat.trl.prepare import prepare
from tropism.compat.trl.process import Process
from tropism.data.rows import EncodedRow
from tropism.data.tree import score_key
from tropism.errors import OutputExistsError, UsageError
from tropism.model.save import write_model
from tropism.observe.console import Voice
from tropism.train.checkpoints.files import place_of
from tropism.train.evaluation.evaluator import Evaluator
from tropism.train.frozen.reference import StoredReference


class _Trainer:
    """What the trainers share. Arguments are TRL's.

    Args:
        model: a name, a transformers module or a `PeftModel`. A module is trained in place.
        args: one of TRL's configs, ours or its own. Default: the default one.
        train_dataset, eval_dataset: a `datasets.Dataset` or any iterable of dicts, in TRL's formats.
        processing_class: the tokenizer. Default: the one that comes with the model.
        callbacks: of transformers. They read, and may ask to log, evaluate, save or stop.
        optimizers: an optimizer over weights of the module, and a scheduler.
        peft_config: a `peft.LoraConfig`; with a module, any that peft has.
        quantization_config: nf4 or int8, for a model by name.

    Raises:
        UsageError: for an argument that is refused, with what to do instead.
        DataError: for a row that cannot be trained on.
    """

    method: ClassVar[str]
    trainer: ClassVar[type[ours.Trainer]]

    def __new__(cls, *arguments: Any, **given: Any) -> Self:
        """Refuse arguments of other versions of TRL by name."""
        check_names(cls.__name__, given, signature(cls.__init__).parameters, "argument")
        return super().__new__(cls)

    def _begin(self, args: Any, **arguments: Any) -> None:
        """Check the arguments, encode the data, and build our trainer."""
        self.args = config_of(args, self.method)
        found = prepare(self.method, self.trainer, self.args, **arguments)
        self._ours, self._events, self._rules = found.trainer, found.events, found.rules
        self.processing_class = found.tokenizer
        self.accelerator = Process()
        self._events.module = lambda: self.model
        self._events.call("on_init_end")

    @property
    def state(self) -> Any:
        """transformers' `TrainerState`: `global_step`, `epoch`, `log_history`, `best_metric`."""
        return self._events.state

    @property
    def control(self) -> Any:
        """transformers' `TrainerControl`."""
        return self._events.control

    @property
    def model(self) -> Any:
        """The module that is trained. A model that was passed by name is loaded by the first call of train(),
        evaluate() or predict(); None before that."""
        run = self._ours._run
        return run.engine.model.module if run is not None and run._built is not None else self._ours.objects.model

    def add_callback(self, callback: Any) -> None:
        """Add a callback, an instance or a class."""
        self._events.handler.add_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, or the first one of a class."""
        self._events.handler.remove_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback, or the first one of a class, and return it."""
        return self._events.handler.pop_callback(callback)

    def train(self, resume_from_checkpoint: bool | str | Path | None = None) -> TrainOutput:
        """Train, and write the run directory.

        Args:
            resume_from_checkpoint: True resumes the run in `output_dir`; a path names that directory or one of its
                checkpoints.

        Returns:
            transformers' `TrainOutput`: global_step, training_loss, metrics.

        Raises:
            TropismError: a subclass that names the problem and the remedy, before the first step where possible.
        """
        began = time.monotonic()
        directory = self._events.directory
        try:
            result = self._ours.fit(resume_of(resume_from_checkpoint, directory.path))
        except OutputExistsError as error:
            more = ", or resume the run in it with train(resume_from_checkpoint=True)" if directory.holds_run else ""
            raise OutputExistsError(f"{str(error).partition('. ')[0]}. Set another output_dir{more}.") from None
        if not self.state.log_history:  # the run was done before
            for line in directory.records():
                self._events.replay(line)
        if self.args.load_best_model_at_end:
            self._take_best(result.steps)
        seconds = time.monotonic() - began
        steps = self.state.global_step = result.steps
        metrics = {"train_runtime": seconds, "train_steps_per_second": steps / seconds,
                   "train_loss": self._events.training_loss, "epoch": float(self.state.epoch or 0.0)}
        self._events.finish(metrics)
        return TrainOutput(steps, self._events.training_loss, metrics)

    def _take_best(self, last: int) -> None:
        """Load the weights of the best checkpoint.

        Args:
            last: step whose weights the model has.
        """
        step = self.state.best_global_step
        place = place_of(self._events.directory.checkpoints, step or 0)
        if not (place / "model").is_dir():
            return
        self.state.best_model_checkpoint = str(place)
        with self._ours.working() as run:
            if step != last and self.model is not None:
                run.inputs.policy.take_result(self.model, place / "model", run.inputs.numerics, run.world)

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None,
                 metric_key_prefix: str = "eval") -> dict[str, float]:
        """Evaluate the current policy.

        Args:
            eval_dataset: default: the one that the trainer was created with. Other rows can be evaluated only if the
                reference has scored them, or is in memory.

        Raises:
            UsageError: if there are no rows, or rows without reference scores.
        """
        began = time.monotonic()
        if eval_dataset is None:
            found = self._ours.evaluate()
            metrics, count = found.metrics, found.rows
        else:
            evaluator, metrics = self._evaluated(eval_dataset, "eval_dataset")
            count = len(evaluator.rows)
        metrics = prefixed(metrics, metric_key_prefix)
        seconds = time.monotonic() - began
        metrics |= {f"{metric_key_prefix}_runtime": seconds,
                    f"{metric_key_prefix}_samples_per_second": count / seconds,
                    "epoch": float(self.state.epoch or 0.0)}
        self.state.log_history.append({**metrics, "step": self.state.global_step})
        self._events.call("on_log", logs=dict(metrics))
        self._events.call("on_evaluate", metrics=dict(metrics))
        return metrics

    def predict(self, test_dataset: Any, ignore_keys: Any = None, metric_key_prefix: str = "test") -> PredictionOutput:
        """Score rows under the current policy.

        Returns:
            transformers' `PredictionOutput`. `predictions` is `[rows, completions]`, the log-prob of each completion
            in nats; `label_ids` `[rows]` the labels of `KTOTrainer`, else None; `metrics` those of `evaluate`.

        Raises:
            UsageError: for rows without reference scores.
        """
        evaluator, metrics = self._evaluated(test_dataset, "test_dataset")
        assert evaluator.last is not None
        scores = np.asarray(evaluator.last.logps).reshape(len(evaluator.rows), -1)[:, :2]
        labels = [row.desirable for row in evaluator.rows]
        metrics = prefixed(metrics, metric_key_prefix)
        self._events.call("on_predict", metrics=dict(metrics))
        return PredictionOutput(scores, None if None in labels else np.array(labels), metrics)

    def _evaluated(self, dataset: Any, name: str) -> tuple[Evaluator, dict[str, float]]:
        """Evaluate rows of another dataset."""
        rows: list[EncodedRow] = encode(dataset, self.processing_class, self._rules, name)[0]
        if not rows:
            raise UsageError(f"{name} has no rows whose prompt leaves room for a completion")
        with self._ours.working() as run:
            engine = run.build()
            evaluator = Evaluator(rows, run.inputs.numerics.microbatch_tokens, run.inputs.data.max_length)
            if isinstance(engine.reference, StoredReference) and not _is_scored(rows, engine):
                raise UsageError(f"{name} has rows without reference scores, which are computed before step 1. Pass "
                                 "them as eval_dataset when you create the trainer, or run: tropism evaluate "
                                 f"{self._events.directory.path} --data FILE")
            return evaluator, evaluator(engine)

    def save_model(self, output_dir: str | Path | None = None, _internal_call: bool = False) -> None:
        """Write the model and the tokenizer, as from_pretrained reads them, into a directory. It may be the run
        directory, which has the model under `model/`, too.

        Raises:
            UsageError: before the model is loaded.
        """
        place = Path(str(output_dir or self.args.output_dir)).expanduser()
        best = self.state.best_model_checkpoint
        finished = Path(best) / "model" if best else self._events.directory.model
        if not self.accelerator.is_main_process:
            return
        place.mkdir(parents=True, exist_ok=True)
        if finished.is_dir():
            shutil.copytree(finished, place, dirs_exist_ok=True)
        elif self.model is not None:
            write_model(self.model, self.processing_class, place, torch.float32, ())
        else:
            raise UsageError("the model is not loaded yet. Call train() before save_model().")

    def save_state(self) -> None:
        """Write `trainer_state.json`, with the history, into `output_dir`."""
        if self.accelerator.is_main_process:
            self.state.save_to_json(str(self._events.directory.path / "trainer_state.json"))

    def log_metrics(self, split: str, metrics: Mapping[str, float]) -> None:
        """Print metrics."""
        if self.accelerator.is_main_process:
            Voice().say(f"{split}: " + ", ".join(f"{name} {value}" for name, value in sorted(metrics.items())))

    def is_world_process_zero(self) -> bool:
        """Whether this is the main process."""
        return self.accelerator.is_main_process

    def push_to_hub(self, *arguments: Any, **options: Any) -> NoReturn:
        """Refused.

        Raises:
            UsageError: with the command that uploads the model.
        """
        raise UsageError("push_to_hub is not supported. Upload the model with: hf upload NAME "
                         f"{self._events.directory.model}")

    def end(self) -> None:
        """Trackers are finished by train()."""


class DPOTrainer(_Trainer):
    """TRL's `DPOTrainer`. See `_Trainer` for the arguments that all trainers share.

    Args:
        ref_model: the reference, a module or a name. Default: the policy before step 1.
    """

    method: ClassVar[str] = "dpo"
    trainer: ClassVar[type[ours.Trainer]] = ours.DPOTrainer

    def __init__(self, model: Any = None, ref_model: Any = None, args: Any = None, data_collator: Any = None,
                 train_dataset: Any = None, eval_dataset: Any = None, processing_class: Any = None,
                 compute_metrics: Any = None, callbacks: Any = None, optimizers: tuple[Any, Any] = (None, None),
                 quantization_config: Any = None, peft_config: Any = None) -> None:
        self._begin(args, model=model, train_dataset=train_dataset, eval_dataset=eval_dataset,
                    tokenizer=processing_class, callbacks=callbacks, optimizers=optimizers, peft_config=peft_config,
                    quantization=quantization_config, others={"ref_model": ref_model},
                    refused={"data_collator": data_collator, "compute_metrics": compute_metrics})


class KTOTrainer(DPOTrainer):
    """TRL's `KTOTrainer`, with the paper's reference point over the whole optimizer step. See `DPOTrainer`."""

    method: ClassVar[str] = "kto"
    trainer: ClassVar[type[ours.Trainer]] = ours.KTOTrainer


class SFTTrainer(_Trainer):
    """TRL's `SFTTrainer`. See `_Trainer` for the arguments that all trainers share.

    Args:
        formatting_func: makes plain text of a record.
    """

    method: ClassVar[str] = "sft"
    trainer: ClassVar[type[ours.Trainer]] = ours.SFTTrainer

    def __init__(self, model: Any = None, args: Any = None, data_collator: Any = None, train_dataset: Any = None,
                 eval_dataset: Any = None, processing_class: Any = None, compute_loss_func: Any = None,
                 compute_metrics: Any = None, callbacks: Any = None, optimizers: tuple[Any, Any] = (None, None),
                 optimizer_cls_and_kwargs: Any = None, preprocess_logits_for_metrics: Any = None,
                 quantization_config: Any = None, peft_config: Any = None, formatting_func: Any = None) -> None:
        self._begin(args, model=model, train_dataset=train_dataset, eval_dataset=eval_dataset,
                    tokenizer=processing_class, callbacks=callbacks, optimizers=optimizers, peft_config=peft_config,
                    quantization=quantization_config, formatting=formatting_func,
                    refused={"data_collator": data_collator, "compute_metrics": compute_metrics,
                             "compute_loss_func": compute_loss_func,
                             "optimizer_cls_and_kwargs": optimizer_cls_and_kwargs,
                             "preprocess_logits_for_metrics": preprocess_logits_for_metrics})


class GKDTrainer(_Trainer):
    """TRL's `GKDTrainer` on given completions (`lmbda=0`). See `_Trainer` for the arguments that all trainers share.

    Args:
        teacher_model: a module or a name, with the same tokenizer.
    """

    method: ClassVar[str] = "gkd"
    trainer: ClassVar[type[ours.Trainer]] = ours.KDTrainer

    def __init__(self, model: Any = None, teacher_model: Any = None, args: Any = None, data_collator: Any = None,
                 train_dataset: Any = None, eval_dataset: Any = None, processing_class: Any = None,
                 compute_metrics: Any = None, callbacks: Any = None, optimizers: tuple[Any, Any] = (None, None),
                 preprocess_logits_for_metrics: Any = None, peft_config: Any = None,
                 formatting_func: Any = None) -> None:
        teacher = teacher_model or getattr(args, "teacher_model_name_or_path", None)
        if teacher is None:
            raise UsageError("teacher_model is required. Pass a name or a module.")
        self._begin(args, model=model, train_dataset=train_dataset, eval_dataset=eval_dataset,
                    tokenizer=processing_class, callbacks=callbacks, optimizers=optimizers, peft_config=peft_config,
                    others={"teacher_model": teacher},
                    refused={"data_collator": data_collator, "compute_metrics": compute_metrics,
                             "formatting_func": formatting_func,
                             "preprocess_logits_for_metrics": preprocess_logits_for_metrics})


def _is_scored(rows: list[EncodedRow], engine: Any) -> bool:
    """Whether the reference knows every completion of these rows."""
    return all(score_key(row.prompt_ids, completion) in engine.reference.scores
               for row in rows for completion in row.completions)
