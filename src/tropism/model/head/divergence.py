"""Divergence from a teacher: from the hidden states of both to one value per token.

The logits of all positions never exist at once. The student's log-probs of the target tokens come from the same tiles,
so distillation needs one pass over the head. The forward pass keeps a few numbers per position, such as the log-sum-exp
of both; with them the backward pass goes through each tile once. If the vocabulary is divided over processes, all of
them make the same calls (see `vocab_parallel`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tropism.losses.divergence import DIVERGENCES, LOWEST
from tropism.model.head import folds
from tropism.model.head.folds import score
from tropism.model.head.logprob import Head, backpropagate
from tropism.model.head.tiles import at, by_blocks, on_gpu, put, slices
from tropism.model.head.vocab_parallel import UNDIVIDED, Columns
from tropism.shapes import Hidden, PerToken, TokenIndex
from tropism.spans import timed_as

# Logits of one model at once, in elements: 64 MiB in float32 on a CPU; more on a GPU, where each tile adds to the
# gradient of its columns of the head.
_CPU_CHUNK, _GPU_CHUNK = 2**24, 2**26

Kept = tuple[Tensor, ...]
"""What the forward pass keeps for the backward pass: some numbers for each token, `[n, ...]`."""


class Divergence(Protocol):
    """One of `losses.divergence`, with its mixing weight bound."""

    def __call__(self, log_p: Tensor, log_q: Tensor, *, value: bool = True) -> tuple[Tensor, Tensor]:
        """(log p, log q) of teacher and student, `[n, V]`, to the value `[n]` and the slope `[n, V]`."""
        ...


class Targets(Protocol):
    """A teacher's distribution for each supervised token of a batch."""

    def compare(self, rows: slice, logits: Tensor, temperature: float, divergence: Divergence,
                columns: Columns) -> tuple[Tensor, Kept]:
        """`[n]` divergence of the tokens `rows`, and what `slope` needs.

        Args:
            rows: which tokens.
            logits: `[n, V]` the student's logits over the shared vocabulary. If the vocabulary is divided, the columns
                on this process; the divergence is complete.
            temperature: of both softmaxes.
            columns: which columns these are.
        """
        ...

    def slope(self, rows: slice, part: slice, kept: Kept, temperature: float, divergence: Divergence,
              columns: Columns) -> tuple[Callable[..., Tensor], Kept]:
        """How to get the derivative of the divergence by the student's logits of one tile, divided by the temperature.

        Args:
            rows, temperature, divergence, columns: as in `compare`.
            part: columns of the tile, among those on this process; the last ones may be above the shared vocabulary.
            kept: what `compare` has returned, of these rows.

        Returns:
            A function of a block of the logits `[m, c]`, of the shared vocabulary, and of the same rows of each of the
            tensors that follow, which returns `[m, c]`.
        """
        ...


@dataclass(frozen=True, slots=True)
class FullTargets:
    """The full distribution of a teacher in memory, computed tile by tile.

    Args:
        hidden: `[S, D]` the teacher's hidden state for each supervised token.
        head: its head; undivided, or divided like the student's.
    """

    hidden: Hidden
    head: Head

    def compare(self, rows: slice, logits: Tensor, temperature: float, divergence: Divergence,
                columns: Columns) -> tuple[Tensor, Kept]:
        """See `Targets`."""
        def log_sums(*both: Tensor) -> tuple[Tensor, ...]:
            return tuple(_log_sum(_heated(one, temperature)) for one in both)

        def compared(student: Tensor, teacher: Tensor, log_z: Tensor) -> tuple[Tensor, Tensor]:
            log_q, log_p = (_normalized(one, temperature, log_z[:, number])
                            for number, one in enumerate((student, teacher)))
            value, slope = divergence(log_p, log_q)
            return value, slope.sum(-1)

        teacher = self._logits(rows, slice(None), columns)[:, : logits.shape[1]].to(logits.dtype)
        if (kernel := kernel_of(logits, divergence, columns)) is not None:
            value, numbers = kernel[0].compare(logits, teacher, temperature, *kernel[1:])
            return value, (numbers,)
        log_z, _ = columns.join(torch.stack(by_blocks(log_sums, logits, teacher)), logits.new_empty(0, len(logits)))
        parts = torch.stack(by_blocks(compared, logits, teacher, log_z.t()))
        _, (value, total) = columns.join(parts[:0], parts)
        return value, (log_z.t(), total[:, None])

    def slope(self, rows: slice, part: slice, kept: Kept, temperature: float, divergence: Divergence,
              columns: Columns) -> tuple[Callable[..., Tensor], Kept]:
        """See `Targets`."""
        def change(student: Tensor, teacher: Tensor, log_z: Tensor, total: Tensor) -> Tensor:
            teacher = teacher[:, : student.shape[1]].to(student.dtype)
            log_q, log_p = (_normalized(one, temperature, log_z[:, number])
                            for number, one in enumerate((student, teacher)))
            return divergence(log_p, log_q, value=False)[1].addcmul(log_q.exp_(), total, value=-1)

        def changed(student: Tensor, teacher: Tensor, numbers: Tensor) -> Tensor:
            if not student.shape[1]:
                return torch.zeros_like(student)
            kernel = kernel_of(student, divergence, columns)
            teacher = teacher[:, : student.shape[1]].to(student.dtype)
            result: Tensor = kernel[0].slope(student, teacher, numbers, temperature, *kernel[1:])  # type: ignore[index]
            return result

        return change if len(kept) > 1 else changed, (self._logits(rows, part, columns), *kept)

    def _logits(self, rows: slice, part: slice, columns: Columns) -> Tensor:
        head = self.head.divided_as(columns)
        weight = head.weight.to(head.compute or head.weight.dtype)
        return head.logits(self.hidden[rows].to(weight.dtype), weight, part)


