"""One row of data: as a record, in the common shape, and as token ids."""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

import numpy as np

from tropism.data.tree import Completion, TokenIds, prompt_key

Message = dict[str, Any]
"""A chat message as templates take it: `role`, `content`, and all other keys of the user's data."""


class Reason(StrEnum):
    """Why a row is dropped. The run continues, and the audit lists the row with its place."""

    EMPTY_COMPLETION = "empty_completion"
    EMPTY_PROMPT = "empty_prompt"
    MISSING_FIELD = "missing_field"
    IDENTICAL_PAIR = "identical_pair"
    NO_COMPLETION = "no_completion"
    NO_SUPERVISED_TOKEN = "no_supervised_token"  # noqa: S105  not a password
    TOO_LONG = "too_long"
    UNDESIRABLE = "undesirable"
    UNPAIRED = "unpaired"
    EQUAL_SCORES = "equal_scores"
    NO_LABEL = "no_label"
    TIE = "tie"
    DISAGREEMENT = "disagreement"


@dataclass(frozen=True, slots=True)
class RawRow:
    """A record and its place: FILE:LINE, or FILE:row N for formats without lines."""

    place: str
    record: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Dropped:
    """A row that cannot be trained on, with the reason and a detail for people."""

    place: str
    reason: Reason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A row in the common shape of all formats.

    Args:
        id: the record's `id`, or else `place`.
        place: FILE:LINE.
        prompt: plain text or messages.
        completions: one, or (chosen, rejected); text for a text prompt, messages for messages.
        desirable: label of an unpaired row; None without one.
        tools: tool schemas, unchanged.
        weight: factor of the row's loss; None without one, which is 1.
    """

    id: str
    place: str
    prompt: str | tuple[Message, ...]
    completions: tuple[str | tuple[Message, ...], ...]
    desirable: bool | None = None
    tools: tuple[Any, ...] | None = None
    weight: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class EncodedRow:
    """A row as token ids, after truncation.

    Args:
        id, place: as in `Row`.
        prompt_ids: `[p]` the ids that generation would get. If the sides have different prompts, the common beginning
            of these; see `asked`.
        completions: as in `Row`. A pair may have two more, see `with_shared_lengths`.
        desirable: label of an unpaired row.
        split_key: decides the side of the train/evaluation split; rows of one conversation share it.
        notes: changes to the row (`prompt_cut`, `completion_cut`, `text_changed`, ...).
        partner: mismatched completion that was given with the row. KTO's reference point uses it instead of another
            row's completion.
        prompt_key: `tree.prompt_key` of the prompt before truncation, of the first side if the sides have different
            ones. It decides whether two rows have the same prompt. Default: that of `prompt_ids`, for rows that were
            never truncated.
        weight: factor of the row's loss, 0 or more.
    """

    id: str
    place: str
    prompt_ids: TokenIds
    completions: tuple[Completion, ...]
    desirable: bool | None
    split_key: bytes
    notes: frozenset[str] = field(default_factory=frozenset)
    partner: Completion | None = None
    prompt_key: bytes = b""
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.prompt_key:
            object.__setattr__(self, "prompt_key", prompt_key(self.prompt_ids))

    @property
    def tree_key(self) -> bytes:
        """Rows with equal prompt ids after truncation share a tree within a step. They may have different prompts.
        Without prompt ids there is nothing to share."""
        return self.prompt_ids.tobytes() or self.place.encode()

    @property
    def asked(self) -> TokenIds:
        """The ids that generation would get. If the sides have different prompts, those of the first side."""
        first = self.completions[0]
        whole = np.concatenate((self.prompt_ids, first.ids[: first.loss_mask.argmax()]))
        return whole if prompt_key(whole) == self.prompt_key or not len(self.prompt_ids) else self.prompt_ids

    @property
    def flat_tokens(self) -> int:
        """Prompt and completion tokens if each completion is computed with its own prompt."""
        return sum(len(self.prompt_ids) + len(completion.ids) for completion in self.completions[:2])

    def with_shared_lengths(self) -> "EncodedRow":
        """A pair followed by the beginnings of both sides, each with as many supervised tokens as the shorter side."""
        shared = min(completion.length for completion in self.completions)
        return replace(self, completions=(*self.completions, *(side.first(shared) for side in self.completions)))


View = Literal["unpaired", "paired", "single"]
"""Kind of rows: labeled completions, pairs, or completions without labels."""
