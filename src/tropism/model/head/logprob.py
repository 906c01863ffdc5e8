"""Chunked log-probs: from hidden states to log-probs of given tokens, without the logits of all positions at once.

The head applies bias, logit scale and final soft-cap. Logits exist for one chunk of positions at a time and are
recomputed in the backward pass, so memory does not grow with positions x vocabulary.

The vocabulary may be divided over processes, which then make the same calls with equal hidden states and targets.
Values and the gradient by the hidden states are complete and equal on all of them: the backward pass sums the
contributions of all processes. Gradients by weight and bias cover the rows on each process.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tropism.errors import ModelError
from tropism.model.head.vocab_parallel import UNDIVIDED, Columns, Divided, Undivided
from tropism.shapes import HeadWeight, Hidden, PerToken, TokenIndex
from tropism.spans import timed_as

_CHUNK_ELEMENTS = 2**25  # logits at once: 128 MiB in float32


@dataclass(frozen=True, slots=True)
class Head:
    """The language-model head: logits are `scale * (hidden @ weight.T + bias)`, then soft-capped.

    Args:
        weight: `[V, D]`; if the vocabulary is divided, the rows on this process.
        bias: `[V]` or None; likewise.
        scale: factor on the logits (Cohere's logit_scale, Falcon-H1's lm_head_multiplier, 1 / Granite's
            logits_scaling).
        softcap: cap c of c tanh(logits / c) (Gemma 2, RecurrentGemma), or None.
        compute: dtype of the matrix products; None for the weight's.
        columns: which rows of the weight are on this process.
    """

    weight: HeadWeight
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    compute: torch.dtype | None = None
    columns: Columns = UNDIVIDED

    @timed_as("head")
    def per_token_logps(self, hidden: Hidden, targets: TokenIndex, chunk: int | None = None) -> PerToken:
        """`[S]` log-prob of each target, in float32 or more.

        Args:
            hidden: `[S, D]` the hidden state that predicts each target.
            targets: `[S]` token ids.
            chunk: positions per chunk; by default as many as fit 128 MiB of logits.
        """
        chunk = chunk or max(1, _CHUNK_ELEMENTS // self.columns.max_width(self.weight))
        result: PerToken = _LinearLogProb.apply(hidden, self.weight, self.bias, targets, self, chunk)
        return result

    def logits(self, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """`[chunk, V]` logits in at least float32, and the derivative of the soft-cap, or None without one."""
        logits = product(hidden, weight.t())
        if self.bias is not None:
            logits += self.bias.to(logits.dtype)
        if self.scale != 1.0:
            logits *= self.scale
        if self.softcap is None:
            return logits, None
        bent = torch.tanh_(logits.div_(self.softcap))
        return bent * self.softcap, 1 - bent * bent

    def to_raw(self, change: Tensor, bend: Tensor | None) -> Tensor:
        """Turn a derivative by the logits into one by `hidden @ weight.T + bias`, in place."""
        if bend is not None:
            change *= bend
        if self.scale != 1.0:
            change *= self.scale
        return change

    @timed_as("head")
    @torch.no_grad()
    def log_collisions(self, hidden: Hidden, chunk: int | None = None) -> PerToken:
        """`[S]` log of the sum of p^2 over the vocabulary, in float32 or more: how peaked each prediction is."""
        compute = self.compute or self.weight.dtype
        weight = self.weight.to(compute)
        chunk = chunk or max(1, _CHUNK_ELEMENTS // self.columns.max_width(weight))
        out = hidden.new_empty(len(hidden), dtype=torch.promote_types(compute, torch.float32))
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            logits, _ = self.logits(hidden[rows].to(compute), weight)
            log_z = self.columns.log_z(logits)
            out[rows] = self.columns.log_z(logits.mul_(2)) - 2 * log_z
        return out

    def divided_as(self, columns: Columns) -> "Head":
        """This head, with the columns that another head has on this process.

        Args:
            columns: those of the other head, up to the last id that is compared.

        Raises:
            ModelError: on every process, if this head is divided at other ids.
        """
        if columns.divided_like(self.columns):
            return self
        if isinstance(self.columns, Undivided) and isinstance(columns, Divided):
            rows = slice(columns.start, columns.start + columns.width)
            return replace(self, weight=self.weight[rows], bias=None if self.bias is None else self.bias[rows],
                           columns=columns)
        raise ModelError("the heads of student and teacher are not divided over the processes at the same ids: their "
                         "sizes differ, or only one is divided. Use --top-k, which stores the teacher's likeliest "
                         "tokens and works with any division.")


def product(left: Tensor, right: Tensor) -> Tensor:
    """Matrix product with a result of at least float32, accumulated in float32 if the device supports it."""
    if left.dtype in (torch.float32, torch.float64):
        return left @ right
    if left.device.type == "cuda":
        return torch.mm(left, right, out_dtype=torch.float32)
    return (left @ right).float()


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, head: Head,
                chunk: int) -> Tensor:
        compute = head.compute or weight.dtype
        weight_c = weight.to(compute)
        out = hidden.new_empty(len(hidden), dtype=torch.promote_types(compute, torch.float32))
        frozen = not (ctx.needs_input_grad[1] or ctx.needs_input_grad[2])
        # With a frozen head the input gradient is upstream x (d logp / d hidden): computed now, it saves a product.
        slope = torch.empty_like(hidden, dtype=out.dtype) if frozen and ctx.needs_input_grad[0] else None
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            logits, bend = head.logits(hidden[rows].to(compute), weight_c)
            out[rows], log_z = head.columns.target_logps(logits, targets[rows])
            if slope is not None:
                change = head.to_raw(score(logits, log_z, targets[rows], head.columns), bend)
                slope[rows] = head.columns.sum(product(change.to(compute), weight_c))
        ctx.head, ctx.chunk = head, chunk
        ctx.save_for_backward(hidden, weight, bias, targets, slope)
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, slope = ctx.saved_tensors
        if slope is not None:
            return (upstream[:, None] * slope).to(hidden.dtype), None, None, None, None, None

        def change_of(rows: slice, logits: Tensor) -> Tensor:
            columns = ctx.head.columns
            change = score(logits, columns.log_z(logits), targets[rows], columns)
            return change.mul_(upstream[rows, None])

        return (*backpropagate(ctx, hidden, weight, bias, change_of), None, None, None)


def backpropagate(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None,
                  change_of: Callable[[slice, Tensor], Tensor]) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients by hidden states, weight and bias, as far as required. Logits are recomputed chunk by chunk.

    The gradient by hidden states is complete on every process. The others cover the rows on this process.

    Args:
        ctx: of an autograd function with these three as its first inputs, and with `head` and `chunk`.
        change_of: returns the derivative of the loss by the logits of some positions, and may overwrite the logits.
    """
    head: Head = ctx.head
    compute = head.compute or weight.dtype
    weight_c = weight.to(compute)
    accumulate_dtype = torch.promote_types(compute, torch.float32)
    grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
    grad_weight = torch.zeros_like(weight, dtype=accumulate_dtype) if ctx.needs_input_grad[1] else None
    grad_bias = (torch.zeros_like(bias, dtype=accumulate_dtype)
                 if bias is not None and ctx.needs_input_grad[2] else None)
    for start in range(0, len(hidden), ctx.chunk):
        rows = slice(start, start + ctx.chunk)
        inputs = hidden[rows].to(compute)
        logits, bend = head.logits(inputs, weight_c)
        change = head.to_raw(change_of(rows, logits), bend)
        change_c = change.to(compute)
        if grad_hidden is not None:
            grad_hidden[rows] = head.columns.sum(product(change_c, weight_c)).to(hidden.dtype)
        if grad_weight is not None:
            accumulate(grad_weight, change_c.t(), inputs)
        if grad_bias is not None:
            grad_bias += change.sum(0)
    return (grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype))


