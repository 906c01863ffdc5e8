"""Whether an adapter to start from belongs to the base model that it is trained on."""

import os
from pathlib import Path
from typing import Any

from tropism.model import base_weights as base
from tropism.model.adapters import files as adapter_files
from tropism.model.adapters.parameters import adapter_name
from tropism.model.names import split_revision
from tropism.observe.console import Voice

PASSED_MODULE = "the module that was passed as model"


def check_base(directory: Path, name: str | None, found: str | None, voice: Voice) -> None:
    """Warn if an adapter was trained on other base weights.

    Args:
        directory: of the adapter.
        name: of the base model; None for a module without an origin.
        found: hash of the base weights; None if they are quantized.
    """
    known = base.recorded_hash(directory)
    named = absolute_name(adapter_files.read_values(directory).get("base_model_name_or_path"))
    if found is not None and known is not None:
        if found != known:
            voice.warn(f"{directory}: this adapter was trained on a base model whose weights differ from those of "
                       f"{name or PASSED_MODULE}. Check --model.")
    elif named is not None and name is not None and not _same(named, name):
        voice.warn(f"{directory}: the base model of this adapter is {named}, but it is trained on {name}. "
                   "Tropism cannot check that their weights are equal.")


def clear_unknown_base(module: Any, voice: Voice) -> None:
    """Clear the base model's name in the adapter's file if a user's module has no origin or differs from it."""
    config = module.peft_config[adapter_name(module)]
    origin = config.base_model_name_or_path
    if not origin:
        why = "has no directory or Hub id as its origin"
    elif Path(origin).is_dir() and (name := base.first_difference(module, Path(origin))):
        why = f"differs from {origin} (in {name})"
    else:
        return
    config.base_model_name_or_path = None
    voice.warn(f"{PASSED_MODULE} {why}, so the adapter's file will name no base model. Save the model without the "
               "adapter, and name that directory to use the adapter: tropism export RUN --base DIR")


def absolute_name(origin: Any) -> str | None:
    """The name of a model, with an absolute path if it is a directory; None for no name."""
    name = str(origin or "")
    return os.path.abspath(name) if name and Path(name).is_dir() else name or None


def _same(name: str, other: str) -> bool:
    """Whether two names mean the same model."""
    name, other = split_revision(name)[0], split_revision(other)[0]
    return name == other or (Path(name).is_dir() and Path(other).is_dir() and os.path.samefile(name, other))
