"""The base of all option groups: typed, frozen, documented by the string under each field."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import get_annotations
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

T = TypeVar("T")
_EVERYDAY = "everyday"

Everyday = Annotated[T, _EVERYDAY]
"""The type of an option that the short help shows: `epochs: Everyday[int] = 1`."""

_DEFAULT = " Default: "
_INLINE = 12
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30,
          "TIB": 2**40}
_VALUES = {"model": "MODEL", "reference": "MODEL", "teacher": "MODEL", "data": "DATA", "eval_data": "DATA",
           "output": "PATH", "store": "DIR", "store_limit": "SIZE",
           "memory_limit": "SIZE", "log_dir": "DIR", "loss": "NAMES",
           "loss_weights": "NUMBERS", "track": "NAMES", "lora.targets": "NAMES", "lora.modules_to_save": "NAMES",
           "lora.adapter": "DIR", "keep_best": "METRIC", "stop_metric": "METRIC", "max_time": "TIME", "resume": "PATH",
           "evaluator": "NAMES",
           "chat_template": "FILE", "columns": "NAME=COLUMN", "labels": "WORD=MEANING",
           "chat_template_kwargs": "NAME=VALUE", "compare": "MODEL", "feedback": "FILE"}
"""What help shows as the value of an option that takes text."""

_NAMES = frozenset(name.rpartition(".")[2] for name, kind in _VALUES.items()
                   if kind in ("MODEL", "DATA", "PATH", "DIR", "FILE"))
_LONGEST_NAME, _LONGEST_PATH = 255, 4095  # bytes


@dataclass(frozen=True, slots=True)
class Option:
    """One option as help and reference show it.

    Args:
        name: in YAML and Python; that of a group's option is `group.name`.
        heading: the group that it is listed under.
        text: what it does, without its default.
        default: in words or as a value; empty for an option that is off unless given.
        info: its type and constraints.
    """

    name: str
    heading: str
    text: str
    default: str
    info: FieldInfo

    @property
    def flag(self) -> str:
        """As the command line spells it."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def switch(self) -> str:
        """As help shows it: with both forms for an on/off option that is on by default."""
        on = bool in _types(self.info.annotation) and self.default == "true"
        return f"--[no-]{self.flag.removeprefix('--')}" if on else self.flag

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of an option that takes only some words."""
        return tuple(kind for kind in _types(self.info.annotation) if isinstance(kind, str))

    @property
    def values(self) -> str:
        """What help shows behind the name: choices, a kind of value, or nothing for an on/off option."""
        kinds = _types(self.info.annotation)
        if bool in kinds:
            return ""
        if all(isinstance(kind, str) for kind in kinds):
            listed = "|".join(map(str, kinds))
            return listed if len(listed) <= _INLINE else "NAME"
        if str in kinds:
            return "INTERVAL" if int in kinds else _VALUES.get(self.name, "TEXT")
        return "FLOAT" if float in kinds else "INT"

    @property
    def everyday(self) -> bool:
        """True for an option that the short help shows."""
        return self.info.is_required() or _EVERYDAY in self.info.metadata


def size_bytes(size: str | int) -> int:
    """A size in bytes: `5GB`, `500MB`, `2GiB`, or a number.

    Raises:
        ValueError: for anything else.
    """
    found = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([KMGT]I?B)?", str(size).strip().upper())
    if found is None:
        raise ValueError(f"{size}: not a valid size. Use a form such as 5GB, 500MB or 2GiB.")
    return int(float(found[1]) * _UNITS[found[2] or ""])


def check_size(text: str) -> str:
    """The text of a size, checked by `size_bytes`.

    Raises:
        ValueError: if it is invalid, or 0.
    """
    if not size_bytes(text):
        raise ValueError(f"{text}: not a valid size. It must be at least 1 byte.")
    return text


def _types(annotation: Any) -> list[Any]:
    """Types and literal values in an annotation, without None."""
    if annotation is type(None):
        return []
    if get_origin(annotation) is Annotated:
        return _types(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [kind for inner in get_args(annotation) for kind in _types(inner)] or [annotation]


def shown(value: Any) -> str:
    """A value as YAML writes it: `true`, `5e-6`."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}".replace("e-0", "e-") if isinstance(value, float) else str(value)


