"""Help screens, from the table of commands and the descriptions of options."""

import shutil
import textwrap
from collections.abc import Iterable, Sequence
from importlib import import_module

from tropism.cli.table import COMMANDS, HEADINGS, Command, in_order

_WIDTH = 100
_COLUMN = 32

Row = tuple[str, str]


def requested(tokens: list[str]) -> str | None:
    """The text that `--help`, `--help-all` or `--version` asks for; None if a command is to run."""
    if "--version" in tokens:
        from tropism import __version__

        return __version__
    words = [token for token in tokens[:2] if not token.startswith("-")]
    name = next((name for name in (" ".join(words), *words[:1]) if name in COMMANDS), None)
    subcommands = [known for known in COMMANDS if words and known.startswith(f"{words[0]} ")]
    everything = "--help-all" in tokens
    wanted = everything or bool({"--help", "-h"} & set(tokens))
    if name is not None:
        return command_help(name, everything) if wanted else None
    if subcommands and (wanted or len(tokens) == 1):
        return overview(subcommands, f"{words[0]} COMMAND")
    return overview(list(COMMANDS), "COMMAND [OPTIONS]") if not tokens or (wanted and not words) else None


def overview(names: Sequence[str], usage: str) -> str:
    """The commands by group."""
    parts = [f"Usage: tropism {usage}", "Align and distill language models offline."]
    column = max(map(len, names)) + 4
    for group in dict.fromkeys(COMMANDS[name].group for name in names):
        parts.append(_block(group, [(name, COMMANDS[name].summary) for name in names if COMMANDS[name].group == group],
                            column))
    parts.append(_block("Options", [("--help", "Show the help of a command: tropism COMMAND --help."),
                                    ("--version", "Show the version."),
                                    ("--log-format json", "Print each line as a JSON object. [$TROPISM_LOG_FORMAT]"),
                                    ("--quiet", "Print only warnings, errors and results. [$TROPISM_QUIET]"),
                                    ("--install-completion", "Complete commands and options in bash, zsh or fish.")],
                        column))
    parts.append("Example\n  " + COMMANDS[names[0]].examples[0])
    return "\n\n".join(parts)


def command_help(name: str, everything: bool = False) -> str:
    """The help of one command.

    Args:
        everything: all options with their full descriptions, instead of the everyday ones with one sentence each.
    """
    command = COMMANDS[name]
    groups: dict[str, list[Row]] = {"Required": []}
    for argument in command.arguments:
        if argument.required:
            groups["Required"].append((argument.name, _text(argument.text, argument.default)))
    hidden = _add_options(command, groups, everything)
    own = [(argument.name, _text(argument.text, argument.default)) for argument in command.arguments
           if not argument.required and (everything or argument.everyday)]
    if own:
        groups["Options"] = own
    parts = [f"Usage: tropism {name} {_usage(groups['Required'])}[OPTIONS]",
             textwrap.fill(f"{command.summary} {command.note}".strip(), _width())]
    widths = [len(left) for rows in groups.values() for left, _ in rows]
    column = min(max(widths) + 4, _COLUMN)
    parts += [_block(title, rows, column) for title, rows in groups.items() if rows]
    parts.append("\n".join(["Examples", *(f"  {example}" for example in command.examples)]))
    if hidden:
        parts.append(f"{hidden} more options: tropism {name} --help-all")
    return "\n\n".join(["\n".join(parts[:2]), *parts[2:]])


def _add_options(command: Command, groups: dict[str, list[Row]], everything: bool) -> int:
    """Add the options of the command's class to the groups. Returns how many are not shown."""
    if not command.options:
        return 0
    described = in_order(getattr(import_module("tropism.config"), command.options).described())
    own = [option.heading for option in described if option.heading not in HEADINGS]
    for heading in dict.fromkeys(["Required", *own, *HEADINGS]):
        shown = [option for option in described if option.heading == heading and (everything or option.everyday)]
        for option in shown:
            text = option.text if everything else option.text.partition(". ")[0].removesuffix(".") + "."
            if everything and len(option.choices) > 1 and option.values not in ("", "|".join(option.choices)):
                text += f" One of {', '.join(option.choices)}."
            left = f"{option.switch} {option.values}".rstrip()
            groups.setdefault(heading, []).append((left, _text(text, "" if option.default == "false" else
                                                               option.default)))
    return 0 if everything else sum(not option.everyday for option in described)


def _usage(required: list[Row]) -> str:
    return "".join(f"{left} " for left, _ in required)


def _text(text: str, default: str) -> str:
    return f"{text} [{default}]" if default else text


def _width() -> int:
    return min(shutil.get_terminal_size((80, 24)).columns, _WIDTH)


def _block(title: str, rows: Iterable[Row], column: int) -> str:
    """A title, and rows in two columns."""
    width = _width()
    lines = [title]
    for left, right in rows:
        indent = " " * column
        wrapped = textwrap.wrap(right, max(width - column, 30), break_long_words=False, break_on_hyphens=False)
        if len(left) + 4 > column:
            lines.append(f"  {left}")
            lines += [indent + line for line in wrapped]
        else:
            lines += [f"  {left}".ljust(column) + wrapped[0], *(indent + line for line in wrapped[1:])]
    return "\n".join(lines)
