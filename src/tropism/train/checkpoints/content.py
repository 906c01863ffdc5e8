"""What `trainer.json` may hold. Hashes show that a checkpoint is as it was written, and not by which program."""

from collections.abc import Callable, Mapping
from typing import Any, get_args

from tropism.model.checkpointing import Checkpointing
from tropism.model.cpu_products import Products
from tropism.observe.rundir import GROWING
from tropism.train.run_state import RunState
from tropism.train.settings import AutoShard

Kind = Callable[[Any], bool]
"""Whether a value is of a kind."""


def _number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 2**63)


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _switch(value: Any) -> bool:
    return isinstance(value, bool)


def _table(value: Any) -> bool:
    return isinstance(value, dict)


def _optional(kind: Kind) -> Kind:
    return lambda value: value is None or kind(value)


def _list(kind: Kind, length: int | None = None) -> Kind:
    return lambda value: (isinstance(value, list) and length in (None, len(value))
                          and all(kind(entry) for entry in value))


def _dict(kind: Kind) -> Kind:
    return lambda value: isinstance(value, dict) and all(kind(entry) for entry in value.values())


def _fields(**kinds: Kind) -> Kind:
    return lambda value: isinstance(value, dict) and all(name in value and kind(value[name])
                                                         for name, kind in kinds.items())


def _guards(value: Any) -> bool:
    series = _dict(_list(_number))
    known = _fields(first=series, last=series, seen=_dict(_count), zeros=_count, said=_dict(_number))
    return known(value) and value["first"].keys() == value["last"].keys() == value["seen"].keys() and all(
        value["first"].values())


def _observers(value: Any) -> bool:
    stopper = _fields(metric=_text, best=_optional(_number), best_step=_optional(_count), without=_count)
    return isinstance(value, dict) and all(value.get(name) in (None, {}) or kind(value[name])
                                           for name, kind in (("guards", _guards), ("stopper", stopper)))


def _one_of(*known: str) -> Kind:
    return lambda value: isinstance(value, str) and value in known


_SETTINGS: Mapping[str, Kind] = {
    "microbatch_tokens": lambda value: _count(value) and value > 0,
    "checkpointing": _one_of(*get_args(Checkpointing)), "offload": _switch, "compiled": _switch, "asked_tokens": _count,
    "asked_checkpointing": _one_of("", *get_args(Checkpointing)), "products": _one_of(*get_args(Products)),
    "gather_once": _optional(_switch), "shard": _one_of(*get_args(AutoShard)),
    "forwards_first_tokens": _count}


def _settings(value: Any) -> bool:
    """Those of earlier versions are fewer."""
    return isinstance(value, dict) and all(name in _SETTINGS and _SETTINGS[name](entry)
                                           for name, entry in value.items())


def _numpy(value: Any) -> bool:
    return (isinstance(value, list) and len(value) == 5 and all(map(_text, value[:2])) and all(map(_count, value[2:4]))
            and _number(value[4]))


def _python(value: Any) -> bool:
    return (isinstance(value, list) and len(value) == 3 and _count(value[0]) and _list(_count)(value[1])
            and _optional(_number)(value[2]))


_KINDS: Mapping[str, Kind] = {
    "step": _count, "totals": _fields(**dict.fromkeys(RunState().totals, _count)), "evaluation_due": _switch,
    "samples_due": _switch,
    "window": _fields(rows=_list(_list(_list(_number, 2))), skipped=_list(_table), last=_dict(_number), tokens=_count,
                      seconds=_number),
    "settings": _settings, "learning_rate": _number, "tolerance": _fields(in_a_row=_count), "answers": _list(_text),
    "baselines": _dict(_number), "evaluation": _dict(_number), "seconds": _number, "options": _table,
    "fingerprints": _dict(_text), "libraries": _dict(_text), "stop_ids": _list(_count), "guards": _observers,
    "offsets": lambda value: _dict(_count)(value) and value.keys() <= set(GROWING),
    "shift": _optional(_list(_number, 2)), "updater": _table,
    "random": _fields(torch=_text, numpy=_numpy, python=_python),
    "optimizer": _fields(groups=_list(_fields(params=_list(_text))), values=_dict(_table), begun=_switch)}

_LATER = frozenset(("learning_rate", "samples_due", "settings", "stop_ids"))
"""Not read where they are missing."""


def invalid_entries(trainer: Mapping[str, Any]) -> list[str]:
    """Names in `trainer.json` whose value is missing or not of their kind."""
    return [name for name, kind in _KINDS.items()
            if (name not in trainer and name not in _LATER) or (name in trainer and not kind(trainer[name]))]


def group_fits(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Whether the options of a saved parameter group can replace those of the same optimizer now."""
    return all(_alike(mine[name], theirs[name]) for name in mine.keys() & theirs.keys())


def _alike(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, tuple | list):
        return (isinstance(theirs, tuple | list) and len(mine) == len(theirs)
                and all(map(_alike, mine, theirs)))
    if mine is None or theirs is None:  # such as `foreach`, which torch chooses
        return not isinstance(theirs, list | dict) and not (theirs is None and _number(mine))
    return _number(theirs) if _number(mine) else isinstance(theirs, type(mine))
