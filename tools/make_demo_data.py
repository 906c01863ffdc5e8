"""Make the demo feedback file from a chat model's own answers.

Every prompt in the prompts file is answered several times by the model, each answer is labeled
by the rule in `tropism.commands.demo.rule`, and the rows are written as JSON lines:

    python tools/make_demo_data.py MODEL_DIR src/tropism/demo/feedback.jsonl

Sampling is seeded and runs on one CPU thread, so the same model, library versions and machine
give the same file again.
"""

import argparse
import importlib.util
import json
import re
import string
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

DEMO = Path(__file__).resolve().parent.parent / "src" / "tropism" / "demo"
# The file is shown to people, so answers with these words stay out of it.
COARSE = re.compile(r"\b(?:shit|fuck|bitch|bastard|damn|crap)\w*", re.IGNORECASE)


def load_rule(path: Path) -> Callable[[str], bool]:
    """Load `passes` from the rule's file, so that the package need not be installed."""
    spec = importlib.util.spec_from_file_location("demo_rule", path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    passes: Callable[[str], bool] = module.passes
    return passes


def read_prompts(path: Path) -> list[str]:
    """Read one prompt a line, skip blank lines and refuse repeated prompts."""
    prompts = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if len(set(prompts)) != len(prompts):
        raise ValueError(f"{path} repeats a prompt")
    return prompts


def presentable(answer: str) -> bool:
    """Return whether the answer has text, no coarse word and no half-decoded character."""
    return bool(answer) and "\ufffd" not in answer and COARSE.search(answer) is None


def sample_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    options: argparse.Namespace,
) -> list[list[str]]:
    """Answer every prompt `options.answers` times; return the distinct answers of each prompt."""
    answers: list[list[str]] = [[] for _ in prompts]
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    template = tokenizer.apply_chat_template
    texts = [template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    # Prompts of similar length share a batch, which keeps the padding small.
    order = sorted(range(len(texts)), key=lambda index: (len(texts[index]), index))
    jobs = [index for index in order for _ in range(options.answers)]
    for start in range(0, len(jobs), options.batch_size):
        batch = jobs[start : start + options.batch_size]
        encoded = tokenizer(
            [texts[index] for index in batch], return_tensors="pt", padding=True, add_special_tokens=False
        )
        with torch.inference_mode():
            output = model.generate(
                **encoded,
                do_sample=True,
                temperature=options.temperature,
                top_p=options.top_p,
                top_k=0,
                max_new_tokens=options.max_new_tokens,
            )
        new_tokens = output[:, encoded["input_ids"].shape[1] :]
        decoded = tokenizer.batch_decode(new_tokens, skip_special_tokens=True)
        for index, text in zip(batch, decoded, strict=True):
            answer = text.strip()
            if presentable(answer) and answer not in answers[index]:
                answers[index].append(answer)
        print(f"{min(start + len(batch), len(jobs))}/{len(jobs)} answers", flush=True)
    return answers


def feedback_rows(
    prompts: list[str], answers: list[list[str]], passes: Callable[[str], bool]
) -> Iterator[dict[str, object]]:
    """Yield one labeled row for each answer."""
    for number, (prompt, texts) in enumerate(zip(prompts, answers, strict=True), start=1):
        for letter, answer in zip(string.ascii_lowercase, texts, strict=False):
            yield {
                "id": f"d{number:03d}-{letter}",
                "prompt": [{"role": "user", "content": prompt}],
                "completion": [{"role": "assistant", "content": answer}],
                "label": passes(answer),
            }


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Make the demo feedback file.")
    parser.add_argument("model", type=Path, help="directory of a chat model and its tokenizer")
    parser.add_argument("output", type=Path, help="the JSON lines file to write")
    parser.add_argument("--prompts", type=Path, default=DEMO / "prompts.txt")
    parser.add_argument("--answers", type=int, default=5, help="answers sampled for each prompt")
    parser.add_argument("--temperature", type=float, default=0.9)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--batch-size", type=int, default=70)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Sample, label and write the rows."""
    options = parse_options()
    # Sums over several threads may round differently from run to run.
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    passes = load_rule(DEMO / "rule.py")
    prompts = read_prompts(options.prompts)
    # Generation needs the prompts to end at the same place, so the padding goes on the left.
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    answers = sample_answers(model, tokenizer, prompts, options)
    rows = list(feedback_rows(prompts, answers, passes))
    with options.output.open("w", encoding="utf-8", newline="\n") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    desirable = sum(bool(row["label"]) for row in rows)
    print(f"{len(rows)} rows, {desirable} desirable, {len(rows) - desirable} undesirable")


if __name__ == "__main__":
    main()
