"""Names that published trainers take, by trainer and by where they are written, and those with a meaning of their own.

Of OpenRLHF v0.9.5 (and the dotted flags of its newer versions), ColossalAI's coati, NeMo-Aligner, LLaMA-Factory and
Axolotl. The fields of TRL are read from the installed package.
"""

from tropism.argument_names.explained import Kind

_OPENRLHF = (
    "pretrain aux_loss_coef max_epochs learning_rate lr_scheduler lr_warmup_ratio l2 adam_betas max_norm "
    "micro_train_batch_size train_batch_size max_len dataset dataset_probs dataset_split eval_dataset eval_split "
    "max_samples input_template apply_chat_template save_path ckpt_path save_steps eval_steps logging_steps "
    "max_ckpt_num max_ckpt_mem save_hf_ckpt disable_ds_ckpt load_checkpoint use_ds_universal_ckpt zero_stage zpg "
    "adam_offload overlap_comm grad_accum_dtype deepcompile param_dtype attn_implementation use_liger_kernel "
    "gradient_checkpointing gradient_checkpointing_use_reentrant load_in_4bit lora_rank lora_alpha target_modules "
    "lora_dropout seed full_determinism disable_fast_tokenizer local_rank use_wandb wandb_org wandb_group "
    "wandb_project wandb_run_name use_tensorboard use_ms ")
_PREFERENCES = ("model ref_model strategy tokenizer optim train_dataloader eval_dataloader scheduler max_norm beta "
                "max_epochs save_hf_ckpt disable_ds_ckpt")

PUBLISHED: dict[str, dict[str, str]] = {
    "openrlhf": {
        "KTOTrainer": _PREFERENCES,
        "DPOTrainer": _PREFERENCES,
        "KDTrainer": "model teacher_model strategy optim train_dataloader eval_dataloader scheduler max_norm "
                     "pretrain_mode batch_size max_epochs tokenizer save_hf_ckpt disable_ds_ckpt",
        "train_kto": _OPENRLHF + "ref_offload beta desirable_loss_weight undesirable_loss_weight input_key output_key "
                                 "label_key",
        "train_dpo": _OPENRLHF + "ref_pretrain ref_offload beta ipo label_smoothing nll_loss_coef min_lr_ratio "
                                 "prompt_key chosen_key rejected_key tokenizer_chat_template packing_samples "
                                 "ring_attn_size ring_head_stride ds_tensor_parallel_size",
        "train_kd": _OPENRLHF + "teacher_model teacher_offload kd_coef pretrain_mode input_key output_key "
                                "ds_tensor_parallel_size",
    },
    "coati": {
        "KTOTrainer": "actor ref_model booster actor_optim plugin actor_lr_scheduler tokenizer max_epochs beta "
                      "desirable_weight undesirable_weight apply_loss_mask accumulation_steps start_epoch "
                      "save_interval save_dir coordinator",
        "train_kto": "plugin tp pp sp sp_mode enable_sequence_parallelism zero_stage zero_cpu_offload beta "
                     "desirable_weight undesirable_weight auto_weight disable_loss_mask pretrain tokenizer_dir dataset "
                     "eval_dataset max_length batch_size accumulation_steps max_epochs lr weight_decay grad_clip "
                     "warmup_steps mixed_precision grad_checkpoint use_flash_attn lora_config save_dir save_interval "
                     "checkpoint_path config_file log_dir use_wandb",
    },
    "nemo-aligner": {
        "KTOTrainer": "cfg model optimizer scheduler train_dataloader val_dataloader test_dataloader logger "
                      "ckpt_callback run_timer",
        "gpt_kto.yaml": "trainer.num_nodes trainer.devices trainer.precision trainer.max_time trainer.kto.max_epochs "
                        "trainer.kto.max_steps trainer.kto.val_check_interval trainer.kto.save_interval "
                        "trainer.kto.limit_train_batches trainer.kto.limit_val_batches trainer.kto.gradient_clip_val "
                        "exp_manager.explicit_log_dir exp_manager.resume_if_exists "
                        "exp_manager.resume_ignore_no_checkpoint exp_manager.max_time_per_run "
                        "exp_manager.create_wandb_logger exp_manager.wandb_logger_kwargs "
                        "exp_manager.checkpoint_callback_params pretrained_checkpoint.restore_from_path "
                        "model.micro_batch_size model.global_batch_size model.kto.ref_policy_kl_penalty "
                        "model.kto.desirable_loss_weight model.kto.undesirable_loss_weight "
                        "model.kto.preference_average_log_probs model.kto.log_prob_forward_micro_batch_size "
                        "model.kto.preference_loss_weight model.kto.sft_loss_weight model.kto.sft_average_log_probs "
                        "model.peft.peft_scheme model.peft.lora_tuning model.optim.name model.optim.lr "
                        "model.optim.weight_decay model.optim.betas model.optim.sched.name "
                        "model.optim.sched.warmup_steps model.optim.sched.constant_steps model.optim.sched.min_lr "
                        "model.data.data_impl model.data.data_prefix model.data.seq_length model.data.num_workers "
                        "model.data.reset_position_ids model.data.reset_attention_mask model.data.eod_mask_loss "
                        "model.data.splits_string model.data.append_eod model.data.apply_ftfy "
                        "model.data.validation_drop_last model.seed",
    },
    "llama-factory": {
        "config": "model_name_or_path adapter_name_or_path trust_remote_code flash_attn use_unsloth "
                  "enable_liger_kernel rope_scaling quantization_bit quantization_method double_quantization "
                  "use_fast_tokenizer resize_vocab stage finetuning_type do_train freeze_trainable_layers lora_rank "
                  "lora_alpha lora_dropout lora_target additional_target loraplus_lr_ratio use_rslora use_dora "
                  "pissa_init create_new_adapter pref_beta pref_ftx pref_bco_weight pref_loss dpo_label_smoothing "
                  "kto_chosen_weight kto_rejected_weight simpo_gamma ld_alpha ref_model ref_model_adapters "
                  "reward_model use_galore use_badam use_swanlab pure_bf16 disable_shuffling early_stopping_steps "
                  "plot_loss template dataset eval_dataset dataset_dir media_dir cutoff_len train_on_prompt "
                  "mask_history streaming buffer_size mix_strategy interleave_probs overwrite_cache "
                  "preprocessing_num_workers max_samples val_size packing neat_packing tool_format default_system "
                  "enable_thinking tokenized_path",
    },
    "axolotl": {
        "config": "base_model tokenizer_config model_type tokenizer_type trust_remote_code load_in_8bit load_in_4bit "
                  "bf16 fp16 tf32 rl rl_beta dpo_label_smoothing dpo_use_weighting rpo_alpha orpo_alpha simpo_gamma "
                  "cpo_alpha kto_desirable_weight kto_undesirable_weight precompute_ref_log_probs datasets "
                  "test_datasets pretraining_dataset dataset_prepared_path dataset_processes shuffle_merged_datasets "
                  "dataset_exact_deduplication val_set_size chat_template chat_template_jinja default_system_message "
                  "adapter lora_model_dir lora_r lora_alpha lora_dropout lora_target_modules lora_target_linear "
                  "lora_modules_to_save peft_use_dora peft_use_rslora relora_steps sequence_len pad_to_sequence_len "
                  "sample_packing eval_sample_packing group_by_length excess_length_strategy "
                  "gradient_accumulation_steps micro_batch_size eval_batch_size num_epochs max_steps warmup_steps "
                  "warmup_ratio learning_rate lr_scheduler cosine_min_lr_ratio optimizer weight_decay adam_beta1 "
                  "adam_beta2 adam_epsilon max_grad_norm logging_steps eval_steps evals_per_epoch save_steps "
                  "saves_per_epoch save_strategy eval_strategy save_total_limit output_dir wandb_project wandb_entity "
                  "use_tensorboard gradient_checkpointing gradient_checkpointing_kwargs early_stopping_patience "
                  "train_on_inputs resume_from_checkpoint auto_resume_from_checkpoints flash_attention sdp_attention "
                  "special_tokens tokens fsdp fsdp_config deepspeed seed plugins hub_model_id neftune_noise_alpha "
                  "torch_compile sequence_parallel_degree context_parallel_size tensor_parallel_size debug strict",
    },
}
"""Names by trainer and by class, script or file. Those of NeMo-Aligner's configuration are in groups."""

