"""Tasks of lm-eval in each evaluation of a run, with the best checkpoint by one of their metrics.

    pip install 'tropism[eval]'
    python examples/lm_eval_evaluator.py MODEL [--output RUN] [--steps N]

MODEL is a directory or hub id. The same function works on the command line, from the directory of this file:

    tropism kto ... --evaluator lm_eval_evaluator:capitals --keep-best capitals/acc:max
"""

import argparse
import json
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tropism import KTOTrainer

CAPITALS = {"Latvia": "Riga", "Kenya": "Nairobi", "Peru": "Lima", "Nepal": "Kathmandu", "Cuba": "Havana",
            "Ghana": "Accra", "Fiji": "Suva", "Oman": "Muscat"}
INSTALLED = find_spec("lm_eval") is not None


def capitals(model: Any, tokenizer: Any, rows: list[dict]) -> dict[str, float]:
    """The figures of a task of our own, from a local file. Names of tasks, such as arc_easy, work as well."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "capitals.jsonl"
        docs = [{"country": country, "right": number, "cities": list(CAPITALS.values())}
                for number, country in enumerate(CAPITALS)]
        file.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
        task = {"task": "capitals", "dataset_path": "json", "test_split": "train", "output_type": "multiple_choice",
                "dataset_kwargs": {"data_files": str(file), "cache_dir": directory},
                "doc_to_text": "The capital of {{country}} is", "doc_to_choice": "{{cities}}",
                "doc_to_target": "{{right}}", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]}
        found = simple_evaluate(HFLM(pretrained=model, tokenizer=tokenizer, batch_size=8), tasks=[task],
                                bootstrap_iters=0, limit=100, log_samples=False)
    # lm-eval calls a metric "acc,none". A name in Tropism has no comma.
    return {f"{name}/{metric.partition(',')[0]}": value for name, metrics in found["results"].items()
            for metric, value in metrics.items() if isinstance(value, float) and "stderr" not in metric}


def rows() -> list[dict]:
    """Feedback on answers, one right and one wrong for each country."""
    cities = list(CAPITALS.values())
    return [{"prompt": f"The capital of {country} is", "completion": f" {city}", "label": city == right}
            for number, (country, right) in enumerate(CAPITALS.items())
            for city in (right, cities[(number + 1) % len(cities)])]


def main() -> None:
    parser = argparse.ArgumentParser(description="tasks of lm-eval during training")
    parser.add_argument("model", help="directory or hub id")
    parser.add_argument("--output", help="run directory, by default tropism-run")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps, by default 4")
    arguments = parser.parse_args()

    if not INSTALLED:
        print("lm_eval is not installed, so its tasks are left out: pip install 'tropism[eval]'")
    trainer = KTOTrainer(
        arguments.model, train_dataset=rows(), eval_fraction=0.25, plain_text=True, output=arguments.output,
        max_steps=arguments.steps, eval_every=2, batch_size=4, learning_rate=1e-3, samples=0,
        evaluator=capitals if INSTALLED else None, keep_best="capitals/acc:max" if INSTALLED else "loss",
    )
    result = trainer.fit()
    for name in ("capitals/acc", "capitals/acc_norm", "loss"):
        if name in result.after:
            print(f"{name}: {result.before[name]:.3f} before, {result.after[name]:.3f} after")


if __name__ == "__main__":
    main()
