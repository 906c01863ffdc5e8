"""A pack of trees as the tensors of one forward pass, in the tree layout or the padded one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tropism.data.tree import PromptTree

Layout = Literal["tree", "padded"]


@dataclass(frozen=True, slots=True)
class Segments:
    """Which keys each stretch of queries sees, for attention by gathered keys.

    A segment is a prompt, or a completion without its last token. Its queries see the keys of its tree's prompt
    and its own, causally, with the last query aligned to the last key.

    Args:
        query_lengths, key_lengths: per segment; sums are T and K.
        key_index: `[K]` int64, positions in the packed keys, gathered segment after segment.
        cu_queries, cu_keys: `[segments + 1]` int32, cumulative lengths.
    """

    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    key_index: Tensor
    cu_queries: Tensor
    cu_keys: Tensor

    def to(self, device: torch.device) -> "Segments":
        """The same on a device."""
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True)
                                for name in ("key_index", "cu_queries", "cu_keys")})


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass. `B` is 1 and `L` is T in the tree layout.

    Args:
        input_ids: `[B, L]`.
        position_ids: `[B, L]`; they restart after the prompt for each completion.
        segments: the tree layout's attention; None in the padded layout.
        attention_mask: the padded layout's mask `[B, L]`; None in the tree layout.
        predict_index: `[S]` position in the flattened hidden states that predicts a supervised token.
        target_ids: `[S]` that token.
        completion_index: `[S]` the completion it belongs to.
        lengths: `[C]` supervised tokens per completion.
        tokens: tokens that are not padding.
    """

    input_ids: Tensor
    position_ids: Tensor
    segments: Segments | None
    attention_mask: Tensor | None
    predict_index: Tensor
    target_ids: Tensor
    completion_index: Tensor
    lengths: Tensor
    tokens: int

    def to(self, device: torch.device) -> "Batch":
        """The same on a device."""
        if device.type == "cpu":
            return self
        moved = {name: value.to(device, non_blocking=True) if isinstance(value, Tensor | Segments) else value
                 for name, value in ((slot, getattr(self, slot)) for slot in self.__slots__)}
        return Batch(**moved)


def collate(trees: Sequence[PromptTree], layout: Layout) -> Batch:
    """Lay trees out. Completions are numbered in the order of the trees and, within a tree, of the tree.

    No trees give a batch of one token and no completion, so that ranks can run equal numbers of passes.
    """
    return _tree(trees) if layout == "tree" else _padded(trees)


@dataclass(slots=True)
class _Labels:
    """Collects what the head needs: where each supervised token is predicted, and what it is."""

    index: list[npt.NDArray[np.int64]]
    target: list[npt.NDArray[np.int32]]
    completion: list[npt.NDArray[np.int64]]
    lengths: list[int]

    def add(self, tree: PromptTree, position: int, prompt_end: int, start: int) -> None:
        """Completion `position` of `tree`, whose prompt ends at `prompt_end` and whose input is at `start`."""
        completion = tree.completions[position]
        where = np.concatenate(([prompt_end], start + np.arange(len(completion.ids) - 1)))
        self.index.append(where[completion.loss_mask].astype(np.int64))
        self.target.append(completion.ids[completion.loss_mask])
        self.completion.append(np.full(completion.length, len(self.lengths), dtype=np.int64))
        self.lengths.append(completion.length)

    def tensors(self) -> dict[str, Tensor]:
        def joined(arrays: Sequence[npt.NDArray[np.generic]]) -> Tensor:
            flat = np.concatenate(arrays) if arrays else np.zeros(0)
            return torch.from_numpy(flat.astype(np.int64))

        return {"predict_index": joined(self.index), "target_ids": joined(self.target),
                "completion_index": joined(self.completion),
                "lengths": torch.tensor(self.lengths, dtype=torch.int64)}


def _tree(trees: Sequence[PromptTree]) -> Batch:
    ids: list[npt.NDArray[np.int32]] = []
    positions: list[npt.NDArray[np.int64]] = []
    keys: list[npt.NDArray[np.int64]] = []
    queries: list[int] = []
    labels = _Labels([], [], [], [])
    at = 0
    for tree in trees:
        root, depth = at, len(tree.prompt_ids)
        prompt_keys = root + np.arange(depth)
        ids.append(tree.prompt_ids)
        positions.append(np.arange(depth))
        queries.append(depth)
        keys.append(prompt_keys)
        at += depth
        for number, completion in enumerate(tree.completions):
            labels.add(tree, number, root + depth - 1, at)
            length = len(completion.ids) - 1
            if length:
                ids.append(completion.ids[:-1])
                positions.append(depth + np.arange(length))
                queries.append(length)
                keys.append(np.concatenate((prompt_keys, at + np.arange(length))))
                at += length
    if not trees:
        ids, positions, keys, queries = [np.zeros(1, np.int32)], [np.zeros(1, np.int64)], [np.zeros(1, np.int64)], [1]
    key_lengths = [len(index) for index in keys]
    return Batch(
        input_ids=torch.from_numpy(np.concatenate(ids).astype(np.int64))[None],
        position_ids=torch.from_numpy(np.concatenate(positions))[None],
        segments=Segments(tuple(queries), tuple(key_lengths), torch.from_numpy(np.concatenate(keys)),
                          _cumulative(queries), _cumulative(key_lengths)),
        attention_mask=None, tokens=at, **labels.tensors())


def _cumulative(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)


def _padded(trees: Sequence[PromptTree]) -> Batch:
    """One line per completion, prompt and completion side by side, padded on the right."""
    lines = [np.concatenate((tree.prompt_ids, completion.ids[:-1]))
             for tree in trees for completion in tree.completions] or [np.zeros(1, np.int32)]
    width = max(len(line) for line in lines)
    input_ids = np.zeros((len(lines), width), dtype=np.int64)
    mask = np.zeros((len(lines), width), dtype=np.int64)
    for number, line in enumerate(lines):
        input_ids[number, : len(line)] = line
        mask[number, : len(line)] = 1
    labels = _Labels([], [], [], [])
    number = 0
    for tree in trees:
        for position in range(len(tree.completions)):
            start = number * width + len(tree.prompt_ids)
            labels.add(tree, position, start - 1, start)
            number += 1
    return Batch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.arange(width).expand(len(lines), width).contiguous(),
        segments=None, attention_mask=torch.from_numpy(mask),
        tokens=int(mask.sum()) if trees else 0, **labels.tensors())
