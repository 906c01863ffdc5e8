"""One line of data: as it was read, as it was understood, and as token ids."""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

from tropism.data.tree import Completion, TokenIds

Message = dict[str, Any]
"""A chat message as templates take it: `role`, `content`, and whatever else the user's data has."""


class Reason(StrEnum):
    """Why a row is left out. The run goes on; the audit lists it with its line."""

    EMPTY_COMPLETION = "empty_completion"
    EMPTY_PROMPT = "empty_prompt"
    MISSING_FIELD = "missing_field"
    IDENTICAL_PAIR = "identical_pair"
    NO_COMPLETION = "no_completion"
    NO_SUPERVISED_TOKEN = "no_supervised_token"
    UNDESIRABLE = "undesirable"
    UNPAIRED = "unpaired"
    EQUAL_SCORES = "equal_scores"


@dataclass(frozen=True, slots=True)
class RawRow:
    """A record and where it stands: `place` is FILE:LINE, or FILE:row N for formats without lines."""

    place: str
    record: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Dropped:
    """A row that cannot be trained on, with the reason and, for a person, the detail."""

    place: str
    reason: Reason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A row in the one shape that all formats are turned into.

    Args:
        id: column `id` where the data has one, else `place`.
        place: FILE:LINE.
        prompt: plain text, or messages.
        completions: one (unpaired) or two (chosen, rejected), each plain text or messages; of the prompt's kind.
        desirable: the label of an unpaired row; None without one.
        tools: tool schemas exactly as the user gave them.
    """

    id: str
    place: str
    prompt: str | tuple[Message, ...]
    completions: tuple[str | tuple[Message, ...], ...]
    desirable: bool | None = None
    tools: tuple[Any, ...] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class EncodedRow:
    """A row as token ids, after truncation. What all later rooms work with.

    Args:
        id, place: as in `Row`.
        prompt_ids: `[p]` what generation would be given.
        completions: as in `Row`; one or (chosen, rejected), all continuing the same prompt ids. A pair may carry
            two more: see `with_shared_lengths`.
        desirable: label of an unpaired row.
        split_key: decides the side of a train/evaluation split; rows of one conversation share it.
        notes: what happened to the row on the way (`prompt_cut`, `completion_cut`, `text_changed`, ...).
        partner: a mismatched completion that came with the row, to be taken for KTO's reference point in place of
            another row's completion.
    """

    id: str
    place: str
    prompt_ids: TokenIds
    completions: tuple[Completion, ...]
    desirable: bool | None
    split_key: bytes
    notes: frozenset[str] = field(default_factory=frozenset)
    partner: Completion | None = None

    @property
    def prompt_key(self) -> bytes:
        """Rows with equal prompt ids have equal keys, and share a tree within a step."""
        return self.prompt_ids.tobytes()

    @property
    def flat_tokens(self) -> int:
        """Prompt + completion tokens as if each completion were computed on its own."""
        return sum(len(self.prompt_ids) + len(completion.ids) for completion in self.completions[:2])

    def with_shared_lengths(self) -> "EncodedRow":
        """A pair followed by the beginnings of both sides, of as many supervised tokens as the shorter side has."""
        shared = min(completion.length for completion in self.completions)
        return replace(self, completions=(*self.completions, *(side.first(shared) for side in self.completions)))


View = Literal["unpaired", "paired", "single"]
