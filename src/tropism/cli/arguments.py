"""Expands the command line: options from files, the run to resume, `true` and `false`."""

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tropism.config import METHODS, takes_bool
from tropism.config_file import CODE, checked, read_yaml
from tropism.errors import UsageError, count_of
from tropism.methods.options import OPTIONS
from tropism.observe.console import Voice
from tropism.observe.file_kinds import check_kind
from tropism.observe.rundir import RunDirectory
from tropism.options import check_file_name


def spelled_out(tokens: list[str]) -> list[str]:
    """The tokens, with every file and run that they name replaced by its options.

    Raises:
        UsageError: for a file that cannot be read, or a run that cannot be resumed.
    """
    return join_booleans(with_config(_joined(tokens)))


def _joined(tokens: list[str]) -> list[str]:
    """The tokens with all values of a repeated `--evaluator` in one."""
    if sum(token.partition("=")[0] == "--evaluator" for token in tokens) < 2:
        return tokens
    found: list[str] = []
    values: list[str] = []
    remaining = iter(tokens)
    for token in remaining:
        name, joined, value = token.partition("=")
        if name == "--evaluator":
            values.append(value if joined else next(remaining, ""))
        else:
            found.append(token)
    return [*found, f"--evaluator={','.join(values)}"]


def planned(tokens: list[str]) -> tuple[list[str], dict[str, str]]:
    """The command that `plan` plans, and the values of plan's own options.

    Args:
        tokens: behind `plan`: a method or a YAML file, and options.

    Raises:
        UsageError: if there is neither, or an option has no value.
    """
    if not tokens or tokens[0].startswith("-"):
        raise UsageError("CONFIG or a method is required. Example: tropism plan kto --model MODEL --data DATA")
    own, rest = own_options(tokens[1:], ("--device", "--json"))
    command = [tokens[0]] if tokens[0] in METHODS else ["train", tokens[0]]
    return [*command, *rest, *(() if "output" in names_of(rest) else ("--output=planned",))], own


