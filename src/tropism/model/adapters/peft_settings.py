"""Check the settings in `adapter_config.json`: valid values, settings peft knows, and those that Tropism supports."""

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from tropism.errors import ModelError

# Initializations. The second kind also changes the base weights, so its adapters fit a base that was never saved.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
_CHANGING_STARTS = ("pissa", "olora", "corda", "loftq", "lora_ga")
_MERGE = "Merge the adapter into its base first"
_BIASES = ("none", "all", "lora_only")
_SERVED = frozenset((
    "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "fan_in_fan_out", "bias", "use_rslora",
    "use_dora", "modules_to_save", "init_lora_weights", "layers_to_transform", "layers_pattern", "rank_pattern",
    "alpha_pattern", "lora_bias", "ensure_weight_tying", "modules_to_tie", "base_model_name_or_path", "revision",
    "peft_type", "task_type", "inference_mode", "auto_mapping", "peft_version", "runtime_config", "megatron_core",
    "eva_config", "loftq_config"))


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


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


# A check of the value, what the value must be, and whether null is valid.
_FORMS: dict[str, tuple[Callable[[Any], bool], str, bool]] = {
    "r": (_rank, "an integer above 0", False),
    "lora_alpha": (_number, "a number", False),
    "lora_dropout": (_number, "a number", False),
    "target_modules": (lambda value: bool(value) and (isinstance(value, str) or _names(value)),
                       "a list of module names, or a regular expression", False),
    "exclude_modules": (lambda value: isinstance(value, str) or _names(value),
                        "a list of module names, or a regular expression", True),
    "modules_to_save": (_names, "a list of module names", True),
    "rank_pattern": (_each(_rank), "a map of module names to integers above 0", True),
    "alpha_pattern": (_each(_number), "a map of module names to numbers", True),
    "layers_to_transform": (_layers, "an integer or a list of integers", True),
    "layers_pattern": (lambda value: isinstance(value, str) or _names(value), "a module name or a list of them", True),
    "bias": (lambda value: value in _BIASES, f"one of {', '.join(_BIASES)}", False),
    "use_rslora": (_switch, "true or false", False),
    "use_dora": (_switch, "true or false", False),
    "lora_bias": (_switch, "true or false", False),
    "fan_in_fan_out": (_switch, "true or false", False),
    "ensure_weight_tying": (_switch, "true or false", False)}


def check_values(values: Mapping[str, Any], file: Path) -> None:
    """Reject invalid values in the settings of a LoRA, before peft fails on them. Other types are not checked.

    Args:
        values: content of the file.

    Raises:
        ModelError: with file and setting.
    """
    if values.get("peft_type") != "LORA":
        return
    for name, (valid, form, optional) in _FORMS.items():
        if name not in values or valid(values[name]) or (optional and values[name] is None):
            continue
        if name == "target_modules" and not values[name] and values.get("target_parameters"):
            continue
        raise ModelError(f"{file}: {name} is {values[name]!r}, but must be {form}")


def check_known(values: Mapping[str, Any], file: Path) -> None:
    """Reject settings that the installed peft does not know. It would ignore them and compute something else.

    Args:
        values: content of the file.

    Raises:
        ModelError: with file and setting.
    """
    import peft  # slow to import, and most runs have no adapter

    try:
        kind = peft.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(values.get("peft_type"))]
    except (ValueError, KeyError):
        raise ModelError(f"{file}: peft_type {values.get('peft_type')!r} is unknown to peft {peft.__version__}. "
                         "Install the version of peft that wrote the adapter.") from None
    known = {field.name for field in fields(kind)}
    if strange := sorted(name for name, value in values.items() if value and name not in known):
        raise ModelError(f"{file}: the setting {strange[0]} is unknown to peft {peft.__version__}, which would ignore "
                         "it. Install the version of peft that wrote the adapter, or use that version to merge it.")


def check_served(config: Any, place: str) -> None:
    """Reject an adapter with settings that Tropism does not support.

    Args:
        config: peft's configuration.
        place: the adapter's name in the error.

    Raises:
        ModelError: with the setting.
    """
    if isinstance(config.modules_to_save, str):
        raise ModelError(f"{place}: modules_to_save is {config.modules_to_save!r}, but must be a list of module names")
    plain = type(config)()
    for name, value in vars(config).items():
        if name not in _SERVED and value and value != getattr(plain, name, None):
            raise ModelError(f"{place}: the setting {name} is unsupported. {_MERGE}")
    if config.bias != "none":
        raise ModelError(f"{place}: bias {config.bias!r} is unsupported, since it trains biases of the base. {_MERGE}")
    start = config.init_lora_weights
    if start in _PLAIN_STARTS:
        return
    if str(start).lower().startswith(_CHANGING_STARTS):
        raise ModelError(f"{place}: init_lora_weights {start!r} is unsupported, since it changed the base weights too. "
                         "Merge the adapter into the changed base first.")
    raise ModelError(f"{place}: init_lora_weights {start!r} is unsupported. {_MERGE}")
