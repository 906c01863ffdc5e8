"""The engine of a run on tensors without values: the same models, method and optimizer, of which only shapes exist."""

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface

from tropism.data.batching.collate import Batch
from tropism.data.tree import PromptTree
from tropism.model import attention as tree_attention
from tropism.model.bf16_weights import roundable
from tropism.model.head.divergence import Comparison, TopK
from tropism.model.head.tiles import Planned, planning
from tropism.model.language_model import LanguageModel
from tropism.train.adamw8bit import AdamW8bit
from tropism.train.engine import Engine
from tropism.train.optimizer import Updater
from tropism.train.planning.count import Count, Counter
from tropism.train.planning.heap import Gaps
from tropism.train.planning.memory import KEPT
from tropism.train.step import train_step
from tropism.train.step_packs import StepPacks

HOST = torch.device("cpu")
"""Fake tensors are on the CPU: torch has no fake GPU without a real one."""
_HEAD = "tropism.model.head"


@dataclass
class ZeroReference:
    """Stands for stored reference scores."""

    fingerprint: str = ""

    def score(self, trees: Sequence[PromptTree], batch: Batch) -> Tensor:
        """`[C]` zeros."""
        return torch.zeros(len(batch.lengths), dtype=torch.float64)


@dataclass
class StoredTopK:
    """Stands for a teacher's stored tokens."""

    comparison: Comparison
    k: int
    fingerprint: str = ""

    def targets(self, trees: Sequence[PromptTree], batch: Batch) -> TopK:
        """Tensors of the shapes of `StoredTeacher.targets`."""
        tokens = len(batch.target_ids)
        return TopK(torch.zeros(tokens, self.k, dtype=torch.int64), torch.zeros(tokens, self.k), torch.zeros(tokens))


def layers_of(module: Any) -> torch.nn.ModuleList:
    """The decoder layers of a model: its longest list of modules."""
    lists = [part for part in module.modules() if isinstance(part, torch.nn.ModuleList)]
    return max(lists, key=len, default=torch.nn.ModuleList())


def fake_copy(module: Any, fake: FakeTensorMode, number: int | None = None,
              dtypes: Callable[[str], torch.dtype | None] = lambda name: None) -> Any:
    """A copy of a module, real or on the meta device, with weights that have no values. It shares nothing with it.

    Args:
        number: of decoder layers to copy; None for all.
        dtypes: another dtype for the weight of a name; None to keep its own.
    """
    left_out = list(layers_of(module)[number:]) if number is not None else []
    memo: dict[int, Any] = {id(layer): torch.nn.Module() for layer in left_out}
    unused = {id(weight) for layer in left_out for weight in (*layer.parameters(), *layer.buffers())}
    with fake, torch.no_grad():
        for name, weight in module.named_parameters():
            if id(weight) in unused:
                continue
            made = torch.empty(weight.shape, dtype=dtypes(name) or weight.dtype, device=HOST)
            memo[id(weight)] = torch.nn.Parameter(made, requires_grad=weight.requires_grad)
        for buffer in module.buffers():
            memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device=HOST)
        copied = copy.deepcopy(module, memo)
    if number is not None:
        del layers_of(copied)[number:]
    return copied


def narrowed(module: Any) -> Callable[[str], torch.dtype | None]:
    """The dtypes of a frozen model whose products are computed in bfloat16: as `round_to_bf16` leaves them."""
    names = roundable(module)
    return lambda name: torch.bfloat16 if name in names else None


