"""Methods: the table of losses, and their weighted sums."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tropism.methods.loss_table import LOSSES, LossRow

if TYPE_CHECKING:
    from tropism.methods.method import Method, StepInputs, Term, Units

__all__ = ["LOSSES", "LossRow", "Method", "Term", "Units", "StepInputs"]


def __getattr__(name: str) -> Any:
    """Names that need torch are looked up when they are used: options are checked against the table without it."""
    if name in __all__:
        return getattr(import_module("tropism.methods.method"), name)
    raise AttributeError(f"module 'tropism.methods' has no attribute {name!r}")