def kernel_of(logits: Tensor, divergence: Divergence, columns: Columns) -> tuple[Any, str, float] | None:
    """Triton's kernels for a divergence, its name and its mixing weight; None for plain torch."""
    name = next((name for name, known in DIVERGENCES.items() if known is getattr(divergence, "func", None)), None)
    if name is None or columns != UNDIVIDED or not folds.on_triton(logits):
        return None
    from tropism.model.head import divergence_triton_kernels

    return divergence_triton_kernels, name, divergence.keywords["mix"]  # type: ignore[attr-defined]


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
                columns: Columns) -> tuple[Tensor, Kept]:
        """See `Targets`."""
        kept_q, rest, log_z = _kept_logps(logits, self.ids[rows], temperature, columns)
        log_p = torch.cat((self.logps[rows], self.tail[rows, None]), dim=-1).to(logits.dtype)
        value, slope = divergence(log_p, torch.cat((kept_q, rest[:, None]), dim=-1))
        # Tokens of the tail share its slope by their mass: with m that mass, the derivative of one of them is
        # (p / m) (slope - m total). If all of them are masked, none has a slope.
        total, rest = slope.sum(-1, keepdim=True), rest.clamp(min=LOWEST)[:, None]
        return value, (log_z[:, None] + rest, slope[:, -1:] - rest.exp() * total,
                       slope[:, :-1] - kept_q.exp() * total)

    def slope(self, rows: slice, part: slice, kept: Kept, temperature: float, divergence: Divergence,
              columns: Columns) -> tuple[Callable[..., Tensor], Kept]:
        """See `Targets`."""
        def change(student: Tensor, ids: Tensor, shift: Tensor, of_tail: Tensor, of_kept: Tensor) -> Tensor:
            every = (student / temperature).sub_(shift).exp_().mul_(of_tail)
            return put(every, ids, of_kept, columns.start + part.start)

        return change, (self.ids[rows], *kept)


def _heated(logits: Tensor, temperature: float) -> Tensor:
    """Logits divided by the temperature, as one that may not be overwritten."""
    return logits if temperature == 1 else logits / temperature


def _log_sum(logits: Tensor) -> Tensor:
    """`[n]` log-sum-exp in float64: rounded to float32 it would lose the digits of large logits."""
    if not logits.shape[1]:
        return logits.new_full(logits.shape[:1], -torch.inf, dtype=torch.float64)
    peak = logits.amax(-1).clamp(min=torch.finfo(logits.dtype).min)
    return torch.logsumexp(logits - peak[:, None], dim=-1).double() + peak


def _normalized(logits: Tensor, temperature: float, log_z: Tensor) -> Tensor:
    """`[n, c]` log-probs, as a copy."""
    rounded = log_z.to(logits.dtype)
    return (_heated(logits, temperature) - rounded[:, None]).sub_((log_z - rounded).to(logits.dtype)[:, None])


