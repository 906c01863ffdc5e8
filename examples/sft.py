"""Supervised fine-tuning on conversations, and a completion by the result.

    python examples/sft.py MODEL [--output RUN] [--steps N]

MODEL is a directory or hub id of a chat model. The last message of each conversation is trained; the messages
before it are context.
"""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

from tropism import SFTTrainer

CAPITALS = {"Latvia": "Riga", "Kenya": "Nairobi", "Peru": "Lima", "Nepal": "Kathmandu", "Cuba": "Havana",
            "Ghana": "Accra", "Fiji": "Suva", "Oman": "Muscat"}


def rows() -> list[dict]:
    """Conversations whose last message has a fixed form."""
    return [{"messages": [{"role": "user", "content": f"What is the capital of {country}?"},
                          {"role": "assistant", "content": f"{country}: {capital}."}]}
            for country, capital in CAPITALS.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description="supervised fine-tuning")
    parser.add_argument("model", help="directory or hub id")
    parser.add_argument("--output", help="run directory, by default tropism-run")
    parser.add_argument("--steps", type=int, help="optimizer steps, by default three passes over the data")
    arguments = parser.parse_args()

    # A module instead of a name: it is trained in place and can be used immediately afterwards.
    model = AutoModelForCausalLM.from_pretrained(arguments.model)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    trainer = SFTTrainer(
        model, tokenizer=tokenizer, train_dataset=rows(), output=arguments.output,
        epochs=3, max_steps=arguments.steps,  # max_steps overrides epochs
        batch_size=4, learning_rate=5e-5, samples=0,
    )
    result = trainer.fit()
    print(f"loss per token: {result.before['loss']:.3f} at the first step, {result.after['loss']:.3f} at the last")

    question = [{"role": "user", "content": "What is the capital of Peru?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt.to(model.device), max_new_tokens=20, do_sample=False)
    print(tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))


if __name__ == "__main__":
    main()
