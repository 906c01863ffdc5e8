"""KTO on a dataloader written for NeMo-Aligner, with the mismatched rows of its batches.

    python examples/from_nemo_batches.py MODEL [--output RUN] [--steps N]

If you have a dataloader of that trainer, pass it as train_dataloader. The collate function here replaces yours, so
that the example is complete. The model is a Hugging Face model: convert a .nemo checkpoint first.
"""

import argparse
import json
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tropism import KTOTrainer

LOG = Path(__file__).parent / "data" / "feedback.jsonl"


class Collate:
    """Batches as dicts, padded on the right: ids, and labels that are -100 at tokens that are not trained."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def __call__(self, entries: list[dict]) -> dict[str, torch.Tensor]:
        prompts = [torch.tensor(self.tokenizer.encode(f"Question: {entry['question']}\nAnswer:")) for entry in entries]
        answers = [torch.tensor([*self.tokenizer.encode(f" {entry['answer']}", add_special_tokens=False),
                                 self.tokenizer.eos_token_id]) for entry in entries]
        batch = {"preference": torch.tensor([int(entry["thumb"] == "up") for entry in entries])}
        for prefix, others in (("", answers), ("kl_", answers[1:] + answers[:1])):
            texts = [torch.cat(parts) for parts in zip(prompts, others, strict=True)]
            labels = [torch.cat((torch.full_like(prompt, -100), answer))
                      for prompt, answer in zip(prompts, others, strict=True)]
            batch[f"{prefix}samples"] = pad_sequence(texts, batch_first=True,
                                                     padding_value=self.tokenizer.pad_token_id or 0)
            batch[f"{prefix}sample_labels"] = pad_sequence(labels, batch_first=True, padding_value=-100)
            batch[f"{prefix}sample_length"] = torch.tensor([len(text) for text in texts])
        return batch


def main() -> None:
    parser = argparse.ArgumentParser(description="KTO on NeMo-Aligner's batches")
    parser.add_argument("model", help="directory or hub id")
    parser.add_argument("--output", help="run directory, by default tropism-run")
    parser.add_argument("--steps", type=int, help="optimizer steps, by default one pass over the dataloader")
    arguments = parser.parse_args()

    log = [json.loads(line) for line in LOG.read_text(encoding="utf-8").splitlines()]
    train = DataLoader(log, batch_size=8, shuffle=True, collate_fn=Collate(AutoTokenizer.from_pretrained(
        arguments.model)))

    trainer = KTOTrainer(
        arguments.model, train_dataloader=train,
        kl_source="batch",  # the batches' own mismatched rows; by default completions are paired within the step
        beta=0.2,  # called ref_policy_kl_penalty in NeMo-Aligner, where this is the default
        learning_rate=5e-5, output=arguments.output, max_steps=arguments.steps,
    )
    result = trainer.fit()
    print(f"reference point: {result.before['kl']:.4f} at the first step, {result.after['kl']:.4f} at the last")


if __name__ == "__main__":
    main()
