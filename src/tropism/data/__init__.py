"""Rows to prompt trees: reading, rendering, auditing, scheduling, packing."""

from tropism.data.rows import EncodedRow
from tropism.data.tree import Completion, PromptTree

__all__ = ["Completion", "EncodedRow", "PromptTree"]
