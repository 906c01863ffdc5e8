"""How an export is served: what was checked, and the commands that its card shows."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from tropism.commands.export import ollama
from tropism.commands.export.read_run import Chosen, ExportedRun
from tropism.data.tokenization.apply_template import ChatTemplate
from tropism.data.tokenization.chat_template import parse_kwargs
from tropism.errors import DataError, UsageError
from tropism.model import load
from tropism.model.adapters.files import GGUF_BASE
from tropism.model.generation import read_generation
from tropism.model.names import split_revision
from tropism.model.source import ModelSource
from tropism.observe.manifest import text_fingerprints

_VLLM_DTYPES = {"float64": "float32"}
"""Dtypes that vLLM lacks, and what it uses instead."""
_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of its `--max-lora-rank`."""


@dataclass
class Serving:
    """What serving needs to know of an export.

    Args:
        checked: what was compared with the training and agrees.
        problems: what differs from the training, or cannot be served.
        gguf: of its GGUF file, as `Agreement.to_json` has it.
        gguf_base: whether it is an adapter of a GGUF file.
        modelfile: what its Modelfile leaves out; None without one.
    """

    checked: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    gguf: dict[str, Any] | None = None
    gguf_base: bool = False
    modelfile: list[str] | None = None


def template_kwargs(run: ExportedRun) -> dict[str, Any]:
    """Values for the chat template during training.

    Raises:
        UsageError: if the run's config has something else.
    """
    given = run.options.get("chat_template_kwargs") or ""
    try:
        return given if isinstance(given, dict) else parse_kwargs(str(given))
    except ValueError as error:
        raise UsageError(f"{run.path / 'config.yaml'}: chat_template_kwargs: {error}") from None


def check(run: ExportedRun, chosen: Chosen, directory: Path, tokenizer: Any, trust_remote_code: bool) -> Serving:
    """Compare written files with the training: where generation stops, and how the chat template renders a message.

    Args:
        directory: of the export.
        tokenizer: of the training.
    """
    found = Serving()
    generation, _ = read_generation(directory)
    trained = run.manifest.get("stop_ids") if chosen.trainer is None else chosen.stop_ids
    known = range(len(tokenizer))
    left = sorted({token for token in trained or () if token in known} - set(stop_ids(generation)))
    if trained is None:
        found.problems.append("The run has no record of the tokens that ended its completions, so they were not "
                              "compared with generation_config.json.")
    elif left:
        names = ", ".join(f"{tokenizer.convert_ids_to_tokens(token)} ({token})" for token in left)
        found.problems.append(f"Completions ended with {names} in training, but generation_config.json does not stop "
                              "there. Add it to eos_token_id, or pass it as a stop string.")
    else:
        found.checked.append("generation_config.json stops at every token that ended a completion in training")
    written = load.load_tokenizer(ModelSource(str(directory)), trust_remote_code=trust_remote_code)
    kept = run.manifest if chosen.trainer is None else chosen.trainer
    template = (kept.get("fingerprints") or {}).get("template")
    if not written.chat_template:
        found.problems.append("There is no chat template: the model continues plain text, by /v1/completions.")
    elif template not in (None, text_fingerprints(written)["template"]) or (
            _rendered(run, written) != _rendered(run, tokenizer)):
        found.problems.append("The written chat template differs from that of the training.")
    else:
        found.checked.append("the chat template renders a message as in training")
    return found


def stop_ids(generation: GenerationConfig | None) -> list[int]:
    """The tokens at which generation stops."""
    stops = None if generation is None else generation.eos_token_id
    return stops if isinstance(stops, list) else [] if stops is None else [stops]


def adds_bos(tokenizer: Any) -> bool:
    """Whether a tokenizer puts the beginning of text before any text."""
    return tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]


def _rendered(run: ExportedRun, tokenizer: Any) -> tuple[str, list[int]]:
    template = ChatTemplate(tokenizer, template_kwargs(run), "the chat template")
    try:
        text = template.render([{"role": "user", "content": "Why is it 12 o'clock?"}], None, "a message", generate=True)
    except DataError as error:  # the same for both templates
        return str(error), []
    return text, tokenizer(text, add_special_tokens=False)["input_ids"]


def lora_problem(config: Any) -> str | None:
    """Why vLLM does not load an adapter; None if it does.

    Args:
        config: peft's.
    """
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA":
        return f"it is of the type {kind}"
    if config.use_dora:
        return "it uses DoRA"
    if config.modules_to_save:
        return "it replaces modules (modules_to_save)"
    if getattr(config, "bias", "none") != "none":
        return "it changes biases"
    return f"its rank is above {_VLLM_RANKS[-1]}" if _rank(config) > _VLLM_RANKS[-1] else None


