"""Commands and configurations of TRL and LLaMA-Factory, whose options are those of transformers and their own."""

import re
from pathlib import Path
from typing import Any

from tropism.argument_names import plain
from tropism.borders import read_object
from tropism.commands.migrate import shared
from tropism.commands.migrate.command_line import CONFIGS, Given, read_config
from tropism.commands.migrate.translation import VARIABLE, Translation, number, off
from tropism.errors import UsageError

TRL = r"^(?:\S*/)?trl$|trl[./]scripts[./](\w+?)(?:\.py)?$|(?:^|/)(kto|dpo|sft|gkd)\.py$"
LLAMA_FACTORY = r"(?:^|/)(?:llamafactory-cli|lmf)$|(?:^|/)(?:train|train_bash)\.py$"

_TRL: dict[str, dict[str, Any]] = {
    "kto": {"learning_rate": 1e-6, "num_train_epochs": 3, "warmup_steps": 0, "max_length": 1024, "seed": 42,
            "per_device_train_batch_size": 8},
    "dpo": {"num_train_epochs": 3, "warmup_steps": 0, "max_length": 1024, "seed": 42, "per_device_train_batch_size": 8},
    "sft": {"num_train_epochs": 3, "warmup_steps": 0, "max_length": 1024, "seed": 42, "per_device_train_batch_size": 8},
}
_LLAMA_FACTORY = {"learning_rate": 5e-5, "num_train_epochs": 3, "warmup_steps": 0, "cutoff_len": 2048, "seed": 42,
                  "per_device_train_batch_size": 8, "finetuning_type": "lora", "lora_rank": 8}
