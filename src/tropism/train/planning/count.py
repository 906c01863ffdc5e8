"""Counts the operations of a step without computing them: FLOPs, bytes, launches, host waits and live memory.

The step runs on fake tensors, which have shapes but no values, under a mode that sees every operation. What it counts
is therefore the code that trains, not a formula beside it.
"""

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from tropism.train.planning.heap import Gaps

Kind = Literal["element-wise", "products", "attention", "head"]
KINDS: tuple[Kind, ...] = ("element-wise", "products", "attention", "head")

GAPS = "gaps"
"""Component of the gaps in the heap."""

_aten = torch.ops.aten
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "convolution", "linear", "_linear_pointwise", "addmv",
             "mv")
_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_GATHERS = ("embedding", "index_select", "gather", "index", "slice", "_unsafe_index")


@dataclass(slots=True)
class Cost:
    """Work of one kind.

    Args:
        flops: floating-point operations of matrix products and attention.
        bytes: read and written by the operations, each input and output once.
        launches: operations that are not views.
        seconds: by `Device.seconds`, operation by operation; 0 without a device.
    """

    flops: float = 0.0
    bytes: float = 0.0
    launches: float = 0
    seconds: float = 0.0

    def add(self, flops: float, size: float, seconds: float, times: float = 1.0) -> None:
        """Add one operation that runs so many times."""
        self.flops += times * flops
        self.bytes += times * size
        self.launches += times
        self.seconds += times * seconds


@dataclass
class Count:
    """What was counted.

    Args:
        costs: by kind of operation.
        live: bytes of live tensors by component.
        peaks: the same when their sum was largest in each phase of the step.
        waits: reads of a value by the host.
    """

    costs: dict[Kind, Cost] = field(default_factory=lambda: {kind: Cost() for kind in KINDS})
    live: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    peaks: dict[str, dict[str, float]] = field(default_factory=dict)
    waits: float = 0

    @property
    def at_peak(self) -> dict[str, float]:
        """Live bytes by component when their sum was largest."""
        return max(self.peaks.values(), key=lambda held: sum(held.values()), default={})

    @property
    def peak(self) -> float:
        """Largest sum of live bytes."""
        return sum(self.at_peak.values())

    def along(self, *others: "tuple[Count, float]") -> "Count":
        """This count plus, for each other one, so many times the difference to it, in every figure."""
        def further(a: float, *b: float) -> float:
            return max(0.0, a + sum(times * (to - a) for to, (_, times) in zip(b, others, strict=True)))

        names = ("flops", "bytes", "launches", "seconds")
        costs = {kind: Cost(*(further(getattr(cost, name), *(getattr(other.costs[kind], name) for other, _ in others))
                              for name in names)) for kind, cost in self.costs.items()}
        peaks = {phase: {name: further(held.get(name, 0), *(other.peaks[phase].get(name, 0) for other, _ in others))
                         for name in {name for one in (self, *(other for other, _ in others))
                                      for name in one.peaks[phase]}}
                 for phase, held in self.peaks.items() if all(phase in other.peaks for other, _ in others)}
        return Count(costs, peaks=peaks, waits=further(self.waits, *(other.waits for other, _ in others)))

    def total(self) -> Cost:
        """Work of all kinds."""
        return Cost(*(sum(getattr(cost, name) for cost in self.costs.values())
                      for name in ("flops", "bytes", "launches", "seconds")))


