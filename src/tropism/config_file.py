"""Reads the options in a YAML file, and checks each of them with its line."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from tropism.argument_names import means_never, ours, same_value, value_of
from tropism.borders import read_mapping
from tropism.config import METHODS, MethodOptions, check_name, explain, place_of, takes_bool
from tropism.errors import UsageError, did_you_mean
from tropism.options import shown

_TRUST, _EVALUATOR = "trust_remote_code", "evaluator"
CODE = frozenset((_TRUST, _EVALUATOR))
"""Options that let code run."""
_ON_OFF = ("compile", "parallel.shard")
"""Options that take the words `on` and `off`, which YAML reads as booleans."""


def read_yaml(path: str | Path, default: str | None = None, decided: Collection[str] = (),
              say: Callable[[str], None] = lambda text: None) -> tuple[str | None, dict[str, Any]]:
    """The method that a configuration file names, or None, and its options, checked one by one.

    `trust_remote_code` and `evaluator` are not among them: a file, which someone else may have written, never lets
    code run.

    Args:
        path: the file.
        default: the method of a file that does not name one.
        decided: of these two, which were said elsewhere. Otherwise a file that has them is refused.
        say: is told of each name of another trainer that was replaced by ours.

    Raises:
        UsageError: with file and line, for an unknown key (naming the closest known one) or an invalid value.
    """
    path = Path(path)
    values, node = read_mapping(path)
    lines = _lines_of(path, node)
    return checked(values, lambda key: f"{path}:{lines.get(str(key), 1)}: ", default, decided, say)


def checked(values: dict[str, Any], place: Callable[[Any], str], default: str | None = None,
            decided: Collection[str] = (),
            say: Callable[[str], None] = lambda text: None) -> tuple[str | None, dict[str, Any]]:
    """The method that recorded options name, or None, and the options, checked one by one.

    Args:
        values: as in a file.
        place: where a key is, for errors.
        default, decided, say: as in `read_yaml`.

    Raises:
        UsageError: as in `read_yaml`.
    """
    method = values.pop("method", None)
    if method is not None and not (isinstance(method, str) and method in METHODS):
        raise UsageError(f"{place('method')}method: unknown method {method!r}. " + did_you_mean(str(method), METHODS))
    known = METHODS.get(method or default or "")
    values, own = _ours((known or MethodOptions).flattened(values), known, place, say)
    _check(values, known, lambda key: place(own.get(key, key)))
    named = values.pop(_EVALUATOR, None)
    if named not in (None, "none") and _EVALUATOR not in decided:
        raise UsageError(f"{place(_EVALUATOR)}{_EVALUATOR}: a file cannot name code to run. If you trust it, pass "
                         f"--evaluator {shown(named)}, else --evaluator none.")
    if TypeAdapter(bool).validate_python(values.pop(_TRUST, False)) and _TRUST not in decided:
        raise UsageError(f"{place(_TRUST)}{_TRUST}: a file cannot allow the code of a model to run. If you trust the "
                         "models of this run, pass --trust-remote-code, else --no-trust-remote-code.")
    return method, values


def _ours(values: dict[str, Any], options: type[MethodOptions] | None, place: Callable[[Any], str],
          say: Callable[[str], None]) -> tuple[dict[str, Any], dict[str, str]]:
    """Values by our names, and the names that the file has for them where these differ.

    Raises:
        UsageError: if two names of one option give it two values.
    """
    known = {name for cls in ([options] if options else METHODS.values()) for name in cls.flat_fields()}
    found: dict[str, Any] = {}
    own: dict[str, str] = {}
    for key, value in values.items():
        alias = None if key in known else ours(str(key), known)
        if alias:
            say(f"{place(key)}{key} is {alias} here")
            if means_never(alias, value):
                continue
        option = alias or key
        value = str(value).lower() if option == "resume" and isinstance(value, bool) else value
        if option in _ON_OFF and isinstance(value, bool):
            value = "on" if value else "off"
        new = value_of(option, value)
        if new is not value and new != value:  # NaN differs from itself
            say(f"{place(key)}{option} {value} is {new} here")
        if option in found and not same_value(found[option], new):
            raise UsageError(f"{place(key)}{key}: sets the same option as {own.get(option, option)}, to another value. "
                             "Remove one.")
        found[option] = new
        if alias:
            own[option] = str(key)
    return found, own


def _lines_of(path: Path, node: Any, group: str = "") -> dict[str, int]:
    """The line of each key, those inside a mapping as `group.key`.

    Raises:
        UsageError: for a duplicate key.
    """
    lines: dict[str, int] = {}
    for key, value in node.value if node is not None else ():
        name = f"{group}{key.value}"
        if name in lines:
            raise UsageError(f"{path}:{key.start_mark.line + 1}: {name}: already set on line {lines[name]}. "
                             "Remove one.")
        lines[name] = key.start_mark.line + 1
        if isinstance(value, yaml.MappingNode) and not group:
            lines |= _lines_of(path, value, f"{name}.")
    return lines


def _check(values: dict[str, Any], options: type[MethodOptions] | None, place: Callable[[Any], str]) -> None:
    """Check keys and types of values, those of groups as `group.key`; with `options` None, against any method.

    Raises:
        UsageError: for the first invalid one.
    """
    classes = [options] if options else list(METHODS.values())
    known = {name: info for cls in classes for name, info in cls.flat_fields().items()}
    for key, value in values.items():
        check_name(classes[0], str(key), known, place(key))
        if isinstance(value, bool) and not takes_bool(known[key].annotation):
            raise UsageError(f"{place(key)}{key}: {shown(value)} is not a valid value")
    for cls in classes:
        try:
            # Without its output a file is never complete, so options are checked one by one and not in combination:
            # the command line may add to them or override them.
            fields = cls.flat_fields()
            cls.model_validate(cls.nested({key: value for key, value in values.items()
                                           if key in fields and key != "output"}))
        except ValidationError as error:
            for problem in error.errors():
                if problem["type"] != "missing":
                    name = place_of(problem, fields)
                    raise UsageError(f"{place(name)}{name}: {explain(problem)}") from None
