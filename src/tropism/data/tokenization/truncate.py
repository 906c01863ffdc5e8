"""The truncation rule: one cut for all sides of a row, prompts from the left, completions from the right."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field

from tropism.data.tree import Completion
from tropism.options import Everyday, Options


@dataclass(frozen=True, slots=True)
class Limits:
    """Token limits of a row.

    Args:
        max_length: prompt + completion, in tokens.
        max_prompt_length: prompt alone, in tokens; None for no limit of its own.
    """

    max_length: int
    max_prompt_length: int | None = None


@dataclass(frozen=True, slots=True)
class PromptCutter:
    """How one prompt may be shortened.

    Args:
        ids: the whole prompt.
        head: how many leading tokens a cut keeps if they fit: a BOS alone, and with the system message.
        shorter: prompts without their oldest turns, longest first, computed only when needed.
    """

    ids: list[int]
    head: tuple[int, ...] = ()
    shorter: Callable[[], Sequence[list[int]]] = tuple

    def to(self, limit: int, floor: int = 0) -> list[int]:
        """The prompt in at most `limit` tokens: at a message border if that leaves `floor`, else mid-message."""
        if len(self.ids) <= limit:
            return self.ids
        for candidate in self.shorter():
            if floor <= len(candidate) <= limit:
                return candidate
        # No border is right. Keep the head where it leaves at least half for what comes last.
        head = max((size for size in self.head if size <= max(limit // 2, 1)), default=0)
        return self.ids[:head] + self.ids[len(self.ids) - (limit - head) :]


def fit(prompt: PromptCutter, completions: Sequence[Completion], limits: Limits) -> tuple[
        list[int], list[Completion | None]]:
    """Prompt ids and completions within the limits; None for a completion with nothing left to learn.

    The prompt is cut to `max_prompt_length`; if prompt + longest completion still exceed `max_length` it is cut
    further, to no fewer than half of `max_length`; then completions lose their ends, terminator included.
    """
    ids = prompt.ids
    if limits.max_prompt_length is not None:
        ids = prompt.to(limits.max_prompt_length)
    longest = max(len(completion.ids) for completion in completions)
    if len(ids) + longest > limits.max_length:
        floor = min(len(ids), limits.max_length // 2)
        ids = prompt.to(min(len(ids), max(limits.max_length - longest, floor)), floor)
    return ids, [completion.cut(limits.max_length - len(ids)) for completion in completions]


class LengthOptions(Options):
    """Length limits of a row."""

    heading: ClassVar[str] = "Data"

    max_length: Everyday[int | None] = Field(None, ge=2)
    """Maximum tokens of prompt plus completion. Longer rows are truncated. Default: the model's, at most 2048."""
    max_prompt_length: int | None = Field(None, ge=1)
    """Maximum tokens of a prompt, below `--max-length`. Longer prompts are truncated from the left."""
