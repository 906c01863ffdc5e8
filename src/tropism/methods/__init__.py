"""The table of losses, and a method: what a run makes of some of its rows."""

from tropism.methods.method import Method, StepInputs, Term, Units
from tropism.methods.table import LOSSES, LossRow

__all__ = ["LOSSES", "LossRow", "Method", "Term", "Units", "StepInputs"]
