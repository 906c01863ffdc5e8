"""A DPO script written for TRL. Only its import was changed.

    python examples/coming_from/trl_dpo.py MODEL
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from tropism.compat.trl import DPOConfig, DPOTrainer

PAIRS = [{"prompt": f"Name a {kind}.", "chosen": f" {good}.", "rejected": f" {bad}!"} for kind, good, bad in [
    ("tree", "Oak", "Carp"), ("fish", "Carp", "Crow"), ("bird", "Crow", "Oak"), ("metal", "Tin", "Elm"),
    ("river", "Nile", "Etna"), ("volcano", "Etna", "Nile"), ("color", "Red", "Two"), ("number", "Two", "Red")]]


class ShowMargins(TrainerCallback):
    """Print what most people look at."""

    def on_log(self, args, state, control, logs=None, **kwargs):  # noqa: ANN001, ANN003, ANN201
        if "rewards/margins" in logs:
            print(f"step {state.global_step}: margin {logs['rewards/margins']:+.3f}")


def main() -> None:
    """Train, evaluate and save."""
    name = sys.argv[1]
    model = AutoModelForCausalLM.from_pretrained(name)
    tokenizer = AutoTokenizer.from_pretrained(name)
    args = DPOConfig(output_dir="dpo-out", per_device_train_batch_size=2, gradient_accumulation_steps=1, beta=0.1,
                     num_train_epochs=2, learning_rate=1e-3, logging_steps=2, eval_strategy="epoch",
                     save_strategy="epoch", report_to="none")
    trainer = DPOTrainer(model=model, ref_model=None, args=args, train_dataset=PAIRS[:6], eval_dataset=PAIRS[6:],
                         processing_class=tokenizer, callbacks=[ShowMargins])
    trainer.train()
    print(f"evaluation accuracy: {trainer.evaluate()['eval_rewards/accuracies']:.2f}")
    trainer.save_model("dpo-out/final")


if __name__ == "__main__":
    main()
