"""What must be the same on all processes, and the error that names what is not."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from tropism.distributed.world import World
from tropism.errors import UsageError, count_of

_ADVICE = "Start all of them with the same options, files and versions."
_LISTED = 10
_VALUES = 3
_SHOWN = 160


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that all processes must share.

    Args:
        key: the same on all of them.
        shown: what an error says of it.
    """

    key: str
    shown: str

    @classmethod
    def of(cls, value: Any) -> "Fact":
        """A fact that is shown as it is compared."""
        return cls(str(value), str(value))


Facts = Mapping[str, Fact]
"""Facts by name, the most important first. `NAME: DETAIL` is a detail of `NAME`."""


def check_same(world: World, describe: Callable[[], Facts], advice: str = _ADVICE) -> None:
    """Check that all processes describe themselves alike. All of them call this together.

    The exchange is text that processes with other versions of Python and of libraries understand too.

    Args:
        describe: gives the facts of this process. An error in it is raised on all processes.
        advice: what to do.

    Raises:
        UsageError: naming each fact that differs, with its values and processes; the same on all of them.
    """
    if world.size == 1:
        return
    own = world.together(describe)
    told = world.gather(json.dumps({name: [fact.key, fact.shown] for name, fact in own.items()}))
    found = differences([{name: Fact(*fact) for name, fact in json.loads(text).items()} for text in told])
    if found:
        more = [f"and {count_of(len(found) - _LISTED, 'other difference')}"] if len(found) > _LISTED else []
        raise UsageError("the processes of this run differ in:", *(f"  {line}" for line in (*found[:_LISTED], *more)),
                         advice)


def differences(everyone: Sequence[Facts]) -> list[str]:
    """`NAME: process 0 has 1, process 1 has 2` for each fact that differs. Details of one that differs are omitted.

    Args:
        everyone: facts of each process.
    """
    found: dict[str, str] = {}
    for name in dict.fromkeys(name for facts in everyone for name in facts):
        if any(name.startswith(f"{other}: ") for other in found):
            continue
        facts = [one.get(name) for one in everyone]
        if any((fact and fact.key) != (facts[0] and facts[0].key) for fact in facts):
            found[name] = f"{name}: {_holders(facts)}"
    return list(found.values())


def _holders(facts: Sequence[Fact | None]) -> str:
    """Which processes have which value."""
    ranks: dict[Any, list[int]] = {}
    for rank, fact in enumerate(facts):
        ranks.setdefault(fact and fact.key, []).append(rank)
    groups = list(ranks.values())[:_VALUES]
    values = [_short(facts[holders[0]]) for holders in groups]
    parts = []
    for holders, value in zip(groups, values, strict=True):
        many, fact = len(holders) > 1, facts[holders[0]]
        if fact is not None and values.count(value) > 1:
            value += f" ({hashlib.blake2b(fact.key.encode(), digest_size=6).hexdigest()})"
        parts.append(f"process{'es' * many} {_ranges(holders)} {'have' if many else 'has'} {value}")
    others = sum(map(len, list(ranks.values())[_VALUES:]))
    return ", ".join(parts + ([f"{count_of(others, 'process', 'processes')} more"] if others else []))


def _short(fact: Fact | None) -> str:
    """A value on one line."""
    if fact is None:
        return "none"
    line = " ".join(fact.shown.split())
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3, 5` for ascending numbers."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