def _rank(config: Any) -> int:
    return max([int(config.r), *map(int, (config.rank_pattern or {}).values())])


def commands(run: ExportedRun, facts: Mapping[str, Any], name: str, config: Any | None, serving: Serving,
             ) -> list[tuple[str, str]]:
    """What serves the export, each with its command, for the directory that contains it or for any directory.

    Args:
        facts: the content of `export.json`.
        name: of the directory, or `owner/name` on the Hub.
        config: peft's config of a trained adapter.
    """
    kwargs = json.dumps(template_kwargs(run))
    template = [] if kwargs == "{}" else ["--default-chat-template-kwargs", kwargs]
    dtype, is_on_hub = str(facts["dtype"]), "/" in name
    place = name if is_on_hub else f"./{name}"
    if facts["adapter"] and not facts["merged"]:
        if config is None or serving.gguf_base or lora_problem(config):
            return []
        base, commit = split_revision(str(facts["base"]))
        revision = [] if commit is None else ["--revision", commit]
        if commit is not None and is_on_hub:  # else vLLM reads the tokenizer at the revision of the base
            revision += ["--tokenizer-revision", "main"]
        module = f"{name}={place}"
        if set(name) & set("=,{"):
            module = json.dumps({"name": name, "path": place})
        rank = next(one for one in _VLLM_RANKS if one >= _rank(config))
        half = dtype if dtype in ("float16", "bfloat16") else "bfloat16"
        return [("vLLM", command(
            "vllm", "serve", base if "/" in base else f"./{base}", *revision, "--enable-lora", "--lora-modules", module,
            "--max-lora-rank", str(rank), "--dtype", half, "--tokenizer", place, "--generation-config", place,
            *template))]
    code = ["--trust-remote-code"] if facts.get("needs_code") else []
    found = [("vLLM", command("vllm", "serve", place, f"--served-model-name={name}", "--dtype",
                              _VLLM_DTYPES.get(dtype, dtype), *template, *code)),
             ("transformers", command("transformers", "serve", place, *(
                 [] if kwargs == "{}" else ["--chat-template-kwargs", kwargs]), *code))]
    if serving.gguf is not None:
        file = str(serving.gguf["file"])
        weights = ["--hf-repo", name, "--hf-file", file] if is_on_hub else ["-m", f"{place}/{file}"]
        found.append(("llama.cpp", command(
            "llama-server", *weights, f"--alias={name}", "--jinja", *(
                [] if kwargs == "{}" else ["--chat-template-kwargs", kwargs]))))
    if serving.modelfile is not None:
        called = ollama.model_name(name)
        there = f"./{called}" if is_on_hub else place
        found.append(("Ollama", " && ".join(command(*words) for words in (
            *([("hf", "download", name, "--local-dir", there)] if is_on_hub else []),
            ("ollama", "create", called, "-f", f"{there}/{ollama.FILE}"), ("ollama", "run", called)))))
    return found


def command(*words: str) -> str:
    """A line for bash or zsh. It stays one line in a Markdown file, whatever the words are."""
    return " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    if word.isprintable() and not set(word) & set("<&"):
        return shlex.quote(word)
    return "$'" + "".join(
        char if char.isprintable() and char not in "<&\\'" else "".join(f"\\x{byte:02x}" for byte in _bytes(char))
        for char in word) + "'"


def _bytes(char: str) -> bytes:
    """A character as a file name has it; half of a surrogate pair stands for a byte that is no text."""
    return char.encode("utf-8", "surrogateescape" if "\udc80" <= char <= "\udcff" else "surrogatepass")


def remarks(run: ExportedRun, facts: Mapping[str, Any], config: Any | None, serving: Serving) -> list[str]:
    """Sentences for the card."""
    found = [*serving.problems, *([f"{serving.gguf['summary']}."] if serving.gguf else [])]
    adapter = facts["adapter"] and not facts["merged"]
    if adapter and serving.gguf_base:
        found.append(f"{GGUF_BASE}.")
    elif adapter and config is not None and (problem := lora_problem(config)):
        found.append(f"vLLM does not load this adapter, because {problem}. Export it with --merge.")
    elif adapter:
        found.append("vLLM serves the adapter under its own name, next to the base. Tokenizer, chat template and stop "
                     "tokens are those of the adapter.")
    if str(facts["dtype"]) in _VLLM_DTYPES and not adapter:
        found.append(f"vLLM has no {facts['dtype']} and computes in {_VLLM_DTYPES[str(facts['dtype'])]}.")
    if prompt := run.options.get("system_prompt"):
        found.append(f"Training added a system message to conversations without one. Servers do not: send it in each "
                     f"request. It is: {prompt}")
    return found
