"""Truncation: prompts on the left, completions on the right, with one prompt for all sides of a row."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field

from tropism.data.tree import Completion
from tropism.options import Everyday, Options

Overlong = Literal["truncate", "drop"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Token limits of a row.

    Args:
        max_length: of prompt and completion together.
        max_prompt_length: of the prompt; None for no separate limit.
        overlong: what becomes of longer rows. None truncates them, which nobody has decided.
    """

    max_length: int
    max_prompt_length: int | None = None
    overlong: Overlong | None = None

    def exceeded_by(self, prompt: int, completion: int) -> bool:
        """Whether a prompt and its longest completion, of so many tokens, do not fit."""
        return prompt + completion > self.max_length or prompt > (self.max_prompt_length or prompt)


@dataclass(frozen=True, slots=True)
class PromptCutter:
    """Truncates one prompt.

    Args:
        ids: the full prompt.
        head: numbers of first tokens to keep if they fit: the BOS, or BOS and system message.
        shorter: prompts without their oldest turns, longest first. None is computed unless it is needed.
    """

    ids: list[int]
    head: tuple[int, ...] = ()
    shorter: Callable[[], Sequence[list[int]]] = tuple

    def to(self, limit: int, floor: int = 0) -> list[int]:
        """The prompt in at most `limit` tokens: cut at a message border if that leaves `floor`, else anywhere."""
        if len(self.ids) <= limit:
            return self.ids
        shorter = self.shorter()
        fits = bisect_left(shorter, -limit, key=lambda ids: -len(ids))
        if fits < len(shorter) and len(shorter[fits]) >= floor:
            return shorter[fits]
        # No border fits. Keep the head if it leaves at least half of the limit for the end of the prompt.
        head = max((size for size in self.head if size <= max(limit // 2, 1)), default=0)
        return self.ids[:head] + self.ids[len(self.ids) - (limit - head) :]


def fit(prompt: PromptCutter, completions: Sequence[Completion], limits: Limits) -> tuple[
        list[int], list[Completion | None]]:
    """Prompt ids and completions within the limits; None for a completion without a supervised token left.

    The prompt is cut to `max_prompt_length`. If prompt and longest completion still exceed `max_length`, the prompt is
    cut further, to no fewer than half of `max_length`. Then completions are cut at the end, with their terminators.
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
    """Maximum tokens of prompt plus completion. Longer rows are truncated. Default: the model's, at most
    2048."""
    max_prompt_length: int | None = Field(None, ge=1)
    """Maximum prompt length in tokens, less than `--max-length`. Longer prompts are truncated from the left."""
    overlong: Overlong | None = None
    """Rows longer than the limits: `truncate` or `drop` them. Dropped rows are counted in the audit. Default: truncate,
    with a warning if more than 10% of the rows are."""
