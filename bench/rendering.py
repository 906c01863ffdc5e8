"""Compare how fast Tropism and TRL turn a file of conversations into token ids.

    pip install trl -c constraints/tested.txt
    python bench/rendering.py --tokenizer DIR --data FILE --rows 20000 --workers 2

FILE is JSONL of conversational rows (prompt, completion, label). Both sides start from the file with empty caches and
the same number of processes, and take turns. TRL's side is `datasets.load_dataset` and the preparation in the
constructor of KTOTrainer, whose model is a tiny random one.
"""

import argparse
import importlib.util
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

MAX_LENGTH = 2048


def ours(data: Path, tokenizer: Any, workers: int, scratch: Path) -> tuple[float, int, list[list[int]]]:
    """Tropism: seconds, tokens, and the ids of the first 100 rows."""
    from tropism.data.read_rows import read_rows
    from tropism.data.tokenization.render import Renderer
    from tropism.data.tokenization.truncate import Limits

    began = time.monotonic()
    rows = read_rows(data, Renderer(tokenizer, Limits(MAX_LENGTH)), "unpaired", workers=workers, cache=scratch).rows
    seconds = time.monotonic() - began
    facts = rows.facts  # type: ignore[attr-defined]
    first = [[*row.prompt_ids.tolist(), *row.completions[0].ids.tolist()] for row in itertools.islice(rows, 100)]
    return seconds, int(facts.prompt_tokens.sum() + facts.tokens.sum()), first


def theirs(data: Path, tokenizer: Any, workers: int, scratch: Path) -> tuple[float, int, list[list[int]]]:
    """TRL: the same."""
    import datasets
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import KTOConfig, KTOTrainer

    tiny = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8,
                                        num_hidden_layers=1, num_attention_heads=1))
    tiny.save_pretrained(scratch / "model")  # the trainer takes its reference from there
    args = KTOConfig(output_dir=str(scratch / "out"), dataset_num_proc=workers if workers > 1 else None,
                     max_length=MAX_LENGTH, report_to=[], use_cpu=True, bf16=False)
    began = time.monotonic()
    rows = datasets.load_dataset("json", data_files=str(data), split="train", cache_dir=str(scratch))
    found = KTOTrainer(str(scratch / "model"), args=args, train_dataset=rows, processing_class=tokenizer).train_dataset
    seconds = time.monotonic() - began
    tokens = sum(len(row["prompt_ids"]) + len(row["completion_ids"]) for row in found)
    return seconds, tokens, [row["prompt_ids"] + row["completion_ids"] for row in found.select(range(100))]


def smoke() -> None:
    """Our side on a few random rows, with a tokenizer of words."""
    from harness import inputs

    with tempfile.TemporaryDirectory() as place:
        seconds, tokens, first = ours(inputs.tiny_rows("kto", Path(place)), inputs.tiny_tokenizer(), 1, Path(place))
    print(f"{len(first)} rows, {tokens} tokens, {seconds:.2f} s")


def main() -> None:
    """Let the sides take turns, and print the ratio of their times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", help="directory or hub id of a tokenizer with a chat template")
    parser.add_argument("--data", type=Path, help="JSONL file of conversational rows")
    parser.add_argument("--rows", type=int, default=20_000, help="rows to read (default: 20000)")
    parser.add_argument("--workers", type=int, default=2, help="processes of each side (default: 2)")
    parser.add_argument("--rounds", type=int, default=3, help="times that each side runs (default: 3)")
    parser.add_argument("--smoke", action="store_true", help="try it: our side on a few rows, without TRL")
    given = parser.parse_args()
    if given.smoke:
        smoke()
        return
    if given.tokenizer is None or given.data is None:
        parser.error("--tokenizer and --data are needed")
    if importlib.util.find_spec("trl") is None:
        parser.exit(2, "TRL is not installed: run `pip install trl -c constraints/tested.txt`\n")
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_caching()
    tokenizer = AutoTokenizer.from_pretrained(given.tokenizer)
    ratios = []
    with tempfile.TemporaryDirectory() as place:
        data = Path(place) / "rows.jsonl"
        with given.data.open() as lines, data.open("w") as some:
            some.writelines(itertools.islice(lines, given.rows))
        for turn in range(given.rounds):
            found = {}
            for side in (ours, theirs) if turn % 2 else (theirs, ours):
                with tempfile.TemporaryDirectory(dir=place) as scratch:
                    found[side.__name__] = side(data, tokenizer, given.workers, Path(scratch))
            (mine, tokens, first), (other, their_tokens, their_first) = found["ours"], found["theirs"]
            # TRL learns what the template writes behind the terminator, a newline here, too.
            same = sum(two[: len(one)] == one for one, two in zip(first, their_first, strict=True))
            ratios.append(other / mine)
            print(json.dumps({"round": turn + 1, "rows_per_s": round(given.rows / mine),
                              "trl_rows_per_s": round(given.rows / other), "ratio": round(other / mine, 2),
                              "tokens": tokens, "trl_tokens": their_tokens,
                              "first_100_equal_to_the_terminator": same}), flush=True)
    print(f"{given.workers} processes: TRL takes {statistics.median(ratios):.2f} times as long "
          f"({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
