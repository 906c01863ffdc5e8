"""From a batch to log-probs: backbone, head, and the sum over each completion."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tropism.data.batching.collate import Batch, Layout
from tropism.distributed.passes import begin_step, prepare_backward, within
from tropism.distributed.shard import part_of, travels_in
from tropism.errors import ModelError
from tropism.model.adapters.switch import without_input_cast
from tropism.model.attention import NAME, TreePass, plain_implementation, tree_arguments
from tropism.model.checkpointing import Checkpointing, checkpointed, layers_forward
from tropism.model.compiled import CompiledLayers
from tropism.model.head.divergence import Comparison, Targets
from tropism.model.head.logprob import head_of
from tropism.model.moe_experts import compute_experts
from tropism.model.moe_router import RouterLogits
from tropism.model.token_state import layers_of
from tropism.shapes import PerCompletion, PerToken
from tropism.spans import timed_as

T = TypeVar("T")
Precision = Literal["fp32", "bf16", "fp64"]


@contextmanager
def computing(module: Any, precision: Precision, device: torch.device, cache: bool = True) -> Iterator[None]:
    """Let a module compute in a precision: by autocast for bfloat16, else in the dtype of its weights.

    If a sharded module communicates its matrices in bfloat16 but computes in float32, they are cast for each product.

    Args:
        cache: cast a weight that several layers share only once. Layers that are computed again cast it again.
    """
    if precision == "bf16":
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=cache):
            yield
    elif travels_in(module) is not None:
        with _Float32Products(), without_input_cast(module):
            yield
    else:
        yield


class _Float32Products(TorchFunctionMode):
    _PRODUCTS = (torch.nn.functional.linear, torch.addmm, torch.matmul, torch.mm, torch.bmm, torch.baddbmm)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in self._PRODUCTS:
            args = [value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value
                    for value in args]
        return function(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True)
class CompletionScores:
    """What a forward pass yields for each completion.

    Args:
        logps: `[C]` summed log-prob, in nats.
        divergence: `[C]` summed divergence from the teacher; None without a teacher.
        confidence: `[C]` mean of log p(token) - log sum p^2, no gradient; None unless requested.
    """

    logps: PerCompletion
    divergence: PerCompletion | None = None
    confidence: PerCompletion | None = None


@dataclass(frozen=True)
class LanguageModel:
    """A causal model as Tropism uses it.

    Args:
        module: a transformers causal model, in evaluation mode: no dropout anywhere.
        layout: layout of its batches.
        precision: `fp32`, `fp64`, or `bf16` (autocast, with weights in their own dtype).
        device: device of its weights.
        sum_once: for a sharded policy: sum gradients over processes only after the last pack of a step.
        gather_once: for a sharded policy: gather weights once per step, and keep them for all of its packs.
        stays: for a sharded frozen model: keep weights outside of its layers gathered between passes.
        rounding: largest difference between our log-prob of a completion and the model's own, measured at start, in
            nats per square root of its tokens.
        checkpointing: what passes with gradients keep of each layer for the backward pass.
        offload: keep that in host memory.
        compiled: the compiled layers, for passes over trees with gradients; None if layers are not compiled.
    """

    module: Any
    layout: Layout
    precision: Precision
    device: torch.device
    sum_once: bool = False
    gather_once: bool = False
    stays: bool = False
    rounding: float = 0.0
    checkpointing: Checkpointing = "none"
    offload: bool = False
    compiled: CompiledLayers | None = None
    layers: Sequence[torch.nn.Module] = field(init=False, repr=False, compare=False)
    """The decoder layers."""

    def __post_init__(self) -> None:
        self._attend()
        compute_experts(self.module, self.precision == "fp64")
        object.__setattr__(self, "layers", layers_of(self.module))

    def _attend(self) -> None:
        """Set the attention of the layout, which other users of the module may have changed."""
        wanted = NAME if self.layout == "tree" else plain_implementation(self.module)
        if self.module.config._attn_implementation == wanted:
            return
        self.module.set_attn_implementation(wanted)
        if self.module.config._attn_implementation != wanted:  # some families only log a failure
            raise ModelError(f"{type(self.module).__name__} does not support replacing its attention")

    @property
    def compute(self) -> torch.dtype:
        """Dtype of the matrix products."""
        return {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}[self.precision]

    def tree_pass(self, batch: Batch, *, record: bool = False, earlier: TreePass | None = None) -> TreePass | None:
        """The argument that tree attention needs for a batch; None in the padded layout."""
        return TreePass(batch.segments, record, earlier) if batch.segments is not None else None

    def _within(self, action: Callable[[], T], tree: TreePass | None) -> T:
        """Run an action on the module. If the module is sharded, its weights outside of layers are gathered for it."""
        self._attend()
        return within(self.module, action, self.stays or (tree is not None and tree.earlier is not None))

    def hidden(self, batch: Batch, tree: TreePass | None, routed: RouterLogits | None = None) -> Tensor:
        """`[S, D]` hidden state that predicts each supervised token. `routed` receives the router logits."""
        return self._within(lambda: (self._hidden(batch, tree, routed),), tree)[0]

    @timed_as("forward")
    def _hidden(self, batch: Batch, tree: TreePass | None, routed: RouterLogits | None) -> Tensor:
        kwargs: dict[str, Any] = {"attention_mask": batch.attention_mask} if tree is None else tree_arguments(
            self.module, tree, self.device)
        if routed is not None:
            kwargs["output_router_logits"] = True
        with self._layers(batch), self._computing():
            output = _backbone(self.module)(input_ids=batch.input_ids, position_ids=batch.position_ids,
                                            use_cache=False, **kwargs)
        if routed is not None:
            routed.keep(output)
        states = output.last_hidden_state.flatten(0, 1)
        if tree is not None:
            if tree.record:
                tree.states = states.detach()
            if tree.earlier is not None and tree.earlier.states is not None:
                states = torch.cat((tree.earlier.states, states))
        return states.index_select(0, batch.predict_index)

    def _computing(self) -> AbstractContextManager[None]:
        return computing(self.module, self.precision, self.device, cache=self.checkpointing == "none")

    @contextmanager
    def _layers(self, batch: Batch) -> Iterator[None]:
        """Let layers run compiled and checkpointed in a pass with gradients."""
        if not torch.is_grad_enabled():
            yield
            return

        compiled = self.compiled if self.compiled is not None and self.compiled.serves(batch) else None

        def change(layer: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
            if compiled is not None:
                forward = compiled.forward_of(layer, forward)
            # Compiled layers keep their matrix products and compute the rest again by themselves.
            if self.checkpointing == "none" or (compiled is not None and self.checkpointing == "selective"):
                return forward
            return checkpointed(layer, forward, self.checkpointing, self._computing, self.offload)

        with layers_forward(self.layers, change):
            yield

    def per_token_logps(self, batch: Batch, tree: TreePass | None = None,
                        routed: RouterLogits | None = None) -> PerToken:
        """`[S]` log-prob of each supervised token, in at least float32."""
        tree = tree or self.tree_pass(batch)

        def action() -> tuple[Tensor]:
            hidden = self._hidden(batch, tree, routed)
            return (head_of(self.module, self.compute).per_token_logps(hidden, batch.target_ids),)

        return self._within(action, tree)[0]

    def logps(self, batch: Batch, tree: TreePass | None = None, routed: RouterLogits | None = None) -> PerCompletion:
        """`[C]` summed log-prob of each completion, in nats. The sum is taken in float64."""
        return summed(self.per_token_logps(batch, tree, routed), batch)

    def score_completions(self, batch: Batch, tree: TreePass | None = None, *, comparison: Comparison | None = None,
                          targets: Targets | None = None, confidence: bool = False,
                          routed: RouterLogits | None = None) -> CompletionScores:
        """What losses need for each completion of a batch, from one forward pass.

        Args:
            comparison, targets: compare with a teacher; both or neither.
            confidence: compute how confident the policy is of each completion, for WPO.
            routed: receives the router logits.
        """
        tree = tree or self.tree_pass(batch)

        def action() -> tuple[Tensor, Tensor | None, Tensor | None]:
            hidden = self._hidden(batch, tree, routed)
            head = head_of(self.module, self.compute)
            away = peaks = None
            if comparison is not None and targets is not None:
                per_token, away = comparison.per_token(hidden, head, batch.target_ids, targets)
            else:
                per_token = head.per_token_logps(hidden, batch.target_ids)
            if confidence:
                peaks = head.log_collisions(hidden)
            return per_token, away, peaks

        per_token, away, peaks = self._within(action, tree)
        sure = None if peaks is None else summed(per_token.detach() - peaks, batch) / batch.lengths
        return CompletionScores(summed(per_token, batch), None if away is None else summed(away, batch), sure)

    def begin_step(self) -> None:
        """Call this before the first pass of a step, whose last one is `backward` with `last`."""
        if self.gather_once:
            begin_step(self.module)

    @timed_as("backward")
    def backward(self, share: Tensor, last: bool) -> None:
        """Add the gradient of a pack's share of the loss.

        Args:
            last: whether this is the last pack of the step.
        """
        prepare_backward(self.module, last, self.sum_once)
        share.backward()

    def snapshot(self) -> dict[str, Tensor]:
        """A copy of the trainable weights in host memory, of this process's parts."""
        return {name: part_of(weight.detach()).to("cpu", copy=True) for name, weight in self.module.named_parameters()
                if weight.requires_grad}


def summed(per_token: PerToken, batch: Batch) -> PerCompletion:
    """`[C]` sums over the supervised tokens of each completion, in float64."""
    total = torch.zeros(len(batch.lengths), dtype=torch.float64, device=per_token.device)
    return total.index_add(0, batch.completion_index, per_token.double())


def _backbone(module: Any) -> Any:
    """The model below the head. `base_model` is the module itself if its class names a missing attribute (Llama 4)."""
    return module.model if module.base_model is module else module.base_model
