"""Compiled decoder layers. Each layer is compiled by itself, with tree attention left as it is."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface

from tropism.data.batching.collate import Batch
from tropism.model.attention import NAME, tree_attention

_LIMIT = 64
"""Versions of a layer's code, which layers share. At torch's own limit of 8, it stops to compile without a word."""


class CompiledLayers:
    """The layers of a model, compiled when they first run. The module itself does not change.

    Args:
        backend: of `torch.compile`.
    """

    def __init__(self, backend: str = "inductor") -> None:
        AttentionInterface.register(NAME, torch.compiler.disable(tree_attention))
        self.graphs = 0
        """Number of graphs compiled so far."""
        self._expected = 0
        self._backend = torch._dynamo.lookup_backend(backend)
        self._forwards: dict[int, Callable[..., Any]] = {}

    @property
    def recompiles(self) -> int:
        """Number of graphs that were compiled after the first ones."""
        return self.graphs - self._expected

    def expect_no_more(self) -> None:
        """Count graphs that are compiled from now on as recompiled."""
        self._expected = self.graphs

    def serves(self, batch: Batch) -> bool:
        """Whether a batch runs through compiled layers: trees of at least two tokens. Lengths 0 and 1 and masks would
        be compiled again."""
        return batch.segments is not None and batch.tokens > 1

    def forward_of(self, layer: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled forward method of a layer, for any number of tokens."""
        if id(layer) not in self._forwards:
            self._forwards[id(layer)] = torch.compile(forward, dynamic=True, backend=self._compile,
                                                      recompile_limit=_LIMIT)
        return self._forwards[id(layer)]

    def _compile(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return self._backend(graph, inputs)


def worth_compiling(steps: int, device: torch.device) -> bool:
    """Whether a run gains from compiled layers. Compiling takes about a minute, and compiled layers save about 0.2 s of
    a step on a GPU."""
    return device.type == "cuda" and steps >= 300
