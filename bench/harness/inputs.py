"""Models and rows: a tiny random model, the demo's model, shapes with random weights, and rows for every method."""

import json
import os
import random
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen3Config

from tropism.commands.demo.run import model_file
from tropism.errors import UsageError
from tropism.model import load, save
from tropism.model.source import ModelSource

BUILT = Path(__file__).parents[2] / "build" / "bench"
"""Where models and finished measurements are kept between calls."""

SHAPES: dict[str, Any] = {
    "qwen3-0.6b": Qwen3Config(vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
                              num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
                              max_position_embeddings=40960),
    "llama-1.2b": LlamaConfig(vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
                              num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=True,
                              max_position_embeddings=131072),
    "llama-8b": LlamaConfig(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                            num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=False,
                            max_position_embeddings=131072),
}
"""Models of these shapes get random weights and the tokenizer of the demo's model."""

DATA = {
    ("kto", "short"): "pandalm_human_kto", ("dpo", "short"): "pandalm_human_pairs",
    ("kd", "short"): "selfinstruct_human_sft", ("kto", "long answers"): "tulu_human_accept_kto",
    ("dpo", "long answers"): "tulu_human_pairs", ("kd", "long answers"): "tulu_human_accept_kto",
    ("kto", "long prompts"): "qa_feedback_kto", ("dpo", "long prompts"): "qa_feedback_pairs",
    ("kd", "long prompts"): "qa_feedback_sft", ("kto", "grouped"): "pandalm_human_kto",
    ("dpo", "grouped"): "pandalm_human_pairs", ("kd", "grouped"): "tulu_human_accept_kto",
}
"""File of each method and kind of rows, in the data directory."""

_WORDS = ["oak", "elm", "ash", "fir", "yew", "bay", "box", "fig", "may", "sea", "sky", "sun"]


def data_directory(given: Path | None) -> Path | None:
    """The directory of real rows: the one that is given, else $TROPISM_TEST_DATA if it has them."""
    found = given or Path(os.environ.get("TROPISM_TEST_DATA", "") or BUILT)
    inner = found / "data"
    return next((path for path in (found, inner) if any((path / f"{name}.jsonl").exists() for name in DATA.values())),
                None)


def rows_of(method: str, kind: str, directory: Path | None, folder: Path) -> Path:
    """The rows of a kind as a file; without a directory of real rows, the demo's feedback.

    Raises:
        UsageError: if the rows are not there.
    """
    if directory is not None:
        path = directory / f"{DATA[method, kind]}.jsonl"
        if not path.exists():
            raise UsageError(f"{path} does not exist. Pass --data-dir with the directory that has it.")
        return path
    if kind not in ("short", "grouped"):
        raise UsageError(f"rows with {kind} do not come with the package. Pass --data-dir, or set TROPISM_TEST_DATA.")
    source = files("tropism.commands.demo") / "feedback.jsonl"
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    return _write(folder / f"demo-{method}.jsonl", _of_feedback(method, rows))


def _of_feedback(method: str, rows: list[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """Labeled rows as they are; as pairs, each desirable completion with an undesirable one of its prompt."""
    if method == "kto":
        yield from rows
        return
    worse: dict[str, list[Any]] = {}
    for row in rows:
        if not row["label"]:
            worse.setdefault(json.dumps(row["prompt"]), []).append(row["completion"])
    for number, row in enumerate(row for row in rows if row["label"]):
        others = worse.get(json.dumps(row["prompt"]), [])
        if method == "kd":
            yield {"prompt": row["prompt"], "completion": row["completion"]}
        elif others:
            yield {"prompt": row["prompt"], "chosen": row["completion"], "rejected": others[number % len(others)]}


def tiny_rows(method: str, folder: Path, count: int = 24) -> Path:
    """Random rows of a few words, two or three to a prompt."""
    generator = random.Random(0)

    def words(most: int) -> str:
        return " ".join(generator.choices(_WORDS, k=generator.randint(2, most)))

    prompts = [words(12) + " ? " for _ in range(max(2, count // 3))]
    fields = {"kto": ("completion",), "dpo": ("chosen", "rejected"), "kd": ("completion",)}[method]
    return _write(folder / f"tiny-{method}.jsonl", (
        {"prompt": generator.choice(prompts), **{name: words(9) for name in fields},
         **({"label": number % 2 == 0} if method == "kto" else {})} for number in range(count)))


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def tiny_tokenizer(vocabulary: int = 0) -> PreTrainedTokenizerFast:
    """A tokenizer of words; `vocabulary` adds words up to that size."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = ["<unk>", "<s>", "</s>", "?", *_WORDS]
    names += [f"w{number}" for number in range(len(names), vocabulary)]
    backend = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>",
                                   pad_token="</s>")


def tiny_model(folder: Path, seed: int = 0, **sizes: Any) -> Path:
    """A directory with a random Llama and the tokenizer of words."""
    tokenizer = tiny_tokenizer(sizes.get("vocab_size", 0))
    config = LlamaConfig(**{"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48,
                            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                            "max_position_embeddings": 32768, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
                            **sizes})
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def model_directory(name: str) -> Path:
    """A model directory: of a path, of a shape with random weights, or of the demo's model (`smollm2`)."""
    if Path(name).is_dir():
        return Path(name)
    path = BUILT / name
    if (path / "config.json").exists():
        return path
    demo = ModelSource.of(str(model_file()))
    tokenizer = load.load_tokenizer(demo)
    if name == "smollm2":
        save.export(load.load_model(demo, "fp32", torch.device("cpu")), tokenizer, path, torch.float32, [])
    elif name in SHAPES:
        torch.manual_seed(0)
        config = SHAPES[name]
        config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, 2, 2
        dtype = torch.bfloat16 if name == "llama-8b" else torch.float32
        AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(path)
        tokenizer.save_pretrained(path)
    else:
        raise UsageError(f"--model {name} is neither a directory nor one of smollm2, {', '.join(SHAPES)}")
    return path


def teacher_directory(model: Path) -> Path:
    """A teacher of the same size: the model with noise on its weights, since a copy of it would teach nothing."""
    path = BUILT / f"teacher-of-{model.name}" if BUILT in model.parents else model.parent / f"teacher-of-{model.name}"
    if not (path / "config.json").exists():
        teacher = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in teacher.parameters():
                weight.mul_(1 + 0.1 * torch.randn(weight.shape, generator=generator))
        teacher.save_pretrained(path)
        load.load_tokenizer(ModelSource.of(str(model))).save_pretrained(path)
    return path
