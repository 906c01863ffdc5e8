"""Prompt trees: a prompt and the completions that continue it. All data is a view of these."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]


def token_ids(ids: "list[int] | TokenIds") -> TokenIds:
    """Token ids as a read-only int32 array, so that trees can share it."""
    array = np.array(ids, dtype=np.int32)
    array.setflags(write=False)
    return array


def _as_int32(ids: TokenIds) -> TokenIds:
    """Ids as an int32 array; unchanged if they are one already."""
    return ids if isinstance(ids, np.ndarray) and ids.dtype == np.int32 else token_ids(ids)


@dataclass(frozen=True, eq=False)
class Completion:
    """The continuation of a prompt.

    Args:
        ids: `[c]` token ids, with the terminator unless the completion was truncated.
        loss_mask: `[c]` True for supervised tokens.

    Raises:
        ValueError: if the shapes differ or no token is supervised.
    """

    ids: TokenIds
    loss_mask: Mask

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", _as_int32(self.ids))
        if self.ids.ndim != 1 or self.ids.shape != self.loss_mask.shape:
            raise ValueError(f"ids and loss_mask must be 1-d of equal length, not {self.ids.shape} and "
                             f"{self.loss_mask.shape}")
        if not self.loss_mask.any() and not isinstance(self, Unsupervised):
            raise ValueError("a completion needs at least one supervised token")

    @classmethod
    def supervised(cls, ids: "list[int] | TokenIds") -> "Completion":
        """A completion in which every token is supervised."""
        array = token_ids(ids)
        return cls(array, np.ones(len(array), dtype=np.bool_))

    @property
    def length(self) -> int:
        """Number of supervised tokens."""
        return int(self.loss_mask.sum())

    @cached_property
    def key(self) -> bytes:
        """Hash of ids and mask; equal completions have equal keys."""
        digest = hashlib.blake2b(self.ids.tobytes(), digest_size=16)
        digest.update(self.loss_mask.tobytes())
        return digest.digest()

    def cut(self, limit: int) -> "Completion | None":
        """The first `limit` tokens; None if none of them is supervised."""
        if len(self.ids) <= limit or isinstance(self, Unsupervised):
            return self
        if not self.loss_mask[:limit].any():
            return None
        return Completion(self.ids[:limit], self.loss_mask[:limit])

    def first(self, supervised: int) -> "Completion":
        """The beginning with the first `supervised` supervised tokens; all of it if it has no more."""
        if supervised >= self.length:
            return self
        end = int(np.flatnonzero(self.loss_mask)[supervised - 1]) + 1
        return Completion(self.ids[:end], self.loss_mask[:end])


class Unsupervised(Completion):
    """A completion without a supervised token: its log-prob is 0. Published trainers keep such rows.

    Args:
        ids, loss_mask: as in `Completion`; the mask may be all False.
    """

    @classmethod
    def of(cls, ids: TokenIds) -> "Unsupervised":
        """The last of some ids, unsupervised."""
        return cls(token_ids(ids[-1:]), np.zeros(1, dtype=np.bool_))


@dataclass(frozen=True, eq=False)
class PromptTree:
    """A prompt and its distinct completions. No pack, rank or step splits a tree.

    Args:
        prompt_ids: `[p]`; the last one predicts the first token of each completion. Empty if the completions have
            nothing in common: their first tokens are then context, unsupervised.
        completions: at least one, distinct by content.

    Raises:
        ValueError: for no completion, two equal ones, or a supervised first token without a prompt.
    """

    prompt_ids: TokenIds
    completions: tuple[Completion, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_ids", _as_int32(self.prompt_ids))
        if len(self.prompt_ids) == 0 and any(completion.loss_mask[0] for completion in self.completions):
            raise ValueError("a tree needs a prompt of at least one token, or completions whose first token is not "
                             "supervised")
        if not self.completions:
            raise ValueError("a tree needs at least one completion")
        if len({completion.key for completion in self.completions}) != len(self.completions):
            raise ValueError("the completions of a tree must be distinct")

    @cached_property
    def carriers(self) -> tuple[int, ...]:
        """For each completion, the one whose input contains its own: itself, or a completion that it begins.

        Attention is causal, so the beginning of a completion need not be computed twice.
        """
        inputs = [completion.ids[:-1].tobytes() for completion in self.completions]
        carriers = list(range(len(inputs)))
        # In sorted order, inputs that begin with an input follow it immediately.
        order = sorted(carriers, key=lambda i: (inputs[i], -i))
        for one, following in reversed(list(pairwise(order))):
            if inputs[following].startswith(inputs[one]):
                carriers[one] = carriers[following]
        return tuple(carriers)

    @cached_property
    def tokens(self) -> int:
        """Tokens that the tree layout computes. The last token of a completion predicts nothing."""
        return len(self.prompt_ids) + sum(len(completion.ids) - 1 for i, completion in enumerate(self.completions)
                                          if self.carriers[i] == i)

    @property
    def score_keys(self) -> list[bytes]:
        """`score_key` of each completion."""
        return [score_key(self.prompt_ids, completion) for completion in self.completions]


def prompt_key(ids: TokenIds) -> bytes:
    """The key of a prompt: a hash of its ids. Pass the ids before truncation, or different prompts may get one key."""
    return hashlib.blake2b(ids.tobytes(), digest_size=16).digest()


def score_key(prompt_ids: TokenIds, completion: Completion) -> bytes:
    """The key of a stored log-prob: a hash of prompt ids and completion."""
    digest = hashlib.blake2b(prompt_ids.tobytes(), digest_size=16)
    digest.update(b"|")
    digest.update(completion.key)
    return digest.digest()
