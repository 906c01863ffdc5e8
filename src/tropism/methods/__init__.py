"""The table of losses, and a method: what a run makes of some of its rows."""

from tropism.methods.method import Method, Term, Units, Wide
from tropism.methods.table import LOSSES, LossRow

__all__ = ["LOSSES", "LossRow", "Method", "Term", "Units", "Wide"]
