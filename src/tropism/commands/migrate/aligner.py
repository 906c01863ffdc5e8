"""Commands of ColossalAI's coati, and overrides and configurations of NeMo-Aligner."""

import math
import re
from pathlib import Path
from typing import Any

from tropism.borders import parse_mapping, read_object
from tropism.commands.migrate import shared
from tropism.commands.migrate.command_line import Given
from tropism.commands.migrate.transformers_based import with_config
from tropism.commands.migrate.translation import Line, Translation, number, off
from tropism.errors import UsageError

COATI = r"(?:^|/)(train_\w+)\.py$"
NEMO = r"(?:^|/)(train_gpt_\w+)\.py$"
_COATI: dict[str, dict[str, Any]] = {
    "kto": {"batch_size": 4, "accumulation_steps": 8, "max_epochs": 3, "weight_decay": 0.1, "warmup_ratio": 0.025,
            "seed": 42},
}
_NEMO = {"ref_policy_kl_penalty": 0.2, "global_batch_size": 64, "lr": 9e-6, "weight_decay": 0.1, "seed": 1234,
         "warmup_steps": 10}
_SUMMED = ("coati adds the gradients of accumulated micro-batches without dividing by their number, and clips the sum. "
           "Here a step is their mean. AdamW does not notice the factor, clipping does.")


def coati(given: Given) -> Translation:
    """A run of ours from a command of coati's training scripts.

    Raises:
        UsageError: for a script that trains otherwise.
    """
    method = {"": "kto", "train_kto": "kto", "train_dpo": "dpo", "train_sft": "sft"}.get(given.program)
    if method is None:
        raise UsageError(f"{given.program}: cannot be translated. Offline training only: train_kto.py, train_dpo.py "
                         "and train_sft.py.")
    run = Translation("coati", method, given, {**_COATI["kto"], "schedule": "cosine_with_min_lr"})
    every, accumulation = number(run.value("save_interval")), number(run.value("accumulation_steps")) or 1
    if every is not None and every >= 1 and accumulation >= 1:
        steps = math.lcm(int(every), int(accumulation)) // int(accumulation)
        run.set("save_every", steps, "save_interval", text=f"--save-every {steps}: they save where {every:g} "
                                                           "micro-batches and an update end together")
    shared.batch_size(run, "batch_size", "accumulation_steps")
    shared.warmup(run, "warmup_steps")
    shared.precision(run, "mixed_precision")
    shared.trackers(run)
    shared.memory(run)
    if run.has("auto_weight"):
        run.set("desirable_weight", "auto", "auto_weight")
    for name, option in (("dataset", "data"), ("eval_dataset", "eval_data")):
        if run.has(name):
            files = shared.joined(run.value(name))
            run.set(option, files, name, text=f"--{option.replace('_', '-')} takes the JSONL files that "
                                              "prepare_dataset.py read, not the Arrow folders that it wrote: replace "
                                              "the paths")
    _lora_file(run)
    if method == "kto":
        run.notes.append("coati evaluates on its training data. Here --eval-data is evaluated.")
        run.notes.append(_SUMMED)
    run.rest()
    return run


