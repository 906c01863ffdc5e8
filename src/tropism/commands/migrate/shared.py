"""What the trainers share: batches, warmup, precision, adapters, intervals, trackers and datasets."""

import math
import re
from typing import Any

from tropism.commands.migrate.translation import VARIABLE, Translation, joined, number, off
from tropism.errors import count_of


def batch_size(run: Translation, rows: str, accumulation: str) -> None:
    """Rows of a step: those of a process and pass, times accumulation, times processes."""
    if run.value(rows) is None and run.value(accumulation) is None:
        return
    sizes = [number(run.value(name)) or (1.0 if run.value(name) is None else math.nan) for name in (rows, accumulation)]
    if not all(size >= 1 and size == int(size) for size in sizes):
        run.close("replaced", "add --batch-size with rows x accumulation steps x processes", rows, accumulation)
        return
    parts = [count_of(int(sizes[0]), "row"), count_of(int(sizes[1]), "accumulation step"),
             count_of(run.processes, "process", "processes")]
    total = int(sizes[0] * sizes[1]) * run.processes
    run.set("batch_size", total, rows, accumulation, text=f"--batch-size {total}: {' x '.join(parts)}")
    if run.given.processes is None:
        run.notes.append("1 process is assumed. With N processes, multiply --batch-size by N.")


def warmup(run: Translation, *steps: str) -> None:
    """Warmup in steps, as a share of the run."""
    for name in steps:
        value = number(run.value(name))
        if run.has(name):  # not their default
            run.defaults = {other: ratio for other, ratio in run.defaults.items() if other != "warmup_ratio"}
        if value is None and run.value(name) is not None and not off(run.value(name)):
            run.close("replaced", "add --warmup-ratio with its share of the optimizer steps", name)
        elif value is not None:
            most = number(run.value("max_steps"))
            if value == 0 and run.has("warmup_ratio"):
                run.close("without effect", "The ratio counts.", name)
            elif 0 <= value < 1:
                run.set("warmup_ratio", value, name)
            elif most is not None and most >= value > 0:
                ratio = float(f"{value / most:.6g}")
                run.set("warmup_ratio", ratio, name, text=f"--warmup-ratio {ratio:g}: {value:g} of {most:g} steps")
            else:
                run.close("replaced", f"add --warmup-ratio with {value:g} / number of optimizer steps; the default is "
                                      "0.1", name)


def schedule(run: Translation, name: str) -> None:
    """The learning-rate schedule. The one called constant has no warmup at the others."""
    value = run.value(name)
    if value is None:
        return
    plainly = str(value).strip().lower()
    if run.set("schedule", value, name) and plainly == "constant":
        run.options["warmup_ratio"] = 0
        run.close("without effect", "A constant schedule has no warmup there.", "warmup_ratio", "warmup_steps")


def precision(run: Translation, *names: str) -> None:
    """The dtype of computation."""
    for name in names:
        value = str(run.value(name)).strip().lower()
        kind = {"true": name.removeprefix("pure_"), "full": name, "1": name, "16": "fp16", "bf16-mixed": "bf16",
                "16-mixed": "fp16", "32": "fp32", "float16": "fp16", "half": "fp16"}.get(value, value)
        if name == "bf16" and run.trainer == "trl" and value == "false" and not run.has("fp16"):  # on by default there
            run.set("precision", "fp32", name)
        elif run.value(name) is None or (not run.has(name) and name not in run.defaults):
            run.close("without effect", "It is off.", name)
        elif kind in ("auto", "no"):
            run.close("without effect", "--precision auto is the default: bf16 on GPUs, fp32 on CPUs.", name)
        elif kind == "fp16":
            run.close("replaced", "float16 needs loss scaling and is not offered. --precision auto computes in bf16 on "
                                  "GPUs.", name)
        else:
            run.set("precision", kind, name)


def adapter(run: Translation, wanted: bool, rank: str, alpha: str, targets: str, *, nf4: tuple[str, ...] = (),
            int8: tuple[str, ...] = (), others: tuple[str, ...] = ()) -> None:
    """LoRA and the quantization under it.

    Args:
        wanted: whether an adapter is trained.
        rank, alpha, targets: names of the options.
        nf4, int8: switches of quantization.
        others: further options of adapters, which the table of names takes.
    """
    if not wanted:
        run.close("without effect", "No adapter is trained.", rank, alpha, targets, *others)
        run.close("not supported", "Weights are quantized only under an adapter: --lora.rank 16.",
                  *(name for name in (*nf4, *int8) if run.has(name)))
        return
    run.set("lora.rank", run.value(rank) if run.value(rank) is not None else 8, rank)
    if run.value(alpha) is not None:
        run.set("lora.alpha", run.value(alpha), alpha)
    names = run.value(targets)
    if names is not None:
        if str(joined(names)).strip().lower() in ("all", "all-linear"):
            run.close("without effect", "Every linear layer except the head is the default.", targets)
        else:
            run.set("lora.targets", joined(names), targets)
    for kind, switches in (("nf4", nf4), ("int8", int8)):
        for name in switches:
            if run.has(name):
                run.set("lora.quantize", kind, name)
            else:
                run.close("without effect", "It is off.", name)


