"""Hand-made trees: token ids, masks and labels that no file format can express.

    python examples/custom_trees.py MODEL [--output RUN] [--steps N]

A tree is one prompt with the completions that continue it. Here each prompt is a sum, its completions are guesses, and
a program checks them: the labels of KTO. The prompt of a tree is computed once for all its completions.
"""

import argparse
import random

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tropism import KTOTrainer
from tropism.data.tree import Completion, PromptTree, token_ids


def trees(tokenizer: PreTrainedTokenizerBase, count: int = 16) -> list[tuple[PromptTree, list[bool]]]:
    """Sums with three guesses each, and which guesses are correct."""
    draw = random.Random(0)
    found = []
    for one, other in draw.sample([(one, other) for one in range(1, 10) for other in range(1, 10)], count):
        prompt = tokenizer.encode(f"{one} + {other} =")
        guesses = [one + other, *draw.sample([number for number in range(2, 19) if number != one + other], 2)]
        tree = PromptTree(token_ids(prompt), tuple(guess_tokens(tokenizer, guess) for guess in guesses))
        found.append((tree, [guess == one + other for guess in guesses]))
    return found


def guess_tokens(tokenizer: PreTrainedTokenizerBase, guess: int) -> Completion:
    """A guess as a completion. Nothing is added to token ids, so include the terminator."""
    lead, number = (tokenizer.encode(text, add_special_tokens=False) for text in (" is it", f" {guess}"))
    ids = token_ids([*lead, *number, tokenizer.eos_token_id])
    mask = ids != -1  # every token is supervised, except the words that all guesses share
    mask[: len(lead)] = False
    return Completion(ids, mask)


def main() -> None:
    parser = argparse.ArgumentParser(description="hand-made trees")
    parser.add_argument("model", help="directory or hub id")
    parser.add_argument("--output", help="run directory, by default tropism-run")
    parser.add_argument("--steps", type=int, help="optimizer steps, by default one pass over the trees")
    arguments = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    made = trees(tokenizer)
    trainer = KTOTrainer(
        arguments.model, train_dataset=made[:12], eval_dataset=made[12:],  # trees are never split
        output=arguments.output, max_steps=arguments.steps,
        group_prompts=True,  # all completions of a tree in one step; by default each is a row
        batch_size=12, learning_rate=2e-5, desirable_weight="auto",  # one correct guess and two wrong ones: weight 2
    )
    result = trainer.fit()
    print(f"held-out AUC: {result.before['rewards/auc']:.2f} before, {result.after['rewards/auc']:.2f} after")


if __name__ == "__main__":
    main()
