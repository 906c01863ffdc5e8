"""TRL's trainers, run by ours."""

import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch
from transformers.trainer_utils import PredictionOutput, TrainOutput

from tropism import trainers as ours
from tropism.compat.trl.config import CONFIGS, check_refused
from tropism.compat.trl.encode import Rules, encode
from tropism.compat.trl.events import Events, prefixed
from tropism.compat.trl.options import intervals, lora_of, plan_of, quantization_of, resume_of
from tropism.compat.trl.order import packed, per_chunk, schedule_of, with_partners
from tropism.compat.trl.process import Process
from tropism.data.rows import EncodedRow
from tropism.data.tree import score_key
from tropism.errors import UsageError, count_of
from tropism.model.load import load_config, load_tokenizer
from tropism.model.save import write_model
from tropism.model.source import ModelSource
from tropism.observe.rundir import RunDirectory
from tropism.train.evaluation.evaluator import Evaluator
from tropism.train.frozen.reference import StoredReference

_PACKED_AT_ONCE = 1000
"""Rows that TRL packs into blocks at a time."""


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

    def _prepare(self, model: Any, args: Any, train_dataset: Any, eval_dataset: Any, tokenizer: Any, callbacks: Any,
                 optimizers: tuple[Any, Any], peft_config: Any, quantization: Any = None, formatting: Any = None,
                 refused: Mapping[str, Any] | None = None, **models: Any) -> None:
        """Check the arguments, encode the data, and build our trainer."""
        _refuse(refused or {})
        if model is None or train_dataset is None:
            raise UsageError(f"{'model' if model is None else 'train_dataset'} is required")
        self.args = args = CONFIGS[self.method]() if args is None else args
        check_refused(args, self.method)
        plan, inner = plan_of(args, self.method, _processes()), quantization_of(args)
        options = dict(plan.options)
        quiet = bool(options.pop("quiet", False))
        named = isinstance(model, str | Path)
        if quantization is not None and inner is not None:
            raise UsageError("quantization_config is passed twice: as an argument and in args.model_init_kwargs. Pass "
                             "one of them.")
        source = ModelSource.of(str(model) if named else model.config.name_or_path)
        self.processing_class = tokenizer or load_tokenizer(source, trust_remote_code=options["trust_remote_code"])
        self.processing_class = getattr(self.processing_class, "tokenizer", self.processing_class)
        config = load_config(source, trust_remote_code=options["trust_remote_code"]) if named else model.config
        lora = lora_of(peft_config, quantization or inner, config.model_type)
        if lora.get("quantize") and not named:
            raise UsageError("quantization_config has no effect on a model that is loaded already. Pass the model by "
                             "name.")
        options |= {"router_aux_weight": _router_weight(args, config), "lora": lora}
        self._rules = _rules(args, self.method, formatting)
        most = None
        if not hasattr(train_dataset, "__len__"):
            if plan.max_steps is None:
                raise UsageError("train_dataset has no length. Set max_steps.")
            most = plan.max_steps * plan.batches.step_size
        rows, dropped = encode(train_dataset, self.processing_class, self._rules, "train_dataset", most)
        held_out, more = encode(eval_dataset, self.processing_class, self._rules, "eval_dataset") if (
            eval_dataset is not None) else ([], 0)
        if not rows:
            raise UsageError(f"train_dataset: no row is left. All prompts have max_length={args.max_length} tokens or "
                             "more. Raise max_length.")
        if plan.published:
            rows = with_partners(rows, plan.batches.size, args.max_length)
        steps = schedule_of(
            rows, plan.batches, plan.epochs, plan.max_steps, plan.micro_batches, blocks=_blocks(args, self.method, rows),
            needs_partners=self.method == "kto" and options["loss"] == "kto" and not plan.published)
        options |= {name: value for name, value in intervals(args, steps.total_steps, bool(held_out)).items()
                    if name not in options}
        directory = RunDirectory(Path(options["output"]).expanduser())
        self._events = Events(args, directory, callbacks or [], self.processing_class, steps.total_steps)
        optimizer, scheduler = optimizers
        if optimizer is not None:  # it has its own rate; as in TRL, the schedule of the config changes it
            for name in ("optimizer", "learning_rate", "weight_decay"):
                options.pop(name)
            scheduler = scheduler or torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda step: plan.rule.factor(step + 1, steps.total_steps))
        self._ours = self.trainer(
            model, tokenizer=self.processing_class, optimizer=options.pop("optimizer", optimizer),
            scheduler=scheduler, quiet=quiet,
            train_dataset=[{}], eval_dataset=[{}] if held_out else None,
            **{name: value for name, value in (options | models).items() if value is not None and value != {}})
        self._ours.objects = replace(self._ours.objects, train=None, evaluation=None, rows=rows, eval_rows=held_out,
                                     steps=steps, rule=plan.rule, listener=self._events)
        for name, count in (("train_dataset", dropped), ("eval_dataset", more)):
            if count and not quiet:
                self._ours._say(f"{name}: {count_of(count, 'row')} dropped: max_length={args.max_length} leaves no room "
                                "for a completion")
        self.accelerator = Process()
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
        result = self._ours.fit(resume_of(resume_from_checkpoint))
        if not self.state.log_history:  # the run was done before
            for line in self._events.directory.records():
                self._events.replay(line)
        seconds = time.monotonic() - began
        steps = self.state.global_step = result.steps
        metrics = {"train_runtime": seconds, "train_steps_per_second": steps / seconds,
                   "train_loss": self._events.training_loss, "epoch": float(self.state.epoch or 0.0)}
        self._events.finish(metrics)
        return TrainOutput(steps, self._events.training_loss, metrics)

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
        with self._ours._working() as run:
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
        place = Path(output_dir or self.args.output_dir).expanduser()
        finished = self._events.directory.model
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
        self.accelerator.print(f"{split}: " + ", ".join(f"{name} {value}" for name, value in sorted(metrics.items())))

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

    method, trainer = "dpo", ours.DPOTrainer

    def __init__(self, model: Any = None, ref_model: Any = None, args: Any = None, data_collator: Any = None,
                 train_dataset: Any = None, eval_dataset: Any = None, processing_class: Any = None,
                 compute_metrics: Any = None, callbacks: Any = None, optimizers: tuple[Any, Any] = (None, None),
                 quantization_config: Any = None, peft_config: Any = None) -> None:
        self._prepare(model, args, train_dataset, eval_dataset, processing_class, callbacks, optimizers, peft_config,
                      quantization_config, refused={"data_collator": data_collator, "compute_metrics": compute_metrics},
                      ref_model=ref_model)


