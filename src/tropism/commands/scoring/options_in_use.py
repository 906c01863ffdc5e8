"""Which options decide a measurement, and which of them a run was trained with."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tropism.config import METHODS, ScoringOptions
from tropism.config_file import read_yaml
from tropism.data.tokenization.chat_template import TemplateOptions
from tropism.data.tokenization.render import Renderer
from tropism.data.tokenization.truncate import LengthOptions
from tropism.errors import UsageError, first_line
from tropism.methods.build import build_method
from tropism.observe.console import Voice
from tropism.options import shown

_NAMES = ("reference", "beta", *LengthOptions.model_fields, "precision")
_LONGEST = 60  # characters of a value in the log


def say_options(model: str, options: ScoringOptions, renderer: Renderer, precision: str, voice: Voice) -> None:
    """Print the options that decide the figures; of a run also its own, if they differ.

    Args:
        model: as it was given: a run directory, a model in one, or any other model.
        renderer: of the rows, after it has read them.
        precision: of the computation.
    """
    of_template = (name for name in TemplateOptions.model_fields if name != "plain_text")  # a choice without effect
    names = _NAMES + (tuple(of_template) if renderer.saw_messages else ("as_messages",))
    given = {name: getattr(options, name) for name in names}
    used = {**given, "max_length": renderer.limits.max_length, "precision": precision}
    shown_now = {name: value for name, value in used.items()
                 if value not in (None, False) or name == "reference"}
    line = f"options in use: {_as_typed(shown_now)}"
    run = _run_of(model)
    if run is None:
        voice.say(line)
        return
    try:
        method, own = read_yaml(run / "config.yaml", decided=True)
        other = _differences(given, used, _with_reference(own, method))
    except (UsageError, RecursionError) as error:
        place = str(run / "config.yaml")
        why = first_line(error).removeprefix(place).removeprefix(": ")  # the place may go on with a line number
        voice.warn(f"{line}. The options of the run are unknown: {place}{why if why[:1] == ':' else f': {why}'}")
        return
    if not other:
        voice.say(f"{line}, as in the run {run}")
        return
    voice.warn(f"{line}. The run {run} was trained with {_as_typed(other)}. To measure as the run does, pass the same "
               "options.")


def _run_of(model: str) -> Path | None:
    """The run that a directory is, or that it belongs to as the result or as a checkpoint's model."""
    path = Path(model).expanduser().absolute()
    found = (one for one in (path, *path.parents[:3]) if (one / "manifest.json").is_file())
    return next((one for one in found if (one / "config.yaml").is_file()), None)


def _with_reference(own: Mapping[str, Any], method: str | None) -> dict[str, Any]:
    """The options of a run, with the model before step 1 as its reference if it needs one and names no other."""
    reference, kind = own.get("reference"), METHODS.get(method or "")
    if reference in (None, "live"):
        needed = kind is not None and build_method(
            kind.view, {"loss": "sft", **{name: info.default for name, info in kind.model_fields.items()}, **own},
            [True, False]).needs_reference
        named = str(own.get("model", ""))
        reference = named if needed and " given in Python" not in named else None
    return {**own, "reference": reference}


def _differences(given: Mapping[str, Any], used: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a run that are not in use. A default that was not overridden is the same."""
    names = [name for name in given if name in own and own[name] not in (given[name], used[name])]
    # A reference that was named is a choice, and the figures without one do not need it.
    return {name: own[name] for name in names if name != "reference" or (given[name] is None and own[name])}


def _as_typed(values: Mapping[str, Any]) -> str:
    """Options as they are typed: `--beta 0.1 --max-length 512, no --reference`."""
    typed, absent = [], []
    for name, value in values.items():
        option = f"--{name.replace('_', '-')}"
        if value is None or isinstance(value, bool):
            if value:
                typed.append(option)
            else:
                absent.append(f"no {option}")
            continue
        text = shown(value)
        typed.append(f"{option} {shlex.quote(text if len(text) <= _LONGEST else f'{text[:_LONGEST]}...')}")
    return ", ".join(filter(None, (" ".join(typed), *absent)))
