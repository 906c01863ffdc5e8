"""Options of other trainers that have no counterpart here, and what to do instead."""

from typing import Literal

Kind = Literal["taken", "replaced", "without effect", "not supported"]
"""What becomes of another trainer's name."""

_BATCH = ("--batch-size is the number of rows of an optimizer step over all devices: rows per device x devices x "
          "accumulation steps elsewhere. --microbatch-tokens limits the memory of a pass and changes no result.")
_RUNNING = "It says how processes are started and reached. torchrun does that here, and nothing else is needed."
_TORCHRUN = ("torchrun starts the processes: torchrun --nproc-per-node 8 -m tropism kto ... They share the training "
             "state (--parallel.shard). --parallel.tensor divides layers.")
_TOKENIZER = ("The tokenizer comes with the model. Change it there: save model and tokenizer into one directory, and "
              "pass that as --model.")
_TRACK = ("--track wandb or --track tensorboard logs the run, under the name of its output directory. Trackers read "
          "their own environment variables, such as WANDB_PROJECT, WANDB_ENTITY and WANDB_API_KEY.")
_PROMPTS = ("Only completions are trained. To train on prompts too, use tropism sft with texts without prompts, or "
            "--supervise all for every assistant message.")
_HUB = "Nothing is uploaded. tropism export RUN --to DIR writes a model directory to upload."
_OBJECTS = ("torchrun starts the processes, and they share the training state (--parallel.shard). The trainers of "
            "tropism.compat take the object.")

