"""TRL's arguments as our options, order and update rule."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as _LORA_TARGETS
from transformers import get_scheduler

from tropism.compat.trl.order import Batches
from tropism.data.schedule import STEP, MicroBatchRule
from tropism.errors import UsageError
from tropism.observe.metrics import direction
from tropism.train.checkpoints.files import place_of
from tropism.train.optimizer import UpdateRule

_OPTIMIZERS = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "sgd": "sgd",
               "adamw_8bit": "adamw8bit", "adamw_bnb_8bit": "adamw8bit", "paged_adamw_8bit": "paged-adamw8bit"}
_WITHOUT_RULE = ("reduce_lr_on_plateau", "greedy")
_SMOOTHED = ("robust", "exo_pair", "aot", "aot_unpaired")
_WITHOUT_EFFECT = ("dtype", "torch_dtype", "attn_implementation", "device_map", "use_cache", "low_cpu_mem_usage")
_OF_LORA = {"r", "lora_alpha", "lora_dropout", "target_modules", "modules_to_save", "use_dora", "use_rslora",
            "task_type", "peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision",
            "inference_mode", "qalora_group_size", "megatron_core", "runtime_config", "layers_pattern"}
"""Fields of `peft.LoraConfig` that are taken, or that change nothing without another one."""
_OF_QUANTIZATION = ("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type")


@dataclass(frozen=True)
class Plan:
    """What a config comes to.

    Args:
        options: ours, by name, without those that depend on the data.
        batches: of the training rows.
        epochs: passes over the data.
        max_steps: optimizer steps; None for all epochs.
        rule: learning rate and AdamW.
        micro_batches: what the micro-batches of a step decide.
        published: pair KTO's completions as TRL does.
    """

    options: dict[str, Any]
    batches: Batches
    epochs: float
    max_steps: int | None
    rule: UpdateRule
    micro_batches: MicroBatchRule = STEP
    published: bool = False


def plan_of(args: Any, method: str, processes: int) -> Plan:
    """What a config comes to.

    Args:
        args: a config of ours or of TRL.
        method: kto, dpo, sft or gkd.
        processes: that train together.

    Raises:
        UsageError: for a value that is not supported.
    """
    if args.use_cpu and torch.cuda.is_available():
        raise UsageError("use_cpu=True is not supported on a machine with a GPU. Hide the GPU with "
                         "CUDA_VISIBLE_DEVICES=''")
    own = dict(args.tropism_options or {}) if hasattr(args, "tropism_options") else {}
    size, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    if "batch_size" in own:  # the same on any number of processes
        size, accumulation, processes = _size(own.pop("batch_size"), size), 1, 1
    if (strategy := getattr(args, "train_sampling_strategy", "random")) not in ("random", "sequential"):
        raise UsageError(f"train_sampling_strategy={strategy!r} is not supported. Use random or sequential. Rows of "
                         "any length are packed without padding.")
    seed = args.seed if args.data_seed is None else args.data_seed
    batches = Batches(size, processes, accumulation, strategy == "random", seed, args.dataloader_drop_last)
    values = {
        "output": args.output_dir, "seed": args.seed, "learning_rate": args.learning_rate,
        "weight_decay": args.weight_decay, "max_grad_norm": args.max_grad_norm or 0.0,
        "optimizer": _optimizer(args), "batch_size": batches.step_size,
        "precision": "auto" if args.bf16 is None else "bf16" if args.bf16 else "fp32",
        "trust_remote_code": bool(args.trust_remote_code or _init(args).get("trust_remote_code")),
        "compile": "on" if args.torch_compile else "auto",
        "offload_checkpoints": bool(args.activation_offloading),
        "track": ",".join(args.report_to) or None, "samples": 0, **_of_method(args, method)}
    maximum = args.max_steps if args.max_steps and args.max_steps > 0 else None
    point = own.pop("reference_point", "step")
    if point not in (("step", "published") if method == "kto" else ("step",)):
        raise UsageError(f"tropism_options: reference_point must be step or, for KTO, published (got {point!r})")
    rule = (MicroBatchRule("micro_batch", "mean") if point == "published" else
            MicroBatchRule("step", "mean", per_token=True) if method == "dpo" else STEP)
    return Plan({**values, **own}, batches, float(args.num_train_epochs), maximum, _rule(args), rule,
                point == "published")


def intervals(args: Any, steps: int, evaluates: bool) -> dict[str, Any]:
    """Options that say how often to log, evaluate and save.

    Args:
        steps: optimizer steps of the run.
        evaluates: evaluation rows were passed.
    """
    def every(name: str, strategy: Any) -> int | str | None:
        value, strategy = getattr(args, f"{name}_steps"), str(getattr(strategy, "value", strategy))
        if strategy == "epoch":
            return "1ep"
        if strategy == "steps" and value:
            return math.ceil(steps * value) if value < 1 else int(value)
        return None

    strategy = str(getattr(args.save_strategy, "value", args.save_strategy))
    found: dict[str, Any] = {"log_every": every("logging", args.logging_strategy) or max(1, steps)}
    if evaluates:
        found["eval_every"] = every("eval", args.eval_strategy) or 0
    if strategy == "best" or args.load_best_model_at_end:
        found |= _best(args, evaluates)
    if (save := every("save", strategy)) is not None:
        found |= {"save_every": save, "keep": args.save_total_limit or 0, "checkpoint_model": True}
    return found


def _best(args: Any, evaluates: bool) -> dict[str, Any]:
    """Options that keep the best checkpoint.

    Raises:
        UsageError: without a metric or evaluations, or for the direction in which the metric gets worse.
    """
    if not evaluates or not args.metric_for_best_model:
        raise UsageError("save_strategy='best' and load_best_model_at_end need metric_for_best_model and eval_dataset")
    metric = args.metric_for_best_model.removeprefix("eval_")
    if direction(metric) == ("lower" if args.greater_is_better else "higher"):
        raise UsageError(f"greater_is_better={args.greater_is_better}: {metric} improves in the other direction. Set "
                         f"greater_is_better={not args.greater_is_better}.")
    return {"keep_best": metric, "checkpoint_model": True}


def lora_of(peft_config: Any, quantization: Any, model_type: str) -> dict[str, Any]:
    """Options of adapters from a `peft.LoraConfig` and a `BitsAndBytesConfig`, or objects like them.

    Args:
        model_type: of the model's config. It decides which modules get an adapter if none are named, as in peft.

    Raises:
        UsageError: for another kind of adapter or quantization.
    """
    found: dict[str, Any] = {}
    if peft_config is not None:
        kind = str(getattr(getattr(peft_config, "peft_type", None), "value", type(peft_config).__name__))
        if kind != "LORA":
            raise UsageError(f"peft_config is a {type(peft_config).__name__}, which is not supported. Use "
                             "peft.LoraConfig.")
        usual = LoraConfig()
        for name in sorted(vars(usual).keys() - _OF_LORA):
            value = getattr(peft_config, name, None)
            if value not in (None, [], {}, getattr(usual, name)):
                raise UsageError(f"peft_config: {name}={value!r} is not supported. Build the adapter with "
                                 "peft.get_peft_model, and pass the result as model.")
        targets = peft_config.target_modules or _LORA_TARGETS.get(model_type)
        if isinstance(targets, str) and targets != "all-linear":
            raise UsageError(f"peft_config: target_modules={targets!r} is a pattern, which is not supported. Pass a "
                             "list of names, or all-linear.")
        saved = peft_config.modules_to_save
        found = {"rank": peft_config.r, "alpha": peft_config.lora_alpha, "dora": peft_config.use_dora,
                 "rslora": peft_config.use_rslora, "modules_to_save": ",".join(saved) if saved else None,
                 "targets": targets if targets is None or isinstance(targets, str) else ",".join(sorted(targets))}
    if quantization is not None:
        given = {name: quantization.get(name) if isinstance(quantization, Mapping) else
                 getattr(quantization, name, None) for name in _OF_QUANTIZATION}
        if given["load_in_4bit"] and given["bnb_4bit_quant_type"] not in ("nf4", None):
            raise UsageError(f"quantization_config: {given['bnb_4bit_quant_type']} is not supported. Use nf4.")
        found["quantize"] = "nf4" if given["load_in_4bit"] else "int8" if given["load_in_8bit"] else None
    return {name: value for name, value in found.items() if value not in (None, False)}


def quantization_of(args: Any) -> Any:
    """The quantization in `model_init_kwargs`, if any.

    Raises:
        UsageError: for an argument that is not supported.
    """
    init = _init(args)
    for name, value in init.items():
        if name in ("trust_remote_code", "quantization_config", *_WITHOUT_EFFECT) or value is None:
            continue
        if name == "revision":
            if value == "main":
                continue
            raise UsageError(f"model_init_kwargs: revision {value!r} is not read here. Write it after the name of the "
                             f"model: MODEL@{value}")
        raise UsageError(f"model_init_kwargs: {name} is not supported. Load the model with from_pretrained, and pass "
                         "it as model.")
    return init.get("quantization_config")


def _init(args: Any) -> dict[str, Any]:
    value = getattr(args, "model_init_kwargs", None) or {}
    return dict(json.loads(value) if isinstance(value, str) else value)


def _size(value: Any, micro_batch: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"tropism_options: batch_size must be a number of rows, at least 1 (got {value!r})")
    return value


def _optimizer(args: Any) -> str:
    name = str(getattr(args.optim, "value", args.optim))
    if name not in _OPTIMIZERS:
        raise UsageError(f"optim={name!r} is not supported. Use one of {', '.join(_OPTIMIZERS)}, or pass optimizers.")
    return _OPTIMIZERS[name]


def _of_method(args: Any, method: str) -> dict[str, Any]:
    """Options of the loss."""
    if method == "kto":
        return {"loss": args.loss_type, "beta": args.beta, "desirable_weight": args.desirable_weight,
                "undesirable_weight": args.undesirable_weight}
    if method == "dpo":
        given = [args.loss_type] if isinstance(args.loss_type, str) else args.loss_type
        losses = ["ipo_mean" if loss == "ipo" else loss for loss in given]  # TRL divides by lengths
        found = {"loss": ",".join(losses), "beta": None if losses == ["sft"] else args.beta,
                 "ld_alpha": args.ld_alpha, "wpo": args.use_weighting,
                 "loss_weights": ",".join(map(str, args.loss_weights)) if args.loss_weights else None,
                 "label_smoothing": args.label_smoothing if any(loss in _SMOOTHED for loss in losses) else None,
                 "discopop_tau": args.discopop_tau if "discopop" in losses else None}
        if args.f_divergence_type != "reverse_kl":
            alpha = args.f_divergence_type == "alpha_divergence"
            found |= {"f_divergence": args.f_divergence_type,
                      "f_alpha": args.f_alpha_divergence_coef if alpha else None}
        return found
    if method == "sft":
        if args.loss_type not in ("nll", "chunked_nll"):
            raise UsageError(f"loss_type={args.loss_type!r} is not supported. Use nll.")
        return {}
    if args.lmbda:
        raise UsageError(f"lmbda={args.lmbda} is not supported: completions are not generated during training. Set "
                         "lmbda=0 to distill on the data, which the student may have written before.")
    divergence = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(float(args.beta), "js")
    return {"kd_weight": 1.0, "divergence": divergence, "divergence_mix": args.beta if divergence == "js" else None}


def _rule(args: Any) -> UpdateRule:
    """Learning rate and AdamW, as transformers would make them.

    Raises:
        UsageError: for a schedule that depends on evaluations.
    """
    kind = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    if kind in _WITHOUT_RULE:
        raise UsageError(f"lr_scheduler_type={kind!r} is not supported, because its rates depend on evaluations. Use "
                         "linear or cosine.")
    peak, share, extra = args.learning_rate, args.warmup_steps, dict(args.lr_scheduler_kwargs or {})
    betas = (args.adam_beta1, args.adam_beta2)
    if _optimizer(args) != "adamw" and (*betas, args.adam_epsilon) != (0.9, 0.999, 1e-8):
        raise UsageError(f"optim={args.optim} always has betas 0.9 and 0.999 and eps 1e-8. Remove adam_beta1, "
                         "adam_beta2 and adam_epsilon.")
    known: dict[int, Any] = {}

    def factor(step: int, steps: int) -> float:
        if steps not in known:
            scratch = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
            known[steps] = get_scheduler(
                kind, scratch, num_warmup_steps=math.ceil(steps * share) if share < 1 else int(share),
                num_training_steps=steps, scheduler_specific_kwargs=extra).lr_lambdas[0]
        return float(known[steps](step - 1))

    return UpdateRule(factor, betas, args.adam_epsilon)


def resume_of(value: bool | str | Path | None, output: Path) -> str:
    """Our `resume` for `resume_from_checkpoint`. `output_dir/checkpoint-500` is the checkpoint of step 500.

    Raises:
        UsageError: for a path outside of the run directory.
    """
    if value is None or value is False:
        return "never"
    if value is True:
        return "auto"
    place = Path(value).expanduser()
    if (named := re.fullmatch(r"checkpoint-(\d+)", place.name)) and not place.exists():
        place = place_of(place.parent / "checkpoints", int(named[1]))
    if output.resolve() not in (place.resolve(), *place.resolve().parents):
        raise UsageError(f"resume_from_checkpoint: {value} is neither {output} nor a checkpoint in it. Set output_dir "
                         "to the directory of the run.")
    return str(place)
