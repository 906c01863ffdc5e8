"""What coati_kto.py uses of coati's dataset module: rows of token ids, and their batches."""

import json
from pathlib import Path
from typing import Any

import torch

LOG = Path(__file__).parents[1] / "data" / "feedback.jsonl"


def load_tokenized_dataset(tokenizer: Any, share: slice = slice(None)) -> list[dict[str, Any]]:
    """Rows as coati's preparation script writes them; it reads them from arrow files."""
    rows = [json.loads(line) for line in LOG.read_text(encoding="utf-8").splitlines()][share]
    return [{"prompt": tokenizer.encode(f"Question: {row['question']}\nAnswer:"),
             "completion": [*tokenizer.encode(f" {row['answer']}", add_special_tokens=False), tokenizer.eos_token_id],
             "label": row["thumb"] == "up"} for row in rows]


class DataCollatorForKTODataset:
    """Batches in coati's layout, padded on the right to one length; the mismatched rows are the reversed batch."""

    def __init__(self, tokenizer: Any, max_length: int) -> None:
        self.pad, self.max_length = tokenizer.pad_token_id, max_length

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = {"label": torch.tensor([row["label"] for row in rows])}
        for prefix, others in (("", rows), ("kl_", rows[::-1])):
            ids = torch.full((len(rows), self.max_length), self.pad)
            mask = torch.zeros_like(ids)
            for number, (row, other) in enumerate(zip(rows, others, strict=True)):
                text = (row["prompt"] + other["completion"])[: self.max_length]
                ids[number, : len(text)] = torch.tensor(text)
                mask[number, len(row["prompt"]) : len(text)] = 1
            batch |= {f"{prefix}input_ids": ids, f"{prefix}attention_mask": ids != self.pad,
                      f"{prefix}loss_mask": mask}
        return batch
