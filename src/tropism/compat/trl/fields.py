"""What each field of TRL's config classes is here: one table, for checks and for the documentation."""

from dataclasses import dataclass
from typing import Any, Literal

Fate = Literal["taken", "replaced", "no effect", "refused"]


@dataclass(frozen=True)
class Field:
    """One field.

    Args:
        fate: `taken`: does what it does in TRL. `replaced`: something of ours does the same. `no effect`: changes
            nothing here. `refused`: any value other than the default, or one that means off, is an error.
        text: what it becomes, why it has no effect, or what to do instead.
    """

    fate: Fate
    text: str


_TAKEN = {
    "output_dir": "`output`, the run directory. It must be new or empty unless the run in it is resumed",
    "per_device_train_batch_size": "`batch_size` = this x `gradient_accumulation_steps` x processes",
    "gradient_accumulation_steps": "`batch_size` = this x `per_device_train_batch_size` x processes",
    "num_train_epochs": "`epochs`, fractions too",
    "max_steps": "`max_steps`; -1 means all epochs",
    "learning_rate": "`learning_rate`",
    "lr_scheduler_type": "every schedule of transformers except reduce_lr_on_plateau and greedy, with its rates",
    "lr_scheduler_kwargs": "arguments of the schedule",
    "warmup_steps": "steps, or a share of the run if below 1. As in TRL, the first warmup step has rate 0",
    "optim": "adamw_torch, adamw_torch_fused, adamw_8bit, adamw_bnb_8bit, paged_adamw_8bit and sgd",
    "weight_decay": "`weight_decay`, of matrices",
    "adam_beta1": "beta 1 of AdamW", "adam_beta2": "beta 2 of AdamW", "adam_epsilon": "eps of AdamW",
    "max_grad_norm": "`max_grad_norm`",
    "bf16": "True is `precision=bf16`, False `precision=fp32`. Unset, bf16 on GPUs and fp32 on CPUs",
    "use_cpu": "on a machine without a GPU. With one it is refused: hide the GPU with CUDA_VISIBLE_DEVICES=''",
    "tf32": "set by transformers when the config is created",
    "logging_strategy": "`log_every`. The last step is always logged",
    "logging_steps": "`log_every`; a share of the run if below 1",
    "logging_first_step": "log step 1 too",
    "report_to": "`track`: trackers by name",
    "eval_strategy": "`eval_every`. With evaluation rows, the run is also evaluated before step 1 and at the end, "
                     "which log_history omits where TRL does not evaluate",
    "eval_steps": "`eval_every`; a share of the run if below 1",
    "eval_on_start": "put the evaluation before step 1 into log_history, too",
    "save_strategy": "`save_every`; best is `keep_best` of metric_for_best_model",
    "save_steps": "`save_every`; a share of the run if below 1",
    "save_total_limit": "`keep`. Unset keeps all checkpoints",
    "metric_for_best_model": "`keep_best`, and the metric of EarlyStoppingCallback",
    "greater_is_better": "the direction of metric_for_best_model. It must be the one in which the metric improves",
    "load_best_model_at_end": "`keep_best`. After train(), `model`, evaluate() and save_model() have the best "
                              "checkpoint. RUN/model has the last step",
    "seed": "`seed`, and the order of the rows: the same as in TRL",
    "data_seed": "order of the rows",
    "dataloader_drop_last": "omit a short last batch of each epoch",
    "train_sampling_strategy": "random and sequential, with TRL's order",
    "resume_from_checkpoint": "read by scripts, which pass it to train()",
    "do_train": "read by scripts", "do_eval": "read by scripts", "do_predict": "read by scripts",
    "model_init_kwargs": "trust_remote_code and quantization_config are taken. dtype, attn_implementation, device_map, "
                         "use_cache and low_cpu_mem_usage have no effect. Others are refused",
    "trust_remote_code": "`trust_remote_code`",
    "router_aux_loss_coef": "`router_aux_weight`. Unset, the coefficient in the model's config",
    "max_length": "maximum tokens of prompt and completion, cut at the end. None means the model's limit",
}

