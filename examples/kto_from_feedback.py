"""KTO from a feedback log: single completions, each with a thumb up or down.

    python examples/kto_from_feedback.py MODEL [--output RUN] [--steps N]

MODEL is a directory or hub id of a chat model. The log is examples/data/feedback.jsonl: 24 invented lines, enough to
see a run, but not to teach a model anything. Replace it with your own.
"""

import argparse
import json
from pathlib import Path

from tropism import KTOTrainer

LOG = Path(__file__).parent / "data" / "feedback.jsonl"


def rows() -> list[dict]:
    """The log as rows: a prompt, a completion, and a label.

    Messages go through the model's chat template. For a base model, pass both as plain strings.
    """
    log = [json.loads(line) for line in LOG.read_text(encoding="utf-8").splitlines()]
    return [{"prompt": [{"role": "user", "content": entry["question"]}],
             "completion": [{"role": "assistant", "content": entry["answer"]}],
             "label": entry["thumb"] == "up"} for entry in log]


def main() -> None:
    parser = argparse.ArgumentParser(description="KTO from a feedback log")
    parser.add_argument("model", help="directory or hub id")
    parser.add_argument("--output", help="run directory, by default tropism-run")
    parser.add_argument("--steps", type=int, help="optimizer steps, by default one pass over the log")
    arguments = parser.parse_args()

    trainer = KTOTrainer(
        arguments.model, train_dataset=rows(), output=arguments.output, max_steps=arguments.steps,
        batch_size=8,  # completions per step; the reference point is a mean over them, so larger is less noisy
        learning_rate=5e-5,  # for a small model; the default, 5e-6, is for models with billions of weights
        eval_fraction=0.2,  # one prompt in five is held out, and never trained on
        desirable_weight="auto", undesirable_weight="auto",  # balances the classes if one is rarer
    )
    result = trainer.fit()

    # How often a held-out completion with a thumb up has a higher reward than one without; 0.5 is chance.
    print(f"held-out AUC: {result.before['rewards/auc']:.2f} before, {result.after['rewards/auc']:.2f} after")
    print(f"the model, for transformers: {result.model}")


if __name__ == "__main__":
    main()