_STAGES = {"sft": "sft", "pt": "sft", "dpo": "dpo", "kto": "kto"}
_SAMPLES = r"(async_)?(grpo|rloo|ppo|online_dpo|nash_md|xpo|prm|reward|vllm|env|chat|utils)"
_READ = {"file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "columns", "ranking", "formatting"}
_OFFLINE = "Offline training only: kto, dpo, sft and kd."


def trl(given: Given) -> Translation:
    """A run of ours from a TRL command, or from a YAML file for one.

    Raises:
        UsageError: for a trainer that samples, or an unknown one.
    """
    with_config(given, "config")
    method = {"gkd": "kd"}.get(given.program, given.program)
    if method not in ("kto", "dpo", "sft", "kd"):
        names = {plain(name) for name in given.values}
        if re.match(_SAMPLES, given.program):
            raise UsageError(f"trl {given.program}: cannot be translated. {_OFFLINE}")
        method = "kto" if names & {"desirable_weight", "undesirable_weight"} else "dpo" if names & {
            "loss_type", "beta", "label_smoothing", "f_divergence_type", "ld_alpha"} else "sft"
    run = Translation("trl", method, given, _TRL.get(method, _TRL["sft"]))
    _mixture(run)
    _common(run)
    _of_trl(run)
    wanted = run.has("use_peft")
    run.close("replaced" if wanted else "without effect", "--lora.rank" if wanted else "No adapter is trained.",
              "use_peft")
    if wanted:
        run.defaults = {**run.defaults, "lora_r": 16, "lora_alpha": 32}
        if not run.has("lora_target_modules"):
            run.notes.append("Adapters are on every linear layer except the head. Without lora_target_modules, peft "
                             "chooses by the kind of model, often q_proj and v_proj: --lora.targets q_proj,v_proj.")
    shared.adapter(run, wanted, "lora_r", "lora_alpha", "lora_target_modules", nf4=("load_in_4bit",),
                   int8=("load_in_8bit",), others=("lora_dropout", "use_dora", "use_rslora", "lora_modules_to_save"))
    if method == "kto":
        run.notes.append("z0 is the paper's, over the whole optimizer step. TRL's depends on the micro-batch.")
        if "shuffle" not in run.options:
            run.notes.append("TRL trains on rows in the order of the file. Here they are shuffled, unless --shuffle "
                             "false.")
    run.rest()
    return run


def llamafactory(given: Given) -> Translation:
    """A run of ours from a configuration or command of LLaMA-Factory.

    Raises:
        UsageError: for a stage that samples.
    """
    if given.program not in ("", "train", "train_bash") and not given.program.endswith(CONFIGS):
        raise UsageError(f"{given.program}: cannot be translated. Only llamafactory-cli train is.")
    with_config(given, "")
    stage = str(given.values.get("stage", "sft"))
    if stage not in _STAGES:
        raise UsageError(f"stage {stage}: cannot be translated. {_OFFLINE}")
    run = Translation("llama-factory", _STAGES[stage], given, _LLAMA_FACTORY)
    run.close("replaced", f"tropism {run.method}", "stage")
    if stage == "pt":
        run.notes.append("Pretraining is tropism sft on texts without prompts.")
    _registered(run)
    _common(run)
    shared.held_out(run, "val_size")
    if run.value("pref_loss") == "ipo":
        run.set("loss", "ipo_mean", "pref_loss", text="--loss ipo_mean, which divides by lengths as they do")
    kind = str(run.value("finetuning_type"))
    said = {"lora": "--lora.rank", "full": "the default"}.get(kind)
    run.close("replaced" if said else "not supported", said or "All weights or an adapter are trained: --lora.rank 8",
              "finetuning_type")
    bits = str(run.value("quantization_bit"))
    if kind == "lora" and bits in ("4", "8"):
        run.set("lora.quantize", {"4": "nf4", "8": "int8"}[bits], "quantization_bit")
    if kind == "lora":
        run.defaults = {"lora_rank": 8, **run.defaults}
    shared.adapter(run, kind == "lora", "lora_rank", "lora_alpha", "lora_target",
                   others=("lora_dropout", "use_dora", "use_rslora", "additional_target", "loraplus_lr_ratio"))
    if run.has("pref_ftx"):
        loss, weight = run.value("pref_loss") or "sigmoid", run.value("pref_ftx")
        if run.method == "dpo" and run.set("loss", f"{loss},sft", "pref_loss", "pref_ftx",
                                           text=f"--loss {loss},sft --loss-weights 1,{weight}"):
            run.options["loss_weights"] = f"1,{weight}"
    if run.method != "dpo":
        run.close("without effect", "It is about pairs.", "pref_loss", "pref_ftx", "dpo_label_smoothing", "simpo_gamma")
    if run.has("template"):
        run.close("replaced", "the model's own chat template; --chat-template FILE names another one", "template")
    if run.has("train_on_prompt") is False and run.method == "sft" and not run.has("mask_history"):
        run.options["supervise"] = "all"
        run.notes.append("--supervise all trains every assistant message, as their default does.")
    if run.has("disable_shuffling"):
        run.set("shuffle", False, "disable_shuffling")
    run.rest()
    return run


def with_config(given: Given, option: str) -> None:
    """Add the values of the configuration that a command names; its own options count. `--no_x` is x: false."""
    given.values = {re.sub(r"^no[-_]", "", name) if value is True else name: value and not re.match("no[-_]", name)
                    if value is True else value for name, value in given.values.items()}
    path = given.values.pop(option, None) if option else None
    if given.program.endswith(CONFIGS):  # without a subcommand
        given.words, given.program = [given.program, *given.words], ""
    if path is None:
        path = next((word for word in given.words if word.endswith(CONFIGS) or VARIABLE.search(word)), None)
        given.words = [word for word in given.words if word != path]
    if isinstance(path, str):
        if VARIABLE.search(path):
            raise UsageError(f"{path}: shell variables are not read. Write the path of the configuration.")
        config = read_config(Path(path).expanduser())
        given.values = {**config.values, **given.values}
        given.directory = config.directory


def _of_trl(run: Translation) -> None:
    """Evaluation rows, the likelihood term of older versions, distillation and supervision."""
    evaluates = any(line.name.endswith(("eval_strategy", "evaluation_strategy")) and line.kind == "taken"
                    for line in run.account)
    if evaluates and run.has("dataset_name") and not run.has("dataset_test_split"):
        run.options["eval_split"] = "test"
        run.notes.append("--eval-split test is where TRL looks for evaluation rows.")
    if run.has("rpo_alpha") and run.method == "dpo":
        losses, weight = run.options.get("loss", "sigmoid"), run.value("rpo_alpha")
        if "," not in losses and run.set("loss", f"{losses},sft", "rpo_alpha",
                                         text=f"--loss {losses},sft --loss-weights 1,{weight}"):
            run.options["loss_weights"] = f"1,{weight}"
    if run.method == "kd":
        _distilled(run)
    if run.method == "sft":
        if run.has("assistant_only_loss"):
            run.set("supervise", "all", "assistant_only_loss")
        if run.value("completion_only_loss") is not None:
            run.close("replaced", "Only completions are trained. To train on prompts too, use texts without prompts.",
                      "completion_only_loss")
        run.notes.append("Of messages TRL trains every token, unless assistant_only_loss is on. Here the last "
                         "assistant message is trained, and with --supervise all every one.")


def _distilled(run: Translation) -> None:
    """GKD: a divergence alone, forward at beta 0 and reverse at 1, on given completions."""
    share = number(run.value("beta"))
    share = 0.5 if share is None else share
    kind = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(share, "js")
    run.options["kd_weight"] = 1.0
    run.set("divergence", kind, "beta", text=f"--divergence {kind}" + f" --divergence-mix {share:g}" * (kind == "js"))
    run.options.setdefault("divergence", kind)
    if kind == "js":
        run.options["divergence_mix"] = share
    run.close("without effect", "It is about sampling. The divergence is computed at temperature 1 there, too.",
              "temperature", "max_new_tokens")
    if number(run.value("lmbda")) == 0:
        run.close("without effect", "Given completions are trained, as with lmbda 0.", "lmbda")
    else:
        run.close("not supported", "Completions are not generated during training. Generate them before, as data.",
                  "lmbda", "seq_kd")
        run.notes.append("GKD generates a share lmbda of the completions during training, 0.5 by default. Here all are "
                         "given.")


def _mixture(run: Translation) -> None:
    """`datasets` of a TRL configuration: a list of sources with their splits and columns."""
    key = next((key for key in run.given.values if plain(key) == "datasets"), None)
    entries = run.given.values.get(key) if key else None
    if not key or not isinstance(entries, list):
        return
    names = [str(entry.get("path", "")) for entry in entries if isinstance(entry, dict)]
    inner = sorted({name for entry in entries if isinstance(entry, dict) for name, value in entry.items()
                    if name != "path" and (name, value) != ("split", "train")})
    run.set("data", ",".join(filter(None, names)), key,
            text="--data takes their paths" + (f"; {', '.join(inner)}: not read" if inner else ""))


def _common(run: Translation) -> None:
    """Options of transformers.TrainingArguments."""
    shared.batch_size(run, "per_device_train_batch_size", "gradient_accumulation_steps")
    shared.schedule(run, "lr_scheduler_type")
    shared.warmup(run, "warmup_steps")
    shared.precision(run, "bf16", "fp16", "dtype", "torch_dtype", "pure_bf16")
    shared.intervals(run)
    shared.best(run)
    shared.trackers(run)
    shared.memory(run)
    for name in ("train_sampling_strategy",):
        if run.value(name) is not None:
            kept = str(run.value(name)).lower() == "sequential"
            run.set("shuffle", not kept, name)
    loss, weights = run.value("loss_type"), run.value("loss_weights")
    if loss is not None and run.method in ("kto", "dpo"):  # TRL's ipo divides by lengths
        names = ["ipo_mean" if name == "ipo" else name for name in str(shared.joined(loss)).split(",")]
        run.set("loss", ",".join(names), "loss_type")
        if weights is not None and "loss" in run.options:
            run.set("loss_weights", shared.joined(weights), "loss_weights")
    elif loss is not None:
        run.close("without effect" if str(loss) == "nll" else "not supported", "SFT and KD have one loss.", "loss_type")


def _registered(run: Translation) -> None:
    """Datasets of LLaMA-Factory by their names in dataset_info.json, if it is where the command says."""
    for name, option in (("dataset", "data"), ("eval_dataset", "eval_data")):
        value = run.value(name)
        if off(value):
            continue
        directory = run.value("dataset_dir")
        directory = Path(directory if isinstance(directory, str) else "data").expanduser()
        info = directory / "dataset_info.json"
        names = [str(part).strip() for part in (value if isinstance(value, list) else str(value).split(","))]
        if not info.is_file():
            run.set(option, ",".join(names), name, text=f"--{option.replace('_', '-')} takes files: replace each name "
                                                        f"with its file. {info} was not found.")
            continue
        known = read_object(info, kind=UsageError)
        found = [_source(directory, known.get(part), part, run) for part in names]
        run.set(option, ",".join(found), name, text=f"--{option.replace('_', '-')} {','.join(found)}, from {info}")
    run.close("replaced", "--data takes the path of each file", "dataset_dir")


def _source(directory: Path, entry: Any, name: str, run: Translation) -> str:
    """What a name of dataset_info.json stands for."""
    if not isinstance(entry, dict):
        run.notes.append(f"{name} is not in dataset_info.json: replace it with a file.")
        return name
    columns = entry.get("columns")
    unread = sorted(str(key) for key in entry.keys() - _READ if not off(entry[key]) and (key, entry[key]) != (
        "split", "train"))
    if unread:
        run.notes.append(f"{name}: {', '.join(unread)} of dataset_info.json {'is' if len(unread) == 1 else 'are'} not "
                         "read. Check what tropism inspect reports.")
    if isinstance(columns, dict) and columns:
        pairs = ",".join(f"{part}={column}" for part, column in columns.items())
        run.notes.append(f"{name}: dataset_info.json names columns ({pairs}). Check what tropism inspect reports, and "
                         "rename columns with --columns.")
    for key in ("hf_hub_url", "file_name"):
        if isinstance(entry.get(key), str):
            return str(directory / entry[key]) if key == "file_name" else entry[key]
    run.notes.append(f"{name}: only hf_hub_url and file_name of dataset_info.json are read. Replace it with a file.")
    return name
