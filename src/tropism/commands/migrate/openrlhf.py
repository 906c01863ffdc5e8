"""Commands of OpenRLHF: the flags of v0.9 and the dotted ones of newer versions."""

from typing import Any

from tropism.commands.migrate import shared
from tropism.commands.migrate.command_line import Given
from tropism.commands.migrate.translation import Translation, number
from tropism.errors import UsageError

PROGRAMS = r"(?:openrlhf\.cli\.|openrlhf/cli/|^|/)(train_\w+?)(?:\.py)?$"
_COMMON = {"lr_scheduler": "cosine_with_min_lr", "lr_warmup_ratio": 0.03, "train_batch_size": 128, "seed": 42}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "kto": {"beta": 0.01, "learning_rate": 1e-5, **_COMMON},
    "dpo": {"learning_rate": 1e-5, "max_len": 512, **_COMMON},
    "kd": {"kd_coef": 0.4, "learning_rate": 5e-6, **_COMMON},
    "sft": {"learning_rate": 5e-6, **_COMMON}}
_NEWER = {
    "model.model_name_or_path": "pretrain", "ref.model_name_or_path": "ref_pretrain", "ref.offload": "ref_offload",
    "model.ipo_enable": "ipo", "model.gradient_checkpointing_enable": "gradient_checkpointing",
    "train.batch_size": "train_batch_size", "train.micro_batch_size": "micro_train_batch_size",
    "adam.lr": "learning_rate", "adam.betas": "adam_betas", "adam.eps": "adam_epsilon", "adam.weight_decay": "l2",
    "muon.lr": "muon_lr", "muon.momentum": "muon_momentum", "muon.weight_decay": "muon_lr",
    "muon.ns_steps": "muon_lr", "muon.nesterov": "muon_lr", "ckpt.output_dir": "save_path", "ckpt.path": "ckpt_path",
    "ckpt.save_hf": "save_hf_ckpt", "ckpt.disable_ds": "disable_ds_ckpt", "ckpt.max_num": "max_ckpt_num",
    "ckpt.max_mem": "max_ckpt_mem", "ckpt.load_enable": "load_checkpoint", "eval.dataset": "eval_dataset",
    "eval.split": "eval_split", "eval.steps": "eval_steps", "logger.wandb.key": "use_wandb",
    "logger.wandb.project": "wandb_project", "logger.wandb.org": "wandb_org", "logger.wandb.group": "wandb_group",
    "logger.wandb.run_name": "wandb_run_name", "logger.tensorboard_dir": "use_tensorboard",
    "ds.lora.rank": "lora_rank", "ds.lora.alpha": "lora_alpha", "ds.lora.target_modules": "target_modules",
    "ds.lora.dropout": "lora_dropout", "ds.tensor_parallel_size": "ds_tensor_parallel_size",
    "train.full_determinism_enable": "full_determinism"}
_METHODS = {"train_kto": "kto", "train_dpo": "dpo", "train_kd": "kd", "train_sft": "sft"}
_KTO = ("z0 is estimated over the whole optimizer step here, over a micro-batch there: with small micro-batches their "
        "estimate is larger.")
_KD = ("KD and cross-entropy start at the first token of the completion and end with its last one here. Theirs also "
       "train the last token of the prompt, and one position past the end.")


