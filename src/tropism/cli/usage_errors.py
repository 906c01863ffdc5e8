"""Explains an error of the command line with options as they are typed."""

from typing import Any

import cyclopts
from cyclopts import CycloptsError

from tropism import config
from tropism.argument_names import instead, ours
from tropism.cli.arguments import names_of
from tropism.cli.table import COMMANDS, in_order
from tropism.options import Option


def explain_error(error: CycloptsError, tokens: list[str]) -> str:
    """What is wrong and what to do.

    Args:
        tokens: the whole command line, with the options of files spelled out.
    """
    name = _command_of(tokens)
    if isinstance(error, cyclopts.UnknownOptionError):
        return _unknown(str(error.token.keyword or error.token.value).split("=")[0], name)
    if isinstance(error, cyclopts.MissingArgumentError):
        typed = error.keyword or (error.argument.name if error.argument is not None else "")
        return (_group(typed, name) or f"{typed} needs a value") if typed in tokens else _missing(tokens, name, typed)
    problems: list[Any] = getattr(error.__cause__, "errors", list)()
    if isinstance(error, cyclopts.ValidationError) and problems:
        if problems[0]["type"] == "missing":
            return _missing(tokens, name, "")
        place = config.place_of(problems[0], [option.name for option in _options_of(name)])
        return _group(f"--{place}", name) or f"--{place.replace('_', '-')}: {config.explain(problems[0])}"
    if isinstance(error, cyclopts.UnusedCliTokensError):
        return f"unexpected argument {(error.unused_tokens or [''])[0]}. See `tropism {name} --help`."
    if isinstance(error, cyclopts.CoercionError) and error.msg and error.argument is not None:  # of `commands`
        option = error.token.keyword if error.token is not None else None
        return f"{option or error.argument.name.lstrip('-').upper()}: {error.msg}"
    return " ".join(str(error).split())


def _command_of(tokens: list[str]) -> str:
    two = " ".join(tokens[:2])
    return two if two in COMMANDS else tokens[0]


def _options_of(name: str) -> list[Option]:
    options = COMMANDS[name].options if name in COMMANDS else ""
    return in_order(getattr(config, options).described()) if options else []


def _own(name: str, required: bool) -> list[str]:
    """Arguments of the command that belong to no options class, as typed."""
    return [argument.name.split()[0] for argument in COMMANDS[name].arguments if not required or argument.required
            ] if name in COMMANDS else []


def _known(name: str) -> list[str]:
    """Options of a command without their dashes, with those of every command."""
    own = [argument.removeprefix("--") for argument in _own(name, required=False) if argument.startswith("--")]
    return [*(option.flag.removeprefix("--") for option in _options_of(name)), *own, "log-format", "quiet"]


def known_options(tokens: list[str]) -> set[str]:
    """Options of the command that the tokens name, with `_`; those of all methods where a file names the method."""
    name = _command_of(tokens)
    if name in ("train", "resume", "sweep"):
        return {field for options in config.METHODS.values() for field in options.flat_fields()}
    return {option.replace("-", "_") for flag in _known(name) for option in flag.split()[:1]}


def _missing(tokens: list[str], name: str, first: str) -> str:
    """All required arguments that are missing, with an example. An unknown option, which may be one of them misspelled,
    is reported instead.

    Args:
        first: the argument that the parser missed first.
    """
    given, known = names_of(tokens), _known(name)
    for token in tokens:
        if token.startswith("--") and not names_of([token]) & {*known}:
            return _unknown(token.split("=")[0], name)
    own = [argument for argument in _own(name, required=True) if argument.startswith("--")]
    missing = [flag for flag in [*(option.flag for option in _options_of(name) if option.info.is_required()), *own]
               if flag.removeprefix("--") not in given]
    positional = [argument for argument in _own(name, required=True) if not argument.startswith("--")]
    missing = [argument for argument in positional if argument.lower() == first.lstrip("-").lower()] + missing
    listed = " and ".join(part for part in (", ".join(missing[:-1]), *missing[-1:]) if part)
    example = COMMANDS[name].examples[0] if name in COMMANDS else "tropism --help"
    return f"{listed} {'are' if len(missing) > 1 else 'is'} required. Example: {example}"


def _group(typed: str, name: str) -> str:
    """What to say if an option is the name of a group, such as --lora."""
    inside = [option.flag for option in _options_of(name) if option.flag.startswith(f"{typed}.")]
    return f"{typed} is a group of options. Did you mean {inside[0]}?" if inside else ""


def _unknown(typed: str, name: str) -> str:
    if text := _group(typed, name):
        return text
    known = _known(name)
    option = typed.lstrip("-").lower().replace("_", "-")
    if option in known:
        return f"unknown option {typed}. Did you mean --{option}?"
    names = {one.replace("-", "_") for one in known}
    if name in config.METHODS and (having := _methods_with(option.replace("-", "_"))):
        return f"unknown option {typed} of `tropism {name}`. {having}"
    every = " --help-all" if _options_of(name) else " --help"
    return f"unknown option {typed}. " + (instead(option, names, "--{}") or f"See `tropism {name}{every}`")


def _methods_with(option: str) -> str:
    """The training commands that have an option, or another trainer's name of it; empty if none has it."""
    having = {method: found for method, options in config.METHODS.items()
              if (found := option if option in (fields := options.flat_fields()) else ours(option, fields))}
    if not having:
        return ""
    commands = " and ".join(f"`tropism {method}`" for method in having)
    return f"{commands} {'have' if len(having) > 1 else 'has'} --{min(having.values()).replace('_', '-')}"
