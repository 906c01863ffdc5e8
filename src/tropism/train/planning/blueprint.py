"""What a run computes with, as far as its cost depends on it; and the count of its steps.

Decoder layers are alike, so a count of 1 and of 2 layers gives that of all. Models whose layers differ are counted in
full.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tropism.data.batching.collate import Batch, Layout
from tropism.data.tree import PromptTree
from tropism.distributed.world import World
from tropism.methods import Method
from tropism.model.adapters.switch import adapter_off
from tropism.model.checkpointing import Checkpointing
from tropism.model.head.divergence import Comparison
from tropism.model.language_model import LanguageModel, Precision
from tropism.model.token_state import carries_state
from tropism.train.engine import Engine
from tropism.train.frozen.reference import freeze
from tropism.train.frozen.teacher import LiveTeacher
from tropism.train.optimizer import build_updater
from tropism.train.planning.count import Count
from tropism.train.planning.fake_engine import (
    HOST,
    FakeEngine,
    StoredTopK,
    ZeroReference,
    fake_copy,
    layers_of,
    narrowed,
    quantize,
    without_kernels,
)
from tropism.train.planning.lengths import over_lengths
from tropism.train.step_packs import StepPacks

_FEW = (1, 2)


@dataclass(frozen=True)
class Blueprint:
    """The parts of an engine, without values.

    Args:
        options: of the run.
        module: the policy with its adapter, real or on the meta device.
        layout, precision, method: of the run.
        reference: `stored`, `live`, or `off` for the policy without its new adapter; None if the method has none.
        teacher: the teacher in memory, real or on the meta device; None without one.
        comparison: with the teacher; None without one.
        gpu: the run is on a GPU.
        narrows: frozen weights are rounded to bfloat16.
        bits: per weight of quantized layers; 0 without.
        plain: names of modules that are not quantized.
    """

    options: Any
    module: Any
    layout: Layout
    precision: Precision
    method: Method
    reference: str | None = None
    teacher: Any = None
    comparison: Comparison | None = None
    gpu: bool = False
    narrows: bool = False
    bits: int = 0
    plain: tuple[str, ...] = ()

    def count(self, steps: Sequence[StepPacks], checkpointing: Checkpointing = "none", clock: Any = None) -> Count:
        """What some steps take with all layers."""
        if self.layout == "padded" and carries_state(self.module):
            return over_lengths(lambda steps: self._with_all_layers(steps, checkpointing, clock), steps)
        return self._with_all_layers(steps, checkpointing, clock)

    def _with_all_layers(self, steps: Sequence[StepPacks], checkpointing: Checkpointing, clock: Any) -> Count:
        models = [self.module, *([] if self.teacher is None else [self.teacher])]
        depths = [len(stack) if alike(stack := layers_of(model)) else 0 for model in models]
        start = [_FEW[0] if depth > _FEW[1] else None for depth in depths]

        def counted(numbers: Sequence[int | None]) -> Count:
            return self._engine(checkpointing, numbers).count(steps, clock)

        base = counted(start)
        return base.along(*(
            (counted([_FEW[1] if at == number else few for at, few in enumerate(start)]),
             (depth - _FEW[0]) / (_FEW[1] - _FEW[0]))
            for number, depth in enumerate(depths) if start[number] is not None))

    def _engine(self, checkpointing: Checkpointing, numbers: Sequence[int | None]) -> FakeEngine:
        """A fake engine.

        Args:
            numbers: of layers of the policy and the teacher; None for all.
        """
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        model = self._model(self.module, fake, numbers[0], self.narrows, checkpointing)
        if self.bits:
            quantize(model.module, fake, self.plain, self.bits)
        with fake:
            updater, _ = build_updater(model.module, self.options, 1)
            without_kernels(updater.optimizer)
            reference = self._reference(model)
        teacher: Any = None
        if self.teacher is not None and self.comparison is not None:
            frozen = self._model(self.teacher, fake, numbers[1], self.precision == "bf16", "none")
            frozen.module.requires_grad_(False)
            teacher = LiveTeacher(frozen, self.comparison)
        elif self.comparison is not None:
            teacher = StoredTopK(self.comparison, self.options.top_k or 1)
        engine = Engine(model, reference, self.method, updater, World(0, 1, HOST), self.options.max_grad_norm, teacher)
        return FakeEngine(engine, fake, self.gpu)

    def _model(self, module: Any, fake: FakeTensorMode, number: int | None, narrows: bool,
               checkpointing: Checkpointing) -> LanguageModel:
        made = fake_copy(module, fake, number, narrowed(module) if narrows else lambda name: None)
        return LanguageModel(made, self.layout, self.precision, HOST, checkpointing=checkpointing)

    def _reference(self, model: LanguageModel) -> Any:
        if self.reference in (None, "stored"):
            return None if self.reference is None else ZeroReference()
        return FrozenScores(model, adapter_off) if self.reference == "off" else FrozenScores(freeze(model))


@dataclass
class FrozenScores:
    """Stands for a live reference: its passes, not its scores."""

    model: LanguageModel
    off: Callable[[Any], AbstractContextManager[None]] | None = None
    fingerprint: str = ""

    @torch.no_grad()
    def score(self, trees: Sequence[PromptTree], batch: Batch) -> Tensor:
        """`[C]` log-probs."""
        if self.off is None:
            return self.model.logps(batch)
        with self.off(self.model.module):
            return self.model.logps(batch)


def alike(layers: torch.nn.ModuleList) -> bool:
    """Whether all layers have the same weights and the same kind of attention."""
    def signature(layer: Any) -> Any:
        attention = [(getattr(part, "sliding_window", None), getattr(part, "layer_type", None))
                     for part in layer.modules()]
        return type(layer), [(name, weight.shape) for name, weight in layer.named_parameters()], attention

    first = signature(layers[0]) if len(layers) else None
    return all(signature(layer) == first for layer in layers)