class KTOTrainer(DPOTrainer):
    """TRL's `KTOTrainer`, with the paper's reference point over the whole optimizer step. See `DPOTrainer`."""

    method, trainer = "kto", ours.KTOTrainer


class SFTTrainer(_Trainer):
    """TRL's `SFTTrainer`. See `_Trainer` for the arguments that all trainers share.

    Args:
        formatting_func: makes plain text of a record.
    """

    method, trainer = "sft", ours.SFTTrainer

    def __init__(self, model: Any = None, args: Any = None, data_collator: Any = None, train_dataset: Any = None,
                 eval_dataset: Any = None, processing_class: Any = None, compute_loss_func: Any = None,
                 compute_metrics: Any = None, callbacks: Any = None, optimizers: tuple[Any, Any] = (None, None),
                 optimizer_cls_and_kwargs: Any = None, preprocess_logits_for_metrics: Any = None,
                 quantization_config: Any = None, peft_config: Any = None, formatting_func: Any = None) -> None:
        self._prepare(model, args, train_dataset, eval_dataset, processing_class, callbacks, optimizers, peft_config,
                      quantization_config, formatting_func,
                      refused={"data_collator": data_collator, "compute_metrics": compute_metrics,
                               "compute_loss_func": compute_loss_func,
                               "optimizer_cls_and_kwargs": optimizer_cls_and_kwargs,
                               "preprocess_logits_for_metrics": preprocess_logits_for_metrics})


