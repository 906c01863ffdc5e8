"""Distill a teacher into a smaller student with the same tokenizer.

    python examples/distill.py STUDENT TEACHER [--output RUN] [--steps N] [--top-k K]

Without --top-k the teacher stays in memory and every step compares the full vocabulary. With it the teacher runs once
before training; its K most likely tokens and the mass of all others are stored, and the teacher is unloaded. Another
run with the same teacher and data, for example at another learning rate, reuses them.
"""

import argparse

from tropism import KDTrainer

TEXTS = [
    "A wren weighs as much as a coin and is louder than a crow.",
    "The river froze in January and the children skated to school.",
    "Bread needs flour, water, salt and somebody who can wait.",
    "He kept the lighthouse for thirty years and never learned to swim.",
    "When the wind turns east the gulls come inland.",
    "She planted beans by the moon and pruned the apple by the book.",
    "The ferry leaves at nine, or when the captain has had his tea.",
    "Nobody counts the steps to the tower until the way down.",
]


def rows() -> list[dict]:
    """The student should continue a beginning as the teacher would. In real runs, use texts like those of later use."""
    split = [(text.split(" ", 3)[:3], text.split(" ", 3)[3]) for text in TEXTS]
    return [{"prompt": " ".join(begin), "completion": f" {rest}"} for begin, rest in split]


def main() -> None:
    parser = argparse.ArgumentParser(description="distillation")
    parser.add_argument("student", help="directory or hub id")
    parser.add_argument("teacher", help="directory or hub id, with the student's tokenizer")
    parser.add_argument("--output", help="run directory, by default tropism-run")
    parser.add_argument("--steps", type=int, help="optimizer steps, by default five passes over the texts")
    parser.add_argument("--top-k", type=int, help="store the teacher's K most likely tokens")
    arguments = parser.parse_args()

    trainer = KDTrainer(
        arguments.student, teacher_model=arguments.teacher, train_dataset=rows(), output=arguments.output,
        epochs=5, max_steps=arguments.steps, batch_size=4, learning_rate=5e-5,
        kd_weight=0.9,  # nine parts divergence from the teacher, one part cross-entropy with the text
        divergence="forward_kl", temperature=1.0, top_k=arguments.top_k,
    )
    result = trainer.fit()
    for key in ("kd/divergence", "kd/ce"):  # nats per token
        print(f"{key}: {result.before[key]:.4f} at the first step, {result.after[key]:.4f} at the last")


if __name__ == "__main__":
    main()
