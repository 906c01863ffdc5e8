"""Turns a pack of trees into the tensors of one forward pass, in the tree layout or the padded layout."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tropism.data.batching.transfer import sent
from tropism.data.tree import PromptTree

Layout = Literal["tree", "padded"]


_MANY = 3
"""Gathered keys per packed key from which on prompts are attended to apart."""


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """Queries of all completions of a prompt together, for attention that does not gather its keys for each of them.

    Args:
        query_lengths, key_lengths: per prompt with computed completions: queries of these, keys of the prompt.
        query_index: positions of these queries in the pack, int64, prompt by prompt.
        key_index: positions of the prompts' keys in the packed keys, int64.
        cu_queries, cu_keys: `[prompts + 1]` int32 cumulative lengths.
        before: number of packed keys before those of the pack's own tokens.
    """

    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    query_index: Tensor
    key_index: Tensor
    cu_queries: Tensor
    cu_keys: Tensor
    before: int

    def to(self, device: torch.device) -> "SharedPrompts":
        """Copy to a device."""
        return replace(self, **{name: sent(getattr(self, name), device)
                                for name in ("query_index", "key_index", "cu_queries", "cu_keys")})


@dataclass(frozen=True, slots=True)
class Segments:
    """Queries and keys of each segment, for attention with gathered keys.

    A segment is a prompt, or a completion without its last token. Its queries attend causally to the keys of its
    tree's prompt and to its own, with the last query aligned to the last key.

    Args:
        query_lengths, key_lengths: per segment; their sums are T and K.
        key_index: `[K]` int64 positions in the packed keys, segment by segment.
        cu_queries, cu_keys: `[segments + 1]` int32 cumulative lengths.
        shared: the same for attention that does not gather keys; None where gathering repeats few of them.
    """

    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    key_index: Tensor
    cu_queries: Tensor
    cu_keys: Tensor
    shared: SharedPrompts | None = None

    def to(self, device: torch.device) -> "Segments":
        """Copy to a device."""
        return replace(self, shared=self.shared and self.shared.to(device), **{
            name: sent(getattr(self, name), device) for name in ("key_index", "cu_queries", "cu_keys")})


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass. `B` is 1 and `L` is T in the tree layout.

    Args:
        input_ids: `[B, L]`.
        position_ids: `[B, L]`; each completion continues from the prompt.
        segments: attention of the tree layout; None in the padded layout.
        attention_mask: `[B, L]` mask of the padded layout; None in the tree layout.
        predict_index: `[S]` positions in the flattened hidden states that predict supervised tokens.
        target_ids: `[S]` those tokens.
        completion_index: `[S]` their completions.
        lengths: `[C]` supervised tokens of each completion.
        tokens: number of tokens without padding.
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
        """Copy to a device."""
        if device.type == "cpu":
            return self
        moved: dict[str, Any] = {name: sent(getattr(self, name), device) for name in (
            "input_ids", "position_ids", "predict_index", "target_ids", "completion_index", "lengths")}
        return replace(self, **moved, segments=self.segments and self.segments.to(device),
                       attention_mask=None if self.attention_mask is None else sent(self.attention_mask, device))


def collate(trees: Sequence[PromptTree], layout: Layout) -> Batch:
    """Build the batch of some trees. Completions are numbered tree by tree.

    Without trees the batch has one token and no completion, so that all ranks can run equal numbers of passes.
    """
    return _tree(trees) if layout == "tree" else _padded(trees)


def collate_leaves(trees: Sequence[PromptTree], roots: Sequence[PromptTree]) -> Batch:
    """Build a batch of completions whose prompts another tree batch has computed.

    Args:
        trees: prompts with the completions.
        roots: trees of the other batch, in its order; `trees[i]` has the prompt of `roots[i]`.

    Returns:
        a batch whose `key_index` and `predict_index` count the tokens of the other batch first.
    """
    packed = sum(root.tokens for root in roots)
    layout = _Layout()
    labels = _Labels([], [], [], [])
    root_at, at = 0, packed
    for tree, root in zip(trees, roots, strict=True):
        at = layout.add_completions(tree, root_at, at, labels)
        root_at += root.tokens
    return layout.batch(labels, at - packed)


@dataclass(slots=True)
class _Labels:
    """Collects the supervised tokens and the positions that predict them."""

    index: list[npt.NDArray[np.int64]]
    target: list[npt.NDArray[np.int32]]
    completion: list[npt.NDArray[np.int64]]
    lengths: list[int]

    def add(self, tree: PromptTree, position: int, prompt_end: int, start: int) -> None:
        """Add completion `position` of `tree`; its prompt ends at `prompt_end`, its input starts at `start`.

        Without a prompt the first token is not supervised, so that `prompt_end` has no effect.
        """
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


class _Layout:
    """Collects the segments of a tree batch."""

    def __init__(self) -> None:
        self.ids: list[npt.NDArray[np.int32]] = []
        self.positions: list[npt.NDArray[np.int64]] = []
        self.keys: list[npt.NDArray[np.int64]] = []

    def add(self, ids: npt.NDArray[np.int32], depth: int, keys: npt.NDArray[np.int64]) -> None:
        """Add a segment that begins at position `depth` and attends to `keys`."""
        self.ids.append(ids)
        self.positions.append(depth + np.arange(len(ids)))
        self.keys.append(keys)

    def add_completions(self, tree: PromptTree, root: int, at: int, labels: _Labels) -> int:
        """Add all completions of a tree from token `at` on; its prompt is at `root`. Returns the end."""
        depth = len(tree.prompt_ids)
        prompt_keys = root + np.arange(depth)
        starts: dict[int, int] = {}
        for number, completion in enumerate(tree.completions):
            if tree.carriers[number] == number:
                starts[number] = at
                length = len(completion.ids) - 1  # the last token predicts nothing
                if length:
                    self.add(completion.ids[:-1], depth, np.concatenate((prompt_keys, at + np.arange(length))))
                    at += length
        for number, carrier in enumerate(tree.carriers):
            labels.add(tree, number, root + depth - 1, starts[carrier])
        return at

    def batch(self, labels: _Labels, tokens: int) -> Batch:
        """The tensors of the batch; with no segment, of one token that attends to itself."""
        if not self.ids:
            self.add(np.zeros(1, np.int32), 0, np.zeros(1, np.int64))
        queries, keys = [len(ids) for ids in self.ids], [len(index) for index in self.keys]
        return Batch(
            input_ids=torch.from_numpy(np.concatenate(self.ids).astype(np.int64))[None],
            position_ids=torch.from_numpy(np.concatenate(self.positions))[None],
            segments=Segments(tuple(queries), tuple(keys), torch.from_numpy(np.concatenate(self.keys)),
                              _cumulative(queries), _cumulative(keys), _shared_prompts(queries, self.keys)),
            attention_mask=None, tokens=tokens, **labels.tensors())


def _shared_prompts(lengths: Sequence[int], keys: Sequence[npt.NDArray[np.int64]]) -> SharedPrompts | None:
    """`Segments.shared` of segments with these numbers of queries and these keys."""
    packed = int(keys[-1][-1]) + 1
    if sum(map(len, keys)) <= _MANY * packed:
        return None
    queries: dict[int, list[npt.NDArray[np.int64]]] = {}
    prompts: dict[int, npt.NDArray[np.int64]] = {}
    at = 0
    for length, seen in zip(lengths, keys, strict=True):
        if len(seen) > length:
            start = int(seen[0])
            prompts[start] = seen[: len(seen) - length]
            queries.setdefault(start, []).append(at + np.arange(length))
        at += length
    query_lengths = [sum(map(len, parts)) for parts in queries.values()]
    key_lengths = [len(prompt) for prompt in prompts.values()]
    return SharedPrompts(
        tuple(query_lengths), tuple(key_lengths),
        torch.from_numpy(np.concatenate([part for parts in queries.values() for part in parts])),
        torch.from_numpy(np.concatenate(list(prompts.values()))),
        _cumulative(query_lengths), _cumulative(key_lengths), packed - at)


def _tree(trees: Sequence[PromptTree]) -> Batch:
    layout = _Layout()
    labels = _Labels([], [], [], [])
    at = 0
    for tree in trees:
        depth = len(tree.prompt_ids)
        if depth:
            layout.add(tree.prompt_ids, 0, at + np.arange(depth))
        at = layout.add_completions(tree, at, at + depth, labels)
    return layout.batch(labels, at)


def occurrences(trees: Sequence[PromptTree], counts: Sequence[int], layout: Layout) -> Tensor:
    """`[B * L]` float64: how often each token of a batch occurs if each row has its own copy of the prompt.

    Args:
        trees: of the batch.
        counts: number of rows that use each completion, in the order of the batch.
        layout: of the batch.

    Returns:
        the counts; 0 for padding and for the token of a batch without trees.
    """
    count = iter(counts)
    counted = [[next(count) for _ in tree.completions] for tree in trees]
    parts = [part for tree, own in zip(trees, counted, strict=True)
             for part in (_tree_occurrences if layout == "tree" else _padded_occurrences)(tree, own)] or [np.zeros(1)]
    if layout == "padded":
        width = max(map(len, parts))
        parts = [np.pad(part, (0, width - len(part))) for part in parts]
    return torch.from_numpy(np.concatenate(parts).astype(np.float64))


def _tree_occurrences(tree: PromptTree, counts: Sequence[int]) -> list[npt.NDArray[np.float64]]:
    """`occurrences` of a tree in the tree layout: its prompt, then each completion that is computed."""
    carried = {number: np.zeros(len(tree.completions[number].ids) - 1) for number in sorted({*tree.carriers})}
    for completion, carrier, count in zip(tree.completions, tree.carriers, counts, strict=True):
        carried[carrier][: len(completion.ids) - 1] += count
    return [np.full(len(tree.prompt_ids), float(sum(counts))), *carried.values()]


def _padded_occurrences(tree: PromptTree, counts: Sequence[int]) -> list[npt.NDArray[np.float64]]:
    """`occurrences` of a tree in the padded layout, one line per completion."""
    return [np.full(len(tree.prompt_ids) + len(completion.ids) - 1, float(count))
            for completion, count in zip(tree.completions, counts, strict=True)]


def _cumulative(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)


def _padded(trees: Sequence[PromptTree]) -> Batch:
    """One line per completion: prompt and completion, padded on the right."""
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