def score(logits: Tensor, log_z: Tensor, targets: Tensor, columns: Columns) -> Tensor:
    """`[chunk, V]` derivative of the log-prob by the logits. Overwrites `logits`."""
    change = logits.sub_(log_z[:, None]).exp_().neg_()
    return columns.add(change, targets[:, None], torch.ones_like(log_z)[:, None])


def accumulate(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, without rounding below float32 if the device supports it."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += product(left, right)


def head_of(model: Any, compute: torch.dtype | None = None, columns: Columns | None = None) -> Head:
    """The head of a transformers causal model, with the scale and soft-cap of its config.

    Args:
        columns: the columns on this process; by default the model's `tropism_columns`, or all. If they are divided,
            weight and bias may be DTensors, whose local parts are used.

    Raises:
        ModelError: if the head has other rows on this process.
    """
    columns = getattr(model, "tropism_columns", UNDIVIDED) if columns is None else columns
    linear = model.get_output_embeddings()
    config = model.config.get_text_config()
    scale = 1.0
    for name in ("logit_scale", "lm_head_multiplier", "output_multiplier"):
        scale *= float(getattr(config, name, None) or 1.0)
    if scaling := getattr(config, "logits_scaling", None):
        scale = scale * scaling if config.model_type.startswith("hyperclovax") else scale / scaling
    softcap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
    weight, bias = linear.weight, getattr(linear, "bias", None)
    if columns != UNDIVIDED:
        weight, bias = _local(weight), _local(bias)
        if isinstance(columns, Divided) and len(weight) != columns.width:
            raise ModelError(f"the head has {len(weight)} rows on process {columns.group.rank} instead of "
                             f"{columns.width} of {columns.vocabulary}. This is a bug in how the model is divided. "
                             "Please report it.")
    return Head(weight, bias, scale, softcap, compute, columns)


def _local(tensor: Any) -> Any:
    """The local part of a DTensor; anything else unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