_REPLACED: dict[str, str] = {
    "per_device_train_batch_size per_gpu_train_batch_size per_device_batch_size batch_size_per_device "
    "batch_size_per_gpu micro_batch_size micro_train_batch_size train_micro_batch_size_per_gpu train_micro_batch_size "
    "device_batch_size mbs gradient_accumulation_steps gradient_accumulation grad_accum_steps grad_accum "
    "accumulation_steps accumulate_grad_batches": _BATCH,
    "warmup warmup_steps num_warmup_steps lr_warmup_steps lr_warmup_iters warmup_iters":
        "Warmup is a share of the optimizer steps: for N of M steps, pass --warmup-ratio with N / M.",
    "bf16 fp16 tf32 dtype torch_dtype param_dtype pure_bf16":
        "--precision sets the compute dtype: auto, fp32, bf16 or fp64. Weights and optimizer state stay float32.",
    "load_in_4bit load_in_8bit quantization_bit use_qlora qlora bnb_4bit_quant_type quantization_method":
        "--lora.quantize nf4 or int8 quantizes the frozen weights under an adapter (--lora.rank 16).",
    "use_peft use_lora peft finetuning_type adapter peft_config peft_scheme lora_config":
        "--lora.rank 16 trains an adapter instead of all weights.",
    "lora_target_linear": "Adapters are on every linear layer except the head, unless --lora.targets names others.",
    "save_strategy eval_strategy evaluation_strategy logging_strategy evals_per_epoch saves_per_epoch "
    "val_check_interval":
        "--save-every, --eval-every and --log-every take steps (50), epochs (0.5ep) or time (30min).",
    "deepspeed zero_stage fsdp fsdp_config fsdp_version num_gpus n_gpus num_processes nproc_per_node "
    "tensor_parallel_size ds_tensor_parallel_size tp zpg num_nodes devices parallelism_config "
    "dp_shard_size dp_replicate_size": _TORCHRUN,
    "plugin booster strategy coordinator": _OBJECTS,
    "flash_attn use_flash_attn use_flash_attention_2 attn_implementation packing sample_packing packing_samples "
    "padding_free group_by_length flash_attention sdp_attention xformers_attention eager_attention "
    "eval_sample_packing eval_packing packing_strategy neat_packing pad_to_sequence_len pad_to_multiple_of":
        "--layout chooses attention and packing. By default nothing is padded, and rows do not see each other.",
    "gradient_checkpointing activation_checkpointing grad_checkpoint use_gradient_checkpointing":
        "--checkpointing full or selective computes activations again in the backward pass.",
    "disable_gradient_checkpointing": "--checkpointing none keeps all activations.",
    "activation_offloading": "--checkpointing full with --offload-checkpoints keeps activations in host memory.",
    "torch_compile deepcompile torch_compile_backend torch_compile_mode":
        "--compile on compiles each layer. By default this happens if the run gains from it.",
    "input_key output_key prompt_key chosen_key rejected_key label_key prompt_column completion_column text_column "
    "dataset_text_field":
        "--columns names the columns of the data: --columns prompt=question,completion=answer.",
    "max_samples max_train_samples num_samples limit_train_batches":
        "A suffix uses a share of the data: --data feedback.jsonl:0.1.",
    "limit_val_batches eval_max_samples": "--eval-limit sets the maximum number of evaluation rows.",
    "dataset_probs interleave_probs":
        "Suffixes weight the parts of the data: --data a.jsonl:2,b.jsonl:0.5. Shuffled, they mix.",
    "use_wandb wandb wandb_project use_tensorboard run_name wandb_run_name wandb_org wandb_group wandb_entity "
    "wandb_name wandb_mode wandb_watch wandb_run_id wandb_log_model project logger create_wandb_logger "
    "wandb_logger_kwargs use_mlflow mlflow_tracking_uri mlflow_experiment_name use_comet comet_project_name "
    "comet_api_key use_swanlab swanlab_project swanlab_run_name swanlab_api_key trackio_space_id trackio_bucket_id "
    "trackio_static_space_id": _TRACK,
    "rpo_alpha pref_ftx dpo_ftx nll_loss_coef":
        "--loss sigmoid,sft --loss-weights 1,ALPHA adds the likelihood of the chosen side.",
    "ipo ipo_enable": "--loss ipo selects the loss.",
    "reference_free disable_reference_model": "Losses without a reference are --loss simpo, cpo and orpo.",
    "overwrite overwrite_output_dir":
        "An output is never overwritten. Choose another --output, or resume the run in it with --resume auto.",
    "load_best_model_at_end metric_for_best_model early_stopping_patience early_stopping_steps greater_is_better "
    "checkpoint_callback_params ckpt_callback":
        "--keep-best METRIC keeps the best checkpoint. --stop-metric METRIC with --stop-patience N stops early.",
    "ref_offload": "The reference is needed once: its scores are computed before step 1 and cached, so nothing of it "
                   "stays on the device.",
    "teacher_offload": "--top-k N stores the teacher's most likely tokens before step 1, so that the teacher need not "
                       "stay in memory.",
    "adam_offload zero_cpu_offload": "--parallel.offload keeps weights, gradients and optimizer state in host memory.",
    "load_checkpoint load_enable checkpoint_path consumed_samples start_epoch resume_if_exists "
    "auto_resume_from_checkpoints":
        "--resume auto continues the run in --output: optimizer, schedule, order of rows and random state included.",
    "ckpt_path": "Checkpoints are in RUN/checkpoints. --save-every 500 writes one every 500 steps.",
    "apply_chat_template": "Messages are always rendered with the model's chat template. --as-messages renders plain "
                           "text with it too.",
    "input_template": "Text around a prompt belongs into the data, or use messages: --as-messages renders plain text "
                      "with the model's chat template, --chat-template FILE with another one.",
    "template chat_template_type":
        "--chat-template FILE, or one of chatml, gemma, llama3, phi3 and plain, replaces the model's chat template.",
    "enable_thinking": "--chat-template-kwargs enable_thinking=false sets variables of the chat template.",
    "auto_weight": "--desirable-weight auto balances the classes by their numbers.",
    "pretrain_mode train_on_prompt train_on_inputs apply_loss_mask disable_loss_mask completion_only_loss "
    "assistant_only_loss mask_history": _PROMPTS,
    "dataset_config": "--split CONFIGURATION/SPLIT chooses the configuration of a dataset on the Hub.",
    "dataset_dir": "--data takes the path of each file. Names of a dataset_info.json are not read here.",
    "push_to_hub hub_model_id hub_strategy hub_private_repo hub_always_push hub_revision hub_token push_dataset_to_hub":
        _HUB,
    "data_seed dataset_shuffle_seed": "--seed sets the order of rows too.",
    "disable_shuffling shuffle_dataset shuffle_merged_datasets train_sampling_strategy curriculum_sampling":
        "--shuffle false keeps the order of the file. By default rows are shuffled anew in every epoch.",
    "save_model save_only_model":
        "--checkpoint-model also writes the model to every checkpoint. A resume needs no "
        "more than any checkpoint has.",
    "run_timer": "--max-time 3h evaluates, saves and stops in time.",
    "val_dataloader": "Pass it as eval_dataloader.",
    "test_dataloader test_datasets do_predict": "Evaluate the result: tropism evaluate RUN --data FILE.",
    "cfg args config": "Pass the options themselves, or a YAML file with them: tropism train FILE.",
    "restore_from_path": "Convert the .nemo file to a Hugging Face model directory, and pass that as --model.",
    "min_lr_ratio min_lr cosine_min_lr_ratio constant_steps":
        "--schedule cosine_with_min_lr decays to a tenth of the peak. Other floors are not supported.",
    "lr_scheduler_kwargs":
        "--schedule takes a name without arguments. cosine_with_min_lr decays to a tenth of the peak.",
    "use_cpu": "A GPU is used if there is one. To hide it, set CUDA_VISIBLE_DEVICES to an empty text.",
    "ref_model_adapters": "To continue an adapter, pass --lora.adapter DIR: the reference is the model with it.",
    "kd_temperature": "--temperature sets the softmax temperature of teacher and student.",
    "kd_alpha kd_ce_alpha": "--kd-weight W minimizes (1 - W) x cross-entropy + W x divergence from the teacher.",
    "truncation_mode": "A long row loses the end of its completion. --max-prompt-length first cuts the prompt from the "
                       "left.",
    "cache_dir dataset_prepared_path tokenized_path data_cache_dir":
        "--store names the cache directory. Models and data of the Hub are cached where HF_HOME says.",
}

