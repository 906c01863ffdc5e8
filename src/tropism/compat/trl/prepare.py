"""From TRL's arguments to one of our trainers: checks, token ids, order and options."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tropism.compat.trl.config import check_refused
from tropism.compat.trl.encode import Rules, encode
from tropism.compat.trl.events import Events
from tropism.compat.trl.options import Plan, intervals, lora_of, plan_of, quantization_of
from tropism.compat.trl.order import packed, per_chunk, schedule_of, with_partners
from tropism.compat.trl.process import Process
from tropism.data.rows import EncodedRow
from tropism.data.schedule import GivenSchedule
from tropism.errors import UsageError, count_of
from tropism.model.load import load_config, load_tokenizer
from tropism.model.source import ModelSource
from tropism.observe.rundir import RunDirectory
from tropism.trainers import Trainer

_PACKED_AT_ONCE = 1000
"""Rows that TRL packs into blocks at a time."""


@dataclass(frozen=True)
class Prepared:
    """What one of TRL's trainers consists of here.

    Args:
        trainer: ours.
        events: its listener.
        rules: how rows are encoded.
        tokenizer: of the policy.
    """

    trainer: Trainer
    events: Events
    rules: Rules
    tokenizer: Any


def prepare(method: str, trainer: type[Trainer], args: Any, *, model: Any, train_dataset: Any, eval_dataset: Any,
            tokenizer: Any, callbacks: Sequence[Any] | None, optimizers: tuple[Any, Any], peft_config: Any,
            refused: Mapping[str, Any], others: Mapping[str, Any] | None = None, quantization: Any = None,
            formatting: Any = None) -> Prepared:
    """Check the arguments, encode the data, and build our trainer.

    Args:
        method: kto, dpo, sft or gkd.
        trainer: our class.
        args: the config.
        refused: arguments that must be None.
        others: further models.
        formatting: makes plain text of a record.

    Raises:
        UsageError: for an argument that is not supported.
        DataError: for a row that cannot be trained on.
    """
    _refuse(refused)
    for name, value in (("model", model), ("train_dataset", train_dataset)):
        if value is None:
            raise UsageError(f"{name} is required")
    check_refused(args, method)
    plan = plan_of(args, method, Process().num_processes)
    strategy = getattr(args.eval_strategy, "value", args.eval_strategy)
    if eval_dataset is None and strategy != "no":
        raise UsageError(f"eval_strategy={strategy!r} needs eval_dataset. Pass it, or set eval_strategy='no'.")
    options = dict(plan.options)
    quiet = bool(options.pop("quiet", False))
    config, tokenizer = _config_and_tokenizer(model, tokenizer, options["trust_remote_code"])
    options |= {"router_aux_weight": _router_weight(args, config),
                "lora": _lora(args, model, peft_config, quantization, config.model_type)}
    rules = _rules(args, method, formatting)
    rows, dropped = encode(train_dataset, tokenizer, rules, "train_dataset", _most(train_dataset, plan))
    held_out, more = ([], 0) if eval_dataset is None else encode(eval_dataset, tokenizer, rules, "eval_dataset")
    if not rows:
        raise UsageError(f"train_dataset: no row is left. All prompts have max_length={args.max_length} tokens or "
                         "more. Raise max_length.")
    if method == "kto" and (plan.batches.size if plan.published else plan.batches.step_size) == 1 \
            and options["loss"] == "kto":
        raise UsageError("KTO compares each row with a completion of another prompt, and a batch has 1 row. Set "
                         f"per_device_train_batch_size{'' if plan.published else ' or gradient_accumulation_steps'} to "
                         "2 or more.")
    if plan.published:
        rows = with_partners(rows, plan.batches.size, args.max_length)
    steps = schedule_of(
        rows, plan.batches, plan.epochs, plan.max_steps, plan.micro_batches, blocks=_blocks(args, method, rows),
        needs_partners=method == "kto" and options["loss"] == "kto" and not plan.published)
    options = intervals(args, steps.total_steps, bool(held_out)) | options
    directory = RunDirectory(Path(options["output"]).expanduser())
    events = Events(args, directory, callbacks or [], tokenizer, steps.total_steps)
    optimizer, scheduler = _updates(optimizers, options, plan, steps)
    given = {name: value for name, value in {**options, **(others or {})}.items() if value is not None and value != {}}
    # The rows are token ids in TRL's order already. In their place our trainer gets a name for the run's config.
    built = trainer(model, tokenizer=tokenizer, optimizer=optimizer, scheduler=scheduler, quiet=quiet,
                    train_dataset=[{}], eval_dataset=[{}] if held_out else None, **given)
    built.objects = replace(built.objects, train=None, evaluation=None, rows=rows, eval_rows=held_out, steps=steps,
                            rule=plan.rule, listener=events)
    planned = len(plan.batches.steps(len(rows), plan.epochs, plan.max_steps)) if method == "kto" else steps.total_steps
    if steps.total_steps < planned:
        built._say(f"train_dataset: {planned} optimizer steps became {steps.total_steps}. A step whose rows have one "
                   "prompt joins the step before it, because KTO needs completions of other prompts. Shuffle the rows "
                   "or raise the batch size to keep all steps.")
    for name, count in (("train_dataset", dropped), ("eval_dataset", more)):
        if count:
            built._say(f"{name}: {count_of(count, 'row')} dropped: max_length={args.max_length} leaves no room for a "
                       "completion")
    return Prepared(built, events, rules, tokenizer)


def _config_and_tokenizer(model: Any, tokenizer: Any, trust_remote_code: bool) -> tuple[Any, Any]:
    """The config of a model, and its tokenizer."""
    named = isinstance(model, str | Path)
    if not named and not hasattr(model, "config"):
        raise UsageError(f"model must be a name, a transformers model or a PeftModel, not {type(model).__name__}")
    config = load_config(ModelSource.of(str(model)), trust_remote_code=trust_remote_code) if named else model.config
    if tokenizer is None:
        source = ModelSource.of(str(model) if named else config.name_or_path)
        tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code)
    return config, getattr(tokenizer, "tokenizer", tokenizer)  # of a processor


def _lora(args: Any, model: Any, peft_config: Any, quantization: Any, model_type: str) -> dict[str, Any]:
    """Options of adapters."""
    inner = quantization_of(args)
    if quantization is not None and inner is not None:
        raise UsageError("quantization_config is passed twice: as an argument and in args.model_init_kwargs. Pass one "
                         "of them.")
    lora = lora_of(peft_config, quantization or inner, model_type)
    if lora.get("quantize") and not isinstance(model, str | Path):
        raise UsageError("quantization_config has no effect on a model that is loaded already. Pass the model by name.")
    return lora


def _most(dataset: Any, plan: Plan) -> int | None:
    """Records to read of a dataset without a length."""
    if hasattr(dataset, "__len__"):
        return None
    if plan.max_steps is None:
        raise UsageError("train_dataset has no length. Set max_steps.")
    return plan.max_steps * plan.batches.step_size


def _updates(optimizers: tuple[Any, Any], options: dict[str, Any], plan: Plan,
             steps: GivenSchedule) -> tuple[Any, Any]:
    """The optimizer, or its name, and a scheduler. One of the caller has its own rate, which the schedule of the
    config changes, as in TRL."""
    optimizer, scheduler = optimizers or (None, None)
    name = options.pop("optimizer")
    if optimizer is None:
        return name, scheduler
    for option in ("learning_rate", "weight_decay"):
        options.pop(option)
    return optimizer, scheduler or torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: plan.rule.factor(step + 1, steps.total_steps))


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
