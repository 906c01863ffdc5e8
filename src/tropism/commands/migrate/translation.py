"""Our options of a run, and the account of every option of the other trainer."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from tropism.argument_names import answer, instead, means_never, plain, value_of
from tropism.argument_names.explained import Kind
from tropism.commands.migrate.command_line import Given
from tropism.config import METHODS, explain
from tropism.errors import UsageError

MISSING = {"model": "MODEL", "data": "DATA", "output": "runs/first", "teacher": "TEACHER"}
"""Values of required options that a command does not give."""

_SECRET = re.compile(r"(^|[._-])token$|api_?key|passw|secret|credential|auth|[._]key$|^key$|use_wandb", re.IGNORECASE)
_SECRETS = re.compile(r"(^|[^a-z])(token|api_?key|password|secret|credential|auth)s?['\"]?\s*[:=]|://[^/@\s]*@|^(hf|sk)[_-]\w{16}",
                      re.IGNORECASE)
_COLUMNS = re.compile(r"(input|output|label|prompt|chosen|rejected)_key$")
VARIABLE = re.compile(r"\$(\w+|\{\w+\}|\()|`")
_SHOWN, _LONGEST = 60, 1000


@dataclass(frozen=True)
class Line:
    """What becomes of one option.

    Args:
        name: as typed, without dashes.
        value: as text; empty for a switch and for a secret.
        kind: of the answer.
        text: what it became, or why not.
        default: it was not given: a default of the other trainer that differs from ours.
    """

    name: str
    value: str
    kind: Kind
    text: str
    default: bool = False


@dataclass
class Translation:
    """A run of ours, as far as it is known.

    Args:
        trainer: key of the table of names.
        method: ours.
        given: what was read. Options that were dealt with are removed from its values.
        defaults: of the other trainer, where they differ from ours.
        newer: names of other versions, with those of the table.
        options: ours, by name.
        account: what became of each option.
        notes: further sentences.
        settled: names that were accounted for.
    """

    trainer: str
    method: str
    given: Given
    defaults: Mapping[str, Any] = field(default_factory=dict)
    newer: Mapping[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    account: list[Line] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    settled: set[str] = field(default_factory=set)

    @property
    def fields(self) -> dict[str, Any]:
        return METHODS[self.method].flat_fields()

    @property
    def processes(self) -> int:
        return self.given.processes or 1

    def has(self, *names: str) -> bool:
        """Whether one of the names is still to be dealt with, and set to something."""
        return any(off(self.given.values[key]) is False for name in names if (key := self._key(name)) is not None)

    def value(self, name: str) -> Any:
        """The value of an option that is still to be dealt with, else the default; None if there is none."""
        key = self._key(name)
        return self.defaults.get(name) if key is None else self.given.values[key]

    def close(self, kind: Kind, text: str, *names: str) -> None:
        """Account for options by one line each. Names that were not given, and have no default, are passed over."""
        for name in names:
            key = self._key(name)
            if key is not None:
                self.account.append(Line(key, shown(key, self.given.values.pop(key)), kind, text))
                self.settled.add(self.canonical(key))
            elif name in self.defaults and name not in self.settled:
                if kind != "without effect":
                    self.account.append(Line(name, shown(name, self.defaults[name]), kind, text, default=True))
                self.settled.add(name)

    def set(self, option: str, value: Any, *names: str, text: str = "") -> bool:
        """Set an option of ours from one or several names, and account for them. An invalid value is left out.

        Returns:
            whether it was set.
        """
        value = value_of(option, value)
        flag = f"--{option.replace('_', '-')}"
        if option not in self.fields:
            self.close("not supported", f"tropism {self.method} has no {flag}", *names)
            return False
        if isinstance(value, str) and VARIABLE.search(value) and not _takes(self.fields[option].annotation, str):
            self.close("replaced", f"add {flag} with its value: shell variables are not read", *names)
            return False
        if len(spelled(value)) > _LONGEST:
            self.close("replaced", f"add {flag} with its value, which is too long for a command", *names)
            return False
        if value is True and not _takes(self.fields[option].annotation, bool):
            self.close("not supported", f"{flag} takes a value, and none was given", *names)
            return False
        known, problem = self._checked(option, value)
        if problem:
            self.close("not supported", f"{flag}: {problem}", *names)
            return False
        self.options[option] = _typed(known, value)
        said = text or f"{flag} {spelled(self.options[option])}".rstrip()
        self.close("replaced" if text else "taken", said, *names)
        return True

    def rest(self) -> None:
        """Account for everything that is left by the table of names, and take what it takes."""
        for name in list(self.given.values):
            self._by_table(name, self.given.values[name])
        for name in self.defaults:
            found = answer(name, self.fields, self.trainer)
            if name not in self.settled and (found is None or found.option not in self.options):
                self._by_table(name, self.defaults[name])

    def finish(self) -> None:
        """Add what is required, and leave out options that cannot be combined."""
        for option, placeholder in MISSING.items():
            if option in self.fields and self.fields[option].is_required() and option not in self.options:
                self.options[option] = placeholder
                if placeholder.isupper():
                    self.notes.append(f"{placeholder} was not given. Replace it.")
        cls = METHODS[self.method]
        while True:
            try:
                found = cls.model_validate(cls.nested(self.options))
                break
            except (UsageError, ValidationError) as error:
                text = str(error) if isinstance(error, UsageError) else explain(error.errors()[0])
                blamed = self._blamed(error, text)
                if blamed is None:
                    raise
                del self.options[blamed]
                self._withdraw(blamed, text)
        self.options = {option: _typed(_field(found, option), value) for option, value in self.options.items()}

    def _blamed(self, error: UsageError | ValidationError, text: str) -> str | None:
        """The option that a check is about: the first one that it names."""
        own = [option for option in self.options if option not in MISSING]
        if isinstance(error, ValidationError):
            place = [str(part) for part in error.errors()[0]["loc"]]
            names = (".".join(place[:end]) for end in range(len(place), 0, -1))
            return next((name for name in names if name in own), own[-1] if own else None)
        found = {option: named.start() for option in own if (named := re.search(
            rf"(?:--|\b){re.escape(option).replace('_', '[_-]')}\b", text)) is not None}
        return min(found, key=found.__getitem__) if found else own[-1] if own else None

    def _withdraw(self, option: str, text: str) -> None:
        """Account for an option that cannot be combined with the others, after all."""
        flag = f"--{option.replace('_', '-')}"
        self.notes.append(f"{flag} is left out: {text}")
        self.account = [replace(line, kind="not supported", text=f"left out: {text}") if line.kind == "taken"
                        and line.text.split()[:1] == [flag] else line for line in self.account]

    def _by_table(self, name: str, value: Any) -> None:
        named = self.canonical(name)
        found = answer(named, self.fields, self.trainer)
        if found is None:
            other = answer(named, {option for cls in METHODS.values() for option in cls.flat_fields()}, self.trainer)
            text = f"tropism {self.method} has no counterpart" if other is not None else (
                instead(named, self.fields, "--{}") or f"not known here. See tropism {self.method} --help-all.")
            self.close("not supported", text, name)
        elif found.kind != "taken":
            unused = off(value) or (found.kind == "not supported" and number(value) == 0)
            kind: Kind = "without effect" if unused else found.kind
            self.close(kind, found.text if kind == found.kind else "It is off.", name)
        elif off(value) or means_never(found.option, value):
            self.close("without effect", "It is off, as it is here by default.", name)
        elif found.option == "trust_remote_code":
            self.close("replaced", "add --trust-remote-code yourself if you trust the code of the model", name)
        else:
            self.set(found.option, joined(value), name)

    def canonical(self, key: str) -> str:
        """The name that the tables have for one that was typed. In names with dots the end counts."""
        name = self.newer.get(plain(key), plain(key))
        return name if name.startswith("lora.") else name.rpartition(".")[2]

    def _key(self, name: str) -> str | None:
        """The name as typed."""
        values = self.given.values
        return name if name in values else next((key for key in values if self.canonical(key) == name), None)

    def _checked(self, option: str, value: Any) -> tuple[Any, str]:
        """The value as the option has it, and what is wrong with it."""
        cls = METHODS[self.method]
        values = {name: text for name, text in MISSING.items() if name in self.fields} | {option: value}
        try:
            options = cls.model_validate(cls.nested(values))
        except ValidationError as error:
            return value, explain(error.errors()[0])
        except UsageError:  # of a combination: see `finish`
            return value, ""
        return _field(options, option), ""


def _field(options: Any, name: str) -> Any:
    """The value of an option, which may be in a group."""
    group, _, inner = name.rpartition(".")
    return getattr(getattr(options, group) if group else options, inner)


def _typed(known: Any, value: Any) -> Any:
    """A value as it is written: switches and counts as their types, all else as it was given."""
    return known if isinstance(known, int) else value


def off(value: Any) -> bool:
    """Whether a value switches something off."""
    return value is None or value is False or value in ([], {}) or (
        isinstance(value, str) and value.strip().lower() in ("false", "none", "null", "no", "off", ""))


def joined(value: Any) -> Any:
    """A list as our options write it."""
    return ",".join(map(str, value)) if isinstance(value, list) else value


def spelled(value: Any) -> str:
    """A value as text."""
    if value is True:
        return ""
    text = str(value).lower() if isinstance(value, bool) else str(joined(value))
    return re.sub(r"e-0(?=\d$)", "e-", text) if isinstance(value, float) else text


def shown(name: str, value: Any) -> str:
    """A value in the account: short, and none of a secret."""
    if value is True or (_SECRET.search(name) and not _COLUMNS.search(name)):
        return ""
    text = spelled(value)
    if _SECRETS.search(text):
        return "..."
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def number(value: Any) -> float | None:
    """A value as a finite number, or None."""
    try:
        found = math.nan if isinstance(value, bool | list | dict) or value is None else float(value)
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def _takes(annotation: Any, kind: type) -> bool:
    return annotation is kind or kind in getattr(annotation, "__args__", ())
