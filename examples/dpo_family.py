"""DPO and its family on pairs: one loss, or several with weights.

    python examples/dpo_family.py MODEL [--output RUN] [--steps N] [--loss NAME[,NAME...]] [--weights W[,W...]]

The default is DPO's own loss (sigmoid) plus a fifth of the likelihood of the chosen side, which keeps good completions
likely while the margin grows. `--loss ipo --weights 1` is IPO, `--loss simpo --weights 1` needs no reference. The names
are those of `tropism dpo --help`.
"""

import argparse
import random

from tropism import DPOTrainer

COLORS = ["red", "green", "blue", "white", "black", "brown"]
THINGS = ["door", "boat", "coat", "lamp", "cup", "wall"]


def pairs(count: int = 48) -> list[dict]:
    """Invented pairs: a sentence is chosen, a shrug rejected. Plain text needs no chat template."""
    draw = random.Random(0)
    found = []
    for _ in range(count):
        color, thing = draw.choice(COLORS), draw.choice(THINGS)
        found.append({"prompt": f"The {thing} is {color}. What color is the {thing}?",
                      "chosen": f" The {thing} is {color}.", "rejected": draw.choice([" No idea.", " Ask me later."])})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="DPO and its family")
    parser.add_argument("model", help="directory or hub id")
    parser.add_argument("--output", help="run directory, by default tropism-run")
    parser.add_argument("--steps", type=int, help="optimizer steps, by default one pass over the pairs")
    parser.add_argument("--loss", default="sigmoid,sft", help="losses, comma-separated")
    parser.add_argument("--weights", default="1,0.2", help="one per loss")
    arguments = parser.parse_args()

    trainer = DPOTrainer(
        arguments.model, train_dataset=pairs(), output=arguments.output, max_steps=arguments.steps,
        loss=arguments.loss, loss_weights=arguments.weights,  # lists work too: ["sigmoid", "sft"], [1, 0.2]
        batch_size=8, learning_rate=2e-5,
        eval_fraction=0.2, group_prompts=True,  # pairs of one prompt in one step: the prompt is computed once
    )
    result = trainer.fit()

    # Each loss has its own metric besides the sum. docs/run-directory.md lists them.
    for key in sorted(result.after):
        if key.startswith("loss") or key == "rewards/accuracies":
            print(f"{key}: {result.before[key]:.4f} before, {result.after[key]:.4f} after")


if __name__ == "__main__":
    main()
