"""The values of each option of a sweep, and what the runs are called."""

import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from tropism.config import MethodOptions
from tropism.errors import UsageError

MOST_RUNS = 500
NONE = "none"
"""Leaves an option unset, unless the option itself takes this word."""

_UNDIVIDED = ("NAMES", "NUMBERS", "DATA", "NAME=COLUMN", "WORD=MEANING", "NAME=VALUE", "TEXT", "PATH")
"""Kinds of values that may contain commas themselves."""
_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]+")
_LONGEST, _LONGEST_VALUE = 150, 40

Values = dict[str, list[str]]
"""Values of options as they were typed, by the name of the option with dashes."""


@dataclass(frozen=True, slots=True)
class Combination:
    """A value for each option of a sweep.

    Args:
        name: of its run directory, such as `learning-rate=1e-6_seed=0`.
        given: options as the command line writes them.
        unset: names of options that have no value, whatever the base says.
    """

    name: str
    given: tuple[str, ...]
    unset: tuple[str, ...]


def read_values(tokens: Sequence[str], options: type[MethodOptions]) -> Values:
    """The options in a command, each with its values. An option can be repeated to add values. Commas separate values,
    except those of options that take a list or a text.

    Args:
        tokens: behind the configuration file.

    Raises:
        UsageError: for an option without a value, an empty value or a value that is given twice.
    """
    kinds = {option.name.replace("_", "-"): option.values for option in options.described()}
    found: Values = {}
    rest = list(tokens)
    while rest:
        typed, joined, value = rest.pop(0).partition("=")
        if not typed.startswith("--"):
            raise UsageError(f"unexpected argument {typed}. Separate the values of an option by commas without spaces: "
                             "--seed 0,1,2")
        name = typed.removeprefix("--").replace("_", "-")
        positive = re.sub(r"(^|\.)no-", r"\1", name)
        if name not in kinds and kinds.get(positive) == "" and not joined:
            name, value = positive, "false"
        elif not joined and rest and not rest[0].startswith("--"):
            value = rest.pop(0)
        elif not joined:
            if kinds.get(name):
                raise UsageError(f"{typed} needs a value")
            value = "true"
        own = [value] if kinds.get(name) in _UNDIVIDED else [part.strip() for part in value.split(",")]
        for text in own:
            if not text:
                raise UsageError(f"{typed}: a value in {value!r} is empty. Separate the values by single commas: "
                                 "--seed 0,1,2")
            if text in found.setdefault(name, []):
                raise UsageError(f"{typed}: {text} is given twice. Remove one.")
            found[name].append(text)
    return found


def typed(values: Mapping[str, Sequence[str]]) -> str:
    """Values of options as one types them."""
    words = []
    for name, own in values.items():
        divided = [",".join(own)] if not any("," in text for text in own) else own
        words += [f"--{name} {shlex.quote(text)}" for text in divided]
    return " ".join(words)


def combinations(values: Mapping[str, Sequence[str]], options: type[MethodOptions]) -> list[Combination]:
    """Every combination of values. The first option changes slowest.

    Raises:
        UsageError: if no option has several values, or there are too many combinations.
    """
    several = [name for name, own in values.items() if len(own) > 1]
    if not several:
        raise UsageError("no option has several values. Example: tropism sweep base.yaml --learning-rate 1e-6,5e-6 "
                         "--seed 0,1")
    count = 1
    for own in values.values():
        count *= len(own)
    if count > MOST_RUNS:
        raise UsageError(f"{count:,} combinations are too many: at most {MOST_RUNS} runs. Remove values.")
    found: list[Combination] = []
    for chosen in product(*values.values()):
        texts = dict(zip(values, chosen, strict=True))
        unset = tuple(name for name, text in texts.items() if text == NONE and _can_be_unset(options, name))
        name = _short("_".join(f"{name}={_safe(texts[name])}" for name in several), _LONGEST)
        found.append(Combination(name, tuple(f"--{name}={text}" for name, text in texts.items() if name not in unset),
                                 unset))
    return found


def _can_be_unset(options: type[MethodOptions], name: str) -> bool:
    """Whether an option has no value by default, and `none` is not one of its words."""
    info = options.flat_fields().get(name.replace("-", "_"))
    return info is not None and not info.is_required() and info.default is None


def _safe(text: str) -> str:
    """A value as part of a file name. Where characters are replaced, a hash tells such values apart."""
    joined = text.replace(",", "+")
    safe = _UNSAFE.sub("-", joined).strip("-") if _UNSAFE.search(joined) else joined
    return safe if safe == joined and len(safe) <= _LONGEST_VALUE else f"{safe[-_LONGEST_VALUE:]}-{_hash(text)}"


def _short(name: str, longest: int) -> str:
    return name if len(name) <= longest else f"{name[:longest]}-{_hash(name)}"


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=4).hexdigest()