_REPLACED = {
    "per_device_eval_batch_size": "`microbatch_tokens`. No evaluation depends on a batch size",
    "activation_checkpointing": "`checkpointing=auto`, which computes again only what would not fit",
    "activation_checkpointing_kwargs": "`checkpointing=auto`",
    "gradient_checkpointing": "`checkpointing=auto`, which computes again only what would not fit",
    "gradient_checkpointing_kwargs": "`checkpointing=auto`",
    "activation_offloading": "`offload_checkpoints`",
    "torch_compile": "`compile=on`; unset, `compile=auto`",
    "torch_compile_backend": "`compile`", "torch_compile_mode": "`compile`",
    "use_liger_kernel": "the log-prob head, which never materializes logits",
    "liger_kernel_config": "the log-prob head, which never materializes logits",
    "auto_find_batch_size": "`microbatch_tokens=auto`, which fits packs into memory. The batch size stays as given",
    "torch_empty_cache_steps": "the memory plan before step 1",
    "logging_nan_inf_filter": "`on_nonfinite=stop`: the run stops and names the rows",
    "include_num_input_tokens_seen": "`tokens` in every record",
    "enable_jit_checkpoint": "a checkpoint on SIGTERM, always",
    "fsdp": "`parallel.shard`: under torchrun, processes share the training state",
    "fsdp_config": "`parallel.shard`, through `tropism_options`",
    "dataset_num_proc": "rows are encoded in the process that trains",
    "disable_dropout": "dropout is always off",
    "pad_to_multiple_of": "packs without padding",
    "precompute_ref_log_probs": "reference log-probs are always computed before step 1, and cached in `store`",
    "precompute_ref_batch_size": "`microbatch_tokens`",
    "padding_free": "packs without padding, always",
    "parallelism_config": "`parallel`, through `tropism_options`",
}

