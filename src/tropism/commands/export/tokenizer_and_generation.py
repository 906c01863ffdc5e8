"""The tokenizer with its chat template, and the generation config with its stop ids, for an export."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from tropism.commands.export.read_run import Chosen, ExportedRun
from tropism.data.tokenization.chat_template import template_text
from tropism.errors import CheckpointError, ModelError, UsageError
from tropism.model import load, save
from tropism.model.generation import corrected, read_generation
from tropism.model.source import ModelSource
from tropism.observe.manifest import text_fingerprints


def tokenizer_of(run: ExportedRun, chosen: Chosen, base: str | None = None) -> Any:
    """The tokenizer of the training, with its chat template.

    Args:
        base: an adapter's base, another place to look for it.

    Raises:
        CheckpointError: if no available tokenizer is the one that a checkpoint was trained with.
        ModelError: if the result has none.
    """
    if chosen.trainer is None:
        return _tokenizer_in(run, chosen.path)
    known = chosen.trainer.get("fingerprints") or {}
    reasons: list[str] = []
    for name, tokenizer in _candidates(run, chosen, base, reasons):
        prints = text_fingerprints(tokenizer)
        wrong = [what for what, found in prints.items() if known.get(what, found) != found]
        if not wrong:
            return tokenizer
        reasons.append(f"the {' and '.join(wrong)} of {name} changed")
    raise CheckpointError(f"{chosen.path}: the tokenizer that it was trained with was not found: "
                          f"{'; '.join(reasons)}")


def _candidates(run: ExportedRun, chosen: Chosen, base: str | None, reasons: list[str]) -> Iterator[tuple[str, Any]]:
    """Available tokenizers by their source; why others are not available is added to `reasons`."""
    for place in (chosen.path / "model", run.directory.model):
        if (place / "tokenizer_config.json").is_file():
            try:
                yield str(place), _tokenizer_in(run, place)
            except ModelError as error:
                reasons.append(str(error))
    for named in dict.fromkeys(filter(None, (None if run.given and base else run.base, base))):
        try:
            tokenizer = load.load_tokenizer(ModelSource.of(named), trust_remote_code=run.trust_remote_code)
            if template := run.options.get("chat_template"):
                tokenizer.chat_template = template_text(template)
            yield named, tokenizer
        except (ModelError, UsageError) as error:
            reasons.append(str(error))


def _tokenizer_in(run: ExportedRun, place: Path) -> Any:
    return load.load_tokenizer(ModelSource(str(place)), trust_remote_code=run.trust_remote_code)


def generation_of(run: ExportedRun, chosen: Chosen, base: str, tokenizer: Any,
                  config: Any | None) -> tuple[GenerationConfig, list[str]]:
    """The generation config from before training, with the trained terminators added to its stop ids.

    Args:
        base: the model that the run started from; for an adapter its base.
        config: the model's config, used if there is no generation config.

    Returns:
        The generation config, and warnings for the user.
    """
    result, notes = read_generation(chosen.path if chosen.trainer is None else run.directory.model)
    if chosen.trainer is None and result is not None:
        return result, notes  # it has the trained terminators
    before = result
    for name in (base, run.base):
        if before is None:
            before, notes = _named(name)
    if before is None:
        before, notes = corrected(GenerationConfig() if config is None else GenerationConfig.from_model_config(config))
    stop_ids = run.manifest.get("stop_ids") if chosen.trainer is None else chosen.stop_ids
    if stop_ids is None:
        stop_ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        if result is None:
            notes.append("no record of the trained terminators. Generation stops at the tokenizer's end of text "
                         f"({tokenizer.eos_token}) and where it stopped before.")
    save.add_stop_ids(before, stop_ids)
    return before, notes


def _named(name: str) -> tuple[GenerationConfig | None, list[str]]:
    """The generation config of a model by its name; for an adapter the one in its directory."""
    with suppress(ModelError):
        source = ModelSource.of(name)
        return read_generation(source.adapter or source.name, None if source.adapter else source.revision)
    return None, []
