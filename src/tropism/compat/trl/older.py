"""Names that scripts for other versions of TRL use, and what TRL 1.16 and Tropism have instead."""

from collections.abc import Collection

from tropism.errors import UsageError, nearest

_OLDER = {
    "tokenizer": "Use processing_class.",
    "warmup_ratio": "Use warmup_steps, which takes a share of the run below 1: warmup_steps=0.1.",
    "evaluation_strategy": "Use eval_strategy.",
    "max_seq_length": "Use max_length.",
    **dict.fromkeys(("max_prompt_length", "max_completion_length", "max_target_length"),
                    "Use max_length, of prompt and completion together."),
    "rpo_alpha": "Use loss_type=['sigmoid', 'sft'] and loss_weights=[1.0, ALPHA].",
    "no_cuda": "Use use_cpu.",
    "group_by_length": "Remove it: rows of any length are packed without padding.",
    "overwrite_output_dir": "Remove it: an output is never overwritten. Set another output_dir.",
    **dict.fromkeys(("label_pad_token_id", "padding_value", "use_logits_to_keep", "save_safetensors",
                     "is_encoder_decoder", "force_use_ref_model", "dataset_batch_size", "use_liger_loss", "use_liger",
                     "half_precision_backend"),
                    "Remove it: it changes nothing here."),
    **dict.fromkeys(("model_adapter_name", "ref_adapter_name"),
                    "Remove it: the model without its adapter is the reference."),
    "generate_during_eval": "Remove it. tropism_options={'samples': 4} completes held-out prompts.",
    "logging_dir": "Remove it. tropism_options={'log_dir': DIR} sets the directory of TensorBoard.",
}
_OF_CONFIGS = ("beta", "loss_type", "label_smoothing", "max_length", "desirable_weight", "undesirable_weight",
               "precompute_ref_log_probs", "packing", "dataset_text_field", "model_init_kwargs", "output_dir",
               "learning_rate", "disable_dropout", "neftune_noise_alpha", "num_train_epochs", "max_steps")


def check_names(owner: str, given: Collection[str], known: Collection[str], what: str) -> None:
    """Check that a config or trainer of TRL 1.16 has these names.

    Args:
        owner: class, for the error.
        what: field or argument.

    Raises:
        UsageError: naming all that it lacks, with what to use instead.
    """
    def instead(name: str) -> str:
        if name in _OLDER:
            return _OLDER[name]
        if what == "argument" and name in _OF_CONFIGS:
            return f"Set it in {owner.replace('Trainer', 'Config')}."
        close = nearest(name, known)
        return f"Did you mean {close}?" if close else "Remove it."

    found = [f"{owner} has no {what} {name}. {instead(name)}" for name in given if name not in known]
    if found:
        raise UsageError(" ".join(found))