_WITHOUT_EFFECT: dict[str, str] = {
    "per_device_eval_batch_size per_gpu_eval_batch_size eval_batch_size micro_eval_batch_size "
    "log_prob_forward_micro_batch_size precompute_ref_batch_size auto_find_batch_size":
        "An evaluation does not depend on a batch size. --microbatch-tokens limits its memory.",
    "precompute_ref_log_probs": "Scores of the reference are always computed before step 1, and cached in --store.",
    "disable_dropout": "Dropout is always 0.",
    "overlap_comm gradient_checkpointing_use_reentrant gradient_checkpointing_kwargs gradient_checkpointing_reentrant "
    "use_reentrant_gc activation_checkpointing_kwargs fsdp_transformer_layer_cls_to_wrap zero3_init_flag "
    "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout "
    "torch_empty_cache_steps accelerator_config low_cpu_mem_usage upcast_layernorm upcast_lmhead_output "
    "flash_attn_cross_entropy flash_attn_rms_norm ignore_bias_buffers torchdistx_path gpu_memory_limit lora_on_cpu":
        "It tunes how that trainer computes. Here this is chosen by measurement or count and changes no result.",
    "grad_accum_dtype": "Gradients are summed in float32 (float64 with --precision fp64).",
    "use_liger_kernel enable_liger_kernel liger_kernel_config use_unsloth use_unsloth_gc cut_cross_entropy "
    "liger_rope liger_rms_norm liger_glu_activation liger_fused_linear_cross_entropy unsloth_cross_entropy_loss "
    "unsloth_lora_mlp unsloth_lora_qkv unsloth_lora_o lora_mlp_kernel lora_qkv_kernel lora_o_kernel":
        "Log-probs are computed in tiles, so that the logits of all tokens are never in memory at once.",
    "full_determinism full_determinism_enable":
        "Runs on a CPU repeat bit for bit without it. tropism verify RUN reports what would differ on this machine.",
    "disable_fast_tokenizer use_fast_tokenizer tokenizer_use_fast tokenizer_legacy tokenizer_type model_type "
    "tokenizer_config base_model_config is_falcon_derived_model is_llama_derived_model is_mistral_derived_model":
        "Model and tokenizer are loaded by what their own files say.",
    "local_rank distributed_executor_backend": _RUNNING,
    "disable_ds_ckpt use_ds_universal_ckpt save_on_each_node":
        "Checkpoints are of one kind, which can be resumed on another number of processes.",
    "resume_ignore_no_checkpoint": "--resume auto starts a new run if no run is there.",
    "config_file": "RUN/config.yaml records every option. tropism train RUN/config.yaml repeats the run.",
    "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor "
    "dataloader_multiprocessing_context dataloader_in_order num_workers preprocessing_batch_size overwrite_cache "
    "data_shared_file_system dataset_num_processes dataset_keep_in_memory buffer_size":
        "Rows are read and rendered ahead of training. --workers and --prefetch tune that and change no result.",
    "dataloader_drop_last validation_drop_last drop_last": "The last step of an epoch takes the rows that are left.",
    "remove_unused_columns label_names length_column_name include_for_metrics dataset_kwargs ignore_pad_token_for_loss":
        "Columns that no format uses are ignored.",
    "do_train do_eval eval_on_start logging_first_step eval_delay":
        "A run trains, and evaluates before step 1 and at the end if there are evaluation rows.",
    "disable_tqdm log_level log_level_replica log_on_each_node logging_nan_inf_filter debug skip_memory_metrics "
    "include_num_input_tokens_seen include_tokens_per_second prediction_loss_only eval_do_concat_batches "
    "eval_use_gather_object eval_accumulation_steps batch_eval_metrics plot_loss is_preprocess "
    "include_effective_tokens_per_second eval_on_each_dataset compute_accuracy print_param_status verbose":
        "It is about that program's own output and loop. RUN/metrics.jsonl and RUN/report have every figure.",
    "average_tokens_across_devices":
        "Losses are always divided once, by the count over all processes and accumulated passes.",
    "bf16_full_eval fp16_full_eval": "An evaluation uses the precision of the run.",
    "ignore_data_skip restore_callback_states_from_checkpoint enable_jit_checkpoint":
        "A resumed run continues at its place in the data, with the same random state.",
    "use_cache use_kv_cache infer_backend infer_dtype offload_folder train_from_scratch":
        "It is about generation or loading there.",
    "optim_target_modules": "It belongs to optimizers that are not supported here.",
    "data_impl reset_position_ids reset_attention_mask eod_mask_loss splits_string apply_ftfy":
        "Rows of a pass never see each other, and text is read as it is written.",
    "preference_loss_weight sft_loss_weight sft_average_log_probs": "It is read and then ignored by that trainer too.",
    "lora_task_type use_bnb_nested_quant double_quantization bnb_4bit_quant_storage "
    "quantization_device_map lora_fan_in_fan_out bnb_config_kwargs quantization_type":
        "It is set by the kind of model and quantization.",
}

