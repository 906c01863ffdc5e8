"""The recipes, and models with the shapes of theirs without weights."""

import json
import re
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from helpers import build_tokenizer
from tropism.config import METHODS, MethodOptions
from tropism.config_file import read_yaml
from tropism.observe.console import Voice
from tropism.train.setup.run_plan import Plan, Prepared

FOLDER = Path(__file__).parents[1] / "examples" / "recipes"
RECIPES = sorted(FOLDER.glob("*.yaml"))
_QWEN2 = {"vocab_size": 151936, "num_key_value_heads": 2, "tie_word_embeddings": True,
          "max_position_embeddings": 32768, "architectures": ["Qwen2ForCausalLM"]}
CONFIGS: dict[str, Any] = {
    "Qwen/Qwen2.5-0.5B-Instruct": Qwen2Config(hidden_size=896, num_hidden_layers=24, num_attention_heads=14,
                                              intermediate_size=4864, **_QWEN2),
    "Qwen/Qwen2.5-1.5B-Instruct": Qwen2Config(hidden_size=1536, num_hidden_layers=28, num_attention_heads=12,
                                              intermediate_size=8960, **_QWEN2),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": LlamaConfig(
        hidden_size=2048, num_hidden_layers=24, num_attention_heads=32, num_key_value_heads=32, intermediate_size=8192,
        vocab_size=49152, tie_word_embeddings=True, max_position_embeddings=8192, architectures=["LlamaForCausalLM"]),
    "Qwen/Qwen3-8B": Qwen3Config(
        hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        intermediate_size=12288, vocab_size=151936, tie_word_embeddings=False, max_position_embeddings=40960,
        architectures=["Qwen3ForCausalLM"]),
}
"""By the names of the models: the shapes in their published config.json."""


def options_of(recipe: Path) -> MethodOptions:
    """A recipe, read as `tropism train` reads it."""
    method, values = read_yaml(recipe)
    assert method is not None
    cls = METHODS[method]
    return cls.model_validate(cls.nested(values))


def card_of(recipe: Path) -> tuple[str, float | None]:
    """The card that a recipe names, and the GiB that it says are predicted; None if it gives no figure."""
    found = re.search(r"^# (?:Card:|Made for) (?:\d x )?([\w-]+)(?:, ([\d.]+) GiB predicted)?", recipe.read_text(
        encoding="utf-8"), re.MULTILINE)
    assert found is not None, recipe
    return found[1], float(found[2]) if found[2] else None


def plan_of(recipe: Path, folder: Path) -> Plan:
    """The plan of a recipe: for its card, and 64 rows of 400 to 1,000 tokens of which the prompt has 40%."""
    options = options_of(recipe)
    named = {name: str(_bare(value, folder)) for name in ("model", "teacher")
             if (value := getattr(options, name, None)) is not None}
    data = folder / f"{options.method}.jsonl"
    data.write_text("".join(json.dumps(_row(options.method, number)) + "\n" for number in range(64)), encoding="utf-8")
    small = options.model_copy(update={**named, "data": str(data), "store": str(folder / "store")})
    return Prepared.of(small, card_of(recipe)[0], Voice(loud=False)).plan()


def _row(method: str, number: int) -> dict[str, Any]:
    length = 400 + 600 * (number * 37 % 64) // 64
    prompt, completion = "a" * (length * 2 // 5), "b" * (length * 3 // 5)
    row: dict[str, Any] = {"prompt": f"{number:02}{prompt}"}
    if method == "dpo":
        return {**row, "chosen": completion, "rejected": "c" + completion}
    return {**row, "completion": completion, **({"label": number % 2 == 0} if method == "kto" else {})}


def _bare(name: str, folder: Path) -> Path:
    """A directory with the config of a model and a small tokenizer."""
    directory = folder / name.replace("/", "--")
    if not directory.exists():
        CONFIGS[name].save_pretrained(directory)
        build_tokenizer().save_pretrained(directory)
    return directory


def predicted_gib(plan: Plan) -> float:
    """The peak in GiB."""
    return sum(plan.choice.components.values()) / 2**30


__all__ = ["CONFIGS", "FOLDER", "RECIPES", "card_of", "options_of", "plan_of", "predicted_gib"]
