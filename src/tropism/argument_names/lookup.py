"""Looks names and values of other trainers up."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tropism.argument_names.aliases import ALIASES, ARGUMENTS, TYPED, VALUES
from tropism.argument_names.explained import EXPLAINED, Kind
from tropism.argument_names.published import OWN
from tropism.errors import UsageError, nearest


@dataclass(frozen=True, slots=True)
class Answer:
    """What becomes of another trainer's name.

    Args:
        kind: `taken` if one of our options takes its value.
        option: that option, or the argument of our trainers; empty for other kinds.
        text: what to do, in sentences; empty for `taken`.
    """

    kind: Kind
    option: str = ""
    text: str = ""


def answer(name: str, known: Collection[str], trainer: str = "") -> Answer | None:
    """What becomes of a name of another trainer; None if it is in no table.

    Args:
        name: as written there. Only the end of a name with dots may be in the table: `trainer.kto.max_epochs`.
        known: our options, and arguments of our trainers.
        trainer: key of `PUBLISHED` whose own meanings apply.
    """
    parts = plain(name).split(".")
    for inner in (".".join(parts[start:]) for start in range(len(parts))):
        if inner in OWN.get(trainer, {}):
            kind, text = OWN[trainer][inner]
            return Answer(kind, text=text)
        if option := inner if inner in known else ours(inner, known):
            return Answer("taken", option)
        if inner in EXPLAINED:
            kind, text = EXPLAINED[inner]
            return Answer(kind, text=text)
    return None


def ours(name: str, known: Collection[str]) -> str | None:
    """Our name of an option that another trainer calls `name`, if it is among the known ones."""
    found = TYPED.get(plain(name))
    return found if found in known else None


def value_of(option: str, value: Any) -> Any:
    """Our value for one of another trainer; any other as it is. Several losses are separated by commas."""
    values = VALUES.get(option)
    if values is None or not isinstance(value, str):
        return value
    return ",".join(values.get(part.strip().lower(), part) for part in value.split(","))


def means_never(option: str, value: Any) -> bool:
    """Whether other trainers say with this value that something never happens: the default here."""
    return (option in _NEVER and value in (0, -1, "0", "-1")) or (option, str(value)) in (
        ("track", "none"), ("max_steps", "-1"))


def same_value(one: Any, other: Any) -> bool:
    """Whether two values of an option are equal, as numbers if they are numbers: `1e-4` and `0.0001`."""
    if isinstance(one, str | float | int) and isinstance(other, str | float | int):
        with suppress(ValueError):
            return float(one) == float(other)
    return bool(one == other)


def instead(name: str, known: Collection[str], style: str = "{}") -> str:
    """What to use instead of an unknown option: an explanation, or the nearest name; empty if none is near.

    Args:
        name: as the user wrote it.
        known: our options.
        style: how an option is shown, such as `--{}`.
    """
    def named(option: str) -> str:
        return style.format(option.replace("_", "-") if style.startswith("--") else option)

    if found := answer(name, known):
        return found.text or f"Did you mean {named(found.option)}?"
    aliases = {alias for alias, option in TYPED.items() if option in known}
    close = nearest(plain(name), {*known, *aliases, *EXPLAINED})
    if close is None:
        return ""
    if close in EXPLAINED and close not in known:
        return EXPLAINED[close][1]
    return f"Did you mean {named(close if close in known else TYPED[close])}?"


def plain(name: str) -> str:
    """A name as the tables have it."""
    return name.lower().replace("-", "_")


_NEVER = ("save_every",)
"""Options for which other trainers use 0 or -1 to mean never."""


def canonical(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by our names, without those that are None.

    Raises:
        UsageError: if an option is given under two names.
    """
    values: dict[str, Any] = {}
    given: dict[str, str] = {}
    for name, value in options.items():
        option = ALIASES.get(name, name)
        if value is None:
            continue
        if option in given:
            raise UsageError(f"{given[option]} and {name} are the same option. Pass one of them.")
        inside = value if isinstance(value, Mapping) else getattr(value, "model_fields_set", ())
        for inner in (f"{option}.{entry}" for entry in inside):  # of a group
            if inner in given:
                raise UsageError(f"{name} and {given[inner]} both set {inner}. Pass one of them.")
            given[inner] = name
        given[option] = name
        values[option] = None if means_never(option, value) else value
        if option == "resume" and isinstance(value, bool | Path):
            values[option] = str(value) if isinstance(value, Path) else "auto" if value else "never"
    return {name: value for name, value in values.items() if value is not None}


def arguments(given: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Arguments by our names. Those given under other names are moved here from `options`.

    Raises:
        UsageError: if one is given twice.
    """
    found = dict(given)
    names = {name: name for name, value in given.items() if value is not None}
    for name in [name for name in options if name in ARGUMENTS]:
        option, value = ARGUMENTS[name], options.pop(name)
        if value is None:
            continue
        if option in names:
            raise UsageError(f"{names[option]} and {name} are the same argument. Pass one of them.")
        names[option], found[option] = name, value
    return found
