"""Option, argument and value names of other trainers that have a counterpart here."""

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
    "use_rslora": "lora.rslora", "peft_use_dora": "lora.dora", "peft_use_rslora": "lora.rslora",
    "lora_modules_to_save": "lora.modules_to_save", "additional_target": "lora.modules_to_save",
    "adapter_name_or_path": "lora.adapter", "lora_model_dir": "lora.adapter",
    "save_hf_ckpt": "checkpoint_model", "dataset_split": "split", "dataset_train_split": "split",
    "dataset_test_split": "eval_split", "tokenizer_chat_template": "chat_template",
    "chat_template_path": "chat_template", "chat_template_jinja": "chat_template", "default_system": "system_prompt",
    "default_system_message": "system_prompt", "dataset_processes": "workers", "logging_dir": "log_dir",
    "f_alpha_divergence_coef": "f_alpha", "use_weighting": "wpo", "dpo_use_weighting": "wpo", "rl_beta": "beta",
    "dpo_beta": "beta", "kto_desirable_weight": "desirable_weight", "kto_undesirable_weight": "undesirable_weight",
    "moe_aux_loss_coef": "router_aux_weight", "explicit_log_dir": "output", "seq_length": "max_length",
    "max_time_per_run": "max_time", "dataset_streaming": "streaming",
}
"""Option names of other trainers, with ours."""

ARGUMENTS: dict[str, str] = {
    "actor": "model", "model_name_or_path": "model", "pretrain": "model", "base_model": "model", "optim": "optimizer",
    "actor_optim": "optimizer", "actor_lr_scheduler": "scheduler", "processing_class": "tokenizer",
}
"""Argument names of other trainers, with ours."""

TYPED: dict[str, str] = {
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