_OF_METRICS = "compute_metrics is refused: logits are never materialized"
_OF_LOADER = "rows are token ids in memory, and no dataloader is used"
_OF_DDP = "gradients are summed by FSDP2"
_OF_HUB = "nothing is pushed. See push_to_hub"
_NO_EFFECT = {
    **dict.fromkeys(("prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object",
                     "eval_accumulation_steps", "include_for_metrics", "batch_eval_metrics", "label_names"),
                    _OF_METRICS),
    **dict.fromkeys(("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers",
                     "dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order",
                     "remove_unused_columns", "length_column_name", "accelerator_config", "ignore_data_skip"),
                    _OF_LOADER),
    **dict.fromkeys(("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"),
                    _OF_DDP),
    **dict.fromkeys(("ddp_backend", "ddp_timeout", "local_rank"), "torchrun and Tropism set up the process group"),
    **dict.fromkeys(("hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push",
                     "hub_revision"), _OF_HUB),
    **dict.fromkeys(("project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
                    "set the tracker's own environment variables"),
    "average_tokens_across_devices": "every mean is over all processes",
    "bf16_full_eval": "evaluations compute as training does", "fp16_full_eval": "evaluations compute as training does",
    "use_cache": "training never uses a key-value cache",
    "log_on_each_node": "the main process logs", "log_level": "the run prints its own log",
    "log_level_replica": "the main process logs",
    "disable_tqdm": "a progress bar is drawn on terminals only. `tropism_options={'quiet': True}` prints nothing",
    "run_name": "a run has the name of its output directory",
    "save_only_model": "checkpoints hold the model and what a resumed run needs",
    "save_on_each_node": "the main process saves",
    "full_determinism": "runs on CPUs are deterministic",
    "debug": "there is no debugging mode", "skip_memory_metrics": "`memory/peak_gib` is always logged",
    "ref_model_mixup_alpha": "see sync_ref_model", "ref_model_sync_steps": "see sync_ref_model",
    "temperature": "of sampling only, in TRL too: the divergence is computed at temperature 1",
    "max_new_tokens": "nothing is generated: see lmbda",
    "teacher_model_init_kwargs": "as model_init_kwargs", "eval_packing": "an evaluation does not depend on packing",
}

_REFUSED = {
    "fp16": "use bf16=True. Master weights are float32 either way",
    "optim_args": "betas and eps are adam_beta1, adam_beta2 and adam_epsilon",
    "optim_target_modules": "train an adapter with peft_config instead",
    "label_smoothing_factor": "preference losses have label_smoothing",
    "neftune_noise_alpha": "noise in the embeddings is not supported",
    "eval_delay": "evaluate from the first interval on",
    "push_to_hub": "upload the result with: hf upload NAME RUN/model",
    "restore_callback_states_from_checkpoint": "keep the state of a callback in your code",
    "deepspeed": "remove it. Under torchrun, processes share the training state as ZeRO 3 does",
    "sync_ref_model": "a reference that follows the policy is not supported. Train again from the result instead",
    "pad_token": "no padding is used. Set tokenizer.pad_token for generation",
    "truncation_mode": "only keep_start is supported. Truncate the prompts before training",
}

_OF_METHOD: dict[str, dict[str, Field]] = {
    "kto": {
        "loss_type": Field("taken", "`loss`: kto or apo_zero_unpaired"), "beta": Field("taken", "`beta`"),
        "desirable_weight": Field("taken", "`desirable_weight`"),
        "undesirable_weight": Field("taken", "`undesirable_weight`"),
    },
    "dpo": {
        "loss_type": Field("taken", "`loss`, one or several"), "loss_weights": Field("taken", "`loss_weights`"),
        "beta": Field("taken", "`beta`"),
        "label_smoothing": Field("taken", "`label_smoothing`, of robust, exo_pair, aot and aot_unpaired. With other "
                                          "losses no effect, as in TRL"),
        "f_divergence_type": Field("taken", "`f_divergence`"),
        "f_alpha_divergence_coef": Field("taken", "`f_alpha`, with alpha_divergence"),
        "ld_alpha": Field("taken", "`ld_alpha`"), "use_weighting": Field("taken", "`wpo`"),
        "discopop_tau": Field("taken", "`discopop_tau`, with discopop"),
    },
    "sft": {
        "dataset_text_field": Field("taken", "column of plain text"),
        "dataset_kwargs": Field("taken", "skip_prepare_dataset: the data has input_ids and, if wanted, labels"),
        "chat_template_path": Field("refused", "load the tokenizer, set its chat_template, and pass it as "
                                               "processing_class"),
        "eos_token": Field("taken", "token at the end of plain text"),
        "shuffle_dataset": Field("refused", "rows are shuffled by the sampler. Call dataset.shuffle(seed=...) to fix "
                                            "another order"),
        "packing": Field("taken", "which rows form a block, and so a batch. Rows of a block do not see each other"),
        "packing_strategy": Field("taken", "only bfd. Others cut rows in the middle and are refused"),
        "completion_only_loss": Field("taken", "which tokens are supervised"),
        "assistant_only_loss": Field("taken", "which tokens are supervised. The chat template needs {% generation %} "
                                              "marks"),
        "loss_type": Field("taken", "only nll. dft is refused"),
    },
    "gkd": {
        "lmbda": Field("taken", "only 0. A share of completions that the student generates during training is not "
                                "supported. Generate them before, as data"),
        "seq_kd": Field("refused", "generate the teacher's completions before training, as data"),
        "beta": Field("taken", "`divergence`: 0 is forward_kl, 1 is reverse_kl, between them js with this share of the "
                               "teacher"),
        "teacher_model_name_or_path": Field("taken", "the teacher, if teacher_model is not passed"),
        "packing": Field("refused", "each conversation is a row of its own"),
        "dataset_text_field": Field("no effect", "rows are conversations: messages"),
        "dataset_kwargs": Field("no effect", "rows are conversations: messages"),
        "packing_strategy": Field("no effect", "see packing"),
        "completion_only_loss": Field("no effect", "the last message is supervised, in TRL too"),
        "assistant_only_loss": Field("no effect", "the last message is supervised, in TRL too"),
        "eos_token": Field("no effect", "the chat template ends a message"),
        "loss_type": Field("no effect", "the divergence is the loss"),
    },
}

_FATES: dict[Fate, dict[str, str]] = {
    "taken": _TAKEN, "replaced": _REPLACED, "no effect": _NO_EFFECT, "refused": _REFUSED}
SHARED: dict[str, Field] = {name: Field(fate, text) for fate, names in _FATES.items() for name, text in names.items()}
"""Fields of `TrainingArguments`, and those that several of TRL's configs have."""


def fields_of(method: str) -> dict[str, Field]:
    """The table of a config class, by its field names.

    Args:
        method: kto, dpo, sft or gkd.
    """
    above = _OF_METHOD["sft"] if method == "gkd" else {}
    return {**SHARED, **above, **_OF_METHOD[method]}


def is_off(value: Any, default: Any) -> bool:
    """Whether a value is the default of its field, or means off."""
    return value == default or value is None or value in (False, 0, "", [], {}, ())
