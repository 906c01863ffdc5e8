"""Methods: the table of losses, and their weighted sums."""

from tropism.methods.loss_table import LOSSES, LossRow
from tropism.methods.method import Method, StepInputs, Term, Units

__all__ = ["LOSSES", "LossRow", "Method", "Term", "Units", "StepInputs"]
