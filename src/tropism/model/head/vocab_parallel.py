"""Which columns of the logits are on this process, and what has to be known of all of them.

A head's vocabulary may be divided over the processes of a group, each with some rows of its weight (vocabulary
parallel: Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, section 3). All of them call the same functions on the
same positions in the same order. What is asked of the whole vocabulary are a few numbers per position. Every process
sends its own and adds up those of all in the order of ranks: so the answers are equal on all of them to the bit, and
equal numbers have equal sums, which an all-reduce of more than two processes does not promise.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Union

import torch
from torch import Tensor

from tropism.losses.divergence import tail_logp

Columns = Union["Undivided", "Divided"]


class Group(Protocol):
    """The processes that share a vocabulary. Tensors may be on any device."""

    @property
    def rank(self) -> int:
        """Which one this is."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def sum(self, values: Tensor) -> Tensor:
        """Elementwise sum, equal to the bit on all processes. `values` may be overwritten."""
        ...

    def gather(self, values: Tensor) -> Tensor:
        """`[size, ...]` what each process gave, in the order of ranks; all give equal shapes and dtypes."""
        ...


@dataclass(frozen=True, slots=True)
class Undivided:
    """All columns are here."""

    def max_width(self, weight: Tensor) -> int:
        """How many columns a process has at most; equal on all of them, as the size of chunks has to be."""
        return len(weight)

    def restrict_to(self, logits: Tensor, vocabulary: int) -> tuple[Columns, Tensor]:
        """The columns of ids below `vocabulary`, and their logits: a view."""
        return self, logits[:, :vocabulary]

    def divided_like(self, other: Columns) -> bool:
        """Whether others, up to the last of these, are divided as these are; every process answers the same."""
        return self == other

    def log_z(self, logits: Tensor) -> Tensor:
        """`[n]` log of the sum of exponentials of all columns."""
        return torch.logsumexp(logits, dim=-1)

    def target_logps(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """`[n]` log-probs of the `[n]` targets, and `[n]` log of the normalizer."""
        log_z = torch.logsumexp(logits, dim=-1)
        return logits.gather(1, targets[:, None]).squeeze(1) - log_z, log_z

    def kept_logps(self, logits: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`[n, k]` log-probs of the `[n, k]` kept ids, `[n]` that of all others, `[n]` log of the normalizer."""
        log_z = torch.logsumexp(logits, dim=-1)
        return logits.gather(1, kept) - log_z[:, None], tail_logp(logits, kept, log_z), log_z

    def log_softmax(self, *logits: Tensor) -> tuple[Tensor, ...]:
        """`[n, V]` log-probs, of each of the given logits."""
        return tuple(torch.log_softmax(one, dim=-1) for one in logits)

    def totals(self, value: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
        """`[n]` value of a divergence and `[n, 1]` sum of its slope, from those of the columns here."""
        return value, slope.sum(-1, keepdim=True)

    def top_k(self, logits: Tensor, k: int) -> Tensor:
        """`[n, k]` ids of the largest logits, by falling logit. Which of equal ones is taken, torch.topk decides."""
        return torch.topk(logits, k, dim=-1).indices

    def add(self, change: Tensor, ids: Tensor, values: Tensor) -> Tensor:
        """Add `[n, k]` values in the columns of `[n, k]` ids. Overwrites `change`."""
        return change.scatter_add_(1, ids, values)

    def put(self, change: Tensor, ids: Tensor, values: Tensor) -> Tensor:
        """Set the columns of `[n, k]` ids, distinct in a row, to `[n, k]` values. Overwrites `change`."""
        return change.scatter_(1, ids, values)

    def sum(self, parts: Tensor) -> Tensor:
        """Elementwise sum of what the columns here contribute to something; overwrites it."""
        return parts


@dataclass(frozen=True, slots=True)
class Divided:
    """Some columns are here: as torch.chunk divides them, so the last ranks may have fewer, or none.

    Ids are those of the whole vocabulary throughout; `[n, v]` are the columns here. The methods are those of `Undivided`.

    Args:
        vocabulary: V, columns of all processes together.
        share: columns of a process that has its full share.
        group: the processes, rank r with the columns from `r * share` on.
    """

    vocabulary: int
    share: int
    group: Group

    @classmethod
    def of(cls, vocabulary: int, group: Group) -> "Divided":
        """V columns divided over a group."""
        return cls(vocabulary, -(-vocabulary // group.size), group)

    @property
    def start(self) -> int:
        """Id of the first column here."""
        return min(self.group.rank * self.share, self.vocabulary)

    @property
    def widths(self) -> list[int]:
        """How many columns each process has."""
        return [min(max(self.vocabulary - rank * self.share, 0), self.share) for rank in range(self.group.size)]

    @property
    def width(self) -> int:
        """How many columns are here."""
        return self.widths[self.group.rank]

    def max_width(self, weight: Tensor) -> int:
        """As `Undivided` says."""
        return self.share

    def restrict_to(self, logits: Tensor, vocabulary: int) -> tuple[Columns, Tensor]:
        """As `Undivided` says; there may be none of them here."""
        fewer = replace(self, vocabulary=min(vocabulary, self.vocabulary))
        return fewer, logits[:, : fewer.width]

    def divided_like(self, other: Columns) -> bool:
        """As `Undivided` says."""
        return (isinstance(other, Divided) and other.group == self.group
                and replace(other, vocabulary=self.vocabulary).widths == self.widths)

    def log_z(self, logits: Tensor) -> Tensor:
        """As `Undivided` says."""
        return torch.logsumexp(self.group.gather(torch.logsumexp(logits, dim=-1)), dim=0)

    def target_logps(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """As `Undivided` says."""
        here = self._logits_at(logits, targets[:, None]).squeeze(1)
        found = self.group.gather(torch.stack((torch.logsumexp(logits, dim=-1), here)))
        log_z = torch.logsumexp(found[:, 0], dim=0)
        return _sum_in_order(found[:, 1]) - log_z, log_z

    def kept_logps(self, logits: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As `Undivided` says."""
        here = torch.logsumexp(logits, dim=-1)
        others = self._with_spare_column(logits, kept, -torch.inf).logsumexp(dim=-1)
        found = self.group.gather(torch.cat((here[:, None], others[:, None], self._logits_at(logits, kept)), dim=-1))
        log_z, rest = torch.logsumexp(found[..., 0], dim=0), torch.logsumexp(found[..., 1], dim=0)
        return _sum_in_order(found[..., 2:]) - log_z[:, None], rest - log_z, log_z

    def log_softmax(self, *logits: Tensor) -> tuple[Tensor, ...]:
        """As `Undivided` says, of the columns here."""
        found = self.group.gather(torch.stack([torch.logsumexp(one, dim=-1) for one in logits]))
        return tuple(one - torch.logsumexp(found[:, number], dim=0)[:, None] for number, one in enumerate(logits))

    def totals(self, value: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
        """As `Undivided` says."""
        found = _sum_in_order(self.group.gather(torch.stack((value, slope.sum(-1)))))
        return found[0], found[1][:, None]

    def top_k(self, logits: Tensor, k: int) -> Tensor:
        """As `Undivided` says. Of equal ones on two processes the lower id is taken, and stands first."""
        best, ids = torch.topk(logits, min(k, self.width), dim=-1)
        spare = (0, k - best.shape[1])  # where a process has fewer than k, so that all send as much
        found = self.group.gather(torch.nn.functional.pad(best, spare))
        of_all = self.group.gather(torch.nn.functional.pad(ids + self.start, spare))
        best, ids = (torch.cat([part[:, :width] for part, width in zip(parts, self.widths, strict=True)], dim=-1)
                     for parts in (found, of_all))
        return ids.gather(1, torch.sort(best, dim=-1, descending=True, stable=True).indices[:, :k])

    def add(self, change: Tensor, ids: Tensor, values: Tensor) -> Tensor:
        """As `Undivided` says; of the columns here."""
        if not self.width:
            return change
        column, here = self._locate(ids)
        return change.scatter_add_(1, column, values * here)

    def put(self, change: Tensor, ids: Tensor, values: Tensor) -> Tensor:
        """As `Undivided` says; of the columns here."""
        return self._with_spare_column(change, ids, values)[:, :-1]

    def sum(self, parts: Tensor) -> Tensor:
        """As `Undivided` says."""
        return self.group.sum(parts)

    def _locate(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Where ids are among the columns here, or some place, and which of them are here."""
        column = ids - self.start
        return column.clamp(0, max(self.width - 1, 0)), (column >= 0) & (column < self.width)

    def _logits_at(self, logits: Tensor, ids: Tensor) -> Tensor:
        """`[n, k]` logits of ids, 0 where they are elsewhere."""
        if not self.width:
            return logits.new_zeros(ids.shape)
        column, here = self._locate(ids)
        return logits.gather(1, column).where(here, 0)

    def _with_spare_column(self, columns: Tensor, ids: Tensor, values: Tensor | float) -> Tensor:
        """`[n, v + 1]` a copy with the columns of ids set; what is elsewhere goes to the last one, else at -inf."""
        column, here = self._locate(ids)
        copy = torch.nn.functional.pad(columns, (0, 1), value=-torch.inf)
        column = column.where(here, self.width)
        return copy.scatter_(1, column, values)


UNDIVIDED = Undivided()


def _sum_in_order(parts: Sequence[Tensor] | Tensor) -> Tensor:
    """Sum over the first dimension, in its order at every place."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
