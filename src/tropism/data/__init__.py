"""From data files to batches: reading, tokenizing, auditing, scheduling and packing rows."""

from tropism.data.rows import EncodedRow
from tropism.data.tree import Completion, PromptTree

__all__ = ["Completion", "EncodedRow", "PromptTree"]
