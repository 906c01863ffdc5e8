"""The one idea: a prompt and the completions that continue it. Everything else is a view of this."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]


def token_ids(ids: "list[int] | TokenIds") -> TokenIds:
    """Token ids as the array every room works with; read-only, so that trees can be shared."""
    array = np.array(ids, dtype=np.int32)
    array.setflags(write=False)
    return array


def _normal(ids: TokenIds) -> TokenIds:
    """Ids that someone has made of another kind, a list say, in the form that equal ids share."""
    return ids if isinstance(ids, np.ndarray) and ids.dtype == np.int32 else token_ids(ids)


@dataclass(frozen=True, eq=False)
class Completion:
    """What continues a prompt.

    Args:
        ids: `[c]` token ids, terminator included unless the completion was cut.
        loss_mask: `[c]` which of them are supervised; positions, never guessed from values.

    Raises:
        ValueError: if it is empty, shapes differ or nothing is supervised.
    """

    ids: TokenIds
    loss_mask: Mask

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", _normal(self.ids))
        if self.ids.ndim != 1 or self.ids.shape != self.loss_mask.shape:
            raise ValueError(f"ids {self.ids.shape} and loss_mask {self.loss_mask.shape} must be equal 1-d")
        if not self.loss_mask.any():
            raise ValueError("a completion needs at least one supervised token")

    @classmethod
    def supervised(cls, ids: "list[int] | TokenIds") -> "Completion":
        """A completion in which every token counts."""
        array = token_ids(ids)
        return cls(array, np.ones(len(array), dtype=np.bool_))

    @property
    def length(self) -> int:
        """Supervised tokens."""
        return int(self.loss_mask.sum())

    @cached_property
    def key(self) -> bytes:
        """Content hash; two completions with equal ids and mask are the same completion."""
        digest = hashlib.blake2b(self.ids.tobytes(), digest_size=16)
        digest.update(self.loss_mask.tobytes())
        return digest.digest()

    def cut(self, limit: int) -> "Completion | None":
        """The first `limit` tokens, or None if none of them is supervised."""
        if len(self.ids) <= limit:
            return self
        if not self.loss_mask[:limit].any():
            return None
        return Completion(self.ids[:limit], self.loss_mask[:limit])

    def first(self, supervised: int) -> "Completion":
        """The beginning that holds the first `supervised` supervised tokens; itself if it has no more."""
        if supervised >= self.length:
            return self
        end = int(np.flatnonzero(self.loss_mask)[supervised - 1]) + 1
        return Completion(self.ids[:end], self.loss_mask[:end])


@dataclass(frozen=True, eq=False)
class PromptTree:
    """One prompt and N distinct completions. A tree is atomic: no pack, rank or step ever splits it.

    Args:
        prompt_ids: `[p]` at least one token; the first completion token is predicted from the last of them.
        completions: distinct by content.

    Raises:
        ValueError: on an empty prompt, no completion, or two equal ones.
    """

    prompt_ids: TokenIds
    completions: tuple[Completion, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_ids", _normal(self.prompt_ids))
        if len(self.prompt_ids) == 0:
            raise ValueError("a tree needs a prompt of at least one token")
        if not self.completions:
            raise ValueError("a tree needs at least one completion")
        if len({completion.key for completion in self.completions}) != len(self.completions):
            raise ValueError("the completions of a tree must be distinct")

    @cached_property
    def carriers(self) -> tuple[int, ...]:
        """For each completion, the one in whose input its own stands: itself, unless it is the beginning of another.

        What follows changes nothing before it, so the beginning of a completion need not be computed again.
        """
        inputs = [completion.ids[:-1].tobytes() for completion in self.completions]
        carriers = list(range(len(inputs)))
        # Sorted, whatever begins with an input follows it at once.
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


def score_key(prompt_ids: TokenIds, completion: Completion) -> bytes:
    """What a log-prob is filed under: the prompt's ids and the completion's."""
    digest = hashlib.blake2b(prompt_ids.tobytes(), digest_size=16)
    digest.update(b"|")
    digest.update(completion.key)
    return digest.digest()
