"""Reads a command line of another trainer, as text or as arguments. Nothing in it is run or expanded."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tropism.borders import read_bytes, read_mapping, read_object
from tropism.errors import UsageError

_MOST = 2**18  # bytes of a command
_ENDS = re.compile(r"[;&|<>()\n]+")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_COMMENT = re.compile(r"""('[^']*'|"(?:\\.|[^"\\])*"|\\.)|(?:(?<=\s)|^)\#[^\n]*""", re.DOTALL | re.MULTILINE)
_NUMBER = re.compile(r"-(\d|\.\d)")
_PROCESSES = ("nproc_per_node", "num_gpus", "num_processes", "nproc_per_machine")
_MACHINES = ("nnodes", "num_nodes")
CONFIGS = (".yaml", ".yml", ".json")


@dataclass
class Given:
    """What a command line or configuration says.

    Args:
        program: name of the script or subcommand, such as `train_kto`; empty for a configuration alone.
        values: by the names as they are typed, without leading dashes. A switch is True.
        words: other arguments, such as the name of a configuration.
        launcher: options of what starts the processes, by plain names.
        variables: environment variables set in front; their values may be secrets and are not kept.
        repeated: names that are given twice, of which the last counts.
        directory: of the configuration, for paths in it.
    """

    program: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    launcher: dict[str, Any] = field(default_factory=dict)
    variables: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    directory: Path = Path()

    @property
    def processes(self) -> int | None:
        """Number of processes, if the launcher says it."""
        counts = [str(self.launcher[name]) for name in _PROCESSES if name in self.launcher]
        if not counts or not counts[0].isdigit() or int(counts[0]) < 1:
            return None
        machines = next((str(self.launcher[name]) for name in _MACHINES if name in self.launcher), "1")
        total = "num_processes" in self.launcher  # accelerate counts those of all machines
        return int(counts[0]) * (int(machines) if machines.isdigit() and not total else 1)


def read_command(arguments: Sequence[str], programs: str) -> Given:
    """A command line, or the configuration that is its only argument.

    Args:
        arguments: one text, or the words of a command.
        programs: pattern of the trainer's scripts and subcommands; a group in it names the program.

    Raises:
        UsageError: if there is none, it is too long, a quote is not closed, or a file cannot be read.
    """
    if not arguments or not "".join(arguments).strip():
        raise UsageError("COMMAND is required: a command line in quotes, its words, or a configuration file")
    if sum(map(len, arguments)) > _MOST:
        raise UsageError(f"COMMAND is too long: at most {_MOST // 1024} KiB are read")
    if len(arguments) > 1:
        return _parsed(list(arguments), programs)
    text = arguments[0]
    path = Path(text.strip())
    if path.suffix in CONFIGS and not re.search(r"\s", text.strip()):
        return read_config(path)
    if path.suffix in (".sh", ".bash") and not re.search(r"\s", text.strip()):
        text = read_bytes(path, _MOST, UsageError).decode(errors="replace")
    return _parsed(_longest(_commands(text), programs), programs)


def read_config(path: Path) -> Given:
    """A configuration in YAML or JSON.

    Raises:
        UsageError: if it cannot be read, or is no mapping.
    """
    values = (read_object(path, _MOST, UsageError) if path.suffix == ".json" else read_mapping(path)[0])
    return Given(values={str(name): value for name, value in values.items()}, directory=path.parent)


def _commands(text: str) -> list[list[str]]:
    """The commands in a text, as words. Lines may end with a backslash.

    Raises:
        UsageError: for a quote that is not closed.
    """
    text = _COMMENT.sub(lambda found: found[1] or "", text.replace("\r\n", "\n"))
    text = re.sub(r"(^|\s)\d(?=[<>])", r"\1", text)  # of 2>&1
    lexer = shlex.shlex(re.sub(r"\\[ \t]*\n", " ", text), posix=True, punctuation_chars=";&|<>()\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    commands: list[list[str]] = [[]]
    try:
        for word in lexer:
            if not _ENDS.fullmatch(word):
                commands[-1].append(word)
            elif set(word) <= {"<", ">", "&"} and word != "&" and word != "&&":  # a redirection
                next(lexer, None)
            elif commands[-1]:
                commands.append([])
    except ValueError as error:
        raise UsageError(f"COMMAND cannot be read: {str(error).lower()}. Check its quotes.") from None
    return commands


def _longest(commands: list[list[str]], programs: str) -> list[str]:
    """The command with a program of the trainer, else with the most options. Lines of options after it belong to it."""
    def weight(words: list[str]) -> tuple[bool, int]:
        return any(re.search(programs, word) for word in words), sum(word.startswith("-") for word in words)

    chosen = max(range(len(commands)), key=lambda place: weight(commands[place]))
    words = list(commands[chosen])
    for more in commands[chosen + 1:]:
        if not more or not more[0].startswith("--"):
            break
        words += more
    return words


def _parsed(words: list[str], programs: str) -> Given:
    """The parts of a command."""
    given = Given()
    place = next((place for place, word in enumerate(words) if re.search(programs, word)), None)
    if place is None:
        scripts = [place for place, word in enumerate(words) if word.endswith(".py")]
        place = scripts[0] if scripts else -1
    before, after = words[:place + 1], words[place + 1:]
    if before:
        found = re.search(programs, before[-1])
        named = next((name for name in found.groups() if name), None) if found else None
        given.program = named or Path(before[-1]).stem
        if after and re.fullmatch(r"trl|axolotl|llamafactory-cli|lmf", Path(before[-1]).name):
            given.program = after.pop(0)  # a subcommand
    given.variables = [word.partition("=")[0] for word in before if _ASSIGNMENT.match(word)]
    devices = [word.partition("=")[2] for word in before if word.startswith("CUDA_VISIBLE_DEVICES=")]
    launcher, _ = _options(before[:-1], [])
    given.launcher = {name.replace("-", "_"): value for name, value in launcher.items()}
    if devices and not any(name in given.launcher for name in _PROCESSES) and re.fullmatch(r"\d+(,\d+)*", devices[0]):
        given.launcher["num_gpus"] = str(devices[0].count(",") + 1)
    if isinstance(include := given.launcher.get("include"), str) and re.fullmatch(r"\w+:\d+(,\d+)*", include):
        given.launcher["num_gpus"] = str(include.count(",") + 1)  # deepspeed --include localhost:0,1
    given.values, given.words = _options(after, given.repeated)
    return given


def _options(words: Sequence[str], repeated: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Options with their values, and the other words. `key=value` is an option, as Hydra writes it."""
    values: dict[str, Any] = {}
    rest: list[str] = []
    name = ""
    for word in words:
        typed, joined, value = word.partition("=")
        if word.startswith("-") and not _NUMBER.match(word) and word.strip("-"):
            name = typed.lstrip("-")
            if name in values and name not in repeated:
                repeated.append(name)
            values[name] = value if joined else True
            name = "" if joined else name
        elif name and values[name] is True:
            values[name] = word
        elif name:
            values[name] = [*(values[name] if isinstance(values[name], list) else [values[name]]), word]
        elif joined and re.fullmatch(r"[+~]*[A-Za-z_][\w./]*", typed):
            values[typed.lstrip("+~")] = value
        elif word.strip("-"):
            rest.append(word)
    return values, rest