def translate(given: Given) -> Translation:
    """A run of ours from a command of OpenRLHF.

    Raises:
        UsageError: for a program that trains otherwise.
    """
    run = Translation("openrlhf", _method(given), given, newer=_NEWER)
    run.defaults = _DEFAULTS[run.method]
    shared.sources(run, "eval_data", "eval_dataset")
    _data(run)
    _loss(run)
    shared.precision(run, "param_dtype", "bf16")
    rank = number(run.value("lora_rank")) or 0
    if rank > 0:
        run.defaults = {**run.defaults, "lora_alpha": 16}
    shared.adapter(run, rank > 0, "lora_rank", "lora_alpha", "target_modules", nf4=("load_in_4bit",))
    if number(run.value("eval_steps")) == -1:
        run.set("eval_every", "1ep", "eval_steps")
    elif run.value("eval_steps") is not None:
        run.set("eval_every", run.value("eval_steps"), "eval_steps")
    if run.has("load_checkpoint"):
        run.set("resume", "auto", "load_checkpoint")
    if number(run.value("min_lr_ratio")) == 0.1:
        run.close("without effect", "A tenth is the floor of cosine_with_min_lr.", "min_lr_ratio")
    run.close("without effect", "Rows of a pass change no result. --microbatch-tokens limits its memory.",
              "micro_train_batch_size")
    if str(run.value("optim")).lower() == "adam":
        run.set("optimizer", "adamw", "optim")
    for kind in ("reference", "model"):  # the same model twice is the default
        if kind == "reference" and run.value("ref_pretrain") == run.value("pretrain"):
            run.close("without effect", "The model before step 1 is the default reference.", "ref_pretrain")
    shared.trackers(run)
    shared.memory(run)
    run.rest()
    if run.method == "kto":
        run.notes.append(_KTO)
    if run.method == "kd":
        run.notes.append(_KD)
    return run


def _method(given: Given) -> str:
    method = _METHODS.get(given.program)
    names = {name.rpartition(".")[2].replace("-", "_") for name in given.values}
    if method is None and not given.program.startswith("train_"):
        method = ("kd" if names & {"kd_coef", "teacher_model"} else "dpo" if names & {
            "chosen_key", "rejected_key", "ipo", "ipo_enable", "ref_pretrain", "nll_loss_coef", "label_smoothing"}
            else "kto" if names & {"desirable_loss_weight", "undesirable_loss_weight", "label_key"} else None)
    if method is None:
        raise UsageError(f"{given.program or 'COMMAND'}: not a program that can be translated. Begin with one of "
                         f"{', '.join(f'openrlhf.cli.{name}' for name in _METHODS)}.")
    return method


def _data(run: Translation) -> None:
    """Datasets, columns and templates."""
    if isinstance(run.value("dataset"), str):
        name = next(key for key in run.given.values if run.canonical(key) == "dataset")
        run.given.values[name] = run.value("dataset").replace("@", "/")
    shared.sources(run, "data", "dataset")
    parts = ({"prompt_key": "prompt", "chosen_key": "chosen", "rejected_key": "rejected"} if run.method == "dpo" else
             {"input_key": "prompt", "output_key": "completion", "label_key": "label"})
    shared.columns(run, parts, {"prompt": "input", "completion": "output"})
    chat = run.has("apply_chat_template")
    if chat and run.method == "kd":
        run.set("as_messages", True, "apply_chat_template")
    if not chat and run.method != "dpo" and not run.has("input_template"):
        run.notes.append("Without --apply_chat_template they write 'User: {}\\nAssistant: ' around a prompt of text. "
                         "Here text is trained as it is: write it into the data, or pass --as-messages.")
    if run.method == "dpo" and not chat and "columns" not in run.options and not run.has("prompt_key"):
        run.notes.append("Without a prompt key they train every token. Here the prompt is a column, or what chosen and "
                         "rejected messages share.")


def _loss(run: Translation) -> None:
    """IPO, the likelihood term and label smoothing."""
    if run.method != "dpo":
        return
    names = []
    if run.has("ipo"):
        run.set("loss", "ipo", "ipo")
        run.close("without effect", "IPO ignores it there too.", "label_smoothing")
    weight = number(run.value("nll_loss_coef"))
    if weight:
        names = [run.options.get("loss", "sigmoid"), "sft"]
        run.options["loss_weights"] = f"1,{weight:g}"
        run.set("loss", ",".join(names), "nll_loss_coef",
                text=f"--loss {','.join(names)} --loss-weights 1,{weight:g}")
    elif weight == 0:
        run.close("without effect", "0 is the default.", "nll_loss_coef")