_PER_PROCESS = ("It counts rows of one process and one pass there. --batch-size is rows x processes x accumulation "
                "steps.")
_IN_MICRO_BATCHES = "It counts micro-batches there, and optimizer steps here: --save-every N."
_RECORDS = "A row is read by its columns: see the formats in docs/data.md, and --format, --columns and --labels."

OWN: dict[str, dict[str, tuple[Kind, str]]] = {
    "openrlhf": {
        "batch_size": ("without effect", "KDTrainer never reads it. The dataloader's batches count."),
        "eval_steps": ("replaced", "--eval-every N counts optimizer steps. -1 is once per epoch: --eval-every 1ep."),
    },
    "coati": {
        "batch_size": ("replaced", _PER_PROCESS),
        "save_interval": ("replaced", _IN_MICRO_BATCHES),
        "dataset": ("replaced", "--data takes the JSONL files that prepare_dataset.py read. Its output, token ids in "
                                "Arrow files, is not read."),
        "eval_dataset": ("replaced", "--eval-data takes JSONL files before prepare_dataset.py. coati evaluates on the "
                                     "training data, this program on the evaluation data."),
        "lora_config": ("replaced", "--lora.rank, --lora.alpha and --lora.targets take r, lora_alpha and "
                                    "target_modules of that file."),
    },
    "nemo-aligner": {
        "optim.name": ("replaced", "--optimizer adamw is what distributed_fused_adam computes."),
        "sched.name": ("replaced", "--schedule cosine_with_min_lr decays to a tenth of the peak, as CosineAnnealing "
                                   "with min_lr 9e-7 of 9e-6 does."),
        "lora_tuning": ("replaced", "--lora.rank, --lora.alpha and --lora.targets describe the adapter."),
        "data_prefix": ("replaced", "--data and --eval-data take its lists for train and validation, separated by "
                                    "commas."),
        "devices": ("replaced", "torchrun starts the processes: torchrun --nproc-per-node 8 -m tropism kto ..."),
    },
    "llama-factory": {
        "stage": ("replaced", "tropism kto, tropism dpo and tropism sft are commands."),
        "dataset": ("replaced", "--data takes the files that dataset_info.json names."),
    },
    "axolotl": {
        "rl": ("replaced", "tropism kto, tropism dpo and tropism sft are commands. --loss names ipo, simpo and orpo."),
        "datasets": ("replaced", "--data takes their paths. " + _RECORDS),
        "test_datasets": ("replaced", "--eval-data takes their paths."),
        "pretraining_dataset": ("replaced", "--data with --streaming --max-steps N reads texts as they are needed."),
        "orpo_alpha": ("replaced", "--loss orpo with --beta sets the weight of the odds term."),
        "excess_length_strategy": ("replaced", "Rows above --max-length are truncated. --overlong drop drops them."),
        "strict": ("without effect", "Unknown options are always an error."),
        "chat_template": ("replaced", "--chat-template takes a file, or one of chatml, gemma, llama3, phi3 and plain. "
                                      "Without it the tokenizer's own template is used."),
    },
}
"""Names that mean something else at one trainer than at the others."""