def intervals(run: Translation) -> None:
    """When to evaluate, save and log, as transformers' options say it."""
    for what, option in (("eval", "eval_every"), ("save", "save_every"), ("logging", "log_every")):
        strategy = next((name for name in (f"{what}_strategy", "evaluation_strategy" if what == "eval" else "")
                         if run.value(name) is not None), "")
        kind, steps = str(run.value(strategy)).strip().lower() if strategy else "", f"{what}_steps"
        if kind == "epoch":
            run.set(option, "1ep", strategy)
            run.close("without effect", "The strategy is epoch.", steps)
        elif kind == "no" or (kind == "false" and strategy):
            run.close("without effect", "Never is the default." if what == "save" else
                      "It happens at the start and the end, and when the option of ours says.", strategy, steps)
            if what == "eval":
                run.options[option] = 0
        elif kind == "best":
            run.set("keep_best", "loss", strategy)
        else:
            if strategy:
                run.close("taken", f"--{option.replace('_', '-')} takes the steps", strategy)
            _every(run, option, steps)
    for name, option in (("evals_per_epoch", "eval_every"), ("saves_per_epoch", "save_every")):
        times = number(run.value(name))
        if times is not None and times > 0:
            run.set(option, f"{1 / times:.6g}ep", name)
        elif times == 0:
            run.close("without effect", "0 is never.", name)


def _every(run: Translation, option: str, steps: str) -> None:
    """An interval in steps; below 1 it is a share of the run."""
    value, most = number(run.value(steps)), number(run.value("max_steps"))
    if value is None:
        return
    if 0 < value < 1:
        if most is not None and most > 0:
            run.set(option, max(1, round(value * most)), steps)
        else:
            epochs = number(run.value("num_train_epochs")) or number(run.value("num_epochs")) or 1.0
            run.set(option, f"{value * epochs:.6g}ep", steps)
    elif value <= 0:
        run.close("without effect", "It is never, or the default here.", steps)
    else:
        run.set(option, int(value), steps)


def best(run: Translation) -> None:
    """The best checkpoint, and early stopping."""
    metric = run.value("metric_for_best_model")
    name = "loss" if off(metric) or metric is None else re.sub(r"^eval_", "", str(metric))
    if run.has("load_best_model_at_end"):
        run.set("keep_best", name, "load_best_model_at_end", "metric_for_best_model")
    for patience in ("early_stopping_patience", "early_stopping_steps"):
        if run.has(patience):
            run.options["stop_metric"] = name
            run.set("stop_patience", run.value(patience), patience)


def trackers(run: Translation) -> None:
    """`report_to` and the switches of trackers. Keys are never repeated."""
    names = joined(run.value("report_to"))
    if names is not None and not off(names):
        kept = [name.strip() for name in str(names).split(",") if name.strip() not in ("all", "none", "")]
        if kept:
            run.set("track", ",".join(kept), "report_to")
        else:
            run.close("replaced", "--track names the trackers", "report_to")
    for switch, name in (("use_wandb", "wandb"), ("use_tensorboard", "tensorboard"), ("use_mlflow", "mlflow"),
                         ("use_swanlab", "swanlab")):
        if run.has(switch):
            value = run.value(switch)
            tracks = [*filter(None, str(run.options.get("track", "")).split(",")), name]
            known = "; set WANDB_API_KEY to its value, which is not repeated here" if isinstance(value, str) else ""
            if name == "tensorboard" and isinstance(value, str) and value.lower() != "true":
                run.options["log_dir"], known = value, f" --log-dir {value}"
            run.set("track", ",".join(dict.fromkeys(tracks)), switch, text=f"--track {name}{known}")
    for name in ("wandb_project", "project_name"):
        if run.has(name):
            if "track" not in run.options:
                run.options["track"] = "wandb"
            run.close("replaced", "--track wandb; set WANDB_PROJECT to its value", name)


def memory(run: Translation) -> None:
    """Checkpointing, tensor parallelism, offloading and compiling."""
    for name in ("gradient_checkpointing", "grad_checkpoint", "activation_checkpointing"):
        if run.has(name):
            run.set("checkpointing", "full", name)
    for name in ("ds_tensor_parallel_size", "tensor_parallel_size", "tp"):
        size = number(run.value(name))
        if size is not None and size > 1:
            run.set("parallel.tensor", int(size), name)
        elif size is not None:
            run.close("without effect", "1 is the default.", name)
    for name in ("adam_offload", "zero_cpu_offload"):
        if run.has(name):
            run.set("parallel.offload", True, name)
    for name in ("torch_compile", "deepcompile"):
        if run.has(name):
            run.set("compile", "on", name)


def held_out(run: Translation, name: str) -> None:
    """A share or a number of rows to hold out."""
    size = number(run.value(name))
    if size is not None and size >= 1:
        run.close("replaced", f"add --eval-fraction with {size:g} / number of rows", name)
    elif size == 0:
        run.close("without effect", "0 is the default.", name)


def columns(run: Translation, names: dict[str, str], usual: dict[str, str]) -> None:
    """Columns of the data, unless our formats recognize them by these names.

    Args:
        names: our part of a row by the option that names its column.
        usual: column that needs no option, by our part.
    """
    found = {part: str(run.value(name)) for name, part in names.items() if not off(run.value(name))}
    renamed = {part: column for part, column in found.items() if column not in (part, usual.get(part))}
    if not renamed:
        run.close("taken", "recognized by its name", *(name for name in names if run.has(name)))
    elif any(re.search(r"[,=]", column) or VARIABLE.search(column) for column in found.values()):
        run.close("replaced", "add --columns prompt=NAME,completion=NAME", *names)
    else:
        value = ",".join(f"{part}={column}" for part, column in found.items() if column != part)
        run.set("columns", value, *(name for name in names if run.has(name)), text=f"--columns {value}")


def sources(run: Translation, option: str, name: str) -> None:
    """Files and datasets separated by commas or given as a list."""
    value: Any = run.value(name)
    if off(value):
        return
    parts = [str(part).strip() for part in (value if isinstance(value, list) else str(value).split(","))]
    run.set(option, ",".join(part for part in parts if part), name)