class Counter(TorchDispatchMode):
    """Follows every operation, and every storage from its allocation until it is freed.

    Use it within a `FakeTensorMode`.

    Args:
        clock: seconds of an operation, from its FLOPs, its bytes, the dtype of its inputs and its kind.

    Attributes:
        count: what was counted so far.
        component: name for the memory that is allocated now.
        phase: part of the step that runs now; peaks are kept apart, since each grows in its own way with a model.
        kind: kind of all operations now; None to tell by the operation.
        gaps: gaps in the heap that count as memory now; None if none do.
    """

    def __init__(self, clock: Any = None) -> None:
        super().__init__()
        self.count = Count()
        self.component = "activations"
        self.kind: Kind | None = None
        self._clock = clock
        self._times = 1.0
        self.gaps: Gaps | None = None
        self._held: dict[int, tuple[str, int, Any, Gaps | None]] = {}
        self.phase = "forward"
        self._sum = 0
        self._largest: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one operation."""
        kwargs = kwargs or {}
        name = func._schema.name.rpartition("::")[2]
        if func is _aten._local_scalar_dense.default:
            self.count.waits += 1
            return {torch.bool: True}.get(args[0].dtype, 1 if not args[0].is_floating_point() else 1.0)
        if name in ("equal", "is_nonzero"):
            self.count.waits += 1
            return True
        if getattr(func, "is_view", False) and isinstance(out := func(*args, **kwargs), Tensor):
            self.hold(out)
            return out
        out = _grouped(*args, **kwargs) if name == "_grouped_mm" else func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for tensor in outputs:
            self.hold(tensor)
        if name in _EMPTY or not outputs or _is_view(func, inputs, outputs):
            return out
        kind = self.kind or _kind_of(name)
        flops, size = flops_of(func, name, args, kwargs, out), _traffic(name, inputs, outputs)
        self.add(kind, flops, size, _dtype_of(inputs))
        return out

    def add(self, kind: Kind, flops: float, size: float, dtype: torch.dtype, launches: int = 1) -> None:
        """Count one operation, of several launches."""
        cost, seconds = self.count.costs[kind], self.seconds_of(flops, size, dtype, kind)
        cost.add(flops, size, seconds, self._times)
        cost.launches += (launches - 1) * self._times

    @contextmanager
    def repeated(self, times: float) -> Iterator[None]:
        """Count each operation of a block so many times."""
        before, self._times = self._times, self._times * times
        try:
            yield
        finally:
            self._times = before

    def seconds_of(self, flops: float, size: float, dtype: torch.dtype, kind: Kind) -> float:
        """Seconds of an operation by the clock; 0 without one."""
        return self._clock(flops, size, dtype, kind) if self._clock is not None else 0.0

    def holds(self, tensor: Tensor) -> str | None:
        """The component of a tensor's storage; None if it is not counted."""
        known = self._held.get(tensor.untyped_storage()._cdata)
        return known and known[0]

    def hold(self, tensor: Tensor, component: str | None = None) -> None:
        """Count the storage of a tensor from now on until it is freed.

        Args:
            component: what it is for; renames a storage that is counted already.
        """
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._held.get(key)
        if known is not None:
            if component is not None and known[0] != component:
                self.count.live[known[0]] -= known[1]
                self.count.live[component] += known[1]
                self._held[key] = (component, *known[1:])
            return
        component, size = component or self.component, storage.nbytes()
        gaps = self.gaps if torch.is_grad_enabled() else None  # else all is freed, and merges
        self._held[key] = (component, size, weakref.ref(storage, lambda _: self._free(key)), gaps)
        self.count.live[component] += size
        self._sum += size
        if gaps is not None:
            gaps.allocate(size)
        phase, used = f"{self.phase}, head" if self.kind == "head" else self.phase, self._sum + self._in_gaps
        if used > self._largest.get(phase, 0):
            self._largest[phase] = used
            self.mark(phase)

    def _free(self, key: int) -> None:
        component, size, _, gaps = self._held.pop(key)
        self.count.live[component] -= size
        self._sum -= size
        if gaps is not None and gaps is self.gaps:
            gaps.free(size)

    @property
    def _in_gaps(self) -> int:
        return 0 if self.gaps is None else self.gaps.total

    def mark(self, phase: str) -> None:
        """Name what is live now as the peak of a phase."""
        held = {**self.count.live, GAPS: self._in_gaps}
        self.count.peaks[phase] = {name: size for name, size in held.items() if size}

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        self._largest.clear()
        self.count.peaks.clear()

    @contextmanager
    def allocating(self, component: str) -> Iterator[None]:
        """Name the memory that a block allocates."""
        before, self.component = self.component, component
        try:
            yield
        finally:
            self.component = before

    @contextmanager
    def counting_as(self, kind: Kind, component: str | None = None) -> Iterator[None]:
        """Count all operations of a block as one kind, and name its memory."""
        before, self.kind = self.kind, kind
        try:
            with self.allocating(component or self.component):
                yield
        finally:
            self.kind = before


def _grouped(a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None) -> Tensor:
    """The result of a grouped product in any dtype. Its own rule for fake tensors knows bfloat16 only."""
    groups = () if offs is None or a.dim() + b.dim() == 5 else (len(offs),)
    if a.dim() + b.dim() == 6:
        groups = (len(a),)
    return a.new_empty(*groups, a.shape[-2], b.shape[-1], dtype=out_dtype or a.dtype)


def _kind_of(name: str) -> Kind:
    if "scaled_dot_product" in name or "flash_attention" in name or "efficient_attention" in name:
        return "attention"
    return "products" if name.rstrip("_") in _PRODUCTS or name in _PRODUCTS else "element-wise"


def _is_view(func: Any, inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> bool:
    """Whether an operation only looks at its inputs in another shape."""
    if func._schema.is_mutable:
        return False
    known = {tensor.untyped_storage()._cdata for tensor in inputs}
    return all(tensor.untyped_storage()._cdata in known for tensor in outputs)


def _bytes_of(tensor: Tensor) -> int:
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _traffic(name: str, inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> int:
    """Bytes read and written. A gather reads what it writes, not the table."""
    written = sum(map(_bytes_of, outputs))
    return 2 * written if name in _GATHERS else written + sum(map(_bytes_of, inputs))


def _dtype_of(inputs: Iterable[Tensor]) -> torch.dtype:
    return next((tensor.dtype for tensor in inputs if tensor.is_floating_point()), torch.float32)


def flops_of(func: Any, name: str, args: Any, kwargs: Any, out: Any) -> float:
    """FLOPs of a matrix product or an attention call; 0 for other operations. Causal attention counts half."""
    if "scaled_dot_product" in name and "cpu" in name:
        shift = 1 if "backward" in name else 0  # the backward pass takes the gradient first
        query, key, value = args[shift : shift + 3]
        whole = 2 * query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2] * (query.shape[3] + value.shape[3])
        causal = any(argument is True for argument in (*args, *kwargs.values()))
        return whole * (2.5 if shift else 1.0) * (0.5 if causal else 1.0)
    if name == "_grouped_mm":
        a, b = args[:2]
        return 2.0 * (b.numel() * a.shape[-2] if a.dim() > b.dim() else a.numel() * b.shape[-1])
    formula = flop_registry.get(func._overloadpacket) or flop_registry.get(getattr(_aten, name.rstrip("_"), None))
    if formula is None:
        if name == "_linear_pointwise":
            return 2.0 * args[0].numel() * args[1].shape[0]
        return 0.0
    return float(formula(*args, **kwargs, out_val=out))