class GKDTrainer(_Trainer):
    """TRL's `GKDTrainer` on given completions (`lmbda=0`). See `_Trainer` for the arguments that all trainers share.

    Args:
        teacher_model: a module or a name, with the same tokenizer.
    """

    method, trainer = "gkd", ours.KDTrainer

    def __init__(self, model: Any = None, teacher_model: Any = None, args: Any = None, data_collator: Any = None,
                 train_dataset: Any = None, eval_dataset: Any = None, processing_class: Any = None,
                 compute_metrics: Any = None, callbacks: Any = None, optimizers: tuple[Any, Any] = (None, None),
                 preprocess_logits_for_metrics: Any = None, peft_config: Any = None,
                 formatting_func: Any = None) -> None:
        teacher = teacher_model or getattr(args, "teacher_model_name_or_path", None)
        if teacher is None:
            raise UsageError("teacher_model is required. Pass a name or a module.")
        self._prepare(model, args, train_dataset, eval_dataset, processing_class, callbacks, optimizers, peft_config,
                      refused={"data_collator": data_collator, "compute_metrics": compute_metrics,
                               "formatting_func": formatting_func,
                               "preprocess_logits_for_metrics": preprocess_logits_for_metrics}, teacher_model=teacher)


_REASONS = {
    "data_collator": "rows are packed without a collator. Change the rows of train_dataset instead",
    "compute_metrics": "logits are never materialized, so there is nothing to pass to it. evaluate() returns rewards, "
                       "log-probs and the loss, and predict() the log-prob of each completion",
    "preprocess_logits_for_metrics": "logits are never materialized. Remove it",
    "compute_loss_func": "the loss is the method's own. Use another method",
    "optimizer_cls_and_kwargs": "create the optimizer from model.parameters(), and pass it in optimizers",
    "formatting_func": "rows are conversations: messages. Apply it to train_dataset before",
}


def _refuse(given: Mapping[str, Any]) -> None:
    """Refuse arguments that cannot be served."""
    for name, value in given.items():
        if value is not None:
            raise UsageError(f"{name} is not supported: {_REASONS[name]}.")


def _processes() -> int:
    """Processes that torchrun started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _rules(args: Any, method: str, formatting: Any) -> Rules:
    if method not in ("sft", "gkd"):
        return Rules(method, args.max_length)
    skip = bool((args.dataset_kwargs or {}).get("skip_prepare_dataset")) if method == "sft" else False
    return Rules(method, None if skip else args.max_length, args.dataset_text_field, args.eos_token,
                 args.completion_only_loss, args.assistant_only_loss, formatting)


def _blocks(args: Any, method: str, rows: list[EncodedRow]) -> list[list[int]] | None:
    """Rows of each block of SFT with packing; None without.

    Raises:
        UsageError: for a strategy that cuts rows.
    """
    if method != "sft" or not args.packing:
        return None
    if args.packing_strategy != "bfd":
        raise UsageError(f"packing_strategy={args.packing_strategy!r} is not supported, because it cuts rows in the "
                         "middle. Use bfd.")
    if args.max_length is None:
        raise UsageError("packing needs max_length, the tokens of a block")
    return per_chunk([row.flat_tokens for row in rows], args.max_length, _PACKED_AT_ONCE, packed)


def _router_weight(args: Any, config: Any) -> float:
    """Weight of the load-balancing loss: given, or the config's."""
    text = config.get_text_config()
    if args.router_aux_loss_coef is not None or not hasattr(text, "output_router_logits"):
        return float(args.router_aux_loss_coef or 0.0)
    return float(getattr(text, "router_aux_loss_coef", 0.0))


def _is_scored(rows: list[EncodedRow], engine: Any) -> bool:
    """Whether the reference knows every completion of these rows."""
    return all(score_key(row.prompt_ids, completion) in engine.reference.scores
               for row in rows for completion in row.completions)

