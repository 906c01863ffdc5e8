"""Configurations of Axolotl."""

from typing import Any

from tropism.commands.migrate import shared
from tropism.commands.migrate.command_line import CONFIGS, Given
from tropism.commands.migrate.transformers_based import with_config
from tropism.commands.migrate.translation import Translation, off
from tropism.errors import UsageError

PROGRAMS = r"^(?:\S*/)?axolotl$|axolotl\.cli\.(\w+)$"
_DEFAULTS: dict[str, Any] = {"warmup_ratio": 0.03, "lr_scheduler": "cosine", "seed": 42, "micro_batch_size": 1}
_METHODS = {"": "sft", "dpo": "dpo", "ipo": "dpo", "orpo": "dpo", "simpo": "dpo", "kto": "kto"}
_READ = {"path", "type", "split", "data_files", "ds_type"}


def translate(given: Given) -> Translation:
    """A run of ours from a configuration of Axolotl.

    Raises:
        UsageError: for a kind of training that samples.
    """
    if given.program not in ("", "train") and not given.program.endswith(CONFIGS):
        raise UsageError(f"{given.program}: cannot be translated. Only axolotl train is.")
    with_config(given, "config")
    kind = "" if off(given.values.get("rl")) else str(given.values["rl"]).lower()
    if kind not in _METHODS:
        raise UsageError(f"rl: {kind}: cannot be translated. Offline training only: kto, dpo, ipo, orpo, simpo, or "
                         "none for sft.")
    run = Translation("axolotl", _METHODS[kind], given, _DEFAULTS)
    if kind in ("ipo", "orpo", "simpo"):
        run.set("loss", "ipo_mean" if kind == "ipo" else kind, "rl")  # TRL divides by lengths
    else:
        run.close("replaced", f"tropism {run.method}", "rl")
    if run.has("orpo_alpha"):
        run.set("beta", run.value("orpo_alpha"), "orpo_alpha")
    if run.has("rpo_alpha") and run.method == "dpo":
        weight = run.value("rpo_alpha")
        loss = run.options.get("loss", "sigmoid")
        if run.set("loss", f"{loss},sft", "rpo_alpha", text=f"--loss {loss},sft --loss-weights 1,{weight}"):
            run.options["loss_weights"] = f"1,{weight}"
    for name, option in (("datasets", "data"), ("test_datasets", "eval_data"), ("pretraining_dataset", "data")):
        _datasets(run, name, option)
    if run.method == "sft" and not run.has("train_on_inputs", "pretraining_dataset"):
        run.options["supervise"] = "all"
        run.notes.append("--supervise all trains every assistant message, as their type chat_template does.")
    _optimization(run)
    _adapters(run)
    run.rest()
    return run


def _optimization(run: Translation) -> None:
    """Steps, rates, precision, intervals, trackers and memory."""
    shared.batch_size(run, "micro_batch_size", "gradient_accumulation_steps")
    shared.schedule(run, "lr_scheduler")
    shared.warmup(run, "warmup_steps")
    shared.precision(run, "bf16", "fp16")
    shared.intervals(run)
    shared.best(run)
    shared.memory(run)
    shared.held_out(run, "val_set_size")
    shared.trackers(run)
    if run.has("chat_template"):
        name = str(run.value("chat_template"))
        if name in ("tokenizer_default", "tokenizer_default_fallback_chatml"):
            run.close("without effect", "The tokenizer's own template is the default.", "chat_template")
        elif name != "jinja":
            run.set("chat_template", {"llama3": "llama3", "phi_3": "phi3"}.get(name, name), "chat_template")
    if run.has("chat_template_jinja"):
        run.close("replaced", "write it into a file, and pass --chat-template FILE", "chat_template_jinja")


def _adapters(run: Translation) -> None:
    """LoRA and QLoRA."""
    kind = "" if off(run.value("adapter")) else str(run.value("adapter")).lower()
    run.close("replaced" if kind else "without effect", "--lora.rank" if kind else "No adapter is trained.", "adapter")
    if kind == "qlora" and not run.has("load_in_4bit"):
        run.options["lora.quantize"] = "nf4"
    if kind and run.has("lora_target_linear"):
        run.close("without effect", "Every linear layer except the head is the default.", "lora_target_linear",
                  "lora_target_modules")
    shared.adapter(run, bool(kind), "lora_r", "lora_alpha", "lora_target_modules", nf4=("load_in_4bit",),
                   int8=("load_in_8bit",), others=("lora_dropout", "lora_target_linear", "lora_modules_to_save",
                                                   "peft_use_dora", "peft_use_rslora"))


def _datasets(run: Translation, name: str, option: str) -> None:
    """A list of datasets: their paths become the data, their types are recognized by columns."""
    value = run.value(name)
    if off(value):
        return
    entries = [entry if isinstance(entry, dict) else {"path": str(entry)}
               for entry in (value if isinstance(value, list) else [value])]
    found: list[str] = []
    for entry in entries:
        path, files = str(entry.get("path", "")), entry.get("data_files")
        local = path in ("json", "csv", "parquet", "arrow", "text")
        parts = [str(part) for part in (files if isinstance(files, list) else [files])] if files else []
        found += parts if local and parts else [f"{path}/{part}" for part in parts] or [path]
        unread = sorted(str(key) for key in entry.keys() - _READ if not off(entry[key]))
        if unread:
            run.notes.append(f"{path}: {', '.join(unread)} {'is' if len(unread) == 1 else 'are'} not read. Check what "
                             "tropism inspect reports, and use --columns and --format.")
        if entry.get("type"):
            run.notes.append(f"{path}: type {_kind(entry['type'])} is recognized by its columns. tropism inspect shows "
                             "rows as they are trained.")
    splits = list(dict.fromkeys(str(entry["split"]) for entry in entries if entry.get("split")))
    if len(splits) == 1 and splits != ["train"] and option == "data":
        run.options["split"] = splits[0]
    elif len(splits) > 1:
        run.notes.append(f"{name}: several splits ({', '.join(splits)}). --split chooses one for all.")
    run.set(option, ",".join(part for part in found if part), name)


def _kind(value: Any) -> str:
    return value if isinstance(value, str) else "user_defined"
