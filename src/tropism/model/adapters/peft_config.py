"""A configuration of peft for a new adapter, as our options."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from tropism.errors import UsageError, count_of

_IGNORED = frozenset((
    "peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision", "runtime_config",
    "megatron_config", "megatron_core", "fan_in_fan_out", "ensure_weight_tying", "eva_config", "corda_config",
    "loftq_config", "lora_ga_config", "layers_pattern", "qalora_group_size"))
"""Settings that follow from the model, or belong to others that are not supported."""

_TAKEN = frozenset(("r", "lora_alpha", "target_modules", "modules_to_save", "use_dora", "use_rslora", "lora_dropout"))

_REASONS = {
    "inference_mode": "an adapter that is trained is not in inference mode",
    "bias": "biases of the base are not trained",
    "task_type": "only CAUSAL_LM is trained",
    "init_lora_weights": "A is uniform as by default, and B is 0",
}
"""Why settings are unsupported."""


def is_config(value: Any) -> bool:
    """Whether a value is a configuration of peft."""
    return hasattr(value, "peft_type") and hasattr(value, "task_type")


def lora_options(config: Any, name: str, model_type: Callable[[], str]) -> tuple[dict[str, Any], list[str]]:
    """The options of `--lora` that give the adapter of a configuration.

    Args:
        config: a `LoraConfig` of peft.
        name: of the argument, for errors.
        model_type: gives the type of the model, which decides the targets if the configuration names none.

    Returns:
        values of `LoraOptions` by name, and a sentence for each setting that is ignored.

    Raises:
        UsageError: naming all settings that are unsupported.
    """
    kind = getattr(getattr(config, "peft_type", None), "value", getattr(config, "peft_type", None))
    if kind != "LORA":
        raise UsageError(f"{name} is of type {type(config).__name__}, which is unsupported: Tropism trains LoRA. Pass "
                         "a LoraConfig.")
    problems = dict(_unsupported(config))
    targets = config.target_modules
    if isinstance(targets, str) and targets != "all-linear":
        problems["target_modules"] = "a regular expression. List the names of the modules instead"
    if problems:
        raise UsageError(f"{name}: {count_of(len(problems), 'unsupported setting')}:",
                         *(f"  {setting}: {why}" for setting, why in problems.items()))
    if targets is None:
        targets = _default_targets(model_type(), name)
    values = {
        "rank": config.r, "alpha": float(config.lora_alpha), "dora": bool(config.use_dora),
        "rslora": bool(config.use_rslora), "targets": targets if isinstance(targets, str) else sorted(targets),
        "modules_to_save": list(config.modules_to_save) if config.modules_to_save else None}
    dropout = config.lora_dropout
    return ({option: value for option, value in values.items() if value not in (None, False)},
            [f"{name}: lora_dropout {dropout:g} is not used, because dropout is always 0"] if dropout else [])


def _unsupported(config: Any) -> Mapping[str, str]:
    """Settings that change the adapter and have no counterpart, each with the reason."""
    plain = type(config)()
    found = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name in _IGNORED | _TAKEN or value == getattr(plain, field.name) or value in (None, "CAUSAL_LM"):
            continue
        if not value and field.name != "init_lora_weights":  # an empty list or pattern
            continue
        shown = str(getattr(value, "value", value))[:100]
        found[field.name] = f"{shown} ({_REASONS[field.name]})" if field.name in _REASONS else shown
    return found


def _default_targets(model_type: str, name: str) -> list[str]:
    """The modules that peft adapts in a model by default."""
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS  # slow to import

    if model_type not in DEFAULTS:
        raise UsageError(f"{name}: target_modules is not set, and peft has no default for models of type {model_type}. "
                         'Set it, for example to "all-linear".')
    return list(DEFAULTS[model_type])
