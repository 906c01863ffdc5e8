"""Option and argument names of other trainers, translated to ours."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tropism.errors import UsageError

ALIASES: dict[str, str] = {
    "max_norm": "max_grad_norm", "max_epochs": "epochs", "save_dir": "output", "save_interval": "save_every",
    "logging_steps": "log_every", "eval_steps": "eval_every", "save_steps": "save_every", "lr": "learning_rate",
    "lr_scheduler_type": "schedule", "l2": "weight_decay", "num_train_epochs": "epochs", "output_dir": "output",
    "kd_coef": "kd_weight", "max_len": "max_length", "train_batch_size": "batch_size", "loss_type": "loss",
    "desirable_loss_weight": "desirable_weight", "undesirable_loss_weight": "undesirable_weight",
    "lr_warmup_ratio": "warmup_ratio", "lr_scheduler": "schedule", "save_path": "output", "report_to": "track",
    "save_total_limit": "keep", "max_ckpt_num": "keep", "resume_from_checkpoint": "resume",
    "ref_policy_kl_penalty": "beta", "global_batch_size": "batch_size", "gradient_clip_val": "max_grad_norm",
    "lora_rank": "lora.rank", "lora_r": "lora.rank", "lora_alpha": "lora.alpha", "target_modules": "lora.targets",
    "lora_target_modules": "lora.targets", "use_dora": "lora.dora", "use_rslora": "lora.rslora",
    "router_aux_loss_coef": "router_aux_weight", "aux_loss_coef": "router_aux_weight",
}
"""Option names of other trainers, with ours."""

ARGUMENTS: dict[str, str] = {
    "actor": "model", "optim": "optimizer", "actor_optim": "optimizer", "actor_lr_scheduler": "scheduler",
    "processing_class": "tokenizer",
}
"""Argument names of other trainers, with ours."""

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
        ours = ALIASES.get(name, name)
        if value is None:
            continue
        if ours in given:
            raise UsageError(f"{given[ours]} and {name} are the same option. Pass one of them.")
        inside = value if isinstance(value, Mapping) else getattr(value, "model_fields_set", ())
        for inner in (f"{ours}.{entry}" for entry in inside):  # of a group
            if inner in given:
                raise UsageError(f"{name} and {given[inner]} both set {inner}. Pass one of them.")
            given[inner] = name
        given[ours] = name
        never = (ours in _NEVER and value in (0, -1)) or (ours, value) == ("track", "none")
        values[ours] = None if never else value
        if ours == "resume" and isinstance(value, bool | Path):
            values[ours] = str(value) if isinstance(value, Path) else "auto" if value else "never"
    return {name: value for name, value in values.items() if value is not None}


def arguments(given: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Arguments by our names. Those given under other names are moved here from `options`.

    Raises:
        UsageError: if one is given twice.
    """
    found = dict(given)
    names = {name: name for name, value in given.items() if value is not None}
    for name in [name for name in options if name in ARGUMENTS]:
        ours, value = ARGUMENTS[name], options.pop(name)
        if value is None:
            continue
        if ours in names:
            raise UsageError(f"{names[ours]} and {name} are the same argument. Pass one of them.")
        names[ours], found[ours] = name, value
    return found
