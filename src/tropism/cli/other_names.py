"""Replaces names and values of other trainers on the command line by ours, and says so."""

from collections.abc import Callable, Collection

from tropism.argument_names import means_never, ours, same_value, value_of
from tropism.errors import UsageError


def translate(tokens: list[str], known: Collection[str], say: Callable[[str], None]) -> list[str]:
    """The command line with our names and values.

    Args:
        tokens: all of them.
        known: our options, with `_`.
        say: is told of each replacement.

    Raises:
        UsageError: if two names of one option give it two values.
    """
    found: list[str] = []
    given: dict[str, tuple[str, str, bool]] = {}
    rest = list(tokens)
    while rest:
        token = rest.pop(0)
        typed, joined, value = token.partition("=")
        if not typed.startswith("--"):
            found.append(token)
            continue
        follows = not joined and bool(rest) and not rest[0].startswith("--")
        value = rest.pop(0) if follows else value
        option = typed.removeprefix("--").replace("-", "_")
        alias = None if option in known else ours(option, known)
        option = alias or option
        flag = f"--{alias.replace('_', '-')}" if alias else typed
        if alias:
            say(f"{typed} is {flag} here")
            if means_never(option, value):
                continue
        new = value_of(option, value)
        if new != value:
            say(f"{flag} {value} is {flag} {new} here")
        before, known_value, other = given.setdefault(option, (typed, new, alias is not None))
        if before != typed and (alias or other):
            if not same_value(known_value, new):
                raise UsageError(f"{before} {known_value} and {typed} {new} set the same option. Pass one of them.")
            continue
        found += [f"{flag}={new}"] if joined else [flag, *[new] * follows]
    return found
