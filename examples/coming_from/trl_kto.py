"""A KTO script written for TRL. Only its import was changed.

    python examples/coming_from/trl_kto.py --model_name_or_path MODEL --output_dir kto-out --use_peft --lora_r 4
"""

from tropism.compat.trl import KTOConfig, KTOTrainer, ModelConfig, TrlParser, get_peft_config

FEEDBACK = [{"prompt": f"Name a {kind}.", "completion": f" {answer}.", "label": label} for kind, answer, label in [
    ("tree", "Oak", True), ("fish", "Crow", False), ("bird", "Crow", True), ("metal", "Elm", False),
    ("river", "Nile", True), ("volcano", "Nile", False), ("color", "Red", True), ("number", "Red", False)]]


def main() -> None:
    """Train an adapter as the command line says."""
    training_args, model_args = TrlParser((KTOConfig, ModelConfig)).parse_args_and_config()
    trainer = KTOTrainer(model=model_args.model_name_or_path, args=training_args, train_dataset=FEEDBACK,
                         peft_config=get_peft_config(model_args))
    trainer.train()
    trainer.save_model(training_args.output_dir)
    trainer.accelerator.print(f"{trainer.state.global_step} steps, "
                              f"z0 {trainer.state.log_history[-2]['kl']:.3f} at the end")


if __name__ == "__main__":
    main()
