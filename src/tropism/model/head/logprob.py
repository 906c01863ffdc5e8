"""Log-probs from hidden states, without the logits of all positions or all columns at once.

The head applies bias, logit scale and final soft-cap. Logits exist for one tile of positions and columns at a time.
Their log-sum-exp is kept for the backward pass, which recomputes each tile, so memory does not grow with positions x
vocabulary.

The vocabulary may be divided over processes, which then make the same calls with equal hidden states and targets.
Values and the gradient by the hidden states are complete and equal on all of them: the backward pass sums the
contributions of all processes. Gradients by weight and bias cover the rows on each process.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tropism.errors import ModelError
from tropism.model.head.folds import fold, unfold
from tropism.model.head.shape import Shape
from tropism.model.head.tiles import COLUMNS, by_blocks, column_slices, slices, tile_elements
from tropism.model.head.vocab_parallel import UNDIVIDED, Columns, Divided, Undivided
from tropism.shapes import HeadWeight, Hidden, PerToken, TokenIndex
from tropism.spans import timed_as


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
            chunk: positions per tile; by default as many as fit `tiles.CPU_TILE` or `GPU_TILE`.
        """
        result: PerToken = _LinearLogProb.apply(hidden, self.weight, self.bias, targets, self, chunk)
        return result

    def shape(self, columns: slice = slice(None)) -> Shape:
        """What makes logits of products, for some of the columns on this process."""
        return Shape(None if self.bias is None else self.bias[columns], self.scale, self.softcap)

    def logits(self, hidden: Tensor, weight: Tensor, columns: slice = slice(None)) -> Tensor:
        """`[n, c]` logits of some of the columns on this process, in at least float32.

        Args:
            hidden: `[n, D]`.
            weight: `[V, D]` all rows on this process, in the dtype of the products.
        """
        return self.shape(columns).logits_(self.raw(hidden, weight, columns))

    def raw(self, hidden: Tensor, weight: Tensor, columns: slice = slice(None)) -> Tensor:
        """`[n, c]` products of which `shape` makes logits; as there."""
        return product(hidden, weight[columns].t())

    def tile_rows(self, elements: int, width: int | None = None) -> int:
        """Positions of a tile with that many elements and columns; by default all. Equal on all processes."""
        most = self.columns.max_width(self.weight)
        return max(1, elements // max(1, most if width is None else min(width, most)))

    @timed_as("head")
    @torch.no_grad()
    def log_collisions(self, hidden: Hidden, chunk: int | None = None) -> PerToken:
        """`[S]` log of the sum of p^2 over the vocabulary, in float32 or more: how peaked each prediction is."""
        compute = self.compute or self.weight.dtype
        weight = self.weight.to(compute)
        out = hidden.new_empty(len(hidden), dtype=torch.promote_types(compute, torch.float32))
        for rows in slices(len(hidden), chunk or self.tile_rows(tile_elements(weight), COLUMNS)):
            inputs = hidden[rows].to(compute)
            parts = [torch.stack(by_blocks(_log_sums, self.logits(inputs, weight, columns)))
                     for columns in column_slices(len(weight))]
            (log_z, of_squares), _ = self.columns.join(joined(parts), out.new_empty(0, len(inputs)))
            out[rows] = of_squares - 2 * log_z
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


def accumulate(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, without rounding below float32 if the device supports it."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.device.type == "cuda" and _adds_to_float32():
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += product(left, right)


@cache
def _adds_to_float32() -> bool:
    """Whether this torch adds products of bfloat16 to a float32 total on GPUs."""
    total, factor = torch.zeros(16, 16, device="cuda"), torch.zeros(16, 16, device="cuda", dtype=torch.bfloat16)
    try:
        torch.addmm(total, factor, factor, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return True


def joined(parts: list[Tensor]) -> Tensor:
    """Log-sum-exp over tiles, elementwise."""
    return parts[0] if len(parts) == 1 else torch.logsumexp(torch.stack(parts), dim=0)


def _log_sums(logits: Tensor) -> tuple[Tensor, Tensor]:
    """`[n]` log of the sums of exp(logits) and exp(2 logits)."""
    return torch.logsumexp(logits, dim=-1), torch.logsumexp(2 * logits, dim=-1)


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, head: Head,
                chunk: int | None) -> Tensor:
        compute = head.compute or weight.dtype
        weight_c = weight.to(compute)
        out = hidden.new_empty(len(hidden), dtype=torch.promote_types(compute, torch.float32))
        log_z = torch.empty_like(out)
        # With a frozen head the input gradient is upstream x (d logp / d hidden): computed now, from tiles that have
        # all columns, it saves a product.
        frozen = ctx.needs_input_grad[0] and not any(ctx.needs_input_grad[1:3])
        slope = torch.empty_like(hidden, dtype=out.dtype) if frozen else None
        width = len(weight) if frozen else COLUMNS
        elements, first = tile_elements(weight), head.columns.start
        for rows in slices(len(hidden), chunk or head.tile_rows(elements, None if frozen else width)):
            inputs, ids, parts = hidden[rows].to(compute), targets[rows], []
            for columns in column_slices(len(weight), width):
                raw = head.raw(inputs, weight_c, columns)
                parts.append(fold(raw, head.shape(columns), ids, first + columns.start))
            here = torch.stack([part[1] for part in parts]).sum(0)
            (log_z[rows],), (found,) = head.columns.join(joined([part[0] for part in parts])[None], here[None])
            out[rows] = found - log_z[rows]
            if slope is not None:
                change = unfold(raw, head.shape(), ids, first, log_z[rows], torch.ones_like(found),
                                _other(raw, compute), finished=True)
                slope[rows] = head.columns.sum(product(change, weight_c))
        ctx.head, ctx.chunk = head, chunk
        ctx.save_for_backward(hidden, weight, bias, targets, log_z, slope)
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_z, slope = ctx.saved_tensors
        if slope is not None:
            return (upstream[:, None] * slope).to(hidden.dtype), None, None, None, None, None
        head: Head = ctx.head

        def change_of(rows: slice, columns: slice, raw: Tensor, out: Tensor | None) -> Tensor:
            return unfold(raw, head.shape(columns), targets[rows], head.columns.start + columns.start, log_z[rows],
                          upstream[rows], out)

        gradients = backpropagate(ctx, hidden, weight, bias, tile_elements(weight), change_of)
        return (*gradients, None, None, None)


def backpropagate(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, elements: int,
                  change_of: Callable[[slice, slice, Tensor, Tensor | None], Tensor],
                  ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients by hidden states, weight and bias, as far as required. Products are recomputed tile by tile.

    The gradient by hidden states is complete on every process. The others cover the rows on this process.

    Args:
        ctx: of an autograd function with these three as its first inputs, and with `head` and `chunk`.
        elements: of a tile.
        change_of: returns the derivative of the loss by the products of some positions and columns on this process,
            which it is given, in place or in the last argument.
    """
    head: Head = ctx.head
    compute = head.compute or weight.dtype
    weight_c = weight.to(compute)
    accumulate_dtype = torch.promote_types(compute, torch.float32)
    grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
    grad_weight = torch.zeros_like(weight, dtype=accumulate_dtype) if ctx.needs_input_grad[1] else None
    grad_bias = (torch.zeros_like(bias, dtype=accumulate_dtype)
                 if bias is not None and ctx.needs_input_grad[2] else None)
    for rows in slices(len(hidden), ctx.chunk or head.tile_rows(elements, COLUMNS)):
        inputs = hidden[rows].to(compute)
        of_hidden = torch.zeros_like(inputs, dtype=accumulate_dtype)
        for columns in column_slices(len(weight)):
            raw = head.raw(inputs, weight_c, columns)
            change = change_of(rows, columns, raw, None if grad_bias is not None else _other(raw, compute))
            if grad_bias is not None:
                grad_bias[columns] += change.sum(0)
                change = change.to(compute)
            if grad_hidden is not None:
                accumulate(of_hidden, change, weight_c[columns])
            if grad_weight is not None:
                accumulate(grad_weight[columns], change.t(), inputs)
        if grad_hidden is not None:
            grad_hidden[rows] = head.columns.sum(of_hidden).to(hidden.dtype)
    return (grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype))


def _other(raw: Tensor, compute: torch.dtype) -> Tensor | None:
    """A tile in the dtype of the products, or None if it may be the same one."""
    return None if raw.dtype == compute else torch.empty_like(raw, dtype=compute)


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
