"""What `adapter_config.json` may say: values that mean something, and those that are trained as they say."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from tropism.errors import ModelError

# Starts that change the base weights too: what they leave in the file belongs to a base that is nowhere.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
_CHANGING_STARTS = ("pissa", "olora", "corda", "loftq", "lora_ga")
_BIASES = ("none", "all", "lora_only")
_SERVED = frozenset((
    "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "fan_in_fan_out", "bias", "use_rslora",
    "use_dora", "modules_to_save", "init_lora_weights", "layers_to_transform", "layers_pattern", "rank_pattern",
    "alpha_pattern", "lora_bias", "ensure_weight_tying", "modules_to_tie", "base_model_name_or_path", "revision",
    "peft_type", "task_type", "inference_mode", "auto_mapping", "peft_version", "runtime_config", "megatron_core",
    "eva_config", "loftq_config"))


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _layers(value: Any) -> bool:
    return all(isinstance(one, int) for one in (value if isinstance(value, list) else [value]))


def _switch(value: Any) -> bool:
    return isinstance(value, bool)


def _each(valid: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(valid, value.values()))


# Whether a value is one; what it has to be; whether none, as null, is one too.
_FORMS: dict[str, tuple[Callable[[Any], bool], str, bool]] = {
    "r": (_rank, "a whole number above 0", False),
    "lora_alpha": (_number, "a number", False),
    "lora_dropout": (_number, "a number", False),
    "target_modules": (lambda value: bool(value) and (isinstance(value, str) or _names(value)),
                       "names of modules, or an expression that they match", False),
    "exclude_modules": (lambda value: isinstance(value, str) or _names(value), "names of modules", True),
    "modules_to_save": (_names, "a list of names of modules", True),
    "rank_pattern": (_each(_rank), "whole numbers above 0 by names of modules", True),
    "alpha_pattern": (_each(_number), "numbers by names of modules", True),
    "layers_to_transform": (_layers, "numbers of layers", True),
    "layers_pattern": (lambda value: isinstance(value, str) or _names(value), "names of modules", True),
    "bias": (lambda value: value in _BIASES, f"one of {', '.join(_BIASES)}", False),
    "use_rslora": (_switch, "true or false", False),
    "use_dora": (_switch, "true or false", False),
    "lora_bias": (_switch, "true or false", False),
    "fan_in_fan_out": (_switch, "true or false", False),
    "ensure_weight_tying": (_switch, "true or false", False)}


def check_values(values: Mapping[str, Any], file: Path) -> None:
    """Refuse a LoRA's settings that are none, before peft stumbles over them; those of other kinds are not looked at.

    Args:
        values: content of the file.

    Raises:
        ModelError: naming file and setting.
    """
    if values.get("peft_type") != "LORA":
        return
    for name, (valid, form, optional) in _FORMS.items():
        if name not in values or valid(values[name]) or (optional and values[name] is None):
            continue
        if name == "target_modules" and not values[name] and values.get("target_parameters"):
            continue
        raise ModelError(f"{file}: {name} is {values[name]!r}, and has to be {form}")


def check_known(values: Mapping[str, Any], file: Path) -> None:
    """Refuse settings that this peft does not know: it would leave them out, and compute another model.

    Args:
        values: content of the file.

    Raises:
        ModelError: naming file and setting.
    """
    import peft  # slow to import, and most runs have no adapter

    try:
        kind = peft.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(values.get("peft_type"))]
    except (ValueError, KeyError):
        raise ModelError(f"{file}: peft_type is {values.get('peft_type')!r}, a kind of adapter that peft "
                         f"{peft.__version__} does not know") from None
    known = {field.name for field in fields(kind)}
    if strange := sorted(name for name, value in values.items() if value and name not in known):
        raise ModelError(f"{file}: {strange[0]} is a setting that peft {peft.__version__} does not know, and without "
                         "it the adapter is another one; install the peft that wrote it, or merge it there")


def check_served(config: Any, place: str) -> None:
    """Refuse an adapter that would be trained, or kept, otherwise than it says.

    Raises:
        ModelError: naming the setting.
    """
    if isinstance(config.modules_to_save, str):
        raise ModelError(f"{place}: modules_to_save is {config.modules_to_save!r}, and has to be a list of names")
    plain = type(config)()
    for name, value in vars(config).items():
        if name not in _SERVED and value and value != getattr(plain, name, None):
            raise ModelError(f"{place}: its {name} is not served; merge the adapter into its base first")
    if config.bias != "none":
        raise ModelError(f"{place}: bias {config.bias!r} lets biases of the base learn, which is not served; merge the "
                         "adapter into its base first")
    start = config.init_lora_weights
    if start in _PLAIN_STARTS:
        return
    if str(start).lower().startswith(_CHANGING_STARTS):
        raise ModelError(f"{place}: began as {start!r}, which changed the base weights too; merge the adapter into "
                         "that base first")
    raise ModelError(f"{place}: init_lora_weights is {start!r}, a start that is not served; merge the adapter into its "
                     "base first")
