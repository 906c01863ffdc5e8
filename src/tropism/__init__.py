"""Tropism aligns and distils language models offline: exact, fast, kind."""

from importlib.metadata import version
from typing import Any

__version__ = version("tropism")

__all__ = ["DPOOptions", "KTOOptions", "RunResult", "run"]


def __getattr__(name: str) -> Any:
    """Names are looked up when they are used, so that `tropism --help` need not import torch."""
    import importlib

    homes = {"run": "tropism.api", "RunResult": "tropism.api",
             "KTOOptions": "tropism.config", "DPOOptions": "tropism.config"}
    if name in homes:
        return getattr(importlib.import_module(homes[name]), name)
    raise AttributeError(f"module 'tropism' has no attribute {name!r}")