def own_options(tokens: Sequence[str], names: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """Values of some options, and the other tokens.

    Raises:
        UsageError: for one without a value.
    """
    own: dict[str, str] = {}
    rest: list[str] = []
    remaining = iter(tokens)
    for token in remaining:
        name, joined, value = token.partition("=")
        if name not in names:
            rest.append(token)
            continue
        given = value if joined else next(remaining, "")
        if not given or given.startswith("--"):
            raise UsageError(f"{name} needs a value")
        own[name] = given
    return own, rest


def device_of(own: Mapping[str, str], known: Sequence[str]) -> str | None:
    """The value of `--device`, if it is given.

    Raises:
        UsageError: for an unknown one.
    """
    device = own.get("--device")
    if device is not None and device not in known:
        raise UsageError(f"--device: {device!r} is not one of {', '.join(known)}")
    return device


def of_another(tokens: list[str]) -> list[str]:
    """The command `migrate`, with the words of another trainer's command behind `--`, where none is an option of ours.

    Args:
        tokens: all of them. `--yaml FILE` may be anywhere.

    Raises:
        UsageError: if `--yaml` has no file, or nothing follows the trainer.
    """
    own: list[str] = []
    words: list[str] = []
    remaining = iter(tokens[1:])
    for word in remaining:
        if word == "--yaml":
            if not (file := next(remaining, "")) or file.startswith("--"):
                raise UsageError("--yaml needs a file. Example: --yaml new.yaml")
            own = [f"--yaml={file}"]
        elif word.startswith("--yaml="):
            own = [word]
        else:
            words.append(word)
    if len(words) < 2:
        raise UsageError("TRAINER and COMMAND are required. Example: tropism migrate trl \"trl kto --beta 0.2\"")
    return ["migrate", *own, "--", *words]


def with_config(tokens: list[str]) -> list[str]:
    """Replace `train FILE ...` and `METHOD --config FILE ...` by a method, the options of FILE, and the others."""
    if tokens[:2] == ["train", "--config"]:
        tokens = ["train", *tokens[2:]]
    if tokens[:1] == ["train"]:
        if len(tokens) < 2 or tokens[1].startswith("-"):
            raise UsageError("CONFIG is required. Example: tropism train RUN/config.yaml")
        method, values = read_yaml(file_named("CONFIG", tokens[1]), decided=decides_code(tokens[2:]), say=note)
        if method is None:
            raise UsageError(f"{tokens[1]}: `method:` is missing. Add one of {', '.join(METHODS)}")
        return of_file(method, values, tokens[2:], tokens[1])
    if tokens[:1] == ["resume"]:
        return _resumed(tokens[1:])
    for position, token in enumerate(tokens):
        name, joined, path = token.partition("=")
        if name == "--config" and tokens[0] in METHODS:
            if not joined and position + 1 == len(tokens):
                raise UsageError("--config needs a file. Example: --config base.yaml")
            path = path if joined else tokens[position + 1]
            method, values = read_yaml(file_named("--config", path), tokens[0], decides_code(tokens), note)
            if method not in (None, tokens[0]):
                raise UsageError(f"{path}: written for method {method}, not {tokens[0]}. Use `tropism {method}`.")
            rest = tokens[1:position] + tokens[position + (1 if joined else 2) :]
            return of_file(tokens[0], values, rest, path)
    return tokens


def of_file(method: str, values: dict[str, Any], given: Sequence[str], path: str,
            say: Callable[[str], None] | None = None) -> list[str]:
    """The command of a method with the options of a file, and those of the command line, which override them.

    Args:
        say: is told of each option of the file that is ignored. Default: a note.
    """
    return [method, *_spelled_out(_for_loss(values, given, path, say or note), given), *given]


def file_named(name: str, value: str) -> str:
    """The value of an argument that names a file.

    Raises:
        UsageError: if nothing can have that name.
    """
    try:
        return check_file_name(value)
    except ValueError as error:
        raise UsageError(f"{name}: {error}") from None


def _resumed(tokens: list[str]) -> list[str]:
    """Replace `resume RUN ...` by the command that started the run, with the given overrides."""
    if not tokens or tokens[0].startswith("-"):
        raise UsageError("RUN is required. Example: tropism resume RUN")
    named = Path(file_named("RUN", tokens[0])).expanduser()
    run = named.parent.parent if named.parent.name == "checkpoints" else named
    if not run.is_dir():
        raise UsageError(f"{named}: cannot resume: directory not found")
    method, values = _recorded(named, run, decides_code(tokens))
    if method is None:
        raise UsageError(f"{run / 'config.yaml'}: `method:` is missing")
    if objects := [name for name, value in values.items() if isinstance(value, str)
                   and ("given in Python" in value or value == "batches of a dataloader")]:
        raise UsageError(f"{named}: cannot resume here: the run was started in Python with objects for "
                         f"{', '.join(objects)}. Resume it there with resume='auto'.")
    rest = tokens[1:]
    values = {name: value for name, value in values.items() if name not in ("output", "resume", "fall_back")}
    if any(token.partition("=")[0] in ("--output", "--resume") for token in rest):
        raise UsageError("tropism resume continues in the directory of the run. Remove --output and --resume.")
    values = _for_processes(values, rest, run / "config.yaml")
    return [method, *_spelled_out(values, rest), *rest, f"--output={run}", f"--resume={named}"]


def _recorded(named: Path, run: Path, decided: set[str]) -> tuple[str | None, dict[str, Any]]:
    """Method and options of a run: from config.yaml, or from a checkpoint if that file is missing or empty."""
    config = run / "config.yaml"
    check_kind(config)
    if config.is_file() and config.stat().st_size:
        return read_yaml(config, decided=decided)
    if not RunDirectory(run).holds_run:
        raise _nothing_recorded(named, run)
    from tropism.train.checkpoints.find import recorded_options  # imports torch: a run does too

    found = recorded_options(run, named)
    if found is None:
        raise _nothing_recorded(named, run)
    options, place = found
    note(f"{config} is missing or empty. Resuming with the options in {place}.")
    return checked(dict(options), lambda key: f"{place}: ", decided=decided)


def _nothing_recorded(named: Path, run: Path) -> UsageError:
    return UsageError(f"{named}: cannot resume: {run} has no config.yaml. If the run stopped before it wrote one, "
                      "start it again with its original command.")


def _for_processes(values: dict[str, Any], given: Sequence[str], path: Path) -> dict[str, Any]:
    """Drop recorded options that do not fit the number of processes, which may have changed."""
    group, names = "parallel.", names_of(given)
    recorded = {name.removeprefix(group): value for name, value in values.items()
                if name.startswith(group) and value and name.replace("_", "-") not in names}
    if recorded.items() <= {"tensor": 1, "shard": "auto"}.items():  # which fit any number
        return values
    from tropism.distributed.world import processes
    from tropism.train.setup.parallel import unusable_sizes  # both import torch: a run does too

    sizes = {name: value for name in ("shard", "replicate", "tensor") if (value := value_of(f"{group}{name}", given))}
    count = processes()
    left_out = [f"{group}{name}" for name in unusable_sizes(recorded, sizes, count)]
    if left_out:
        said = " and ".join(f"{name} {_spell(values[name])}" for name in left_out)
        note(f"{path} has {said}, which does not fit {count_of(count, 'process', 'processes')}. Resuming "
              f"without {'it' if len(left_out) == 1 else 'them'}.")
    return {name: value for name, value in values.items() if name not in left_out}


def _for_loss(values: dict[str, Any], given: Sequence[str], path: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Drop options of the loss of a file if the command line names another loss."""
    named = value_of("loss", given)
    if "loss" not in values or named is None or named.replace(" ", "") == _spell(values["loss"]).replace(" ", ""):
        return values
    left_out = [name for name in (*OPTIONS, "loss_weights") if values.get(name) is not None
                and not any(token.partition("=")[0].replace("-", "_") == f"__{name}" for token in given)]
    if left_out:
        say(f"{path}: ignoring {', '.join(left_out)}, which belong to its loss {_spell(values['loss'])}")
    return {name: value for name, value in values.items() if name not in left_out}


def note(text: str) -> None:
    """Print a note, from the main process only."""
    if os.environ.get("RANK", "0") == "0":
        Voice(errors=True).warn(text)


def value_of(option: str, given: Sequence[str]) -> str | None:
    """The last value that the command line gives an option, or None."""
    named = [value if joined else given[place + 1] if place + 1 < len(given) else ""
             for place, (name, joined, value) in enumerate(token.partition("=") for token in given)
             if name == f"--{option}"]
    return named[-1] if named else None


def names_of(given: Sequence[str]) -> set[str]:
    """Names of the options on the command line, with dashes; `--no-shuffle` counts as `shuffle`."""
    flags = [token.partition("=")[0] for token in given if token.startswith("--")]
    return {re.sub(r"(^|\.)no-", r"\1", flag.removeprefix("--").replace("_", "-")) for flag in flags}


def decides_code(given: Sequence[str]) -> set[str]:
    """The options of `CODE` that the command line has."""
    return {name for name in CODE if name.replace("_", "-") in names_of(given)}


def _spelled_out(values: dict[str, Any], given: Sequence[str]) -> list[str]:
    """Options of a file as the command line writes them, except those that the command line overrides."""
    names = names_of(given)
    options = {name.replace("_", "-"): value for name, value in values.items() if value is not None}
    return [f"--{name}={_spell(value)}" for name, value in options.items() if name not in names]


def _spell(value: Any) -> str:
    """A value of YAML as the command line writes it."""
    if isinstance(value, list):
        return ",".join(map(_spell, value))
    if isinstance(value, dict):
        return ",".join(f"{name}={_spell(entry)}" for name, entry in value.items())
    return str(value).lower() if isinstance(value, bool) else str(value)


def join_booleans(tokens: list[str]) -> list[str]:
    """Join `--shuffle false` to `--shuffle=false`, so that YAML and command line accept the same words."""
    flags = {f"--{name.replace('_', '-')}" for options in METHODS.values()
             for name, info in options.flat_fields().items() if takes_bool(info.annotation)}
    joined: list[str] = []
    for token in tokens:
        if joined and joined[-1] in flags and token.lower() in ("true", "false"):
            joined[-1] += f"={token.lower()}"
        else:
            joined.append(token)
    return joined
