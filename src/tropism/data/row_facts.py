"""Facts about rows as arrays, so that an audit of a million rows creates no row objects."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from tropism.data.rows import EncodedRow
from tropism.data.tree import TokenIds, prompt_key

Integers = npt.NDArray[np.int64]

_DIGEST_BYTES = 16
_TYPES = {"prompt": np.uint64, "tree": np.uint64, "prompt_tokens": np.int64, "completion": np.uint64,
          "tokens": np.int64, "learned": np.int64, "desirable": np.int8, "split": np.uint64, "weight": np.float64}


@dataclass(frozen=True, eq=False)
class RowFacts:
    """Rows as columns, without token ids. Only the first two completions of a row count.

    Args:
        prompt: `[n]` `key_number` of the prompt before truncation.
        prompt_tokens: `[n]` tokens of the prompt after truncation.
        completion: `[n, 2]` `key_number` of each completion; 0 for a missing second one.
        tokens: `[n, 2]` tokens of each completion; 0 for a missing second one.
        learned: `[n, 2]` supervised tokens of each completion.
        desirable: `[n]` 1 or 0; -1 without a label.
        split: `[n]` `key_number` of the split key.
        notes: for each note that occurs, the numbers of its rows, ascending.
        tree: `[n]` `prompt_hash` of the prompt ids after truncation. Default: no prompt was truncated.
        weight: `[n]` factor of the loss. Default: 1 each.

    Raises:
        ValueError: if the columns differ in length.
    """

    prompt: npt.NDArray[np.uint64]
    prompt_tokens: Integers
    completion: npt.NDArray[np.uint64]
    tokens: Integers
    learned: Integers
    desirable: npt.NDArray[np.int8]
    split: npt.NDArray[np.uint64]
    notes: Mapping[str, Integers]
    tree: npt.NDArray[np.uint64] | None = None
    weight: npt.NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        if self.weight is None:
            object.__setattr__(self, "weight", np.ones(len(self.prompt)))
        if self.tree is None:
            object.__setattr__(self, "tree", self.prompt)
        for name, dtype in _TYPES.items():  # narrower columns would overflow in products
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=dtype))
            wanted = (len(self.prompt), 2) if name in ("completion", "tokens", "learned") else (len(self.prompt),)
            if getattr(self, name).shape != wanted:
                raise ValueError(f"{name} has shape {getattr(self, name).shape}, not {wanted}")

    def __len__(self) -> int:
        return len(self.prompt)

    @cached_property
    def prompt_numbers(self) -> Integers:
        """`[n]` consecutive numbers from 0; rows of one prompt, as it is before truncation, have equal numbers."""
        return groups(self.prompt)

    @cached_property
    def tree_numbers(self) -> Integers:
        """`[n]` the same for rows that share a tree within a step: their prompts are equal after truncation."""
        assert self.tree is not None
        return groups(self.tree)

    @cached_property
    def row_numbers(self) -> Integers:
        """`[n]` the same for rows with equal prompts and equal completions; labels do not count."""
        return groups(self.prompt_numbers, *self.completion.T)

    @property
    def sides(self) -> Integers:
        """`[n]` number of completions of each row, 1 or 2."""
        return np.count_nonzero(self.tokens, axis=1).astype(np.int64)

    @property
    def labeled(self) -> bool:
        """True if the rows are labeled completions; either all rows are, or none."""
        return len(self) > 0 and bool(self.desirable[0] >= 0)

    @property
    def weighted(self) -> bool:
        """True if a row has another weight than 1."""
        assert self.weight is not None
        return bool((self.weight != 1).any())

    @property
    def classes(self) -> tuple[int, int]:
        """Number of desirable and of undesirable rows."""
        return int(np.count_nonzero(self.desirable == 1)), int(np.count_nonzero(self.desirable == 0))

    @property
    def flat_tokens(self) -> int:
        """Tokens of an epoch if each completion is computed with its own prompt."""
        return int((self.prompt_tokens * self.sides).sum() + self.tokens.sum())

    @property
    def repeated_tokens(self) -> int:
        """Flat tokens that belong to repeated prompts."""
        once = self.prompt_tokens[first_of(self.tree_numbers)]
        return int((self.prompt_tokens * self.sides).sum() - once.sum())


def facts_of(rows: Sequence[EncodedRow]) -> RowFacts:
    """The facts of rows: their attribute `facts` if they have one, else computed in one pass."""
    known = getattr(rows, "facts", None)
    if isinstance(known, RowFacts):
        return known
    notes: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        for note in row.notes:
            notes.setdefault(note, []).append(number)

    def both(column: Any, dtype: Any) -> Any:
        found = np.zeros((len(rows), 2), dtype=dtype)
        for number, row in enumerate(rows):
            for side, completion in enumerate(row.completions[:2]):
                found[number, side] = column(completion)
        return found

    return RowFacts(
        prompt=np.array([key_number(row.prompt_key) for row in rows], dtype=np.uint64),
        tree=np.array([prompt_hash(row.prompt_ids) for row in rows], dtype=np.uint64),
        prompt_tokens=np.array([len(row.prompt_ids) for row in rows], dtype=np.int64),
        completion=both(lambda completion: key_number(completion.key), np.uint64),
        tokens=both(lambda completion: len(completion.ids), np.int64),
        learned=both(lambda completion: completion.length, np.int64),
        desirable=np.array([-1 if row.desirable is None else int(row.desirable) for row in rows], dtype=np.int8),
        split=np.array([_split_number(row) for row in rows], dtype=np.uint64),
        weight=np.array([row.weight for row in rows], dtype=np.float64),
        notes={note: np.array(numbers, dtype=np.int64) for note, numbers in sorted(notes.items())})


def prompt_hash(ids: TokenIds) -> int:
    """The number of a prompt."""
    return key_number(prompt_key(ids))


def key_number(key: bytes) -> int:
    """The first 8 bytes of a digest as a number. Collisions among a million rows have probability 3e-8."""
    return int.from_bytes(key[:8], "little")


def _split_number(row: EncodedRow) -> int:
    # The key of rows that were given as token ids is their prompt. It is no digest: many prompts begin alike.
    if len(row.split_key) == _DIGEST_BYTES and row.split_key != row.tree_key:
        return key_number(row.split_key)
    return key_number(hashlib.blake2b(row.split_key, digest_size=_DIGEST_BYTES).digest())


def groups(*columns: npt.NDArray[Any]) -> Integers:
    """`[n]` consecutive numbers from 0; rows whose columns are all equal have equal numbers."""
    numbers = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        if (column == column[:1]).all():
            continue
        values, own = np.unique(column, return_inverse=True)
        # Renumbered after each column, so that the product stays below n squared and cannot overflow.
        numbers = np.unique(numbers * len(values) + own, return_inverse=True)[1] if numbers.any() else own
    return numbers


def first_of(numbers: npt.NDArray[Any]) -> Integers:
    """The first row with each number, for ascending numbers."""
    return np.unique(numbers, return_index=True)[1]


def evenly_spaced(count: int, most: int) -> Integers:
    """Up to `most` evenly spaced positions out of `count`."""
    most = min(count, most)
    return np.arange(most, dtype=np.int64) * count // max(most, 1)
