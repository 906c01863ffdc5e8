"""Padded batches as the published trainers' dataloaders make them, from rows that a test knows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Known:
    """What a batch is made of: a prompt, its completions with the tokens that count, a label."""

    prompt: list[int]
    completions: tuple[list[int], ...]
    masks: tuple[list[int], ...]
    label: bool = True

    def text(self, side: int = 0) -> list[int]:
        return self.prompt + self.completions[side]

    def count_of(self, side: int = 0) -> list[int]:
        return [0] * len(self.prompt) + self.masks[side]

    def labels(self, side: int = 0) -> list[int]:
        return [token if counts else -100
                for token, counts in zip(self.text(side), self.count_of(side), strict=True)]


def known(prompt: list[int], *completions: list[int], label: bool = True) -> Known:
    return Known(prompt, completions, tuple([1] * len(completion) for completion in completions), label)


def mismatched(rows: Sequence[Known], partners: Sequence[int]) -> list[Known]:
    return [replace(row, completions=rows[other].completions, masks=rows[other].masks)
            for row, other in zip(rows, partners, strict=True)]


def following(count: int) -> list[int]:
    return [(number + 1) % count for number in range(count)]


def mirrored(count: int) -> list[int]:
    return list(range(count))[::-1]


# --- batches as the published trainers' dataloaders make them ---------------------------------------------------------


def pad(sequences: Sequence[Sequence[int]], value: int, side: str = "right", width: int = 0) -> torch.Tensor:
    """`[n, L]`."""
    width = max(width, *(len(sequence) for sequence in sequences))
    fill = [[value] * (width - len(sequence)) for sequence in sequences]
    rows = [[*f, *s] if side == "left" else [*s, *f] for s, f in zip(sequences, fill, strict=True)]
    return torch.tensor(rows)


def ones(sequences: Sequence[Sequence[int]]) -> list[list[int]]:
    return [[1] * len(sequence) for sequence in sequences]


def openrlhf_kto(rows: Sequence[Known], fill: int, side: str) -> Any:
    everything = [*rows, *mismatched(rows, following(len(rows)))]
    texts = [row.text() for row in everything]
    labels = torch.tensor([int(row.label) for row in rows] + [-1] * len(rows))
    return (pad(texts, fill, side)[:, None], pad(ones(texts), 0, side)[:, None], labels,
            [len(row.prompt) for row in everything])


def openrlhf_dpo(rows: Sequence[Known], fill: int, side: str) -> Any:
    parts: list[Any] = []
    for number in (0, 1):
        texts = [row.text(number) for row in rows]
        parts += [pad(texts, fill, side)[:, None], pad(ones(texts), 0, side)[:, None]]
    return (*parts, [len(row.prompt) for row in rows])


def openrlhf_sft(rows: Sequence[Known], fill: int, side: str) -> Any:
    texts = [row.text() for row in rows]
    early = [[float(counts) for counts in row.count_of()[1:]] + [0.0] for row in rows]
    return pad(texts, fill, side), pad(ones(texts), 0, side), pad(early, 0, side)  # type: ignore[arg-type]


def openrlhf_sft_with_lengths(rows: Sequence[Known], fill: int, side: str) -> Any:
    texts = [row.text() for row in rows]
    return ([len(row.prompt) for row in rows], pad(texts, fill, side)[:, None], pad(ones(texts), 0, side)[:, None],
            {"input": ["a"] * len(rows), "output": ["b"] * len(rows)})


def coati_kto(rows: Sequence[Known], fill: int, side: str) -> Any:
    batch = {"label": torch.tensor([row.label for row in rows])}
    for prefix, group in (("", rows), ("kl_", mismatched(rows, mirrored(len(rows))))):
        ids = pad([row.text() for row in group], fill, side, width=24)
        batch |= {f"{prefix}input_ids": ids, f"{prefix}attention_mask": ids != fill,
                  f"{prefix}loss_mask": pad([row.count_of() for row in group], 0, side, width=24)}
    return batch


def coati_dpo(rows: Sequence[Known], fill: int, side: str) -> Any:
    batch = {}
    for number, name in enumerate(("chosen", "reject")):
        texts = [row.text(number) for row in rows]
        batch |= {f"{name}_input_ids": pad(texts, fill, side, width=24),
                  f"{name}_attention_mask": pad(ones(texts), 0, side, width=24).bool(),
                  f"{name}_loss_mask": pad([row.count_of(number) for row in rows], 0, side, width=24).bool()}
    return batch


def coati_sft(rows: Sequence[Known], fill: int, side: str) -> Any:
    ids = pad([row.text() for row in rows], fill, side, width=24)
    return {"input_ids": ids, "attention_mask": ids != fill,
            "labels": pad([row.labels() for row in rows], -100, side, width=24)}


def nemo_kto(rows: Sequence[Known], fill: int, side: str) -> Any:
    everything = [*rows, *mismatched(rows, following(len(rows)))]
    ids = pad([row.text() for row in everything], fill)
    labels = pad([row.labels() for row in everything], -100)
    return {"samples": ids[: len(rows)], "kl_samples": ids[len(rows) :], "sample_labels": labels[: len(rows)],
            "kl_sample_labels": labels[len(rows) :], "preference": torch.tensor([int(row.label) for row in rows]),
            "sample_length": torch.tensor([len(row.text()) for row in rows]),
            "attention_mask": torch.ones(len(rows), 1, ids.shape[1], ids.shape[1], dtype=torch.bool).tril() < 0.5,
            "position_ids": torch.arange(ids.shape[1])[None]}


def nemo_dpo(rows: Sequence[Known], fill: int, side: str) -> Any:
    batch = {}
    for number, name in enumerate(("chosen", "rejected")):
        batch |= {name: pad([row.text(number) for row in rows], fill),
                  f"{name}_labels": pad([row.labels(number) for row in rows], -100),
                  f"{name}_length": torch.tensor([len(row.text(number)) for row in rows])}
    return batch
