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

from tropism.losses.divergence import tail_logp

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

    def max_width(self, weight: Tensor) -> int:
        """The largest number of columns of any process. Equal on all of them, as chunk sizes must be."""
        return len(weight)

    def restrict_to(self, logits: Tensor, vocabulary: int) -> tuple[Columns, Tensor]:
        """The columns of ids below `vocabulary`, and a view of their logits."""
        return self, logits[:, :vocabulary]

    def divided_like(self, other: Columns) -> bool:
        """Whether `other` is divided at the same ids, as far as these columns reach. Equal on all processes."""
        return self == other

    def log_z(self, logits: Tensor) -> Tensor:
        """`[n]` log-sum-exp over all columns."""
        return torch.logsumexp(logits, dim=-1)

    def target_logps(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """`[n]` log-probs of the `[n]` targets, and the `[n]` log normalizer."""
        log_z = torch.logsumexp(logits, dim=-1)
        return logits.gather(1, targets[:, None]).squeeze(1) - log_z, log_z

    def kept_logps(self, logits: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`[n, k]` log-probs of the `[n, k]` kept ids, `[n]` of all others together, and the `[n]` log normalizer."""
        log_z = torch.logsumexp(logits, dim=-1)
        return logits.gather(1, kept) - log_z[:, None], tail_logp(logits, kept, log_z), log_z

    def log_softmax(self, *logits: Tensor) -> tuple[Tensor, ...]:
        """`[n, V]` log-probs for each of the given logits."""
        return tuple(torch.log_softmax(one, dim=-1) for one in logits)

    def totals(self, value: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
        """`[n]` value of a divergence and `[n, 1]` sum of its slope over all columns."""
        return value, slope.sum(-1, keepdim=True)

    def top_k(self, logits: Tensor, k: int) -> Tensor:
        """`[n, k]` ids of the largest logits in descending order. torch.topk decides between equal logits."""
        return torch.topk(logits, k, dim=-1).indices

    def add(self, change: Tensor, ids: Tensor, values: Tensor) -> Tensor:
        """Add `[n, k]` values to the columns of `[n, k]` ids, in place."""
        return change.scatter_add_(1, ids, values)

    def put(self, change: Tensor, ids: Tensor, values: Tensor) -> Tensor:
        """Set the columns of `[n, k]` ids, distinct within a row, to `[n, k]` values. Overwrites `change`."""
        return change.scatter_(1, ids, values)

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

    def restrict_to(self, logits: Tensor, vocabulary: int) -> tuple[Columns, Tensor]:
        """See `Undivided`. There may be no such columns on this process."""
        fewer = replace(self, vocabulary=min(vocabulary, self.vocabulary))
        return fewer, logits[:, : fewer.width]

    def divided_like(self, other: Columns) -> bool:
        """See `Undivided`."""
        return (isinstance(other, Divided) and other.group == self.group
                and replace(other, vocabulary=self.vocabulary).widths == self.widths)

    def log_z(self, logits: Tensor) -> Tensor:
        """See `Undivided`."""
        return torch.logsumexp(self.group.gather(torch.logsumexp(logits, dim=-1)), dim=0)

    def target_logps(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """See `Undivided`."""
        here = self._logits_at(logits, targets[:, None]).squeeze(1)
        found = self.group.gather(torch.stack((torch.logsumexp(logits, dim=-1), here)))
        log_z = torch.logsumexp(found[:, 0], dim=0)
        return _sum_in_order(found[:, 1]) - log_z, log_z

    def kept_logps(self, logits: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `Undivided`."""
        here = torch.logsumexp(logits, dim=-1)
        others = self._with_spare_column(logits, kept, -torch.inf).logsumexp(dim=-1)
        found = self.group.gather(torch.cat((here[:, None], others[:, None], self._logits_at(logits, kept)), dim=-1))
        log_z, rest = torch.logsumexp(found[..., 0], dim=0), torch.logsumexp(found[..., 1], dim=0)
        return _sum_in_order(found[..., 2:]) - log_z[:, None], rest - log_z, log_z

    def log_softmax(self, *logits: Tensor) -> tuple[Tensor, ...]:
        """See `Undivided`; for the columns on this process.

        The largest logit is subtracted first, as torch does: a log-sum-exp of large logits has large rounding errors.
        """
        peaks = [one.amax(-1).clamp(min=torch.finfo(one.dtype).min) if self.width else one.new_full(
            one.shape[:1], -torch.inf) for one in logits]
        sums = [torch.logsumexp(one - peak[:, None], dim=-1) for one, peak in zip(logits, peaks, strict=True)]
        found = self.group.gather(torch.stack((*peaks, *sums)))
        logps = []
        for one, of_processes, logs in zip(logits, *found.transpose(0, 1).chunk(2), strict=True):
            peak = of_processes.amax(0)
            logps.append(one - peak[:, None] - torch.logsumexp(of_processes - peak + logs, dim=0)[:, None])
        return tuple(logps)

    def totals(self, value: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
        """See `Undivided`."""
        found = _sum_in_order(self.group.gather(torch.stack((value, slope.sum(-1)))))
        return found[0], found[1][:, None]

    def top_k(self, logits: Tensor, k: int) -> Tensor:
        """See `Undivided`. Between equal logits on two processes, the lower id is kept and comes first."""
        best, ids = torch.topk(logits, min(k, self.width), dim=-1)
        spare = (0, k - best.shape[1])  # if this process has fewer than k columns: all must send equal shapes
        found = self.group.gather(torch.nn.functional.pad(best, spare))
        of_all = self.group.gather(torch.nn.functional.pad(ids + self.start, spare))
        best, ids = (torch.cat([part[:, :width] for part, width in zip(parts, self.widths, strict=True)], dim=-1)
                     for parts in (found, of_all))
        return ids.gather(1, torch.sort(best, dim=-1, descending=True, stable=True).indices[:, :k])

    def add(self, change: Tensor, ids: Tensor, values: Tensor) -> Tensor:
        """See `Undivided`; on the columns of this process."""
        if not self.width:
            return change
        column, here = self._locate(ids)
        return change.scatter_add_(1, column, values * here)

    def put(self, change: Tensor, ids: Tensor, values: Tensor) -> Tensor:
        """See `Undivided`; on the columns of this process."""
        return self._with_spare_column(change, ids, values)[:, :-1]

    def sum(self, parts: Tensor) -> Tensor:
        """See `Undivided`."""
        return self.group.sum(parts)

    def _locate(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The local column of each id, clamped into range, and whether the id is on this process."""
        column = ids - self.start
        return column.clamp(0, max(self.width - 1, 0)), (column >= 0) & (column < self.width)

    def _logits_at(self, logits: Tensor, ids: Tensor) -> Tensor:
        """`[n, k]` logits of ids; 0 for ids on other processes."""
        if not self.width:
            return logits.new_zeros(ids.shape)
        column, here = self._locate(ids)
        return logits.gather(1, column).where(here, 0)

    def _with_spare_column(self, columns: Tensor, ids: Tensor, values: Tensor | float) -> Tensor:
        """`[n, v + 1]` a copy with the columns of ids set. Ids of other processes go to the last column, else -inf."""
        column, here = self._locate(ids)
        copy = torch.nn.functional.pad(columns, (0, 1), value=-torch.inf)
        column = column.where(here, self.width)
        return copy.scatter_(1, column, values)


UNDIVIDED = Undivided()


def _sum_in_order(parts: Sequence[Tensor] | Tensor) -> Tensor:
    """Sum over the first dimension, in its order for every element."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
