"""Chunked divergence from a teacher: from the hidden states of both to one value per token.

The logits of all positions never exist at once. The student's log-probs of the target tokens come from the same chunks,
so distillation needs one pass over the head. If the vocabulary is divided over processes, all of them make the same
calls (see `vocab_parallel`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tropism.losses.divergence import LOWEST
from tropism.model.head.logprob import Head, backpropagate, score
from tropism.model.head.vocab_parallel import Columns
from tropism.shapes import Hidden, PerToken, TokenIndex
from tropism.spans import timed_as

# Logits of one model at once, in elements: 16 MiB in float32 on a CPU; more on a GPU, since each chunk adds to the
# gradient of the full head. Up to 14 arrays of this size exist at once.
_CPU_CHUNK, _GPU_CHUNK = 2**22, 2**25

Divergence = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(log p, log q) of teacher and student, `[n, V]`, to the value `[n]` and the slope `[n, V]` of `losses.divergence`."""


class Targets(Protocol):
    """A teacher's distribution for each supervised token of a batch."""

    def compare(self, rows: slice, logits: Tensor, temperature: float, divergence: Divergence,
                columns: Columns) -> tuple[Tensor, Tensor]:
        """`[n]` divergence of the tokens `rows`, and `[n, V]` its derivative by the student's logits.

        Args:
            rows: which tokens.
            logits: `[n, V]` the student's logits over the shared vocabulary, already divided by `temperature`. If the
                vocabulary is divided, the columns on this process, as in the derivative; the divergence is complete.
            columns: which columns these are.
        """
        ...


@dataclass(frozen=True, slots=True)
class FullTargets:
    """The full distribution of a teacher in memory, computed chunk by chunk.

    Args:
        hidden: `[S, D]` the teacher's hidden state for each supervised token.
        head: its head; undivided, or divided like the student's.
    """

    hidden: Hidden
    head: Head

    def compare(self, rows: slice, logits: Tensor, temperature: float, divergence: Divergence,
                columns: Columns) -> tuple[Tensor, Tensor]:
        """See `Targets`."""
        head = self.head.divided_as(columns)
        weight = head.weight.to(head.compute or head.weight.dtype)
        teacher, _ = head.logits(self.hidden[rows].to(weight.dtype), weight)
        log_p, log_q = columns.log_softmax(teacher[:, : logits.shape[1]].to(logits.dtype) / temperature, logits)
        value, slope = divergence(log_p, log_q)
        value, total = columns.totals(value, slope)
        return value, slope - log_q.exp_() * total


@dataclass(frozen=True, slots=True)
class TopK:
    """A teacher's stored k likeliest tokens, with the mass of all other tokens as one more outcome.

    The k + 1 outcomes form a distribution, so the divergence is never negative.

    Args:
        ids: `[S, k]` token ids.
        logps: `[S, k]` their log-probs under softmax(logits / temperature).
        tail: `[S]` log-prob of all other tokens together.
    """

    ids: Tensor
    logps: Tensor
    tail: Tensor

    def compare(self, rows: slice, logits: Tensor, temperature: float, divergence: Divergence,
                columns: Columns) -> tuple[Tensor, Tensor]:
        """See `Targets`."""
        kept = self.ids[rows]
        kept_q, rest, log_z = columns.kept_logps(logits, kept)
        log_p = torch.cat((self.logps[rows], self.tail[rows, None]), dim=-1).to(logits.dtype)
        log_q = torch.cat((kept_q, rest[:, None]), dim=-1)
        value, slope = divergence(log_p, log_q)
        # Tokens of the tail share the tail's slope by their mass. If all of them are masked, none has a slope.
        every = logits - log_z[:, None]
        change = (every - rest.clamp(min=LOWEST)[:, None]).exp_() * slope[:, -1:]
        change = columns.put(change, kept, slope[:, :-1])
        return value, change - every.exp_() * slope.sum(-1, keepdim=True)