class Quantized(torch.nn.Linear):
    """A linear layer whose frozen weight is held in few bits and dequantized for each product, without values.

    Args:
        layer: the linear layer that it stands for.
        bits: per weight. Scales take another eighth of a byte for 8 weights (absmax of blocks of 64, quantized).
    """

    def __init__(self, layer: torch.nn.Linear, bits: int) -> None:
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = layer.in_features, layer.out_features, layer.bias
        size = self.in_features * self.out_features
        self.weight = torch.nn.Parameter(torch.empty(size * bits // 8 + size // 64, dtype=torch.uint8), False)

    def forward(self, hidden: Tensor) -> Tensor:
        """The product with the dequantized weight."""
        result: Tensor = _QuantizedProduct.apply(hidden, self)
        return result if self.bias is None else result + self.bias.to(result.dtype)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """`[out, in]` weight."""
        return torch.zeros(self.out_features, self.in_features).to(dtype)


class _QuantizedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, layer: Quantized) -> Tensor:
        cast = torch.is_autocast_enabled(HOST.type)
        ctx.layer, ctx.compute = layer, torch.get_autocast_dtype(HOST.type) if cast else hidden.dtype
        ctx.dtype = hidden.dtype
        return torch.nn.functional.linear(hidden.to(ctx.compute), layer.dequantized(ctx.compute))

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return (upstream.to(ctx.compute) @ ctx.layer.dequantized(ctx.compute)).to(ctx.dtype), None


def quantize(module: Any, fake: FakeTensorMode, plain: Sequence[str], bits: int) -> None:
    """Replace the linear layers of a fake model as `--lora.quantize` does.

    Args:
        plain: full names of the modules that are not quantized.
    """
    with fake:
        for name, layer in list(module.named_modules()):
            adapter = "lora_" in name or "modules_to_save" in name
            if type(layer) is torch.nn.Linear and not adapter and name.replace(".base_layer", "") not in plain:
                parent, _, own = name.rpartition(".")
                setattr(module.get_submodule(parent), own, Quantized(layer, bits))


class _Varlen(torch.autograd.Function):
    """Stands for one variable-length attention call on a GPU: its memory, and one launch forwards, two backwards."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, pairs: float, counter: Counter) -> Tensor:
        ctx.pairs, ctx.counter = pairs, counter
        out = torch.empty_like(query)
        log_z = torch.empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, log_z)
        heads, width = query.shape[1], query.shape[-1]
        _attend(counter, 4 * heads * width * pairs, (query, key, value, out), 1)
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        query, key, value, out, _ = ctx.saved_tensors
        change = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        _attend(ctx.counter, 10 * query.shape[1] * query.shape[-1] * ctx.pairs,
                (query, key, value, out, upstream, *change), 2)
        return (*change, None, None)


def _attend(counter: Counter, flops: float, tensors: Sequence[Tensor], launches: int) -> None:
    counter.add("attention", flops, _size(*tensors), tensors[0].dtype, launches)


def _size(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass(frozen=True)
class _Kernels:
    """Stands for the fused kernels of a GPU's head: each reads a tile once, and the second one writes it."""

    counter: Counter

    def fold(self, raw: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        """As `folds.fold`."""
        self.counter.add("head", 0.0, _size(raw), raw.dtype)
        return torch.empty_like(raw[:, 0]), torch.empty_like(raw[:, 0])

    def unfold(self, raw: Tensor, shape: Any, targets: Tensor, first: int, log_z: Tensor, upstream: Tensor,
               out: Tensor | None = None) -> Tensor:
        """As `folds.unfold`."""
        out = raw if out is None else out
        self.counter.add("head", 0.0, _size(raw, out), raw.dtype)
        return out


def _on_gpu(counter: Counter, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Tree attention as a GPU computes it: one call for a pack, which gathers keys unless scores have caps or sinks."""
    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None = None,
               dropout: float = 0.0, **rest: Any) -> tuple[Tensor, None]:
        tree = rest.get("tree")
        if tree is None:
            return plain(module, query, key, value, mask, scaling, dropout, **rest)
        segments, window = tree.segments, rest.get("sliding_window")
        tree.seen.add(id(module))
        tree.windows.add(window)
        query, key = query.to(value.dtype), key.to(value.dtype)
        key, value = tree.with_earlier(module, key, value)
        if rest.get("softcap") is None and rest.get("s_aux") is None:
            key, value = key.index_select(2, segments.key_index), value.index_select(2, segments.key_index)
        pairs = float(sum(_pairs(q, k, window) for q, k in zip(segments.query_lengths, segments.key_lengths,
                                                               strict=True)))
        return _Varlen.apply(query, key, value, pairs, counter).transpose(1, 2).contiguous(), None

    return attend


def _pairs(queries: int, keys: int, window: int | None) -> float:
    """Number of (query, key) pairs of a segment: causal from the bottom right, at most `window` keys back."""
    seen = queries * keys - queries * (queries - 1) / 2
    return seen if window is None else min(seen, queries * window)


@contextmanager
def _watched(counter: Counter, gpu: bool) -> Iterator[None]:
    """Let the counter see which operations belong to attention and head, and which keys and values are kept.

    Tiles of the head have the size that they have on the device.
    """
    plain = tree_attention.tree_attention
    inner = _on_gpu(counter, plain) if gpu else plain

    def attend(module: Any, *args: Any, **kwargs: Any) -> Any:
        found = inner(module, *args, **kwargs)
        tree = kwargs.get("tree")
        if tree is not None and tree.record:
            for tensor in tree._kept.get(id(module), ()):
                counter.hold(tensor, "prompt keys/values")
        return found

    AttentionInterface.register(tree_attention.NAME, attend)
    undo: list[tuple[Any, str, Any]] = []
    for name in [name for name in sys.modules if name.startswith(_HEAD)]:
        for function in vars(sys.modules[name]).values():
            if isinstance(function, type) and issubclass(function, torch.autograd.Function):
                for method in ("forward", "backward"):
                    original = function.__dict__.get(method)
                    if isinstance(original, staticmethod):
                        undo.append((function, method, original))
                        setattr(function, method, staticmethod(_as_head(counter, original.__func__)))
    try:
        with planning(Planned(gpu, counter.repeated, _Kernels(counter) if gpu else None)):
            yield
    finally:
        AttentionInterface.register(tree_attention.NAME, plain)
        for owner, name, original in undo:
            setattr(owner, name, original)


def _as_head(counter: Counter, call: Callable[..., Any]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        with counter.counting_as("head", "head tiles"):
            return call(*args, **kwargs)

    return counted


@dataclass(frozen=True)
class FakeEngine:
    """An engine on tensors without values.

    Args:
        engine: on the fake device, of one process.
        fake: the mode of its tensors.
        gpu: count attention and head as a GPU computes them.
    """

    engine: Engine
    fake: FakeTensorMode
    gpu: bool = False

    def count(self, steps: Sequence[StepPacks], clock: Any = None) -> Count:
        """What the steps take, with an optimizer state as after the first step. Counts once."""
        engine, counter = self.engine, Counter(clock)
        with self.fake, _watched(counter, self.gpu), counter:
            for role, module in engine.modules.items():
                for tensor in (*module.parameters(), *module.buffers()):
                    if counter.holds(tensor) is None:
                        counter.hold(tensor, {"policy": "weights"}.get(role, role))
            with counter.allocating("optimizer"):
                begin(engine.updater)
            counter.count.costs = Count().costs
            counter.reset_peak()
            model = _Phased(**{one.name: getattr(engine.model, one.name) for one in fields(engine.model) if one.init})
            model.tell(counter, engine.updater.owned.weights, heap=not self.gpu)
            watched = replace(engine, model=model, updater=_Named(engine.updater, counter))
            for step in steps:
                train_step(watched, step)
            counter.count.live.clear()
        for phase, held in list(counter.count.peaks.items()):  # a single layer is the first and the last one
            if ", only " in phase:
                del counter.count.peaks[phase]
                for place in ("first", "last"):
                    counter.count.peaks[phase.replace("only", place)] = dict(held)
        return counter.count


class _Phased(LanguageModel):
    """A model that tells a counter which part of a pass runs. The backward pass is above the layers, in the last layer,
    in those between, in the first layer, or below: memory at each of these is linear in the number of layers."""

    def tell(self, counter: Counter, weights: Sequence[torch.nn.Parameter], heap: bool) -> None:
        """Tell this counter. `weights` are those that learn; with `heap`, gaps between tensors are counted too."""
        passes, visits, last = [0], [0], len(self.layers) - 1

        def enter(place: str) -> None:
            counter.phase = f"{passes[0]} backward, {place} {visits[0]}"

        def layer_begins(number: int) -> None:
            visits[0] += number == last
            enter("only" if last == 0 else {0: "first", last: "last"}.get(number, "between"))

        def watch(number: int, args: Any, kwargs: Any, output: Any) -> None:
            state = output[0] if isinstance(output, tuple) else output
            if state.requires_grad:
                state.register_hook(lambda _: layer_begins(number))
            hidden = args[0] if args else kwargs.get("hidden_states")
            if number == 0 and isinstance(hidden, Tensor) and hidden.requires_grad:
                hidden.register_hook(lambda _: enter("below"))

        for number, layer in enumerate(self.layers):
            layer.register_forward_hook(lambda _, args, kwargs, output, number=number: watch(
                number, args, kwargs, output), with_kwargs=True)
        for weight in weights:
            weight.register_post_accumulate_grad_hook(lambda weight: counter.hold(weight.grad, "gradients"))
        object.__setattr__(self, "_state", (counter, passes, visits, heap))
        counter.phase, counter.gaps = "0 forward", Gaps() if heap else None

    def backward(self, share: Tensor, last: bool) -> None:
        """As `LanguageModel.backward`."""
        counter, passes, visits, heap = self._state  # type: ignore[attr-defined]
        counter.mark(f"{passes[0]} {KEPT}")
        visits[0], counter.phase, counter.gaps = 0, f"{passes[0]} backward", None
        super().backward(share, last)
        passes[0] += 1
        counter.phase, counter.gaps = f"{passes[0]} forward", Gaps() if heap else None


def without_kernels(optimizer: Any) -> None:
    """Let an 8-bit optimizer hold its state on the device and leave out the update itself. No package is needed."""
    if isinstance(optimizer, AdamW8bit):
        optimizer.paged = False
        optimizer.__dict__.update(_update=lambda *_: None,
                                  _moment=lambda weight: torch.zeros_like(weight, dtype=torch.uint8))


def begin(updater: Updater) -> None:
    """Let an optimizer allocate its state."""
    for part in updater.owned.parts:
        part.grad = torch.zeros_like(part)
    updater.apply(1, torch.ones((), dtype=torch.bool))


class _Named:
    """An updater whose memory is named."""

    def __init__(self, updater: Updater, counter: Counter) -> None:
        self.optimizer, self.owned, self._updater, self._counter = updater.optimizer, updater.owned, updater, counter

    def apply(self, step: int, finite: Tensor) -> float:
        """As `Updater` says."""
        self._counter.phase = "update"
        with self._counter.allocating("optimizer"):
            return self._updater.apply(step, finite)

    def state(self) -> dict[str, Any]:
        """As `Updater` says."""
        return self._updater.state()

    def restore(self, state: dict[str, Any]) -> None:
        """As `Updater` says."""
        self._updater.restore(state)
