"""Option and argument names of other trainers, translated to ours or explained."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tropism.errors import UsageError, nearest

ALIASES: dict[str, str] = {
    "bs": "batch_size", "train_batch_size": "batch_size", "global_batch_size": "batch_size",
    "effective_batch_size": "batch_size", "total_batch_size": "batch_size",
    "lr": "learning_rate", "peak_lr": "learning_rate", "l2": "weight_decay", "wd": "weight_decay",
    "max_norm": "max_grad_norm", "gradient_clip_val": "max_grad_norm", "gradient_clipping": "max_grad_norm",
    "grad_clip": "max_grad_norm", "clip_grad": "max_grad_norm", "clip_grad_norm": "max_grad_norm",
    "num_train_epochs": "epochs", "num_epochs": "epochs", "n_epochs": "epochs", "max_epochs": "epochs",
    "max_train_steps": "max_steps", "num_steps": "max_steps", "total_steps": "max_steps", "train_steps": "max_steps",
    "lr_scheduler_type": "schedule", "lr_scheduler": "schedule", "lr_schedule": "schedule",
    "lr_decay_style": "schedule", "lr_warmup_ratio": "warmup_ratio", "mixed_precision": "precision",
    "max_len": "max_length", "max_seq_len": "max_length", "max_seq_length": "max_length", "cutoff_len": "max_length",
    "sequence_len": "max_length", "model_max_length": "max_length",
    "max_prompt_len": "max_prompt_length", "prompt_max_len": "max_prompt_length",
    "loss_type": "loss", "pref_loss": "loss", "pref_beta": "beta", "ref_policy_kl_penalty": "beta",
    "dpo_label_smoothing": "label_smoothing", "f_divergence_type": "f_divergence",
    "desirable_loss_weight": "desirable_weight", "undesirable_loss_weight": "undesirable_weight",
    "kto_chosen_weight": "desirable_weight", "kto_rejected_weight": "undesirable_weight", "kd_coef": "kd_weight",
    "router_aux_loss_coef": "router_aux_weight", "aux_loss_coef": "router_aux_weight",
    "eval_steps": "eval_every", "eval_interval": "eval_every", "logging_steps": "log_every",
    "log_interval": "log_every", "logging_interval": "log_every", "save_steps": "save_every",
    "save_interval": "save_every", "save_freq": "save_every",
    "save_total_limit": "keep", "max_ckpt_num": "keep", "resume_from_checkpoint": "resume",
    "test_size": "eval_fraction", "val_size": "eval_fraction", "val_set_size": "eval_fraction",
    "eval_ratio": "eval_fraction", "validation_fraction": "eval_fraction",
    "output_dir": "output", "out_dir": "output", "save_dir": "output", "save_path": "output",
    "output_path": "output", "report_to": "track", "random_seed": "seed",
    "dataset_num_proc": "workers", "preprocessing_num_workers": "workers",
    "lora_rank": "lora.rank", "lora_r": "lora.rank", "lora_alpha": "lora.alpha", "target_modules": "lora.targets",
    "lora_target_modules": "lora.targets", "lora_target": "lora.targets", "use_dora": "lora.dora",
    "use_rslora": "lora.rslora",
}
"""Option names of other trainers, with ours."""

ARGUMENTS: dict[str, str] = {
    "actor": "model", "model_name_or_path": "model", "pretrain": "model", "base_model": "model", "optim": "optimizer",
    "actor_optim": "optimizer", "actor_lr_scheduler": "scheduler", "processing_class": "tokenizer",
}
"""Argument names of other trainers, with ours."""

_TYPED: dict[str, str] = {
    **ARGUMENTS, **ALIASES,
    "ref_model": "reference", "reference_model": "reference", "ref_model_name_or_path": "reference",
    "ref_pretrain": "reference", "teacher_model": "teacher", "teacher_model_name_or_path": "teacher",
    "train_dataset": "data", "train_data": "data", "train_file": "data", "dataset": "data", "dataset_name": "data",
    "dataset_path": "data", "data_path": "data", "eval_dataset": "eval_data", "eval_file": "eval_data",
    "validation_file": "eval_data", "lora.r": "lora.rank", "lora.lora_alpha": "lora.alpha",
    "lora.target_modules": "lora.targets", "lora.use_dora": "lora.dora", "lora.use_rslora": "lora.rslora",
}
"""Names on the command line and in YAML, where arguments of trainers are options."""

VALUES: dict[str, dict[str, str]] = {
    "loss": {"dpo": "sigmoid", "slic": "hinge", "slic_hf": "hinge", "exo": "exo_pair", "nca": "nca_pair",
             "sppo": "sppo_hard", "nll": "sft", "cross_entropy": "sft"},
    "optimizer": {"adam_w": "adamw", "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw",
                  "adamw_8bit": "adamw8bit", "adamw_bnb_8bit": "adamw8bit", "paged_adamw_8bit": "paged-adamw8bit"},
    "schedule": {"constant_with_warmup": "constant"},
    "precision": {"float32": "fp32", "bfloat16": "bf16", "float64": "fp64"},
    "export_dtype": {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"},
    "f_divergence": {"js_divergence": "js", "alpha_divergence": "alpha"},
    "resume": {"true": "auto", "false": "never"},
}
"""Values of other trainers, with ours, by the option."""

_BATCH = ("--batch-size is the number of rows of an optimizer step over all devices: rows per device x devices x "
          "accumulation steps elsewhere. --microbatch-tokens limits the memory of a pass and changes no result.")
_EXPLAINED: dict[str, str] = {name: text for names, text in {
    "per_device_train_batch_size per_gpu_train_batch_size per_device_batch_size batch_size_per_device "
    "batch_size_per_gpu micro_batch_size micro_train_batch_size train_micro_batch_size_per_gpu train_micro_batch_size "
    "device_batch_size mbs gradient_accumulation_steps gradient_accumulation grad_accum_steps grad_accum "
    "accumulation_steps accumulate_grad_batches": _BATCH,
    "per_device_eval_batch_size per_gpu_eval_batch_size eval_batch_size micro_eval_batch_size":
        "An evaluation does not depend on a batch size. --microbatch-tokens limits its memory.",
    "warmup warmup_steps num_warmup_steps lr_warmup_steps lr_warmup_iters warmup_iters":
        "Warmup is a share of the optimizer steps: for N of M steps, pass --warmup-ratio with N / M.",
    "bf16 fp16 tf32 dtype torch_dtype param_dtype":
        "--precision sets the compute dtype: auto, fp32, bf16 or fp64. Weights and optimizer state stay float32.",
    "load_in_4bit load_in_8bit quantization_bit use_qlora qlora":
        "--lora.quantize nf4 or int8 quantizes the frozen weights under an adapter (--lora.rank 16).",
    "use_peft use_lora peft finetuning_type adapter": "--lora.rank 16 trains an adapter instead of all weights.",
    "dropout lora_dropout lora.dropout lora.lora_dropout attention_dropout disable_dropout":
        "Dropout is always 0, so that policy and reference agree before step 1.",
    "save_strategy eval_strategy evaluation_strategy logging_strategy":
        "--save-every, --eval-every and --log-every take steps (50), epochs (0.5ep) or time (30min).",
    "adam_beta1 adam_beta2 adam_betas adam_epsilon": "AdamW always uses betas 0.9 and 0.999 and eps 1e-8.",
    "deepspeed zero_stage fsdp fsdp_config num_gpus n_gpus num_processes nproc_per_node tensor_parallel_size":
        "torchrun starts the processes: torchrun --nproc-per-node 8 -m tropism kto ... They share the training state "
        "(--parallel.shard). --parallel.tensor divides layers.",
    "flash_attn use_flash_attn use_flash_attention_2 attn_implementation packing sample_packing packing_samples "
    "padding_free group_by_length":
        "--layout chooses attention and packing. By default nothing is padded, and rows do not see each other.",
    "gradient_checkpointing activation_checkpointing grad_checkpoint use_gradient_checkpointing":
        "--checkpointing full or selective computes activations again in the backward pass.",
    "input_key output_key prompt_key chosen_key rejected_key label_key prompt_column completion_column text_column "
    "dataset_text_field":
        "--columns names the columns of the data: --columns prompt=question,completion=answer.",
    "max_samples max_train_samples num_samples": "A suffix uses a share of the data: --data feedback.jsonl:0.1.",
    "use_wandb wandb wandb_project use_tensorboard run_name":
        "--track wandb or --track tensorboard logs the run, under the name of its output directory.",
    "rpo_alpha pref_ftx dpo_ftx": "--loss sigmoid,sft --loss-weights 1,ALPHA adds the likelihood of the chosen side.",
    "reference_free": "Losses without a reference are --loss simpo, cpo and orpo.",
    "precompute_ref_log_probs": "Scores of the reference are always computed before step 1, and cached in --store.",
    "overwrite overwrite_output_dir":
        "An output is never overwritten. Choose another --output, or resume the run in it with --resume auto.",
    "load_best_model_at_end metric_for_best_model early_stopping_patience":
        "--keep-best METRIC keeps the best checkpoint. --stop-metric METRIC with --stop-patience N stops early.",
}.items() for name in names.split()}
"""Options of other trainers that we do not have, and what to use instead."""


def ours(name: str, known: Collection[str]) -> str | None:
    """Our name of an option that another trainer calls `name`, if it is among the known ones."""
    found = _TYPED.get(_plain(name))
    return found if found in known else None


def value_of(option: str, value: Any) -> Any:
    """Our value for one of another trainer; any other as it is. Several losses are separated by commas."""
    values = VALUES.get(option)
    if values is None or not isinstance(value, str):
        return value
    return ",".join(values.get(part.strip().lower(), part) for part in value.split(","))


def means_never(option: str, value: Any) -> bool:
    """Whether other trainers say with this value that something never happens: the default here."""
    return (option in _NEVER and value in (0, -1, "0", "-1")) or (option, str(value)) in (
        ("track", "none"), ("max_steps", "-1"))


def same_value(one: Any, other: Any) -> bool:
    """Whether two values of an option are equal, as numbers if they are numbers: `1e-4` and `0.0001`."""
    if isinstance(one, str | float | int) and isinstance(other, str | float | int):
        with suppress(ValueError):
            return float(one) == float(other)
    return bool(one == other)


def instead(name: str, known: Collection[str], style: str = "{}") -> str:
    """What to use instead of an unknown option: an explanation, or the nearest name; empty if none is near.

    Args:
        name: as the user wrote it.
        known: our options.
        style: how an option is shown, such as `--{}`.
    """
    def named(option: str) -> str:
        return style.format(option.replace("_", "-") if style.startswith("--") else option)

    aliases = {alias for alias, option in _TYPED.items() if option in known}
    close = nearest(_plain(name), {*known, *aliases, *_EXPLAINED})
    if close is None:
        return ""
    if close in _EXPLAINED and close not in known:
        return _EXPLAINED[close]
    return f"Did you mean {named(close if close in known else _TYPED[close])}?"


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


_NEVER = ("save_every",)
"""Options for which other trainers use 0 or -1 to mean never."""


def canonical(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by our names, without those that are None.

    Raises:
        UsageError: if an option is given under two names.
    """
    values: dict[str, Any] = {}
    given: dict[str, str] = {}
    for name, value in options.items():
        option = ALIASES.get(name, name)
        if value is None:
            continue
        if option in given:
            raise UsageError(f"{given[option]} and {name} are the same option. Pass one of them.")
        inside = value if isinstance(value, Mapping) else getattr(value, "model_fields_set", ())
        for inner in (f"{option}.{entry}" for entry in inside):  # of a group
            if inner in given:
                raise UsageError(f"{name} and {given[inner]} both set {inner}. Pass one of them.")
            given[inner] = name
        given[option] = name
        values[option] = None if means_never(option, value) else value
        if option == "resume" and isinstance(value, bool | Path):
            values[option] = str(value) if isinstance(value, Path) else "auto" if value else "never"
    return {name: value for name, value in values.items() if value is not None}


def arguments(given: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Arguments by our names. Those given under other names are moved here from `options`.

    Raises:
        UsageError: if one is given twice.
    """
    found = dict(given)
    names = {name: name for name, value in given.items() if value is not None}
    for name in [name for name in options if name in ARGUMENTS]:
        option, value = ARGUMENTS[name], options.pop(name)
        if value is None:
            continue
        if option in names:
            raise UsageError(f"{names[option]} and {name} are the same argument. Pass one of them.")
        names[option], found[option] = name, value
    return found