def _kept_logps(logits: Tensor, kept: Tensor, temperature: float, columns: Columns) -> tuple[Tensor, Tensor, Tensor]:
    """`[n, k]` log-probs of the `[n, k]` kept ids, `[n]` of all others together, and the `[n]` log normalizer.

    Args:
        logits: `[n, V]`; if the vocabulary is divided, the columns on this process. The results are complete.
    """
    def parts(block: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        block = block / temperature
        log_sum, here = torch.logsumexp(block, dim=-1), at(block, ids, columns.start)
        return log_sum, torch.logsumexp(put(block, ids, torch.full_like(here, -torch.inf), columns.start), dim=-1), here

    log_sum, others, here = by_blocks(parts, logits, kept)
    (log_z, rest), found = columns.join(torch.stack((log_sum, others)), here.t())
    return found.t() - log_z[:, None], rest - log_z, log_z


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
            chunk: positions per tile.
        """
        found: tuple[PerToken, PerToken] = _LinearDivergence.apply(
            hidden, head.weight, head.bias, target_ids, head, targets, self, chunk)
        return found


class _LinearDivergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target_ids: Tensor, head: Head,
                targets: Targets, comparison: Comparison, chunk: int | None) -> tuple[Tensor, Tensor]:
        compute = head.compute or weight.dtype
        weight_c = weight.to(compute)
        out = hidden.new_empty(3, len(hidden), dtype=torch.promote_types(compute, torch.float32))
        kept: list[Kept] = []
        shared, width = head.columns.restrict_to(comparison.vocabulary, len(weight))
        for rows in slices(len(hidden), chunk or head.tile_rows(_elements(head))) if len(hidden) else [slice(0, 0)]:
            logits, ids = head.logits(hidden[rows].to(compute), weight_c), target_ids[rows, None]
            log_sum, here = by_blocks(lambda block, ids: (torch.logsumexp(block, dim=-1),
                                                          at(block, ids, head.columns.start)[:, 0]), logits, ids)
            (out[2, rows],), (here,) = head.columns.join(log_sum[None], here[None])
            out[0, rows] = here - out[2, rows]
            value, numbers = targets.compare(rows, logits[:, :width], comparison.temperature, comparison.divergence,
                                             shared)
            out[1, rows] = comparison.scale * value
            kept.append(numbers)
        ctx.set_materialize_grads(False)
        ctx.head, ctx.targets, ctx.comparison, ctx.chunk, ctx.shared = head, targets, comparison, chunk, (shared, width)
        ctx.save_for_backward(hidden, weight, bias, target_ids, out[2], *map(torch.cat, zip(*kept, strict=True)))
        return out[0], out[1]

    @staticmethod
    def backward(ctx: Any, of_logps: Tensor | None, of_divergence: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target_ids, log_z, *kept = ctx.saved_tensors
        head: Head = ctx.head
        comparison: Comparison = ctx.comparison
        shared, width = ctx.shared

        def change_of(rows: slice, columns: slice, raw: Tensor, out: Tensor | None) -> Tensor:
            shape, first = head.shape(columns), head.columns.start + columns.start
            common = max(0, width - columns.start)
            slope: Callable[..., Tensor] | None = None
            numbers: Kept = ()
            if of_divergence is not None:
                slope, numbers = ctx.targets.slope(rows, columns, tuple(one[rows] for one in kept),
                                                   comparison.temperature, comparison.divergence, shared)

            def of(block: Tensor, to: Tensor, ids: Tensor, log_z: Tensor, of_logp: Tensor, away: Tensor,
                   *numbers: Tensor) -> tuple[()]:
                logits = shape.logits_(block)
                bend = shape.bend(logits)
                change = None if slope is None else slope(logits[:, :common], *numbers).mul_(away)
                logits = logits.zero_() if of_logps is None else score(logits, ids, first, log_z, of_logp)
                if change is not None:
                    logits[:, :common] += change
                change = shape.to_raw(logits, bend)
                if out is not None:
                    to.copy_(change)
                return ()

            nothing = log_z[rows, None]
            by_blocks(of, raw, raw if out is None else out, target_ids[rows, None], log_z[rows, None],
                      nothing if of_logps is None else of_logps[rows, None],
                      nothing if of_divergence is None else
                      of_divergence[rows, None] * (comparison.scale / comparison.temperature), *numbers)
            return raw if out is None else out

        return (*backpropagate(ctx, hidden, weight, bias, _elements(head), change_of), None, None, None, None, None)


def _elements(head: Head) -> int:
    """Elements of one model's logits at once."""
    return _GPU_CHUNK if on_gpu(head.weight) else _CPU_CHUNK


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
        chunk: positions per tile; by default as many as `Comparison.per_token` takes.
    """
    weight = head.weight.to(head.compute or head.weight.dtype)
    ids = torch.empty(len(hidden), k, dtype=torch.int64, device=hidden.device)
    dtype = torch.promote_types(weight.dtype, torch.float32)
    logps = torch.empty(len(hidden), k, dtype=dtype, device=hidden.device)
    tail = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
    columns, width = head.columns.restrict_to(vocabulary, len(weight))
    for rows in slices(len(hidden), chunk or head.tile_rows(_elements(head))):
        logits = head.logits(hidden[rows].to(weight.dtype), weight)[:, :width]
        ids[rows] = columns.top_k(logits / temperature, k)
        logps[rows], tail[rows], _ = _kept_logps(logits, ids[rows], temperature, columns)
    return TopK(ids, logps, tail)