_UNSUPPORTED: dict[str, str] = {
    "adam_beta1 adam_beta2 adam_betas adam_epsilon betas adam.eps":
        "AdamW always uses betas 0.9 and 0.999 and eps 1e-8.",
    "dropout lora_dropout lora.dropout lora.lora_dropout attention_dropout":
        "Dropout is always 0, so that policy and reference agree before step 1.",
    "optim_args muon_lr muon_momentum embedding_lr embedding_lr_scale lr_quadratic_warmup "
    "loraplus_lr_ratio loraplus_lr_embedding cosine_constant_lr_ratio relora_steps relora use_galore use_apollo "
    "use_badam use_adam_mini use_muon":
        "The optimizers are adamw, adamw8bit, paged-adamw8bit and sgd, with one learning rate for all weights.",
    "ring_attn_size ring_head_stride sp sp_mode enable_sequence_parallelism sequence_parallel_degree "
    "context_parallel_size sequence_parallel ulysses_size sequence_parallel_size":
        "A sequence is not divided over processes. For long ones use --checkpointing full, --parallel.shard and a low "
        "--microbatch-tokens.",
    "pp pipeline_model_parallel_size pipeline_parallel_size":
        "Layers are not arranged in stages. --parallel.shard divides their state, --parallel.tensor their computation.",
    "max_ckpt_mem": "--keep N limits the number of checkpoints. There is no limit on their size.",
    "use_ms": "Download model and data, and pass their directories.",
    "tokenizer_dir tokenizer_name tokenizer_name_or_path resize_vocab resize_token_embeddings_to_32x add_tokens "
    "add_special_tokens special_tokens tokens added_tokens_overrides pad_token eos_token split_special_tokens "
    "new_special_tokens append_eod": _TOKENIZER,
    "model_init_kwargs overrides_of_model_config rope_scaling shift_attn "
    "mixture_of_depths s2_attention":
        "A model is trained as its files say. Download the revision or change its config.json, and pass the "
        "directory.",
    "model_revision revision": "Write it after the name of the model or data: --model owner/name@REVISION.",
    "neftune_noise_alpha noisy_embedding_alpha": "Noise on the embeddings is not supported.",
    "label_smoothing_factor": "Label smoothing of the likelihood is not supported. --label-smoothing is for pairs.",
    "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps": "The reference does not change during a run.",
    "pref_bco_weight": "--loss bco_pair is a loss of its own. Its mixture with sigmoid is --loss sigmoid,bco_pair.",
    "preference_average_log_probs length_normalization dpo_norm_loss":
        "KTO sums the log-probs of a completion. For pairs, --loss sigmoid_norm divides them by the length.",
    "gamma": "--loss simpo has a target margin: --simpo-gamma.",
    "init_lora_weights pissa_init pissa_iter pissa_convert lora_target_parameters peft_layers_to_transform "
    "lora_layers_to_transform freeze_trainable_layers freeze_trainable_modules freeze_extra_modules "
    "unfrozen_parameters use_llama_pro create_new_adapter peft_init_lora_weights":
        "Adapters are on linear layers in every block: --lora.rank, --lora.targets and --lora.modules-to-save.",
    "reward_model process_reward_model reward_model_type ppo_score_norm ppo_epochs":
        "Training is offline. Reward models and sampling during training are not supported.",
    "compute_metrics preprocess_logits_for_metrics eval_table_size eval_max_new_tokens eval_num_beams "
    "predict_with_generate":
        "Evaluations have fixed metrics, in RUN/metrics.jsonl. --samples completes held-out prompts.",
    "plugins custom_trainer": "Plugins are not loaded.",
    "loss_watchdog_threshold loss_watchdog_patience": "A non-finite loss stops the run: see --on-nonfinite.",
    "eval_causal_lm_metrics do_causal_lm_eval do_bench_eval bench_dataset": "Benchmarks are not run during training.",
    "media_dir image_max_pixels video_max_pixels freeze_vision_tower freeze_multi_modal_projector "
    "processor_type": "Images, audio and video are not supported.",
    "tool_format": "Tool calls are written as the model's chat template writes them.",
    "mix_strategy": "Parts of the data are read one after another and shuffled. Suffixes weight them.",
    "dataset_exact_deduplication": "Duplicates are reported by tropism inspect and stay in the data.",
    "gptq use_dft_loss use_mca": "It is not supported. Remove it.",
    "lora_train_bias embedding_lora_dropout linear_lora_dropout lora_initialization_method":
        "Adapters start with output 0, without bias and dropout.",
}

_TEXTS: dict[Kind, dict[str, str]] = {
    "replaced": _REPLACED, "without effect": _WITHOUT_EFFECT, "not supported": _UNSUPPORTED}

EXPLAINED: dict[str, tuple[Kind, str]] = {name: (kind, text) for kind, texts in _TEXTS.items()
                                          for names, text in texts.items() for name in names.split()}
"""Name, kind of the answer, and what to do."""
