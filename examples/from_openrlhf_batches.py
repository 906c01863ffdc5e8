"""KTO on a dataloader written for OpenRLHF.

    python examples/from_openrlhf_batches.py MODEL [--output RUN] [--steps N]

If you have a dataloader of that trainer, pass it as train_dataloader and ignore the rest of this file. The collate
function here replaces yours, so that the example is complete.
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
    """Batches as tuples: ids and attention mask [2n, 1, L], labels [2n], prompt lengths.

    The first half are the rows. The second half, with label -1, pairs each prompt with the next row's completion.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def __call__(self, entries: list[dict]) -> tuple:
        prompts = [self.tokenizer.encode(f"Question: {entry['question']}\nAnswer:") for entry in entries]
        answers = [[*self.tokenizer.encode(f" {entry['answer']}", add_special_tokens=False),
                    self.tokenizer.eos_token_id] for entry in entries]
        rolled = answers[1:] + answers[:1]
        texts = [torch.tensor(prompt + answer)
                 for prompt, answer in [*zip(prompts, answers, strict=True), *zip(prompts, rolled, strict=True)]]
        labels = [int(entry["thumb"] == "up") for entry in entries] + [-1] * len(entries)
        ids = pad_sequence(texts, batch_first=True, padding_value=self.tokenizer.pad_token_id or 0)
        mask = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
        return ids.unsqueeze(1), mask.unsqueeze(1), torch.tensor(labels), [len(prompt) for prompt in prompts * 2]


def main() -> None:
    parser = argparse.ArgumentParser(description="KTO on OpenRLHF's batches")
    parser.add_argument("model", help="directory or hub id")
    parser.add_argument("--output", help="run directory, by default tropism-run")
    parser.add_argument("--steps", type=int, help="optimizer steps, by default two passes over the dataloader")
    arguments = parser.parse_args()

    log = [json.loads(line) for line in LOG.read_text(encoding="utf-8").splitlines()]
    collate = Collate(AutoTokenizer.from_pretrained(arguments.model))
    train = DataLoader(log[:16], batch_size=8, shuffle=True, collate_fn=collate, drop_last=True)
    held_out = DataLoader(log[16:], batch_size=8, collate_fn=collate)

    trainer = KTOTrainer(
        arguments.model, train_dataloader=train, eval_dataloader=held_out,  # the reference is the initial model
        max_epochs=2, max_norm=1.0, beta=0.1, learning_rate=5e-5,  # names of OpenRLHF are accepted
        save_dir=arguments.output, max_steps=arguments.steps,
    )  # a notice says that the second halves are ignored: completions are paired within the step
    result = trainer.fit()
    print(f"held-out AUC: {result.before['rewards/auc']:.2f} before, {result.after['rewards/auc']:.2f} after")


if __name__ == "__main__":
    main()
