"""Make the demo's feedback file from a chat model's own completions.

    python tools/make_demo_data.py MODEL src/tropism/commands/demo/feedback.jsonl

Samples several completions of every prompt, labels each by the rule in `tropism.commands.demo.rule`, and writes JSONL.
Sampling is seeded and runs on one CPU thread: the same model, library versions and machine give the same file.
"""

import argparse
import importlib.util
import json
import re
import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEMO = Path(__file__).resolve().parent.parent / "src" / "tropism" / "commands" / "demo"
# The file is shown to people, so completions with these words are dropped.
COARSE = re.compile(r"\b(?:shit|fuck|bitch|bastard|damn|crap)\w*", re.IGNORECASE)


def load_rule(path: Path) -> Callable[[str], bool]:
    """Load `passes` from the rule's file, which works without the package installed."""
    spec = importlib.util.spec_from_file_location("demo_rule", path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    passes: Callable[[str], bool] = module.passes
    return passes


def read_prompts(path: Path) -> list[str]:
    """Read one prompt per line; skip blank lines and reject repeated prompts."""
    prompts = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if len(set(prompts)) != len(prompts):
        raise ValueError(f"{path} repeats a prompt")
    return prompts


def presentable(completion: str) -> bool:
    """Return whether a completion has text, no coarse word and no half-decoded character."""
    return bool(completion) and "\ufffd" not in completion and COARSE.search(completion) is None


def sample(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", prompts: list[str],
           options: argparse.Namespace) -> list[list[str]]:
    """Sample `options.completions` completions of every prompt; return the distinct ones of each."""
    import torch

    found: list[list[str]] = [[] for _ in prompts]
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    # Prompts of similar length share a batch, which keeps the padding small.
    order = sorted(range(len(texts)), key=lambda index: (len(texts[index]), index))
    jobs = [index for index in order for _ in range(options.completions)]
    for start in range(0, len(jobs), options.batch_size):
        batch = jobs[start : start + options.batch_size]
        encoded = tokenizer([texts[index] for index in batch], return_tensors="pt", padding=True,
                            add_special_tokens=False)
        with torch.inference_mode():
            output = model.generate(
                input_ids=encoded["input_ids"], attention_mask=encoded["attention_mask"], do_sample=True,
                temperature=options.temperature, top_p=options.top_p, top_k=0, max_new_tokens=options.max_new_tokens)
        new_tokens = output[:, encoded["input_ids"].shape[1] :]
        for index, text in zip(batch, tokenizer.batch_decode(new_tokens, skip_special_tokens=True), strict=True):
            completion = text.strip()
            if presentable(completion) and completion not in found[index]:
                found[index].append(completion)
        print(f"{min(start + len(batch), len(jobs))}/{len(jobs)} completions", flush=True)
    return found


def feedback_rows(prompts: list[str], completions: list[list[str]],
                  passes: Callable[[str], bool]) -> Iterator[dict[str, object]]:
    """Yield one labeled row for each completion."""
    for number, (prompt, texts) in enumerate(zip(prompts, completions, strict=True), start=1):
        for letter, completion in zip(string.ascii_lowercase, texts, strict=False):
            yield {
                "id": f"d{number:03d}-{letter}",
                "prompt": [{"role": "user", "content": prompt}],
                "completion": [{"role": "assistant", "content": completion}],
                "label": passes(completion),
            }


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="directory of a chat model and its tokenizer")
    parser.add_argument("output", type=Path, help="JSONL file to write")
    parser.add_argument("--prompts", type=Path, default=DEMO / "prompts.txt",
                        help="text file with one prompt per line (default: the demo's)")
    parser.add_argument("--completions", type=int, default=5, help="completions per prompt (default: 5)")
    parser.add_argument("--temperature", type=float, default=0.9, help="sampling temperature (default: 0.9)")
    parser.add_argument("--top-p", type=float, default=0.95,
                        help="sample from the smallest set of tokens with this probability (default: 0.95)")
    parser.add_argument("--max-new-tokens", type=int, default=48,
                        help="maximum length of a completion in tokens (default: 48)")
    parser.add_argument("--batch-size", type=int, default=70, help="completions per forward pass (default: 70)")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the sampling (default: 0)")
    return parser.parse_args()


def main() -> None:
    """Sample, label and write the rows."""
    options = parse_options()
    import torch  # not for --help
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Sums over several threads may round differently from run to run.
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    passes = load_rule(DEMO / "rule.py")
    prompts = read_prompts(options.prompts)
    # Generation needs the prompts to end at the same place, so the padding goes on the left.
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    rows = list(feedback_rows(prompts, sample(model, tokenizer, prompts, options), passes))
    with options.output.open("w", encoding="utf-8", newline="\n") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    desirable = sum(bool(row["label"]) for row in rows)
    print(f"{len(rows)} rows, {desirable} desirable, {len(rows) - desirable} undesirable")


if __name__ == "__main__":
    main()
