"""Vocabulary parallelism: which columns of the logits are on this process, and reductions over all of them.

The vocabulary of a head may be divided over the processes of a group, each of which holds some rows of its weight
(Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, section 3). All of them call the same functions on the same
positions in the same order. A reduction exchanges a few numbers per position: every process sends its own, and adds up
all of them in the order of ranks. Results are therefore bitwise equal on all processes, and equal terms have equal
sums. An all-reduce over more than two processes guarantees neither.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Union

import torch
from torch import Tensor

Columns = Union["Undivided", "Divided"]


class Group(Protocol):
    """The processes that share a vocabulary. Tensors may be on any device."""

    @property
    def rank(self) -> int:
        """Rank of this process in the group."""
        ...

    @property
    def size(self) -> int:
        """Number of processes."""
        ...

    def sum(self, values: Tensor) -> Tensor:
        """Elementwise sum, bitwise equal on all processes. May overwrite `values`."""
        ...

    def gather(self, values: Tensor) -> Tensor:
        """`[size, ...]` values of all processes in the order of ranks. Shapes and dtypes must be equal."""
        ...


@dataclass(frozen=True, slots=True)
class Undivided:
    """All columns are on this process."""

    @property
    def start(self) -> int:
        """Id of the first column on this process."""
        return 0

    def max_width(self, weight: Tensor) -> int:
        """The largest number of columns of any process. Equal on all of them, as chunk sizes must be."""
        return len(weight)

    def restrict_to(self, vocabulary: int, width: int) -> tuple[Columns, int]:
        """The columns of ids below `vocabulary`, and how many of the first `width` on this process these are."""
        return self, min(vocabulary, width)

    def divided_like(self, other: Columns) -> bool:
        """Whether `other` is divided at the same ids, as far as these columns reach. Equal on all processes."""
        return self == other

    def join(self, logs: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        """`[a, n]` log-sum-exps and `[b, n]` sums over all columns, from those over the columns on this process."""
        return logs, sums

    def top_k(self, logits: Tensor, k: int) -> Tensor:
        """`[n, k]` ids of the largest logits in descending order. torch.topk decides between equal logits."""
        return torch.topk(logits, k, dim=-1).indices

    def sum(self, parts: Tensor) -> Tensor:
        """Elementwise sum of the contributions of all columns. May overwrite `parts`."""
        return parts


@dataclass(frozen=True, slots=True)
class Divided:
    """Some columns are on this process, divided as torch.chunk does: the last ranks may have fewer columns, or none.

    Ids always refer to the full vocabulary; `[n, v]` are the columns on this process. Methods do the same as those of
    `Undivided`.

    Args:
        vocabulary: V, columns of all processes together.
        share: columns of a process with a full share.
        group: the processes; rank r has the columns from `r * share` on.
    """

    vocabulary: int
    share: int
    group: Group

    @classmethod
    def of(cls, vocabulary: int, group: Group) -> "Divided":
        """Divide `vocabulary` columns over a group."""
        return cls(vocabulary, -(-vocabulary // group.size), group)

    @property
    def start(self) -> int:
        """Id of the first column on this process."""
        return min(self.group.rank * self.share, self.vocabulary)

    @property
    def widths(self) -> list[int]:
        """Number of columns of each process."""
        return [min(max(self.vocabulary - rank * self.share, 0), self.share) for rank in range(self.group.size)]

    @property
    def width(self) -> int:
        """Number of columns on this process."""
        return self.widths[self.group.rank]

    def max_width(self, weight: Tensor) -> int:
        """See `Undivided`."""
        return self.share

    def restrict_to(self, vocabulary: int, width: int) -> tuple[Columns, int]:
        """See `Undivided`. There may be no such columns on this process."""
        fewer = replace(self, vocabulary=min(vocabulary, self.vocabulary))
        return fewer, fewer.width

    def divided_like(self, other: Columns) -> bool:
        """See `Undivided`."""
        return (isinstance(other, Divided) and other.group == self.group
                and replace(other, vocabulary=self.vocabulary).widths == self.widths)

    def join(self, logs: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        """See `Undivided`. One exchange."""
        found = self.group.gather(torch.cat((logs, sums)))
        return torch.logsumexp(found[:, : len(logs)], dim=0), _sum_in_order(found[:, len(logs):])

    def top_k(self, logits: Tensor, k: int) -> Tensor:
        """See `Undivided`. Between equal logits on two processes, the lower id is kept and comes first."""
        best, ids = torch.topk(logits, min(k, self.width), dim=-1)
        spare = (0, k - best.shape[1])  # if this process has fewer than k columns: all must send equal shapes
        found = self.group.gather(torch.nn.functional.pad(best, spare))
        of_all = self.group.gather(torch.nn.functional.pad(ids + self.start, spare))
        best, ids = (torch.cat([part[:, :width] for part, width in zip(parts, self.widths, strict=True)], dim=-1)
                     for parts in (found, of_all))
        return ids.gather(1, torch.sort(best, dim=-1, descending=True, stable=True).indices[:, :k])

    def sum(self, parts: Tensor) -> Tensor:
        """See `Undivided`."""
        return self.group.sum(parts)


UNDIVIDED = Undivided()


def _sum_in_order(parts: Sequence[Tensor] | Tensor) -> Tensor:
    """Sum over the first dimension, in its order for every element."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