def check_file_name(value: str, *, for_models: bool = False) -> str:
    """Check that a text can name a file, a directory or something on the Hub, or, with commas, several.

    Args:
        for_models: libraries write a model there, which open UTF-8 names only.

    Raises:
        ValueError: if no system could open it.
    """
    if not value.strip():
        raise ValueError("the name is empty")
    try:
        encoded = value.encode() if for_models else os.fsencode(value)
    except UnicodeEncodeError:
        raise ValueError(f"{value!r} has a character that file names cannot have here") from None
    if b"\0" in encoded:
        raise ValueError("the name has a NUL character")
    longest = max(map(len, encoded.replace(b",", b"/").split(b"/")))
    if longest > _LONGEST_NAME or (len(encoded) > _LONGEST_PATH and b"," not in encoded):
        raise ValueError(f"the name is too long ({longest:,} bytes in one part, {len(encoded):,} in total)")
    try:
        for name in value.split(","):
            Path(name.strip()).expanduser()
    except RuntimeError:
        raise ValueError(f"{value.partition('/')[0]}: no home directory of this name") from None
    return value


class Options(BaseModel):
    """A group of options. Groups live beside their owner and are composed in `config`.

    The docstring of a field is its only description. Its first sentence is what the short help shows. A default that
    depends on something is the last sentence, `Default: ...`; all other defaults are read from the field.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True,
                              protected_namespaces=(), allow_inf_nan=False)
    heading: ClassVar[str] = "Options"
    """Where help lists the fields that this class introduces."""

    @field_validator("*", mode="before")
    @classmethod
    def _can_be_a_name(cls, value: Any, info: ValidationInfo) -> Any:
        if info.field_name not in _NAMES or not isinstance(value, str):
            return value
        return check_file_name(value, for_models=info.field_name == "output")

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """A description is one paragraph, however its source is wrapped."""
        super().__pydantic_init_subclass__(**kwargs)
        for info in cls.model_fields.values():
            info.description = " ".join((info.description or "").split())

    def dump(self) -> dict[str, Any]:
        """Plain values, as YAML holds them."""
        return self.model_dump(mode="json")

    @classmethod
    def flat_fields(cls) -> dict[str, FieldInfo]:
        """Every option by its name on the command line: those of a nested group as `group.name`."""
        found: dict[str, FieldInfo] = {}
        for name, info in cls.model_fields.items():
            group = info.annotation
            if isinstance(group, type) and issubclass(group, Options):
                found |= {f"{name}.{inner}": field for inner, field in group.flat_fields().items()}
            else:
                found[name] = info
        return found

    @classmethod
    def described(cls) -> list[Option]:
        """Every option with its heading, text and default. A required option is listed under Required."""
        found: list[Option] = []
        for name, info in cls.flat_fields().items():
            group, dot, inner = name.partition(".")
            owner = cls.model_fields[group].annotation if dot else cls
            assert isinstance(owner, type)
            introduced = next(base for base in reversed(owner.__mro__)
                              if issubclass(base, Options) and (inner or name) in get_annotations(base))
            text, _, default = (info.description or "").partition(_DEFAULT)
            if not default and not info.is_required() and info.default is not None:
                default = shown(info.default)
            heading = "Required" if info.is_required() else introduced.heading
            found.append(Option(name, heading, text, default.removesuffix("."), info))
        return found

    @classmethod
    def flattened(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values with those of nested groups as `group.name`; anything else stays as it is."""
        found: dict[str, Any] = {}
        for name, value in values.items():
            group = cls.model_fields[name].annotation if name in cls.model_fields else None
            if not (isinstance(group, type) and issubclass(group, Options)):
                found[name] = value
            elif isinstance(value, Mapping | Options):
                inner = value.model_dump() if isinstance(value, Options) else value
                found |= {f"{name}.{key}": entry for key, entry in group.flattened(inner).items()}
            elif value is not None:
                found[name] = value  # not a mapping: the check of names reports it
        return found

    @classmethod
    def nested(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """The opposite of `flattened`."""
        found: dict[str, Any] = {}
        for name, value in values.items():
            group, dot, inner = name.partition(".")
            if dot:
                found[group] = {**found.get(group, {}), inner: value}
            else:
                found[name] = value
        return found
