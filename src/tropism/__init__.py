"""Tropism aligns and distills language models offline: exact, fast, kind."""

from importlib.metadata import version
from typing import Any

__version__ = version("tropism")

__all__ = ["Completion", "DPOOptions", "DPOTrainer", "EvalResult", "KDOptions", "KDTrainer", "KTOOptions", "KTOTrainer",
           "PromptTree", "RunResult", "SFTOptions", "SFTTrainer", "run", "token_ids", "unwrap"]

_HOMES = {"run": "runner", "RunResult": "runner", "PromptTree": "data.tree", "Completion": "data.tree",
          "token_ids": "data.tree", "unwrap": "model.adapters.merge"}


def __getattr__(name: str) -> Any:
    """Names are looked up when they are used, so that `tropism --help` need not import torch."""
    import importlib

    if name in __all__:
        home = _HOMES.get(name, "config" if name.endswith("Options") else "trainers")
        return getattr(importlib.import_module(f"tropism.{home}"), name)
    raise AttributeError(f"module 'tropism' has no attribute {name!r}")
