"""The options of every command: how lines are printed. They are read first, so that errors obey them too."""

from collections.abc import Callable

from tropism.errors import UsageError
from tropism.observe.log_format import LogFormat, from_environment, is_json, is_true

LOG_FORMAT, QUIET = "--log-format", "--quiet"


def output_options(tokens: list[str]) -> tuple[LogFormat, list[str], UsageError | None]:
    """The format that the command line or the environment chooses, the other tokens, and what is wrong with a value."""
    typed, rest = _split(list(tokens))
    json, problem = _read(is_json, *typed.get(LOG_FORMAT, from_environment("TROPISM_LOG_FORMAT", "text")))
    quiet, other = _read(is_true, *typed.get(QUIET, from_environment("TROPISM_QUIET", "false")))
    return LogFormat(json, quiet), rest, problem or other


def _split(tokens: list[str]) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """The values of our options, each with the option as typed, and the other tokens.

    The words behind `--`, and those of another trainer's command behind `migrate TRAINER`, are not ours.
    """
    typed: dict[str, tuple[str, str]] = {}
    rest: list[str] = []
    while tokens and tokens[0] != "--" and not (rest[:1] == ["migrate"] and len(rest) > 1):
        word = tokens.pop(0)
        name, joined, value = word.partition("=")
        if name == LOG_FORMAT:
            typed[LOG_FORMAT] = value if joined else tokens.pop(0) if tokens else "", LOG_FORMAT
        elif name == QUIET:
            follows = not joined and tokens[:1] and tokens[0].lower() in ("true", "false")
            typed[QUIET] = value if joined else tokens.pop(0) if follows else "true", QUIET
        elif word == "--no-quiet":
            typed[QUIET] = "false", QUIET
        else:
            rest.append(word)
    return typed, rest + tokens


def _read(of: Callable[[str, str], bool], value: str, place: str) -> tuple[bool, UsageError | None]:
    try:
        return of(value, place), None
    except UsageError as error:
        return False, error