@dataclass(frozen=True, slots=True)
class Comparison:
    """How a student is compared with its teacher.

    Args:
        divergence: one of `losses.divergence`, with its mixing weight bound.
        temperature: T > 0 of both softmaxes.
        scale: factor on the divergence. T^2 keeps the size of its gradient (Hinton et al. 2015, arXiv:1503.02531,
            section 2.1).
        vocabulary: number of ids that both models have. Further columns of either head are padding and ignored.
    """

    divergence: Divergence
    temperature: float
    scale: float
    vocabulary: int

    @timed_as("head")
    def per_token(self, hidden: Hidden, head: Head, target_ids: TokenIndex, targets: Targets,
                  chunk: int | None = None) -> tuple[PerToken, PerToken]:
        """`[S]` log-prob of each target under the student, and its divergence from the teacher, in nats.

        Args:
            hidden: `[S, D]` the student's hidden state that predicts each target.
            head: the student's head.
            target_ids: `[S]` token ids.
            targets: the teacher's distributions. They get no gradient.
            chunk: positions per chunk.
        """
        chunk = chunk or _chunk(head)
        found: tuple[PerToken, PerToken] = _LinearDivergence.apply(
            hidden, head.weight, head.bias, target_ids, head, targets, self, chunk)
        return found

    def of(self, rows: slice, logits: Tensor, targets: Targets, columns: Columns) -> tuple[Tensor, Tensor]:
        """`[n]` value and `[n, V]` derivative by the student's logits, `V` being the shared vocabulary."""
        shared, shared_logits = columns.restrict_to(logits, self.vocabulary)
        value, change = targets.compare(rows, shared_logits / self.temperature, self.temperature, self.divergence,
                                        shared)
        return self.scale * value, change.mul_(self.scale / self.temperature)


class _LinearDivergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target_ids: Tensor, head: Head,
                targets: Targets, comparison: Comparison, chunk: int) -> tuple[Tensor, Tensor]:
        compute = head.compute or weight.dtype
        weight_c = weight.to(compute)
        out = hidden.new_empty(2, len(hidden), dtype=torch.promote_types(compute, torch.float32))
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            logits, _ = head.logits(hidden[rows].to(compute), weight_c)
            out[0, rows], _ = head.columns.target_logps(logits, target_ids[rows])
            out[1, rows] = comparison.of(rows, logits, targets, head.columns)[0]
        ctx.head, ctx.targets, ctx.comparison, ctx.chunk = head, targets, comparison, chunk
        ctx.save_for_backward(hidden, weight, bias, target_ids)
        return out[0], out[1]

    @staticmethod
    def backward(ctx: Any, of_logps: Tensor, of_divergence: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target_ids = ctx.saved_tensors

        def change_of(rows: slice, logits: Tensor) -> Tensor:
            columns = ctx.head.columns
            away = ctx.comparison.of(rows, logits, ctx.targets, columns)[1].mul_(of_divergence[rows, None])
            change = score(logits, columns.log_z(logits), target_ids[rows], columns).mul_(of_logps[rows, None])
            change[:, : away.shape[1]] += away
            return change

        return (*backpropagate(ctx, hidden, weight, bias, change_of), None, None, None, None, None)


def _chunk(head: Head) -> int:
    """Positions per chunk."""
    return max(1, (_GPU_CHUNK if head.weight.is_cuda else _CPU_CHUNK) // head.columns.max_width(head.weight))


@torch.no_grad()
def top_k(hidden: Hidden, head: Head, k: int, temperature: float, vocabulary: int,
          chunk: int | None = None) -> TopK:
    """A teacher's k likeliest tokens for each position, with the log-prob of all others together.

    If several tokens are equally likely, it is undefined which of them is kept last, but equal on all processes that
    share the vocabulary.

    Args:
        hidden: `[S, D]`.
        head: the teacher's head.
        k: tokens to keep, below `vocabulary`.
        temperature, vocabulary: as in `Comparison`.
        chunk: positions per chunk; by default as many as `Comparison.per_token` takes.
    """
    weight = head.weight.to(head.compute or head.weight.dtype)
    chunk = chunk or _chunk(head)
    ids = torch.empty(len(hidden), k, dtype=torch.int64, device=hidden.device)
    dtype = torch.promote_types(weight.dtype, torch.float32)
    logps = torch.empty(len(hidden), k, dtype=dtype, device=hidden.device)
    tail = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
    for start in range(0, len(hidden), chunk):
        rows = slice(start, start + chunk)
        columns, logits = head.columns.restrict_to(head.logits(hidden[rows].to(weight.dtype), weight)[0], vocabulary)
        logits = logits / temperature
        ids[rows] = columns.top_k(logits, k)
        logps[rows], tail[rows], _ = columns.kept_logps(logits, ids[rows])
    return TopK(ids, logps, tail)