def nemo(given: Given) -> Translation:
    """A run of ours from a NeMo-Aligner command with overrides, or from its YAML file.

    Raises:
        UsageError: for a script other than that of KTO.
    """
    with_config(given, "config-path")
    if given.program not in ("", "train_gpt_kto"):
        raise UsageError(f"{given.program}: cannot be translated. Only train_gpt_kto.py is.")
    given.values = dict(_flat(given.values))
    run = Translation("nemo-aligner", "kto", given, {**_NEMO, "schedule": "cosine_with_min_lr"})
    devices, nodes = number(run.value("devices")), number(run.value("num_nodes")) or 1
    if devices and devices >= 1:
        given.launcher.setdefault("nproc_per_node", str(int(devices)))
        if nodes > 1:
            given.launcher.setdefault("nnodes", str(int(nodes)))
    shared.warmup(run, "warmup_steps")
    for name in ("max_time", "max_time_per_run"):
        if (time := re.fullmatch(r"(\d+):(\d+):(\d+):(\d+)", str(run.value(name)))) is not None:
            days, hours, minutes, seconds = map(int, time.groups())
            run.set("max_time", f"{((days * 24 + hours) * 60 + minutes) * 60 + seconds}s", name)
    share = number(run.value("val_check_interval"))
    if share is not None and share > 0:
        text = str(run.value("val_check_interval"))
        run.set("eval_every", f"{share:g}ep" if "." in text else int(share), "val_check_interval")
    limit = run.value("limit_val_batches")
    if number(limit) == 1.0:
        run.close("without effect", "All evaluation rows is the default.", "limit_val_batches")
    if number(run.value("limit_train_batches")) == 1.0:
        run.close("without effect", "All rows is the default.", "limit_train_batches")
    shared.precision(run, "precision")
    if run.has("resume_if_exists"):
        run.set("resume", "auto", "resume_if_exists")
    if run.has("create_wandb_logger"):
        run.set("track", "wandb", "create_wandb_logger")
    clip = number(run.value("gradient_clip_val"))
    if clip is not None:
        run.set("max_grad_norm", max(clip, 0.0), "gradient_clip_val")
    if str(run.value("peft_scheme")).lower() == "lora":
        rank = run.value("adapter_dim")
        run.set("lora.rank", 32 if rank is None else rank, "peft_scheme", "adapter_dim")
    for name, known in (("optim.name", ("distributed_fused_adam", "fused_adam", "adamw")),
                        ("sched.name", ("cosineannealing",))):
        key = next((key for key in given.values if key.endswith(name)), None)
        if key and str(given.values[key]).lower() in known:
            used = "AdamW is the default." if name == "optim.name" else "--schedule cosine_with_min_lr"
            run.account.append(Line(key, str(given.values.pop(key)), "replaced", used))
    if run.has("encoder_seq_length"):
        run.set("max_length", run.value("encoder_seq_length"), "encoder_seq_length")
    _prefixes(run)
    run.notes.append("Rewards of their metrics are log-ratios. Here they are multiplied by beta.")
    run.rest()
    return run


def _prefixes(run: Translation) -> None:
    """Lists of files for train and validation, written as one value or as names below data_prefix."""
    value = run.value("data_prefix")
    if isinstance(value, str) and value.startswith("{"):  # as Hydra takes it on the command line
        value = parse_mapping(value, Path("data_prefix"))[0]
    for split, option in (("train", "data"), ("validation", "eval_data")):
        key = next((name for name in run.given.values if name.endswith(f"data_prefix.{split}")), None)
        found = run.given.values.get(key) if key else value.get(split) if isinstance(value, dict) else None
        if off(found):
            continue
        files = found if isinstance(found, list) else str(found).strip("[]").split(",")
        run.options[option] = ",".join(str(file).strip(" '\"") for file in files)
        if key:
            run.close("taken", f"--{option.replace('_', '-')}", run.canonical(key))
    run.close("replaced", "--data and --eval-data", "data_prefix")


def _flat(values: dict[str, Any], group: str = "") -> list[tuple[str, Any]]:
    """Nested values by names with dots."""
    found: list[tuple[str, Any]] = []
    for name, value in values.items():
        if isinstance(value, dict) and value:
            found += _flat(value, f"{group}{name}.")
        else:
            found.append((f"{group}{name}", value))
    return found


def _lora_file(run: Translation) -> None:
    """The JSON file of coati's `--lora_config`, if it is there."""
    value = run.value("lora_config")
    if not isinstance(value, str):
        return
    path = Path(value).expanduser()
    if not path.is_file():
        run.close("replaced", f"add --lora.rank and --lora.alpha with r and lora_alpha of {path}, which was not found",
                  "lora_config")
        return
    content = read_object(path, kind=UsageError)
    for name, option in (("r", "lora.rank"), ("lora_alpha", "lora.alpha"), ("target_modules", "lora.targets")):
        if content.get(name) is not None and number(content[name]) != 0:
            run.options[option] = shared.joined(content[name])
    unread = sorted(content.keys() - {"r", "lora_alpha", "target_modules"})
    run.close("replaced", "--lora.rank, --lora.alpha and --lora.targets" + (
        f"; not read: {', '.join(unread)}" if unread else ""), "lora_config")
