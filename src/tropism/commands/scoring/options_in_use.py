"""The line of the log with the options that decide a measurement, and those of the run that are not in use."""

import shlex
from collections.abc import Mapping
from typing import Any

from tropism.commands.scoring.own_run import OwnRun
from tropism.config import ScoringOptions
from tropism.data.tokenization.chat_template import TemplateOptions
from tropism.data.tokenization.render import Renderer
from tropism.data.tokenization.truncate import LengthOptions
from tropism.observe.console import Voice
from tropism.options import shown
from tropism.train.setup.adapter_base import absolute_name

_NAMES = ("reference", "beta", *LengthOptions.model_fields, "precision")
_LONGEST = 60  # characters of a value in the log


def say_options(model: str, run: OwnRun | None, why: str, given: ScoringOptions, resolved: Mapping[str, Any],
                renderer: Renderer, voice: Voice) -> None:
    """Print the options that decide the figures; of a run also its own, if others were given.

    Args:
        model: as it was given.
        run: that it belongs to; None for none.
        why: the options of the run are unknown; empty if they are known or there is no run.
        given: the options that were given now.
        resolved: options in use with the values that they have become.
        renderer: of the rows, after it has read them.
    """
    of_template = (name for name in TemplateOptions.model_fields if name != "plain_text")  # a choice without effect
    names = _NAMES + (tuple(of_template) if renderer.saw_messages else ("as_messages",))
    values = {name: getattr(given, name) for name in names}
    own = {} if run is None else {name: run.options.values.get(name) for name in names} | dict(
        run.recorded) | {"reference": run.reference}
    if run is not None:
        values |= {name: own[name] for name in names if name not in given.model_fields_set}
    values |= resolved
    line = f"options in use: {_as_typed({name: values[name] for name in names if _counts(name, values[name])})}"
    if why:
        voice.warn(f"{line}. The options of the run are unknown: {why}")
    elif run is None:
        voice.say(line)
    elif other := {name: own[name] for name in names if name in given.model_fields_set and _differs(
            own[name], getattr(given, name), values[name])}:
        voice.warn(f"{line}. The run {run.path} was trained with {_as_typed(other)}.")
    else:
        voice.say(f"{line}, as in the run {run.path}")


def _counts(name: str, value: Any) -> bool:
    return value not in (None, False) or name == "reference"


def _differs(own: Any, given: Any, used: Any) -> bool:
    """Whether an option was given another value than the run's. One that was left open is the same as its default."""
    return own not in (given, used, absolute_name(given))


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
