"""KTO on a dataloader written for ColossalChat (coati), with your own model, optimizer and scheduler.

    python examples/from_coati_batches.py MODEL [--output RUN] [--steps N]

If you have a dataloader of that trainer, pass it as train_dataloader. The collate function here replaces yours, so
that the example is complete.
"""

import argparse
import json
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    get_cosine_schedule_with_warmup,
)

from tropism import KTOTrainer

LOG = Path(__file__).parent / "data" / "feedback.jsonl"
LENGTH = 256  # coati pads every batch to one length


class Collate:
    """Batches as dicts: ids, attention mask and loss mask [n, L] of the rows and, as kl_*, of mismatched rows."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def __call__(self, entries: list[dict]) -> dict[str, torch.Tensor]:
        prompts = [self.tokenizer.encode(f"Question: {entry['question']}\nAnswer:") for entry in entries]
        answers = [[*self.tokenizer.encode(f" {entry['answer']}", add_special_tokens=False),
                    self.tokenizer.eos_token_id] for entry in entries]
        batch = {"label": torch.tensor([entry["thumb"] == "up" for entry in entries])}
        for prefix, others in (("", answers), ("kl_", answers[::-1])):
            ids, attention, loss = torch.zeros(3, len(entries), LENGTH, dtype=torch.int64)
            ids += self.tokenizer.pad_token_id or 0
            for row, (prompt, answer) in enumerate(zip(prompts, others, strict=True)):
                text = (prompt + answer)[:LENGTH]
                ids[row, : len(text)] = torch.tensor(text)
                attention[row, : len(text)] = 1
                loss[row, len(prompt) : len(text)] = 1  # 1 at the completion's own tokens
            batch |= {f"{prefix}input_ids": ids, f"{prefix}attention_mask": attention, f"{prefix}loss_mask": loss}
        return batch


def main() -> None:
    parser = argparse.ArgumentParser(description="KTO on coati's batches")
    parser.add_argument("model", help="directory or hub id")
    parser.add_argument("--output", help="run directory, by default tropism-run")
    parser.add_argument("--steps", type=int, help="optimizer steps, by default one pass over the dataloader")
    arguments = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    log = [json.loads(line) for line in LOG.read_text(encoding="utf-8").splitlines()]
    train = DataLoader(log, batch_size=4, shuffle=True, collate_fn=Collate(tokenizer))

    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)  # trained in place
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.01)
    scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=0, num_training_steps=arguments.steps or 3)

    trainer = KTOTrainer(
        model, tokenizer=tokenizer, optimizer=optimizer, scheduler=scheduler, train_dataloader=train,
        accumulation_steps=2,  # two batches of 4 are one step of 8: one mean, one reference point
        max_epochs=1, beta=0.1, desirable_weight=1.0, undesirable_weight=1.0, save_interval=2,
        save_dir=arguments.output, max_steps=arguments.steps,
    )
    result = trainer.fit()
    for path in sorted((result.directory / "checkpoints").glob("step-*/model")):
        print(f"model of a checkpoint: {path}")
    print(f"loss: {result.before['loss']:.4f} at the first step, {result.after['loss']:.4f} at the last")


if __name__ == "__main__":
    main()
