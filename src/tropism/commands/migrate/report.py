"""The command or configuration as it is printed, with the account of every option as comments."""

import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from tropism.commands.files import write_text
from tropism.commands.migrate.translation import VARIABLE, Line, Translation, joined, spelled
from tropism.config import METHODS
from tropism.observe.console import Voice

_TITLES = {"taken": "Taken", "replaced": "Replaced", "without effect": "Without effect here",
           "not supported": "Not supported"}
_PLAIN = re.compile(r"[\w@%+=:,./ ${}-]+")


def command(run: Translation, config: Path | None = None) -> list[str]:
    """The lines of the command, each but the last with a backslash.

    Args:
        config: file with the options; otherwise they are on the command line.
    """
    count = run.given.processes or 1
    machines = str(run.given.launcher.get("nnodes", "1"))
    start = "tropism"
    if count > 1:
        several = machines.isdigit() and int(machines) > 1
        each = count // int(machines) if several else count
        start = f"torchrun {f'--nnodes {machines} ' if several else ''}--nproc-per-node {each} -m tropism"
    if config is not None:
        return [f"{start} train {quoted(str(config))}"]
    lines = [f"{start} {run.method}"]
    for option, value in ordered(run).items():
        flag = f"--{option.replace('_', '-')}"
        text = spelled(value)
        lines.append(f"  {flag}" if value is True else f"  {flag}{'=' if text[:1] == '-' else ' '}{quoted(text)}")
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def ordered(run: Translation) -> dict[str, Any]:
    """Options in the order of help: model, data and output first."""
    known = list(METHODS[run.method].flat_fields())
    first = [name for name in ("model", "teacher", "data", "output") if name in run.options]
    return {name: run.options[name] for name in [*first, *(name for name in known if name in run.options
                                                         and name not in first)]}


def quoted(value: str) -> str:
    """A value for a shell. Variables of a plain text stay variables; nothing else is expanded."""
    if not value.isprintable():
        kept = (char if char.isprintable() and char not in "'\\" else _bytes(char) for char in value)
        return f"$'{''.join(kept)}'"
    if VARIABLE.search(value) and _PLAIN.fullmatch(value) and not re.search(r"\$(?!\w|\{\w+\})", value):
        return f'"{value}"'
    return shlex.quote(value)


def _bytes(char: str) -> str:
    """The bytes of a character, as escapes of a shell."""
    return "".join(f"\\x{byte:02x}" for byte in char.encode("utf-8", "surrogatepass"))


def account(run: Translation) -> list[str]:
    """What became of each option, as lines of comments."""
    lines: list[str] = []
    own = [line for line in run.account if not line.default]
    for kind, title in _TITLES.items():
        found = [line for line in own if line.kind == kind]
        if found:
            lines += ["", f"# {title}", *(f"#   {_line(line)}" for line in found)]
    if defaults := [line for line in run.account if line.default]:
        lines += ["", "# Their defaults, written out", *(f"#   {_line(line)}" for line in defaults)]
    notes = [*run.notes, *_of_the_command(run)]
    if notes:
        lines += ["", "# Notes", *(f"#   {note}" for note in dict.fromkeys(notes))]
    return lines


def _line(line: Line) -> str:
    name = f"{line.name} {line.value}".rstrip()
    return f"{name}: {line.text}"


def _of_the_command(run: Translation) -> list[str]:
    """What was in the command besides options."""
    given, notes = run.given, []
    if given.repeated:
        notes.append(f"Given more than once, of which the last counts: {', '.join(given.repeated)}.")
    if given.words:
        notes.append(f"Ignored: {' '.join(given.words[:5])}")
    if others := [name for name in given.variables if name != "CUDA_VISIBLE_DEVICES"]:
        notes.append(f"Environment variables are not repeated: {', '.join(others)}. Set those you need.")
    used = sorted({found[0] for value in run.options.values() if isinstance(value, str)
                   for found in VARIABLE.finditer(value)})
    if used:
        notes.append(f"Shell variables were not read and stay as they are: {', '.join(used)}.")
    if given.processes is None:
        notes.append("The number of processes is not given. For N on one machine, start it with torchrun "
                     "--nproc-per-node N -m tropism.")
    if str(given.launcher.get("nnodes", "1")) != "1":
        notes.append("Several machines also need torchrun's --rdzv-backend, --rdzv-endpoint and --rdzv-id.")
    for name in ("config_file", "deepspeed", "use_deepspeed"):
        if name in given.launcher:
            notes.append(f"{name} of the launcher is not read: torchrun starts the processes, which share the training "
                         "state (--parallel.shard).")
    return notes


def show(run: Translation, voice: Voice, config: Path | None = None) -> None:
    """Print the command and the account. All of it can be saved as a script."""
    voice.say(*command(run, config), *account(run))


def write_yaml(run: Translation, path: Path) -> None:
    """Write the options as a configuration for `tropism train`.

    Raises:
        OutputError: if it cannot be written.
    """
    values: dict[str, Any] = {"method": run.method}
    for option, value in ordered(run).items():
        group, _, inner = option.rpartition(".")
        (values.setdefault(group, {}) if group else values)[inner] = joined(value)
    write_text(path, yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
