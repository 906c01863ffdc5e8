"""Completion of commands and options in a shell: the scripts of cyclopts, with the options of every command."""

from pathlib import Path
from typing import Literal, cast, get_args

from cyclopts.completion.detect import ShellDetectionError, detect_shell
from cyclopts.completion.install import add_to_rc_file, get_default_completion_path

from tropism.cli.commands import app
from tropism.errors import UsageError
from tropism.observe.console import Voice

Shell = Literal["bash", "zsh", "fish"]
_EVERYWHERE = ("--help", "--help-all", "--quiet", "--log-format")
_AT_THE_TOP = ("--version", "--install-completion", "--show-completion")


def complete(tokens: list[str]) -> str | None:
    """The script that `--show-completion [SHELL]` asks for; or install it for `--install-completion [SHELL]`.

    Raises:
        UsageError: for an unknown shell, or if the shell in use cannot be told.
    """
    option, joined, shell = tokens[0].partition("=")
    rest = [shell, *tokens[1:]] if joined else tokens[1:]
    shell = rest[0] if rest else _in_use(option)
    if shell not in get_args(Shell) or len(rest) > 1:
        raise UsageError(f"{option}: {' '.join(rest) or shell} is not one of {', '.join(get_args(Shell))}")
    if option == "--show-completion":
        return script(cast(Shell, shell))
    _install(cast(Shell, shell))
    return None


def script(shell: Shell) -> str:
    """The completion script for a shell."""
    before = app.help_flags, app.version_flags
    app.help_flags, app.version_flags = _EVERYWHERE, _AT_THE_TOP
    try:
        text = app.generate_completion(prog_name="tropism", shell=shell)
    finally:
        app.help_flags, app.version_flags = before
    # Names of files where an option or argument has no values to choose from.
    return text.replace("complete -F _tropism", "complete -o default -F _tropism")


def _in_use(option: str) -> str:
    try:
        return detect_shell()
    except ShellDetectionError:
        raise UsageError(f"{option}: the shell is unknown. Name it: {option} {'|'.join(get_args(Shell))}") from None


def _install(shell: Shell) -> None:
    path = get_default_completion_path(shell, "tropism")
    path.write_text(script(shell), encoding="utf-8")
    changed = shell != "fish" and add_to_rc_file(path, "tropism", shell)
    voice = Voice()
    voice.say(f"completion for {shell}: {path}")
    if changed:
        voice.say(f"added to {Path.home() / f'.{shell}rc'}")
    voice.say("Open a new shell to use it.")
